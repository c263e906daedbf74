"""``train``: from a recipe, or the last checkpoint of a run, to the trained, tested and saved model."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from mgk._util.errors import Interrupted
from mgk._util.files import atomic_folder, write_json
from mgk._util.machine import cpu_threads, describe, peak_extra_bytes
from mgk._util.signals import StopSignals
from mgk.models import write_card
from mgk.training import checkpoints, distributed
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.evaluation import Evaluation, evaluate_model
from mgk.training.loop import OnStep, TrainingLoop, reason
from mgk.training.recipe import Recipe
from mgk.training.run_dir import (
    BEST,
    CHECKPOINTS,
    CORRECT,
    ENVIRONMENT,
    MODEL,
    SUMMARY,
    OnLog,
    RunSummary,
    metrics_writer,
    prepare_run_dir,
    read_metrics,
    read_summary,
)
from mgk.training.tasks import TaskData, make_model, model_class, open_data, quiet

_PACKAGES = ("mgk", "torch", "transformers", "safetensors", "tokenizers", "numpy", "pydantic")


def _ignore(*arguments: object) -> None:
    pass


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_step: OnStep = _ignore,
    on_log: OnLog = _ignore,
    on_test: OnStep = _ignore,
    on_note: Callable[[str], None] = _ignore,
) -> RunSummary:
    """Train a model by a recipe and test it.

    Under ``torchrun`` every process calls this; the first one alone writes and calls back. SIGINT and SIGTERM save a
    checkpoint and raise ``Interrupted``.

    Args:
        resume: go on from the newest valid checkpoint in it; the summary of a finished run is returned.
        overwrite: delete a run that is there.
        on_test: called with how many steps of the test at the end are done.
        on_note: called with notes for the user, such as a checkpoint that is corrupt.

    Returns:
        The summary, which is also written to ``summary.json``.
    """
    check_batch_size(recipe, distributed.num_launched())
    with cpu_threads(recipe.training.threads), quiet(), StopSignals() as signals:
        try:
            device = distributed.choose_device(recipe.training.device)
            distributed.init(device)
            is_first = distributed.rank() == 0
            if is_first:
                prepare_run_dir(recipe, out, resume=resume, overwrite=overwrite)
            else:
                on_step = on_log = on_test = on_note = _ignore
            distributed.barrier()
            if (out / SUMMARY).is_file():
                return read_summary(out)
            data = _open_data(recipe, on_note)
            step = distributed.broadcast(_first_step(out, on_note) if is_first else 0)
            if is_first:
                _record_environment(out, recipe, data, device, step)
            torch.manual_seed(recipe.seed)
            loop = TrainingLoop(make_model(recipe, data), recipe, data, out, device=device, signals=signals)
            if step:
                loop.restore(out / CHECKPOINTS / f"step-{step}")
            begin = time.perf_counter()
            with metrics_writer(out, step, on_log) if is_first else nullcontext(_ignore) as log:
                memory = peak_extra_bytes(lambda: loop.train(on_step, log), device)
            seconds = time.perf_counter() - begin
            if loop.progress.step < recipe.training.max_steps:
                raise Interrupted(f"stopped by {signals.requested or 'another process'}")
            return _finish(loop, seconds, memory, on_test)
        except Interrupted as stop:
            raise Interrupted(f"{stop} at {_last_step(out)}; go on with: mgk train --resume --out {out}") from None
        except RuntimeError as error:
            if not distributed.is_lost(error):
                raise
            raise Interrupted(f"{out}: another process has failed; {checkpoints.last_good(out)}") from error
        except OSError as error:
            if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
                raise TrainingError(f"{os.fsdecode(error.filename or out)}: {error.strerror or error}") from error
            raise TrainingError(f"{out}: {reason(error)}; {checkpoints.last_good(out)}") from error


def check_batch_size(recipe: Recipe, processes: int) -> None:
    """Raise unless the batch divides over the processes and their accumulated batches."""
    training = recipe.training
    if training.batch_size % (training.accumulation * processes):
        raise RecipeError(
            f"training.batch_size of {training.batch_size} cannot be shared out over {processes} processes in"
            f" {training.accumulation} parts each"
        )


def _open_data(recipe: Recipe, on_note: Callable[[str], None]) -> TaskData:
    """The data; the first rank generates what has to be generated."""
    if recipe.data.options:
        on_note(f"data: {recipe.data.name} with {recipe.data.options}, generated on first use")
    if distributed.rank() > 0:
        distributed.barrier()
    data = open_data(recipe.data)
    if distributed.rank() == 0:
        distributed.barrier()
    return data


def _first_step(run: Path, on_note: Callable[[str], None]) -> int:
    """The step to go on from, 0 at the beginning; what a killed run left incomplete is deleted."""
    for path in (run / CHECKPOINTS).glob(".*"):
        shutil.rmtree(path)
    found, corrupt = checkpoints.newest_valid(run)
    for path, wrong in corrupt.items():
        on_note(f"{path} is corrupt ({wrong}): it is not used")
        checkpoints.remove(path)
    if found is not None:
        on_note(f"going on from {found}")
    elif corrupt:
        on_note("no checkpoint is valid: starting from the beginning")
    return 0 if found is None else checkpoints.step_of(found)


def _last_step(run: Path) -> str:
    found = next(iter(checkpoints.list_checkpoints(run)), None)
    return "the beginning" if found is None else f"step {checkpoints.step_of(found)}"


def _record_environment(run: Path, recipe: Recipe, data: TaskData, device: torch.device, step: int) -> None:
    """Add this session to ``environment.json``; raise where the data are not those that the run began with."""
    path, manifest = run / ENVIRONMENT, data.manifest.to_json()
    sessions: list[Any] = []
    if path.is_file():
        before = json.loads(path.read_bytes())
        sessions = before["sessions"]
        if before["data"]["files"] != manifest["files"]:
            raise TrainingError(f"{data.folder / data.task.name}: the data have changed since {run} began with them")
    machine = describe(device)
    sessions.append(
        {
            "from_step": step,
            "command": sys.argv,
            "processes": distributed.world_size(),
            "machine": asdict(machine),
            "versions": {name: version(name) for name in _PACKAGES},
            "git": machine.commit,
        }
    )
    write_json(path, {"seed": recipe.seed, "data": manifest, "sessions": sessions})


def _finish(loop: TrainingLoop, seconds: float, memory: int | None, on_test: OnStep) -> RunSummary:
    """Test the selected weights, save them, and write the summary, which marks the run as finished."""
    recipe, run, data, model = loop.recipe, loop.run, loop.data, loop.model
    if recipe.evaluation.select == "best":
        model = model_class(data.task).from_pretrained(run / BEST).to(loop.device)
    found = None
    if recipe.evaluation.test:
        found = evaluate_model(model, data, "test", recipe.evaluation_options(), on_test)
    summary = RunSummary(
        task=recipe.task,
        preset=recipe.preset,
        data=recipe.data.name,
        seed=recipe.seed,
        attention=recipe.model.attention,
        heads=recipe.model.num_attention_heads,
        steps=recipe.training.max_steps,
        parameters=model.num_parameters(),
        seconds_per_step=median(seconds for seconds, _ in loop.timings) if loop.timings else 0.0,
        tokens_per_second=median(tokens / seconds for seconds, tokens in loop.timings) if loop.timings else 0.0,
        peak_memory_bytes=memory,
        seconds=seconds,
        device=str(loop.device),
        processes=distributed.world_size(),
        **_metrics(loop, found),
    )
    if distributed.rank() == 0:
        _save_model(run / MODEL, model, data, summary)
        if found is not None and found.correct is not None:
            write_json(run / CORRECT, {"split": found.split, "correct": [int(right) for right in found.correct]})
        write_json(run / SUMMARY, asdict(summary))
    distributed.barrier()
    return summary


def _metrics(loop: TrainingLoop, found: Evaluation | None) -> dict[str, Any]:
    """The fields of the summary that were measured on data."""
    lines = read_metrics(loop.run)

    def last(name: str) -> float:
        return next((float(line[name]) for line in reversed(lines) if name in line), float("nan"))

    metric = "perplexity" if loop.data.is_language else "accuracy"
    values: dict[str, float | None] = {}
    if loop.recipe.evaluation.split == "validation":
        values = {
            "validation_loss": last("eval_loss"),
            f"validation_{metric}": last(f"eval_{metric}"),
            f"best_validation_{metric}": loop.progress.best,
            "best_step": loop.progress.best_step,
        }
    perplexities = {}
    if found is not None:
        values |= {"test_loss": found.loss, f"test_{metric}": found.value}
        perplexities = {"test_perplexity": found.perplexity, "test_sliding_perplexity": found.sliding}
        values |= {name: measured.value for name, measured in perplexities.items() if measured is not None}
    return {
        "train_loss": last("loss"),
        "metric": metric,
        "metrics": {name: value for name, value in values.items() if value is not None},
        "how": {name: measured.how for name, measured in perplexities.items() if measured is not None},
        "test_split": None if found is None else found.split,
        "examples": 0 if found is None else found.examples,
        "correct": None if found is None or found.correct is None else sum(found.correct),
    }


def _save_model(folder: Path, model: PreTrainedModel, data: TaskData, summary: RunSummary) -> None:
    """Weights, tokenizer and model card."""
    kind = "a synthetic sample, not the real task" if data.manifest.synthetic else data.task.title
    facts = {"task": summary.task, "data": f"{data.task.name}: {kind}", "preset": summary.preset}
    with atomic_folder(folder) as written:
        model.save_pretrained(written)
        tokenizer = data.tokenizer()
        if tokenizer is not None:
            tokenizer.save_pretrained(written)
        write_card(
            written,
            model.config,
            {**facts, "steps": summary.steps, "seed": summary.seed, "metrics": summary.metrics},
        )
