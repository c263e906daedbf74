"""Transformers' ``Trainer`` with our order of the data, our evaluation and checkpoints that can be trusted."""

import errno
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import is_torch_bf16_gpu_available

from mgk._util.signals import StopSignals
from mgk.data.batches import StepBatches
from mgk.nn.em import EMModule, m_step_all
from mgk.training import checkpoints, distributed
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.evaluation import Evaluation, evaluate_model
from mgk.training.metrics import MetricsWriter
from mgk.training.nonfinite import first_nonfinite
from mgk.training.recipe import Recipe
from mgk.training.run_dir import BEST
from mgk.training.tasks import Batch, TaskData, count, lengths, num_targets, num_tokens

OnStep = Callable[[int, int], None]
OnLog = Callable[[dict[str, float]], None]

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


@dataclass
class Progress:
    """What ``Trainer`` does not save and a resumed run needs; each rank has its own.

    Attributes:
        loss: the sum since the last line of metrics.
        steps: how many it is of.
        tokens: real ones, of all ranks, since then.
        seconds: of training since then, evaluation left out.
        total_seconds: of training since the beginning.
        best: the best value on the split that is looked at.
        best_step: when it was reached.
    """

    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    total_seconds: float = 0.0
    best: float | None = None
    best_step: int | None = None


@dataclass
class Timings:
    """Of every step in this process."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def seconds_per_step(self) -> float:
        """The median."""
        return statistics.median(self.seconds) if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """The median."""
        rates = [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]
        return statistics.median(rates) if rates else 0.0


def make_arguments(recipe: Recipe, run: Path) -> TrainingArguments:
    """The arguments of ``Trainer``; several processes find each other here."""
    training = recipe.training
    on_cpu = training.device == "cpu" or not torch.accelerator.is_available()
    if training.precision == "bfloat16" and not (on_cpu or is_torch_bf16_gpu_available()):
        raise RecipeError("training.precision: this device has no bfloat16, use float32")
    return TrainingArguments(
        output_dir=str(run / checkpoints.CHECKPOINTS / checkpoints.WRITING),
        max_steps=training.max_steps,
        gradient_accumulation_steps=training.accumulation,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup,
        lr_scheduler_type=_SCHEDULES[training.schedule],
        optim="adamw_torch",
        weight_decay=training.weight_decay,
        adam_epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
        bf16=training.precision == "bfloat16",
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and distributed.expected() > 1 else None,
        ddp_broadcast_buffers=False,  # the M-step keeps them equal, and its counts must stay each rank's own
        # The clusters of an adaptive softmax that no target of a batch is in have no gradient.
        ddp_find_unused_parameters=recipe.model.adaptive_cutoffs is not None,
        gradient_checkpointing=training.gradient_checkpointing,
        dataloader_num_workers=training.workers,
        dataloader_pin_memory=not on_cpu,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        save_steps=training.save_every,
        eval_strategy="steps",
        eval_steps=recipe.evaluation.every or training.max_steps,
        seed=recipe.seed,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )


class MgkTrainer(Trainer):
    """Trains by a recipe."""

    # The model divides by the targets of the whole step.
    loss_is_scaled_for_ga = True
    control: TrainerControl

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: TrainingArguments,
        *,
        recipe: Recipe,
        run: Path,
        data: TaskData,
        signals: StopSignals,
        on_step: OnStep,
        on_log: OnLog,
        start: checkpoints.Choice,
    ) -> None:
        self.recipe, self.run, self.data, self.signals, self.start = recipe, run, data, signals, start
        self.timings = Timings()
        self.progress = _read_progress(start.path)
        self.last_evaluation: Evaluation | None = None
        self.conductor = _Conductor(self, model, on_step, on_log)
        self._stop_agreed = False
        self._step_tokens = 0
        self._step_started = 0.0
        super().__init__(
            model,
            arguments,
            train_dataset=data.split("train"),
            eval_dataset=data.split(recipe.evaluation.split),
            data_collator=data.collator,
            callbacks=[self.conductor],
        )
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """The batches of all steps, as one epoch for ``Trainer``; a generator of its own leaves torch's alone."""
        data, training = cast("Dataset[Batch]", self.train_dataset), self.recipe.training
        sampler = StepBatches(
            count(data),
            training.batch_size,
            training.max_steps,
            seed=self.recipe.seed,
            accumulation=training.accumulation,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            lengths=lengths(data) if self.recipe.data.group_by_length else None,
        )
        return DataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=training.workers,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator().manual_seed(self.recipe.seed),
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """The batches of this rank in a step, and the targets of all ranks in it; ranks agree on stopping, too."""
        self._step_started = time.perf_counter()
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        config = self.model.config
        sums = torch.tensor(
            [
                sum(int(num_targets(batch)) for batch in batches),
                sum(num_tokens(batch, config) for batch in batches),
                self.signals.requested is not None,
            ],
            device=device if distributed.is_several() else None,
        )
        targets, tokens, stops = distributed.total(sums).tolist()
        self._step_tokens, self._stop_agreed = tokens, stops > 0
        return batches, torch.tensor(targets, device=device)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The sum of the losses of this batch over the targets of the step; of all ranks the mean is their sum."""
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss * distributed.world_size()
        value = loss.item()
        if not math.isfinite(value):
            self._stop_nonfinite(value, inputs)
        self.progress.loss += value
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: Batch) -> int:
        """Not counted here: the cost model does."""
        return 0

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Look at the split of the recipe; random numbers go on as if nobody had looked."""
        with torch.random.fork_rng(devices=[]):
            found = evaluate_model(
                self.model,
                self.data,
                self.recipe.evaluation.split,
                batch_size=self.recipe.evaluation.batch_size or self._rows_of_a_batch,
                device=self.args.device,
            )
        self.last_evaluation = found
        if self.progress.best is None or found.is_better_than(self.progress.best):
            self.progress.best, self.progress.best_step = found.value, self.state.global_step
            if self.recipe.evaluation.select == "best" and distributed.rank() == 0:
                self._write(self._save_best)
        metrics = {"eval_loss": found.loss, f"eval_{found.metric}": found.value}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Training's own figures, in place of those that a resumed ``Trainer`` begins anew."""
        if "loss" in logs:
            progress = self.progress
            sums = torch.tensor([progress.loss, progress.steps], dtype=torch.float64)
            if self.args.device.type != "cpu":
                sums = sums.to(self.args.device, torch.float32)
            loss, steps = distributed.total(sums).tolist()
            logs = {
                "loss": loss / steps,
                "grad_norm": logs["grad_norm"],
                "learning_rate": logs["learning_rate"],
                "epoch": self.state.global_step * self.recipe.training.batch_size / self.num_train_examples,
                "tokens_per_second": progress.tokens / progress.seconds,
                "seconds": progress.total_seconds,
            }
            progress.loss, progress.steps, progress.tokens, progress.seconds = 0.0, 0, 0, 0.0
        elif not any(name.startswith("eval_") for name in logs):
            return  # the summary of Trainer, which knows of this process only
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    @property
    def num_train_examples(self) -> int:
        """Examples of the training split."""
        return count(cast("Dataset[Batch]", self.train_dataset))

    @property
    def _rows_of_a_batch(self) -> int:
        training = self.recipe.training
        return training.batch_size // (training.accumulation * distributed.world_size())

    def finish_step(self) -> None:
        """Take the time of a step that is done."""
        seconds = time.perf_counter() - self._step_started
        self.timings.seconds.append(seconds)
        self.timings.tokens.append(self._step_tokens)
        self.progress.steps += 1
        self.progress.tokens += self._step_tokens
        self.progress.seconds += seconds
        self.progress.total_seconds += seconds

    @property
    def must_stop(self) -> bool:
        """Whether a signal asks for the end; several ranks stop where all know of it."""
        return self._stop_agreed if distributed.is_several() else self.signals.requested is not None

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._check_weights()
        self._write(lambda: self._save_sealed(*args, **kwargs))

    def _save_sealed(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        step = self.state.global_step
        written = Path(self.args.output_dir) / f"checkpoint-{step}"
        _progress_file(written, distributed.rank()).write_text(json.dumps(asdict(self.progress)), encoding="utf-8")
        distributed.barrier()
        if distributed.rank() == 0:
            (written / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody reads
            checkpoints.seal(written, self.run / checkpoints.CHECKPOINTS / f"step-{step}")
            checkpoints.keep_newest(self.run, self.recipe.training.keep)

    def _save_best(self) -> None:
        save_weights(self.model, self.run / BEST)

    def _write(self, write: Callable[[], None]) -> None:
        """Write something large; a disk that is full leaves the checkpoints as they were."""
        try:
            write()
        except (OSError, RuntimeError, SafetensorError) as error:
            if distributed.is_lost(error):
                raise
            # torch's writer does not tell why it failed
            is_full = shutil.disk_usage(self.run).free < self.model.get_memory_footprint()
            shutil.rmtree(self.args.output_dir, ignore_errors=True)
            why = os.strerror(errno.ENOSPC) if is_full else reason(error)
            raise TrainingError(
                f"{self.run}: step {self.state.global_step} cannot be saved ({why}); {self.last_good}"
            ) from error

    @property
    def last_good(self) -> str:
        """Half a sentence on where the run can go on from."""
        return checkpoints.last_good(self.run)

    def _check_weights(self) -> None:
        """A gradient that is not finite spoils the weights while the loss still looks well: never save such."""
        for name, tensor in self.model.state_dict().items():
            if not torch.isfinite(tensor).all():
                raise TrainingError(
                    f"step {self.state.global_step} made the weights {name!r} not finite; {self.last_good}"
                )

    def _stop_nonfinite(self, value: float, inputs: Batch) -> None:
        place = first_nonfinite(self.model, inputs) or "the loss itself"
        raise TrainingError(
            f"the loss of step {self.state.global_step + 1} is {value}: the first value that is not finite is in"
            f" {place}; {self.last_good}"
        )


class _Conductor(TrainerCallback):
    """What happens around the steps."""

    def __init__(self, trainer: MgkTrainer, model: nn.Module, on_step: OnStep, on_log: OnLog) -> None:
        self.trainer, self.on_step, self.on_line = trainer, on_step, on_log
        self.writer: MetricsWriter | None = None
        self.has_m_step = any(isinstance(module, EMModule) for module in model.modules())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self.trainer
        if trainer.start.path is None:
            # Dropout of its own for every rank. A resumed run gets each rank's state from its checkpoint.
            seed = np.random.SeedSequence([trainer.recipe.seed, distributed.rank()]).generate_state(1)
            torch.manual_seed(int(seed[0]))
        if distributed.rank() == 0:
            self.writer = MetricsWriter(trainer.run, state.global_step)
            self.on_step(state.global_step, state.max_steps)
        trainer.signals.is_training = True

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.has_m_step:
            m_step_all(kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer.finish_step()
        if self.trainer.must_stop:
            control.should_save = control.should_training_stop = True
        if self.writer is not None:
            self.on_step(state.global_step, state.max_steps)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.writer is not None:
            line = {"step": state.global_step, **kwargs["logs"]}
            self.writer.write(line)
            self.on_line(line)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.signals.is_training = False

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Save a model under a name that holds the old one until the new one is whole."""
    written = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(written, ignore_errors=True)
    model.save_pretrained(written)
    shutil.rmtree(folder, ignore_errors=True)
    written.rename(folder)


def reason(error: Exception) -> str:
    """Why something could not be written, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _progress_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"progress_{rank}.json"


def _read_progress(checkpoint: Path | None) -> Progress:
    """This rank's own; where there are more ranks than there were, the mean over those, which sums up to the same."""
    if checkpoint is None:
        return Progress()
    count_then = len(list(checkpoint.glob("progress_*.json")))
    all_then = [Progress(**json.loads(_progress_file(checkpoint, rank).read_bytes())) for rank in range(count_then)]
    if count_then == distributed.world_size():
        return all_then[distributed.rank()]
    return replace(all_then[0], loss=statistics.fmean(progress.loss for progress in all_then))
