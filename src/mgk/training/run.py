"""``train``: from a recipe to a run's folder with its model and its figures."""

import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

from mgk._util import json_codec
from mgk._util.errors import Interrupted
from mgk._util.files import write_json
from mgk._util.machine import cpu_threads
from mgk._util.memory import peak_extra_bytes
from mgk._util.signals import StopSignals
from mgk.models import write_card
from mgk.training import checkpoints, distributed
from mgk.training.environment import record
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.evaluation import Evaluation, evaluate_model
from mgk.training.metrics import read_metrics
from mgk.training.recipe import Recipe
from mgk.training.run_dir import BEST, MODEL, claim_folder
from mgk.training.run_summary import CORRECT, SUMMARY, RunSummary, read_summary
from mgk.training.tasks import TaskData, make_model, model_class, open_data
from mgk.training.trainer import MgkTrainer, make_arguments, reason

__all__ = ["RunSummary", "read_summary", "train"]

OnStep = Callable[[int, int], None]
OnLog = Callable[[dict[str, float]], None]
Say = Callable[[str], None]


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    on_log: OnLog | None = None,
    on_test: OnStep | None = None,
    say: Say | None = None,
) -> RunSummary:
    """Train a model by a recipe and measure it.

    Under ``torchrun`` every process calls this; the first one writes. Ctrl-C and SIGTERM save and raise
    ``Interrupted``.

    Args:
        recipe: everything that determines the run.
        out: the run's folder.
        resume: go on from the newest whole checkpoint in it; a run that is finished is returned as it is.
        overwrite: delete a run that is there.
        on_step: called with how many steps of how many are done.
        on_log: called with each line of metrics.
        on_test: called with how many steps of the test at the end are done.
        say: called with notes for the user, such as a checkpoint that is damaged.

    Returns:
        The summary, which is in ``summary.json`` too.
    """
    nothing: OnStep = lambda done, total: None  # noqa: E731
    tell = say or (lambda text: None)
    check_shares(recipe, distributed.expected())
    with cpu_threads(recipe.training.threads), quiet(), StopSignals() as signals:
        try:
            arguments = make_arguments(recipe, out)
            is_first = distributed.rank() == 0
            if is_first:
                claim_folder(recipe, out, resume=resume, overwrite=overwrite)
            distributed.barrier()
            if (out / SUMMARY).is_file():
                return read_summary(out)
            data = _opened(recipe, tell if is_first else (lambda text: None))
            start = _start(out, tell) if is_first else checkpoints.Choice(None, {})
            start = distributed.from_first(start)
            if is_first:
                record(out, recipe, data, arguments.device, start.step)
            set_seed(recipe.seed)
            trainer = MgkTrainer(
                make_model(recipe, data),
                arguments,
                recipe=recipe,
                run=out,
                data=data,
                signals=signals,
                on_step=on_step or nothing,
                on_log=on_log or (lambda line: None),
                start=start,
            )
            began = time.perf_counter()
            memory = _run(trainer)
            seconds = time.perf_counter() - began
            if trainer.state.global_step < recipe.training.max_steps:
                raise Interrupted(f"stopped by {signals.requested or 'another process'}")
            return _finish(trainer, arguments, seconds, memory, on_test if is_first else None)
        except Interrupted as stop:
            raise Interrupted(f"{stop} at {_where(out)}; go on with: mgk train --resume --out {out}") from None
        except RuntimeError as error:
            if not distributed.is_lost(error):
                raise
            raise Interrupted(f"{out}: another process has failed; {checkpoints.last_good(out)}") from error
        except OSError as error:
            if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
                raise TrainingError(f"{os.fsdecode(error.filename or out)}: {error.strerror or error}") from error
            raise TrainingError(f"{out}: {reason(error)}; {checkpoints.last_good(out)}") from error


def check_shares(recipe: Recipe, processes: int) -> None:
    """Raise unless the batch can be shared out over the processes and accumulated parts."""
    training = recipe.training
    if training.batch_size % (training.accumulation * processes):
        raise RecipeError(
            f"training.batch_size of {training.batch_size} cannot be shared out over {processes} processes in"
            f" {training.accumulation} parts each"
        )


def _opened(recipe: Recipe, say: Say) -> TaskData:
    """The data; the first rank makes what has to be made."""
    if recipe.data.options:
        say(f"data: {recipe.data.name} with {recipe.data.options}, generated on first use")
    if distributed.rank() == 0:
        data = open_data(recipe.data)
        distributed.barrier()
        return data
    distributed.barrier()
    return open_data(recipe.data)


def _start(run: Path, say: Say) -> checkpoints.Choice:
    """Where to go on; what a run that was killed left half written is cleared away."""
    shutil.rmtree(run / checkpoints.CHECKPOINTS / checkpoints.WRITING, ignore_errors=True)
    choice = checkpoints.choose(run)
    for path, wrong in choice.damaged.items():
        say(f"{path} is damaged ({wrong}): it is not used")
        checkpoints.remove(path)
    if choice.path is not None:
        say(f"going on from {choice.path}")
    elif choice.damaged:
        say("no checkpoint is whole: starting from the beginning")
    return choice


def _run(trainer: MgkTrainer) -> int | None:
    """Train; the peak of memory."""
    path = None if trainer.start.path is None else str(trainer.start.path)
    try:
        return peak_extra_bytes(partial(trainer.train, resume_from_checkpoint=path), trainer.args.device)
    finally:
        trainer.conductor.close()
        trainer.signals.is_training = False
        if distributed.rank() == 0:
            shutil.rmtree(trainer.args.output_dir, ignore_errors=True)


def _finish(
    trainer: MgkTrainer, arguments: TrainingArguments, seconds: float, memory: int | None, on_test: OnStep | None
) -> RunSummary:
    """Test the weights that are kept, save them, and write the summary, which says that the run is finished."""
    recipe, run, data = trainer.recipe, trainer.run, trainer.data
    model = _kept(trainer)
    found = None
    if recipe.evaluation.test:
        found = evaluate_model(
            model,
            data,
            "test",
            batch_size=recipe.evaluation.batch_size or min(32, recipe.training.batch_size),
            device=arguments.device,
            window=recipe.evaluation.window,
            stride=recipe.evaluation.stride,
            max_tokens=recipe.evaluation.max_tokens,
            on_step=on_test,
        )
    lines = read_metrics(run)
    metric = "perplexity" if data.is_language else "accuracy"
    summary = RunSummary(
        task=recipe.task,
        preset=recipe.preset,
        data=recipe.data.name,
        seed=recipe.seed,
        attention=recipe.model.attention,
        heads=recipe.model.num_attention_heads,
        steps=recipe.training.max_steps,
        parameters=model.num_parameters(),
        train_loss=_last(lines, "loss"),
        metric=metric,
        metrics=_metrics(trainer, lines, metric, found),
        test_split=None if found is None else found.split,
        examples=0 if found is None else found.examples,
        correct=None if found is None or found.correct is None else sum(found.correct),
        seconds_per_step=trainer.timings.seconds_per_step,
        tokens_per_second=trainer.timings.tokens_per_second,
        peak_memory_bytes=memory,
        seconds=seconds,
        device=str(arguments.device),
        processes=distributed.world_size(),
        how=_how(found),
    )
    if distributed.rank() == 0:
        _save(run, model, data, summary)
        if found is not None and found.correct is not None:
            write_json(run / CORRECT, {"split": found.split, "correct": [int(right) for right in found.correct]})
        write_json(run / SUMMARY, json_codec.dump(summary))
    distributed.barrier()
    return summary


def _kept(trainer: MgkTrainer) -> PreTrainedModel:
    """The model with the weights that the recipe selects."""
    if trainer.recipe.evaluation.select == "last":
        return trainer.model
    return model_class(trainer.data.task).from_pretrained(trainer.run / BEST).to(trainer.args.device)


def _metrics(
    trainer: MgkTrainer, lines: list[dict[str, Any]], metric: str, found: Evaluation | None
) -> dict[str, float]:
    values: dict[str, float | None] = {}
    if trainer.recipe.evaluation.split == "validation":
        values = {
            "validation_loss": _last(lines, "eval_loss"),
            f"validation_{metric}": _last(lines, f"eval_{metric}"),
            f"best_validation_{metric}": trainer.progress.best,
            "best_step": trainer.progress.best_step,
        }
    if found is not None:
        values |= {"test_loss": found.loss, f"test_{metric}": found.value}
        if found.sliding is not None:
            values["test_sliding_perplexity"] = found.sliding.value
    return {name: value for name, value in values.items() if value is not None}


def _how(found: Evaluation | None) -> dict[str, str]:
    named = {} if found is None else {"test_perplexity": found.perplexity, "test_sliding_perplexity": found.sliding}
    return {name: measured.how for name, measured in named.items() if measured is not None}


def _last(lines: list[dict[str, Any]], name: str) -> float:
    return next((float(line[name]) for line in reversed(lines) if name in line), float("nan"))


def _save(run: Path, model: PreTrainedModel, data: TaskData, summary: RunSummary) -> None:
    folder, written = run / MODEL, run / f".{MODEL}.writing"
    shutil.rmtree(written, ignore_errors=True)
    model.config.use_cache = True  # Trainer turns it off
    model.save_pretrained(written)
    tokenizer = data.tokenizer()
    if tokenizer is not None:
        tokenizer.save_pretrained(written)
    kind = "a made-up sample, not the real task" if data.manifest.synthetic else data.task.title
    write_card(
        written,
        model.config,
        {
            "task": summary.task,
            "data": f"{data.task.name}: {kind}",
            "preset": summary.preset,
            "steps": summary.steps,
            "seed": summary.seed,
            "metrics": summary.metrics,
        },
    )
    shutil.rmtree(folder, ignore_errors=True)
    written.rename(folder)


def _where(run: Path) -> str:
    found = next(iter(checkpoints.list_checkpoints(run)), None)
    return "the beginning" if found is None else f"step {checkpoints.step_of(found)}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and warnings of the libraries below; what matters is said here."""
    level = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    noisy = logging.getLogger("torch.distributed")
    before = noisy.level
    noisy.setLevel(logging.ERROR)
    hook = threading.excepthook
    # TensorBoard's thread hands its error on to the next one who writes, too.
    threading.excepthook = lambda told: None if isinstance(told.exc_value, OSError) else hook(told)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(torch|transformers|accelerate)\b")
            yield
    finally:
        threading.excepthook = hook
        noisy.setLevel(before)
        transformers_logging.set_verbosity(level)
        if had_bars:
            transformers_logging.enable_progress_bar()
