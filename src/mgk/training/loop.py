"""The training loop: steps, M-steps, metrics, evaluation, checkpoints."""

import math
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.utils import is_torch_bf16_gpu_available

from mgk._util import json_codec
from mgk._util.errors import first_line
from mgk._util.files import atomic_folder
from mgk._util.machine import PeakMemory
from mgk._util.signals import StopSignals
from mgk.data.batches import StepBatches
from mgk.nn.em import EMModule, m_step_all
from mgk.training import checkpoints, distributed
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.evaluation import evaluate_model
from mgk.training.nonfinite import first_nonfinite
from mgk.training.recipe import Recipe, TrainingSection
from mgk.training.run_dir import BEST, OnLog
from mgk.training.tasks import Batch, TaskData, count, lengths, num_targets, num_tokens

OnStep = Callable[[int, int], None]


@dataclass
class Progress:
    """The state of a run, from which a resumed run goes on."""

    step: int = 0  # optimizer steps done
    logged_step: int = 0  # of the last line of metrics
    tokens: int = 0  # since that line, of all ranks, without padding
    seconds: float = 0.0  # of training since that line, evaluation excluded
    total_seconds: float = 0.0  # of training since the beginning
    wall_seconds: float = 0.0  # the same with evaluation and checkpoints
    peak_memory_bytes: int | None = 0  # beyond that before training
    best: float | None = None  # on the split that is evaluated
    best_step: int | None = None


class TrainingLoop:
    """Trains by a recipe; ``timings``: seconds and tokens of every step."""

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        data: TaskData,
        run: Path,
        *,
        device: torch.device,
        signals: StopSignals,
    ) -> None:
        self.recipe, self.data, self.run, self.device, self.signals = recipe, data, run, device, signals
        self.train_set = data.split("train")
        self.progress = Progress()
        self.timings = array("d")
        self._must_stop = False
        training = recipe.training
        self._is_bfloat16 = training.precision == "bfloat16"
        if self._is_bfloat16 and device.type != "cpu" and not is_torch_bf16_gpu_available():
            raise RecipeError("training.precision: this device has no bfloat16, use float32")
        if training.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model: PreTrainedModel = model.to(device)
        self.network: nn.Module = self.model
        if distributed.is_distributed():
            self.network = DistributedDataParallel(
                self.model,
                broadcast_buffers=False,  # the M-step's counts are each rank's own
                # Clusters of an adaptive softmax without a target have no gradient.
                find_unused_parameters=recipe.model.adaptive_cutoffs is not None,
            )
        self.optimizer = make_optimizer(self.model, training)
        self._has_m_step = any(isinstance(module, EMModule) for module in model.modules())
        # Since the last line of metrics, on the device.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._loss_sum = torch.zeros((), device=device, dtype=dtype)
        # Dropout differs between ranks.
        seed = np.random.SeedSequence([recipe.seed, distributed.rank()]).generate_state(1)
        torch.manual_seed(int(seed[0]))

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        with checkpoints.restoring(checkpoint):
            self._restore(checkpoint)

    def _restore(self, checkpoint: Path) -> None:
        ranks, timings, progress = checkpoints.load(checkpoint, self.model, self.optimizer)
        self.progress = json_codec.load(Progress, progress)
        if self.progress.step != checkpoints.step_of(checkpoint):
            raise ValueError(f"it is of step {self.progress.step}")
        if timings.shape != (self.progress.step, 2):
            raise ValueError(f"it has timings of shape {tuple(timings.shape)}")
        self.timings = array("d", timings.flatten().tolist())
        if len(ranks["loss"]) == distributed.world_size():
            rank = distributed.rank()
            mine = {name: values[rank].clone() for name, values in ranks.items()}  # aligned
            self._loss_sum.copy_(mine["loss"])
            torch.set_rng_state(mine["rng"])
            if "device_rng" in mine:
                torch.get_device_module(self.device).set_rng_state(mine["device_rng"])
        else:  # dropout differs then; the loss stays the same
            self._loss_sum.copy_(ranks["loss"].mean())

    def train(self, on_step: OnStep, on_log: OnLog) -> None:
        """Train up to the last step, or to the end of one after a signal."""
        training, progress = self.recipe.training, self.progress
        self.network.train()
        batches = self._batches()
        on_step(progress.step, training.max_steps)
        self._memory, self._clock = PeakMemory(self.device), time.perf_counter()
        self.signals.is_training = True
        try:
            while progress.step < training.max_steps and not self._must_stop:
                grad_norm = self._step(batches)
                on_step(progress.step, training.max_steps)
                if grad_norm is not None and progress.step % training.log_every == 0:
                    on_log(self._metrics(float(grad_norm)))
                if self._is_due(self.recipe.evaluation.every):
                    on_log(self._evaluate())
                if self._is_due(training.save_every) or self._must_stop:
                    self._save()
            self._account()
        finally:
            self.signals.is_training = False

    def _account(self) -> None:
        """Add the time since the last call, and the peak memory."""
        now, progress = time.perf_counter(), self.progress
        progress.wall_seconds += now - self._clock
        self._clock = now
        peak, before = self._memory.extra_bytes(), progress.peak_memory_bytes
        progress.peak_memory_bytes = None if peak is None or before is None else max(peak, before)

    def _is_due(self, every: int | None) -> bool:
        step = self.progress.step
        return step == self.recipe.training.max_steps or (every is not None and step % every == 0)

    def _batches(self) -> Iterator[Batch]:
        """The batches of this rank from the present step on."""
        recipe, training = self.recipe, self.recipe.training
        indices = StepBatches(
            count(self.train_set),
            training.batch_size,
            training.max_steps,
            seed=recipe.seed,
            accumulation=training.accumulation,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            lengths=lengths(self.train_set) if recipe.data.group_by_length else None,
        )
        loader = DataLoader(
            self.train_set,
            batch_sampler=islice(indices, self.progress.step * training.accumulation, None),
            collate_fn=self.data.collator,
            num_workers=training.workers,
            pin_memory=self.device.type != "cpu",
            generator=torch.Generator().manual_seed(recipe.seed),
        )
        return iter(loader)

    def _step(self, loader: Iterator[Batch]) -> Tensor | None:
        """One optimizer step; the norm of the gradient where it is logged."""
        begin = time.perf_counter()
        training, progress = self.recipe.training, self.progress
        batches = list(islice(loader, training.accumulation))
        # Counted on the CPU and summed over the ranks.
        counts = (
            sum(int(num_targets(batch)) for batch in batches),
            sum(num_tokens(batch, self.model.config) for batch in batches),
            int(self.signals.requested is not None),
        )
        targets, tokens, stops = distributed.all_reduce_sum(torch.tensor(counts)).tolist()
        loss = self._backward(batches, targets)
        if not math.isfinite(loss):
            places = (first_nonfinite(self.model, self._on_device(batch)) for batch in batches)
            raise TrainingError(
                f"the loss of step {progress.step + 1} is {loss}: the first value that is not finite is in"
                f" {next(filter(None, places), 'the loss itself')}; {checkpoints.last_good(self.run)}"
            )
        grad_norm = None  # neither clipped nor logged
        if training.max_grad_norm or (progress.step + 1) % training.log_every == 0:
            grad_norm = clip_grad_norm_(self.model.parameters(), training.max_grad_norm or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(training, progress.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._has_m_step:
            m_step_all(self.model)
        self._must_stop = stops > 0 if distributed.is_distributed() else self.signals.requested is not None
        progress.step += 1
        progress.tokens += tokens
        seconds = time.perf_counter() - begin
        progress.seconds += seconds
        progress.total_seconds += seconds
        self.timings.extend((seconds, tokens))
        return grad_norm

    def _backward(self, batches: list[Batch], targets: int) -> float:
        """Add the gradient of the mean loss over all targets; the rank's loss.

        A batch's loss is its sum over the targets of the whole step, times the number of
        ranks, over which DDP averages. The device is waited for once, at the end.
        """
        network: Any = self.network
        total = torch.zeros_like(self._loss_sum)
        for number, batch in enumerate(batches, 1):
            is_last = number == len(batches)  # it all-reduces the gradients of all
            is_ddp = isinstance(network, DistributedDataParallel)
            with network.no_sync() if is_ddp and not is_last else nullcontext():
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self._is_bfloat16):
                    output = network(**self._on_device(batch), num_items_in_batch=targets)
                loss = output.loss * distributed.world_size()
                loss.backward()
            total += loss.detach()
        self._loss_sum += total
        return float(total)

    def _on_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def _metrics(self, grad_norm: float) -> dict[str, float]:
        """A line of metrics: means since the line before."""
        progress, training = self.progress, self.recipe.training
        loss = float(distributed.all_reduce_sum(self._loss_sum.cpu().clone()))
        line = {
            "step": progress.step,
            "loss": loss / ((progress.step - progress.logged_step) * distributed.world_size()),
            "grad_norm": grad_norm,
            "learning_rate": learning_rate(training, progress.step - 1),
            "epoch": progress.step * training.batch_size / count(self.train_set),
            "tokens_per_second": progress.tokens / progress.seconds,
            "seconds": progress.total_seconds,
        }
        self._loss_sum.zero_()
        progress.logged_step, progress.tokens, progress.seconds = progress.step, 0, 0.0
        return line

    def _evaluate(self) -> dict[str, float]:
        """A line of metrics on the recipe's split; RNG state is preserved."""
        options, progress = self.recipe.evaluation_options(stride=None), self.progress
        with torch.random.fork_rng(devices=[]):
            found = evaluate_model(self.model, self.data, options.split, options)
        if progress.best is None or found.is_better_than(progress.best):
            progress.best, progress.best_step = found.value, progress.step
            if options.select == "best" and distributed.rank() == 0:
                with self._writing(), atomic_folder(self.run / BEST) as folder:
                    self.model.save_pretrained(folder)
                    checkpoints.finalize(folder)
        return {"step": progress.step, "eval_loss": found.loss, f"eval_{found.metric}": found.value}

    def _save(self) -> None:
        """Save a checkpoint; ranks send their own state to the first one."""
        state = {"loss": self._loss_sum.cpu(), "rng": torch.get_rng_state()}
        if self.device.type != "cpu":
            state["device_rng"] = torch.get_device_module(self.device).get_rng_state()
        ranks = {name: distributed.all_gather(value) for name, value in state.items()}
        self._account()
        step = self.progress.step
        timings = torch.tensor(self.timings, dtype=torch.float64).reshape(-1, 2)
        if distributed.rank() == 0:
            with self._writing():
                state_of = (self.model, self.optimizer, ranks, timings, asdict(self.progress))
                checkpoints.save(self.run, step, *state_of)
                checkpoints.keep_newest(self.run, self.recipe.training.keep)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """``TrainingError`` for weights that are not finite, and for a full disk."""
        step, last_good = self.progress.step, checkpoints.last_good(self.run)
        for name, tensor in self.model.state_dict().items():
            if not torch.isfinite(tensor).all():
                raise TrainingError(f"step {step} made the weights {name!r} not finite; {last_good}")
        try:
            yield
        except (OSError, SafetensorError) as error:
            why = f"step {step} cannot be saved ({reason(error)})"
            raise TrainingError(f"{self.run}: {why}; {last_good}") from error


def make_optimizer(model: nn.Module, training: TrainingSection) -> torch.optim.Optimizer:
    """AdamW; biases and the weights of layer norms are not decayed."""
    free = {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, nn.LayerNorm) or name.endswith("bias")
    }
    decayed, rest = (
        [parameter for parameter in model.parameters() if (parameter in free) == is_free]
        for is_free in (False, True)
    )
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    rate, decay = training.learning_rate, training.weight_decay
    is_fused = next(model.parameters()).device.type in ("cpu", "cuda")
    eps = training.adam_epsilon
    return torch.optim.AdamW(groups, lr=rate, eps=eps, weight_decay=decay, fused=is_fused)


def learning_rate(training: TrainingSection, step: int) -> float:
    """The learning rate of a step from 0: linear warm-up, then the schedule."""
    if step < training.warmup:
        return training.learning_rate * (step / training.warmup)
    decay_steps = max(1, training.max_steps - training.warmup)
    factors = {
        "linear": (training.max_steps - step) / decay_steps,
        "cosine": 0.5 * (1 + math.cos(math.pi * ((step - training.warmup) / decay_steps))),
        "constant": 1.0,
    }
    return training.learning_rate * factors[training.schedule]


def reason(error: Exception) -> str:
    """Why something could not be written, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
