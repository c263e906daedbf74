"""What a finished run came to, in one small file. Free of torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from mgk._util import json_codec
from mgk.training.errors import TrainingError

SUMMARY = "summary.json"
CORRECT = "test_correct.json"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The result of a run.

    Attributes:
        task: whose recipe it was.
        preset: of the recipe.
        data: the name of the data set; one that starts with "synthetic-" is a made-up sample.
        seed: of the run.
        attention: the variant.
        heads: how many.
        steps: of the optimizer.
        parameters: of the model.
        train_loss: the mean over the last steps that were logged.
        metric: the name of what counts: "accuracy" (higher is better) or "perplexity" (lower is better).
        metrics: of the last evaluation ("validation_accuracy", "validation_loss", "best_validation_accuracy",
            "best_step") and of the weights kept ("test_accuracy", "test_loss"); for language models "perplexity"
            in place of "accuracy", by segments, and "test_sliding_perplexity".
        how: how figures of ``metrics`` were measured, by name, where that needs saying: window and stride.
        test_split: what the test figures were measured on, or None.
        examples: of the test; for language models, tokens.
        correct: how many of them were right; None for language models. Which ones: ``read_correct``.
        seconds_per_step: the median, data included, evaluation and saving left out.
        tokens_per_second: real ones, padding left out, over all ranks; the median.
        peak_memory_bytes: beyond what was in use before training, on this rank; None where it cannot be measured.
        seconds: of the whole of training in this process.
        device: where it ran.
        processes: how many ranks.
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


def read_summary(run: Path) -> RunSummary:
    """The summary of a finished run."""
    path = run / SUMMARY
    try:
        return json_codec.load(RunSummary, json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        raise TrainingError(f"{run}: there is no finished run here ({SUMMARY} is missing)") from None
    except ValueError as error:
        raise TrainingError(f"{path}: this is not the summary of a run ({error})") from None


def read_correct(run: Path) -> list[bool]:
    """Whether the model was right on each example of the test split, in the order of the data."""
    path = run / CORRECT
    try:
        return [bool(value) for value in json.loads(path.read_bytes())["correct"]]
    except (FileNotFoundError, NotADirectoryError):
        raise TrainingError(f"{run}: this run has no test results by example ({CORRECT} is missing)") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path}: these are not test results ({error})") from None
