"""The folder of a run: its files, who may write into it, its summary and its metrics. Does not import torch."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgk._util import json_codec
from mgk._util.files import write_file
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

OnLog = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% confidence interval."""

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


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The result of a run.

    Attributes:
        data: the name of the data set; ``synthetic-...`` is a synthetic sample.
        train_loss: the mean over the last steps that were logged.
        metric: the main metric: "accuracy" (higher is better) or "perplexity" (lower is better).
        metrics: of the last evaluation ("validation_accuracy", "validation_loss", "best_validation_accuracy",
            "best_step") and of the weights kept ("test_accuracy", "test_loss"); for language models "perplexity"
            in place of "accuracy", by segments, and "test_sliding_perplexity".
        how: window and stride of the perplexities in ``metrics``, by name.
        test_split: the split of the test metrics, or None.
        examples: of the test; for language models, tokens.
        correct: how many of them were right; None for language models. Which ones: ``read_correct``.
        seconds_per_step: the median, data included, evaluation and checkpoints excluded.
        tokens_per_second: without padding, over all ranks; the median.
        peak_memory_bytes: beyond what was in use before training, on this rank; None where it cannot be measured.
        seconds: of the whole of training in this process.
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
    format: int = 1


def check_run_dir(recipe: Recipe, out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise when the run may not go into this folder."""
    if resume and overwrite:
        raise RecipeError("a run is resumed or overwritten, not both")
    if out.exists() and not out.is_dir():
        raise RecipeError(f"{out}: this is a file, not the folder of a run")
    has_recipe = (out / RECIPE).is_file()
    # A recipe that was being written when the run was killed is no run yet.
    is_used = out.is_dir() and any(not entry.name.startswith(f".{RECIPE}.") for entry in out.iterdir())
    if resume and has_recipe:
        for path, (now, then) in differences(recipe, read_recipe(out / RECIPE)).items():
            raise RecipeError(
                f"{out}: this run was started with {path} = {then!r}, not {now!r}: resume it without changes, as in"
                f" mgk train --resume --out {out}"
            )
    elif resume and is_used:
        raise RecipeError(f"{out}: there is no run to resume here ({RECIPE} is missing)")
    elif is_used and not overwrite:
        is_done = (out / SUMMARY).is_file()
        hint = "choose another --out, or --overwrite it" if is_done else "go on with --resume, or --overwrite it"
        raise RecipeError(f"{out}: there is {'a finished run' if is_done else 'something'} here already: {hint}")
    elif is_used and not has_recipe:
        raise RecipeError(f"{out}: this is not the folder of a run, so it is not overwritten")


def prepare_run_dir(recipe: Recipe, out: Path, *, resume: bool, overwrite: bool) -> None:
    """Check the folder, clear it if it is to be overwritten, and write the recipe into it."""
    check_run_dir(recipe, out, resume=resume, overwrite=overwrite)
    if overwrite and out.is_dir():
        for entry in sorted(out.iterdir(), key=lambda path: path.name == RECIPE):  # last: it marks a run
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if not (out / RECIPE).is_file():
        write_recipe(recipe, out / RECIPE)


def read_run_recipe(run: Path) -> Recipe:
    """The recipe of a run, finished or not."""
    if not (run / RECIPE).is_file():
        raise TrainingError(f"{run}: there is no run here ({RECIPE} is missing)")
    return read_recipe(run / RECIPE)


def read_summary(run: Path) -> RunSummary:
    """The summary of a finished run."""
    with _reading(run / SUMMARY, "there is no finished run here", "this is not the summary of a run") as data:
        return json_codec.load(RunSummary, data)


def read_correct(run: Path) -> list[bool]:
    """Whether the model was right on each example of the test split, in the order of the data."""
    with _reading(run / CORRECT, "this run has no test results by example", "these are not test results") as data:
        return [bool(value) for value in data["correct"]]


@contextmanager
def _reading(path: Path, absent: str, invalid: str) -> Iterator[Any]:
    try:
        yield json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise TrainingError(f"{path.parent}: {absent} ({path.name} is missing)") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path}: {invalid} ({error})") from None


@contextmanager
def metrics_writer(run: Path, step: int, on_log: OnLog) -> Iterator[OnLog]:
    """A function that writes a line to ``metrics.jsonl`` and TensorBoard and then calls ``on_log`` with it.

    Lines after ``step``, of steps that were lost, are deleted first.
    """
    from torch.utils.tensorboard import SummaryWriter

    kept = [line for line in read_metrics(run) if line["step"] <= step]
    write_file(run / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
    board = SummaryWriter(str(run / TENSORBOARD), purge_step=step + 1 if step else None)
    excepthook = threading.excepthook
    # A full disk fails in TensorBoard's thread; the next write raises the same error here.
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
    lines = []
    for text in (run / METRICS).read_text(encoding="utf-8").splitlines() if (run / METRICS).is_file() else ():
        with suppress(ValueError):  # half a line, of a run that was killed while writing
            line = json.loads(text)
            if isinstance(line, dict) and "step" in line:
                lines.append(line)
    return lines
