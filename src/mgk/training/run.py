"""``train``: from a recipe or a checkpoint to the tested, saved model."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from signal import SIGTERM
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mgk._util.errors import Interrupted, UserError
from mgk._util.files import atomic_folder, folder_lock, write_json
from mgk._util.machine import cpu_threads, describe
from mgk._util.signals import StopSignals
from mgk.data.task_registry import TASKS
from mgk.models import write_card
from mgk.training import checkpoints, distributed, run_dir
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.evaluation import Evaluation, evaluate_model
from mgk.training.loop import OnStep, TrainingLoop, reason
from mgk.training.recipe import Recipe
from mgk.training.tasks import TaskData, load_weights, make_model, open_data, quiet

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
    on_log: run_dir.OnLog = _ignore,
    on_test: OnStep = _ignore,
    on_note: Callable[[str], None] = _ignore,
) -> run_dir.RunSummary:
    """Train a model by a recipe and test it.

    Under ``torchrun`` every process calls this; only the first one writes and calls back.
    SIGINT and SIGTERM save a checkpoint and raise ``Interrupted``.

    Args:
        resume: go on from the newest valid checkpoint, if the run is not finished.
        overwrite: delete a run that is there.
        on_test: called with the steps of the test at the end that are done.
        on_note: called with notes for the user, such as a corrupt checkpoint.
    """
    check_batch_size(recipe, distributed.num_launched())
    with (
        cpu_threads(recipe.training.threads),
        quiet(),
        ExitStack() as resources,
        StopSignals() as signals,
        _explained_errors(out),
    ):
        device = distributed.choose_device(recipe.training.device)
        distributed.init(device)
        is_first, is_new = distributed.rank() == 0, False
        if is_first:
            run_dir.check_run_dir(recipe, out, resume=resume, overwrite=overwrite)
            is_new = not out.exists()
            out.mkdir(parents=True, exist_ok=True)
            resources.enter_context(folder_lock(out))
            # another may have begun and ended meanwhile
            is_new = is_new and not (out / run_dir.RECIPE).exists()
        with _cleared_if_it_cannot_start(out if is_new else None):
            if is_first:
                run_dir.prepare_run_dir(recipe, out, resume=resume, overwrite=overwrite)
                _check_finished(out, on_note)
            else:
                on_step = on_log = on_test = on_note = _ignore
            distributed.barrier()
            if (out / run_dir.SUMMARY).is_file():
                return run_dir.read_summary(out)
            data = _open_data(recipe, on_note)
            step = distributed.broadcast(_first_step(out, on_note) if is_first else 0)
            if is_first:
                _record_environment(out, recipe, data, device, step, on_note)
            torch.manual_seed(recipe.seed)
            model = make_model(recipe, data)
            loop = TrainingLoop(model, recipe, data, out, device=device, signals=signals)
            if step:
                loop.restore(out / run_dir.CHECKPOINTS / f"step-{step}")
        with run_dir.metrics_writer(out, step, on_log) if is_first else nullcontext(_ignore) as log:
            loop.train(on_step, log)
        if loop.progress.step < recipe.training.max_steps:
            came = signals.requested  # None: it came to another rank
            raise Interrupted(f"stopped by {came.name if came else 'another process'}", came or SIGTERM)
        return _finish(loop, on_test)


@contextmanager
def _explained_errors(run: Path) -> Iterator[None]:
    """Errors say what is saved of the run, and how it goes on."""
    try:
        yield
    except Interrupted as stop:
        command = f"mgk train --resume --out {run}"
        text = f"{stop} at {_last_step(run)}; go on with: {command}"
        raise Interrupted(text, stop.number) from None
    except RuntimeError as error:
        if not distributed.is_lost(error):
            raise
        last_good = checkpoints.last_good(run)
        raise TrainingError(f"{run}: another process has failed; {last_good}") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
            path = os.fsdecode(error.filename or run)
            raise TrainingError(f"{path}: {error.strerror or error}") from error
        raise TrainingError(f"{run}: {reason(error)}; {checkpoints.last_good(run)}") from error


@contextmanager
def _cleared_if_it_cannot_start(new_run: Path | None) -> Iterator[None]:
    """A run that cannot start leaves nothing in the way of the next."""
    try:
        yield
    except (UserError, OSError) as error:
        if new_run and not isinstance(error, Interrupted):
            shutil.rmtree(new_run, ignore_errors=True)
        raise


def check_batch_size(recipe: Recipe, processes: int) -> None:
    """Raise unless the batch divides over processes and parts."""
    training = recipe.training
    if training.batch_size % (training.accumulation * processes):
        parts = f"{processes} processes in {training.accumulation} parts each"
        size = f"training.batch_size of {training.batch_size}"
        raise RecipeError(f"{size} cannot be shared out over {parts}")


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


def _check_finished(run: Path, on_note: Callable[[str], None]) -> None:
    """A finished run with changed files is finished again."""
    if not (run / run_dir.SUMMARY).is_file():
        return
    try:
        run_dir.check_finished(run)
    except TrainingError as error:
        if checkpoints.newest(run) is None:
            raise
        on_note(f"{error}: so it is finished again")
        (run / run_dir.SUMMARY).unlink()


def _first_step(run: Path, on_note: Callable[[str], None]) -> int:
    """The step to go on from; incomplete files are deleted."""
    for pattern in ("checkpoints/.*", ".*.writing", ".*.tmp"):
        for path in run.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    found, corrupt = checkpoints.newest_valid(run)
    checkpoints.restore_files(run, found)
    for path, wrong in corrupt.items():
        on_note(f"{path} is corrupt ({wrong}): it is not used")
        checkpoints.remove(path)
    if found is not None:
        on_note(f"going on from {found}")
    elif corrupt:
        on_note("no checkpoint is valid: starting from the beginning")
    return 0 if found is None else checkpoints.step_of(found)


def _last_step(run: Path) -> str:
    found = checkpoints.newest(run)
    return "the beginning" if found is None else f"step {checkpoints.step_of(found)}"


def _record_environment(
    run: Path,
    recipe: Recipe,
    data: TaskData,
    device: torch.device,
    step: int,
    on_note: Callable[[str], None],
) -> None:
    """Add this session to ``environment.json``; the data must be equal."""
    manifest = data.manifest.to_json()
    sessions: list[Any] = []
    if (before := _environment(run, step, on_note)) is not None:
        sessions = before["sessions"]
        if before["data"]["files"] != manifest["files"]:
            path = data.folder / data.task.name
            raise TrainingError(f"{path}: the data have changed since {run} began with them")
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
    run_dir.write_environment(run, {"seed": recipe.seed, "data": manifest, "sessions": sessions})


def _environment(run: Path, step: int, on_note: Callable[[str], None]) -> dict[str, Any] | None:
    """The run's record, else that of the checkpoint that it goes on from."""
    if (run / run_dir.ENVIRONMENT).is_file():
        try:
            return run_dir.read_environment(run)
        except TrainingError as error:
            on_note(f"{error}: it is not used")
    return run_dir.read_environment(run / run_dir.CHECKPOINTS / f"step-{step}") if step else None


def _finish(loop: TrainingLoop, on_test: OnStep) -> run_dir.RunSummary:
    """Test and save the selected weights, and write the summary."""
    recipe, run, data, model = loop.recipe, loop.run, loop.data, loop.model
    if recipe.evaluation.select == "best":
        if (wrong := checkpoints.verify(run / run_dir.BEST)) is not None:
            advice = f"mgk train --resume --out {run} takes the checkpoint's"
            raise TrainingError(f"{run / run_dir.BEST}: {wrong}; {advice}")
        model = load_weights(run / run_dir.BEST, data.task).to(loop.device)
    seconds, tokens = np.array(loop.timings).reshape(-1, 2).T
    found = None
    if recipe.evaluation.test:
        found = evaluate_model(model, data, "test", recipe.evaluation_options(), on_test)
    summary = run_dir.RunSummary(
        task=recipe.task,
        preset=recipe.preset,
        data=recipe.data.name,
        seed=recipe.seed,
        attention=recipe.model.attention,
        heads=recipe.model.num_attention_heads,
        steps=recipe.training.max_steps,
        parameters=model.num_parameters(),
        seconds_per_step=float(np.median(seconds)),
        tokens_per_second=float(np.median(tokens / seconds)),
        peak_memory_bytes=loop.progress.peak_memory_bytes,
        seconds=loop.progress.wall_seconds,
        device=str(loop.device),
        processes=distributed.world_size(),
        **_metrics(loop, found),
    )
    if distributed.rank() == 0:
        _save_model(run / run_dir.MODEL, model, data, summary, recipe, found)
        if found is not None and found.correct is not None:
            correct = [int(right) for right in found.correct]
            write_json(run / run_dir.CORRECT, {"split": found.split, "correct": correct})
        run_dir.write_summary(run, summary)
    distributed.barrier()
    return summary


def _metrics(loop: TrainingLoop, found: Evaluation | None) -> dict[str, Any]:
    """The fields of the summary that were measured on data."""
    lines = run_dir.read_metrics(loop.run)

    def last(name: str) -> float:
        return next((float(line[name]) for line in reversed(lines) if name in line), float("nan"))

    metric = loop.data.metric
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
        "block_losses": () if found is None or found.perplexity is None else found.perplexity.block_losses,
    }


def _save_model(
    folder: Path,
    model: PreTrainedModel,
    data: TaskData,
    summary: run_dir.RunSummary,
    recipe: Recipe,
    found: Evaluation | None,
) -> None:
    """Weights, tokenizer and model card."""
    read, licence = _described(data)
    anywhere = recipe.model_copy(update={"data": recipe.data.model_copy(update={"folder": None})})
    facts = {
        "task": summary.task,
        "data": f"{data.task.name}: {read}",
        "licence of the data": licence,
        "preset": summary.preset,
        "steps": summary.steps,
        "seed": summary.seed,
        "parameters": f"{summary.parameters:,}",
        "recipe": anywhere.to_yaml(),
        "metrics": _shown_metrics(summary, found),
    }
    with atomic_folder(folder) as written:
        model.save_pretrained(written)
        tokenizer = data.tokenizer()
        if tokenizer is not None:
            tokenizer.save_pretrained(written)
        write_card(written, model.config, facts)


def _described(data: TaskData) -> tuple[str, str]:
    """What the data are, and their licence."""
    if data.manifest.synthetic:
        return "a synthetic sample, not the real task", "generated here"
    text = data.manifest.facts.get("corpus")  # of bytes: the name of what was prepared
    if text is None:
        return data.task.title, data.task.licence
    if text in TASKS:
        return f"the text of {text}", TASKS[text].licence
    is_library = text.startswith("standard library")
    return f"the text of {text}", "PSF-2.0" if is_library else "that of the text: fill it in"


def _shown_metrics(summary: run_dir.RunSummary, found: Evaluation | None) -> dict[str, str]:
    """The metrics as text, those of the test with intervals."""
    shown = {name: f"{value:.4g}" for name, value in summary.metrics.items()}
    if found is None or found.interval is None:
        return shown
    if found.perplexity is None:
        accuracy, examples = _with_interval(found.interval, ".2%"), f"{found.examples:,} examples"
        return shown | {"test_accuracy": f"{accuracy}, one seed, {examples})"}
    shown[f"test_{found.metric}"] = f"{_with_interval(found.interval)} over parts of the text, one seed)"
    measured = {"test_perplexity": found.perplexity, "test_sliding_perplexity": found.sliding}
    for name, perplexity in measured.items():
        if perplexity is not None:
            text = _with_interval(perplexity.interval())
            shown[name] = f"{text} over parts of the text, one seed; {perplexity.how})"
    return shown


def _with_interval(found: run_dir.Interval, digits: str = ".4g") -> str:
    low, high = f"{found.low:{digits}}", f"{found.high:{digits}}"
    return f"{found.estimate:{digits}} (95% CI {low} to {high}"
