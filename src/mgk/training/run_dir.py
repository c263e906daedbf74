"""The folder of a run: files, metrics, summary, intervals. Does not import torch."""

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mgk._util import files, json_codec
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.recipe import Recipe, differences, read_recipe, write_recipe

RECIPE = "recipe.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
BEST = "best"
MODEL = "model"
SUMMARY = "summary.json"
CORRECT = "test_correct.json"
CARD = "README.md"  # of the model; the only file that people edit

OnLog = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval, of 95% unless said otherwise."""

    estimate: float
    low: float
    high: float


def wilson_interval(correct: int, total: int) -> Interval:
    """Wilson's: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    if not 0 <= correct <= total or total == 0:
        raise ValueError(f"correct must be from 0 to total, and total above 0, got {correct} of {total}")
    from scipy.stats import binomtest

    bounds = binomtest(correct, total).proportion_ci(method="wilson")
    return Interval(correct / total, float(bounds.low), float(bounds.high))


def student_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's: mean -+ t s / sqrt(n), t of n - 1 degrees of freedom.

    For few values, where a bootstrap is too narrow; unbounded for one value.
    """
    mean, count = fmean(values), len(values)
    if count == 1:
        return Interval(mean, -math.inf, math.inf)
    from scipy.stats import t

    half_width = float(t.ppf((1 + confidence) / 2, count - 1)) * stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half_width, mean + half_width)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The result of a run.

    Attributes:
        data: the name of the data set; ``synthetic-...`` is a synthetic sample.
        train_loss: the mean over the last steps that were logged.
        metric: "accuracy" (higher is better), "perplexity" or "bits_per_byte" (lower is).
        metrics: of the last evaluation ("validation_accuracy", "validation_loss",
            "best_validation_accuracy", "best_step") and of the weights kept
            ("test_accuracy", "test_loss"); for language models their metric by segments in
            place of "accuracy", and "test_sliding_perplexity".
        how: window and stride of the perplexities in ``metrics``, by name.
        test_split: the split of the test metrics, or None.
        examples: of the test; for language models, tokens.
        correct: how many of them were right (``read_correct``: which); None for language
            models.
        block_losses: the mean test loss of successive parts of a text, in nats.
        seconds_per_step: the median, data included, evaluation and checkpoints excluded.
        tokens_per_second: without padding, over all ranks; the median over all steps.
        peak_memory_bytes: of this rank, beyond that before training, the most of all
            sessions; None where it cannot be measured.
        seconds: of training, over all sessions, without steps that were lost.
    """

    task: str
    preset: str
    data: str
    seed: int
    attention: str
    heads: int
    steps: int
    parameters: int
    train_loss: float
    metric: str
    metrics: dict[str, float]
    test_split: str | None
    examples: int
    correct: int | None
    seconds_per_step: float
    tokens_per_second: float
    peak_memory_bytes: int | None
    seconds: float
    device: str
    processes: int
    how: dict[str, str] = field(default_factory=dict)
    block_losses: tuple[float, ...] = ()
    format: int = 2


def check_run_dir(recipe: Recipe, out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise when the run may not go into this folder."""
    if resume and overwrite:
        raise RecipeError("a run is resumed or overwritten, not both")
    if out.exists() and not out.is_dir():
        raise RecipeError(f"{out}: this is a file, not the folder of a run")
    has_recipe = (out / RECIPE).is_file()
    # A recipe that was being written when the run was killed is no run yet.
    is_used = out.is_dir() and any(
        not entry.name.startswith(f".{RECIPE}.") and entry.name != files.LOCK for entry in out.iterdir()
    )
    if resume and has_recipe:
        for path, (now, then) in differences(recipe, read_run_recipe(out)).items():
            started = f"this run was started with {path} = {then!r}, not {now!r}"
            command = f"mgk train --resume --out {out}"
            raise RecipeError(f"{out}: {started}: resume it without changes, as in {command}")
    elif resume and is_used:
        raise RecipeError(f"{out}: there is no run to resume here ({RECIPE} is missing)")
    elif is_used and not overwrite:
        what, hint = "something", "go on with --resume"
        if (out / SUMMARY).is_file():
            what, hint = "a finished run", "choose another --out"
        raise RecipeError(f"{out}: there is {what} here already: {hint}, or --overwrite it")
    elif is_used and not has_recipe:
        raise RecipeError(f"{out}: this is not the folder of a run, so it is not overwritten")


def prepare_run_dir(recipe: Recipe, out: Path, *, resume: bool, overwrite: bool) -> None:
    """Check the folder, clear it if it is overwritten, write the recipe."""
    check_run_dir(recipe, out, resume=resume, overwrite=overwrite)
    if overwrite and out.is_dir():
        entries = [entry for entry in out.iterdir() if entry.name != files.LOCK]
        for entry in sorted(entries, key=lambda path: path.name == RECIPE):  # last: it marks a run
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if not (out / RECIPE).is_file():
        write_recipe(recipe, out / RECIPE)


def read_run_recipe(run: Path, *, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a run, finished or not."""
    if not (run / RECIPE).is_file():
        raise RecipeError(f"{run}: there is no run here ({RECIPE} is missing)")
    check_files(run, RECIPE)
    return read_recipe(run / RECIPE, overrides=overrides)


def finished_recipe(run: Path) -> Recipe:
    """The recipe of a run with a model, or ``RecipeError``."""
    recipe = read_run_recipe(run)
    if not (run / SUMMARY).is_file() or not (run / MODEL).is_dir():
        command = f"mgk train --resume --out {run}"
        raise RecipeError(f"{run}: this run is not finished: go on with {command}")
    return recipe


def write_summary(run: Path, summary: RunSummary) -> None:
    """Write ``summary.json``, the mark of a finished run."""
    names = (RECIPE, ENVIRONMENT, METRICS, CORRECT)
    paths = [path for name in names if (path := run / name).is_file()]
    paths += [path for path in (run / MODEL).rglob("*") if path.is_file() and path.name != CARD]
    files.write_hashed(run / SUMMARY, asdict(summary), paths)


def write_environment(run: Path, data: Mapping[str, Any]) -> None:
    """Write ``environment.json``, with the SHA-256 of the recipe."""
    files.write_hashed(run / ENVIRONMENT, data, [run / RECIPE])


def read_summary(run: Path) -> RunSummary:
    """The summary of a finished run."""
    absent, invalid = "there is no finished run here", "this is not the summary of a run"
    with _reading(run / SUMMARY, absent, invalid) as path:
        return json_codec.load(RunSummary, files.read_verified(path))


def read_environment(run: Path) -> dict[str, Any]:
    """Seed and data of a run; per session, machine and versions."""
    absent, invalid = "there is no run here", "this is not the environment of a run"
    with _reading(run / ENVIRONMENT, absent, invalid) as path:
        return files.read_verified(path)


def read_correct(run: Path) -> list[bool]:
    """Whether the model was right on each example of the test split, in order."""
    check_files(run, CORRECT)
    absent, invalid = "this run has no test results by example", "these are not test results"
    with _reading(run / CORRECT, absent, invalid) as path:
        return [bool(value) for value in files.read_json(path)["correct"]]


def check_files(run: Path, name: str) -> None:
    """Raise where a file whose name begins so is not what was written.

    By ``summary.json``; the recipe also by ``environment.json``, the run's or a
    checkpoint's.
    """
    sources = [run / SUMMARY]
    if name == RECIPE:
        sources += [run / ENVIRONMENT, *sorted(run.glob(f"{CHECKPOINTS}/step-*/{ENVIRONMENT}"))]
    errors = []
    for source in filter(Path.is_file, sources):
        try:
            specs = files.verified_specs(source)
        except ValueError as error:
            hint = recovery_hint(run, source.name)
            errors.append(f"{source}: this cannot be trusted ({error}); {hint}")
            continue
        chosen = {path: spec for path, spec in specs.items() if path.startswith(name)}
        for wrong, what in files.wrong_files(run, chosen):
            hint = recovery_hint(run, wrong)
            raise TrainingError(f"{run / wrong}: this file of the run {what}; {hint}")
        return
    if errors:
        raise TrainingError(errors[0])


def check_finished(run: Path) -> None:
    """Raise where a file of a finished run is not what was written."""
    read_summary(run)
    check_files(run, "")


def recovery_hint(run: Path, name: str) -> str:
    """What to do about a file that is not what was written."""
    has_checkpoint = any((run / CHECKPOINTS).glob("step-*"))
    if name == RECIPE or not has_checkpoint:
        return "put it back as it was, or train anew with --overwrite"
    return f"mgk train --resume --out {run} makes it anew from the last checkpoint"


@contextmanager
def _reading(path: Path, absent: str, invalid: str) -> Iterator[Path]:
    try:
        yield path
    except (FileNotFoundError, NotADirectoryError):
        raise TrainingError(f"{path.parent}: {absent} ({path.name} is missing)") from None
    except (ValueError, KeyError, TypeError) as error:
        hint = recovery_hint(path.parent, path.name)
        raise TrainingError(f"{path}: {invalid} ({error}); {hint}") from None


@contextmanager
def metrics_writer(run: Path, step: int, on_log: OnLog) -> Iterator[OnLog]:
    """A function that logs to ``metrics.jsonl``, TensorBoard, ``on_log``.

    TensorBoard drops what it has of steps after ``step``.
    """
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(run / TENSORBOARD), purge_step=step + 1 if step else None)
    excepthook = threading.excepthook
    # A full disk fails in TensorBoard's thread; the next write raises here.
    threading.excepthook = lambda error: None if isinstance(error.exc_value, OSError) else excepthook(error)
    file = (run / METRICS).open("a", encoding="utf-8")

    def write(metrics: dict[str, float]) -> None:
        file.write(json.dumps(metrics) + "\n")
        file.flush()
        for name, value in metrics.items():
            if name != "step":
                group = "eval" if name.startswith("eval_") else "train"
                board.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, int(metrics["step"]))
        on_log(metrics)

    try:
        yield write
    finally:
        for closing in (file, board):
            with suppress(OSError):  # write() has raised it before
                closing.close()
        threading.excepthook = excepthook


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    check_files(run, METRICS)
    lines: list[dict[str, Any]] = []
    if not (run / METRICS).is_file():
        return lines
    for text in (run / METRICS).read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # half a line, of a killed run
            line = json.loads(text)
            if isinstance(line, dict) and "step" in line:
                lines.append(line)
    return lines
