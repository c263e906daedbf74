"""The store of results: one small file a trial, whichever table or figure asked for it. Free of torch.

``RESULTS/trials/PRESET/TASK/MODEL-seed-N.json`` holds all that tables and curves need. What is seen inside a model
(:mod:`mgk.experiments.model_analysis`) lies beside the figures. So every page can be made anew without the runs.
"""

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from mgk.experiments.compare.result import Curve
from mgk.experiments.trials import ModelSpec, Trial, changes
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.recipe import Recipe
from mgk.training.run_dir import RunSummary

FORMAT = 1
TRIALS, FIGURES, TABLES = "trials", "figures", "tables"
# Of a curve: no screen shows more, and the file stays small.
MOST_POINTS = 150


@dataclass(frozen=True, kw_only=True)
class DataNote:
    """What a trial was trained on.

    Attributes:
        label: for a column: what the data are.
        is_papers: whether it is the paper's data at its size; False for stand-ins, shorter inputs and samples.
        is_synthetic: whether it is a made-up sample.
        chance: of always answering the most frequent class; of running text, the perplexity of single words'
            frequencies. A model that has learned is clearly better.
        examples: of each split, as many as are used; of running text, tokens.
    """

    label: str
    is_papers: bool
    is_synthetic: bool
    chance: float
    examples: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What came out of a trial.

    Attributes:
        trial: the trial.
        recipe: that it was trained by.
        summary: of its run.
        data: what it was trained on.
        losses: of training, thinned by averaging.
        validation: the metric on the split that is looked at.
        correct: whether each test example was right; None for language models.
        machine: where, with which versions, commit and date.
        command: that makes it.
        jobs: how many trials ran at once.
        seconds: of the whole trial.
    """

    trial: Trial
    recipe: Recipe
    summary: RunSummary
    data: DataNote
    losses: Curve
    validation: Curve
    correct: tuple[bool, ...] | None
    machine: dict[str, Any]
    command: str
    jobs: int
    seconds: float

    @property
    def metric(self) -> str:
        """The test figure that counts.

        Of language models the perplexity by a sliding window, as in the paper, if it slid over the whole test split,
        and by segments otherwise.
        """
        if self.summary.metric == "accuracy":
            return "test_accuracy"
        is_whole = self.recipe.evaluation.stride is not None and self.recipe.evaluation.max_tokens is None
        return "test_sliding_perplexity" if is_whole else "test_perplexity"

    @property
    def test(self) -> float:
        """Its value: accuracy in per cent, or perplexity."""
        value = self.summary.metrics[self.metric]
        return 100 * value if self.metric == "test_accuracy" else value

    @property
    def date(self) -> str:
        """When: a day."""
        return str(self.machine["date"])[:10]

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "format": FORMAT,
            "trial": asdict(self.trial),
            "command": self.command,
            "summary": self.summary.to_json(),
            "data": asdict(self.data),
            "machine": self.machine,
            "jobs": self.jobs,
            "seconds": round(self.seconds, 1),
            "recipe": self.recipe.model_dump(mode="json", exclude_none=True),
            "losses": self.losses,
            "validation": self.validation,
            "correct": None if self.correct is None else pack(self.correct),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """From JSON data; ``KeyError``, ``TypeError`` or ``ValueError`` when it is something else."""
        if data["format"] != FORMAT:
            raise TypeError(f"this is format {data['format']}, not {FORMAT}")
        trial = data["trial"]
        return cls(
            trial=Trial(**{**trial, "model": ModelSpec(**trial["model"])}),
            recipe=Recipe.model_validate(data["recipe"]),
            summary=RunSummary.from_json(data["summary"]),
            data=DataNote(**data["data"]),
            losses=_curve(data["losses"]),
            validation=_curve(data["validation"]),
            correct=None if data["correct"] is None else unpack(data["correct"]),
            machine=data["machine"],
            command=data["command"],
            jobs=data["jobs"],
            seconds=data["seconds"],
        )


class ResultStore:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, trial: Trial) -> Path:
        """Where the record of a trial is, or would be."""
        return trial.place(self.folder / TRIALS, ".json")

    def has(self, trial: Trial) -> bool:
        """Whether the trial is done."""
        return self.path(trial).is_file()

    def read(self, trial: Trial) -> TrialResult | None:
        """The record of a trial; None where there is none."""
        return read_trial_result(self.path(trial)) if self.has(trial) else None

    def write(self, record: TrialResult) -> None:
        """Store a record."""
        write_text(self.path(record.trial), compact_json(record.to_json()))

    def records(self, preset: str) -> list[TrialResult]:
        """All records of a preset."""
        return [read_trial_result(path) for path in sorted((self.folder / TRIALS / preset).glob("*/*.json"))]

    def check_same(self, trial: Trial) -> None:
        """Raise where the trial was made by another recipe than it has now."""
        record = self.read(trial)
        if record is None:
            return
        for path, (now, then) in changes(trial.recipe, record.recipe).items():
            raise RecipeError(
                f"{self.path(trial)}: this was measured with {path} = {then!r}, not {now!r}: choose another --results,"
                " or --overwrite it"
            )


def read_trial_result(path: Path) -> TrialResult:
    """The record in a file."""
    try:
        return TrialResult.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path}: this is not the record of a trial ({error})") from None


def pack(flags: Sequence[bool]) -> dict[str, Any]:
    """Yes or no for many, eight a byte."""
    return {"count": len(flags), "bits": base64.b64encode(np.packbits(np.asarray(flags, bool)).tobytes()).decode()}


def unpack(data: Mapping[str, Any]) -> tuple[bool, ...]:
    """What ``pack`` was given."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(data["bits"]), np.uint8), count=data["count"])
    return tuple(bool(bit) for bit in bits)


def thinned(curve: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> Curve:
    """At most so many points, each the mean of neighbours, to five digits."""
    width = -(-len(curve) // most)
    parts: Iterator[Sequence[tuple[float, float]]] = (curve[at : at + width] for at in range(0, len(curve), width or 1))
    return tuple(
        (
            part[-1][0] if len(part) == 1 else sum(x for x, _ in part) / len(part),
            _digits(sum(y for _, y in part) / len(part)),
        )
        for part in parts
    )


def compact_json(data: Any) -> str:
    """Indented JSON whose lists of numbers are on one line."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _on_one_line, text)  # lists of numbers, then lists of such lists
    return re.sub(r"\[\s+(\[[^{}]*?\])\s+\]", _on_one_line, text) + "\n"


def _on_one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match[1].split())}]"


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; its folder is made."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return tuple((step, value) for step, value in points)


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
