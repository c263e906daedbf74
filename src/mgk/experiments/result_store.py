"""The store of results: one small JSON file a trial.

``RESULTS/trials/PRESET/TASK/MODEL-seed-N.json`` has what tables and curves need,
``RESULTS/analysis/...`` the analysis of the model. Pages are made from them alone.
Each holds the SHA-256 of its content; those of format 1 have none.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from mgk._util import json_codec
from mgk._util.files import SHA256, read_json, read_verified
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.trials import Trial
from mgk.training.errors import TrainingError
from mgk.training.recipe import PRESETS, Recipe
from mgk.training.run_dir import RunSummary

TRIALS, ANALYSIS, FIGURES, TABLES = "trials", "analysis", "figures", "tables"
# Points of a curve: as many as a screen shows, in a small file.
MAX_POINTS = 150

Curve = tuple[tuple[float, float], ...]  # (step, value)
_T = TypeVar("_T")


def _pack(flags: Sequence[bool]) -> dict[str, Any]:
    """Booleans, eight a byte."""
    return {
        "count": len(flags),
        "bits": base64.b64encode(np.packbits(np.asarray(flags, bool)).tobytes()).decode(),
    }


def _unpack(data: Any) -> tuple[bool, ...]:
    bits = np.unpackbits(np.frombuffer(base64.b64decode(data["bits"]), np.uint8), count=data["count"])
    return tuple(bits.astype(bool).tolist())


PackedFlags = Annotated[tuple[bool, ...], PlainValidator(_unpack), PlainSerializer(_pack)]
PackedRecipe = Annotated[
    Recipe, PlainSerializer(lambda recipe: recipe.model_dump(mode="json", exclude_none=True))
]


@dataclass(frozen=True, kw_only=True)
class DataNote:
    """What a trial was trained on.

    Attributes:
        is_papers: whether it is the paper's data at its size.
        chance: the majority-class baseline's accuracy; of text, a unigram
            model's perplexity or bits per byte.
        examples: of each split, as many as are used; of running text, tokens.
    """

    label: str
    is_papers: bool
    is_synthetic: bool
    chance: float
    examples: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a trial measured.

    Attributes:
        losses: of training, thinned by averaging.
        validation: the metric on the split that is evaluated during training.
        correct: whether each test example was classified correctly; None for
            language models.
        plan: the SHA-256 of the file that declared the trial before it was run,
            if one did.
    """

    format: Literal[1, 2] = 2
    trial: Trial
    recipe: PackedRecipe
    summary: RunSummary
    data: DataNote
    losses: Curve
    validation: Curve
    correct: PackedFlags | None
    machine: dict[str, Any]
    command: str
    jobs: int
    seconds: float
    plan: str | None = None

    @property
    def metric(self) -> str:
        """The name of the test figure that tables show.

        Of language models bits per byte; of words the perplexity by a sliding window if it
        covers the test split, else by segments.
        """
        if self.summary.metric != "perplexity":
            return f"test_{self.summary.metric}"
        is_whole = self.recipe.evaluation.stride is not None and self.recipe.evaluation.max_tokens is None
        return "test_sliding_perplexity" if is_whole else "test_perplexity"

    @property
    def test(self) -> float:
        """Its value: accuracy in per cent, perplexity or bits per byte."""
        value = self.summary.metrics[self.metric]
        return 100 * value if self.metric == "test_accuracy" else value

    @property
    def date(self) -> str:
        """The day of the measurement."""
        return str(self.machine["date"])[:10]


@dataclass(frozen=True)
class ResultStore:
    """A folder of results."""

    folder: Path

    def path(self, trial: Trial) -> Path:
        """The file of a trial's result."""
        return trial.path(self.folder / TRIALS, ".json")

    def analysis_path(self, trial: Trial) -> Path:
        """The file of the analysis of a trial's model."""
        return trial.path(self.folder / ANALYSIS, ".json")

    def has(self, trial: Trial) -> bool:
        """Whether the trial has a result."""
        return self.path(trial).is_file()

    def read(self, trial: Trial) -> TrialResult | None:
        """The result of a trial; None where there is none."""
        return _read(TrialResult, self.path(trial)) if self.has(trial) else None

    def found(self, trials: Iterable[Trial]) -> tuple[TrialResult, ...]:
        """The results of those trials that have one."""
        results = (self.read(trial) for trial in trials)
        return tuple(result for result in results if result is not None)

    def write(self, item: TrialResult | ModelAnalysis) -> None:
        """Store a result or an analysis."""
        path = self.path(item.trial) if isinstance(item, TrialResult) else self.analysis_path(item.trial)
        json_codec.write(path, item)

    def remove(self, trial: Trial) -> None:
        """Delete a trial's result and analysis."""
        self.path(trial).unlink(missing_ok=True)
        self.analysis_path(trial).unlink(missing_ok=True)

    @property
    def presets(self) -> list[str]:
        """Those with results, the paper's first."""
        return [preset for preset in PRESETS if self._files(TRIALS, preset)]

    def results(self, preset: str) -> list[TrialResult]:
        """All results of a preset."""
        return [_read(TrialResult, path) for path in self._files(TRIALS, preset)]

    def analyses(self, preset: str) -> list[ModelAnalysis]:
        """All analyses of a preset."""
        return [_read(ModelAnalysis, path) for path in self._files(ANALYSIS, preset)]

    def _files(self, kind: str, preset: str) -> list[Path]:
        return sorted((self.folder / kind / preset).glob("*/*.json"))


def thinned(curve: Sequence[tuple[float, float]], max_points: int = MAX_POINTS) -> Curve:
    """At most so many points, each the mean of neighbours, to five digits."""
    return tuple((x, float(f"{y:.5g}")) for x, y in averaged(curve, -(-len(curve) // max_points)))


def averaged(points: Sequence[tuple[float, float]], width: int) -> Sequence[tuple[float, float]]:
    """Means of ``width`` neighbouring points."""
    if width < 2:
        return points
    parts = (points[start : start + width] for start in range(0, len(points), width))
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def _read(kind: type[_T], path: Path) -> _T:
    try:
        data = read_json(path)
        if data["format"] != 1 or SHA256 in data:
            data = read_verified(path)
        return json_codec.load(kind, data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        name = "result of a trial" if kind is TrialResult else "analysis of a model"
        advice = "delete it to measure it again"
        raise TrainingError(f"{path}: this is not the {name} ({error}); {advice}") from None
