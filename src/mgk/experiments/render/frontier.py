"""The frontier: quality against cost. Does not import torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from mgk._util.files import read_json
from mgk.analysis import cost_model
from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.evidence.claims import compare_pair
from mgk.experiments.evidence.decision_rules import (
    CONFIRMED,
    CONTRADICTED,
    EQUIVALENT,
    INCONCLUSIVE,
    MARGINS,
    NOT_MEASURED,
    Evidence,
    Outcome,
)
from mgk.experiments.evidence.effects import PresetResults
from mgk.experiments.model_spec import ModelSpec, sizes_of
from mgk.experiments.render.charts import FewPoints, Series
from mgk.experiments.render.figures import Figure
from mgk.experiments.render.numbers import interval_text, json_safe, short, signed, text
from mgk.experiments.render.study_report import StudyReport
from mgk.experiments.render.tables import DASH, machines, markdown_table
from mgk.experiments.result_store import TrialResult
from mgk.experiments.study import Pair

TIMES = "times.json"
TASK = "bytes"
# The model that all others are compared to, seed by seed.
BASELINE = ModelSpec("softmax", 4)

# Costs and their headings.
COSTS = {
    "cache": "cache, bytes a token",
    "flops": "attention FLOPs a token",
    "parameters": "parameters",
    "step": "training step, ms",
    "token": "generated token, ms",
}
_ADVICE: Mapping[Outcome, str] = {
    CONFIRMED: "take {candidate}",
    CONTRADICTED: "take {baseline}",
    EQUIVALENT: "either {candidate} or {baseline}, which are within {margin:g}% of each other",
    INCONCLUSIVE: "not decided between {candidate} and {baseline}",
}
_OUTCOMES: Mapping[Outcome, str] = {
    CONFIRMED: "Better",
    EQUIVALENT: "Equivalent",
    CONTRADICTED: "Worse",
    INCONCLUSIVE: "Not decided",
}
_QUESTIONS = {"better": "Better", "comparable": "Comparable or better"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One model: its quality and its costs.

    Attributes:
        bits: per byte of the test split, the mean over its own seeds.
        gain: over the baseline in per cent, paired by seed; above 0 is better.
        costs: by name; times are absent where they were not measured.
    """

    model: str
    title: str
    seeds: int
    bits: float
    gain: Interval
    costs: dict[str, float]

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return ModelSpec.parse(self.model)


@dataclass(frozen=True)
class Frontier(StudyReport):
    """What the study has measured so far.

    Attributes:
        times: milliseconds of a training step and of a generated token by model, with
            the machine, as ``times.json`` has them.
    """

    id = "frontier"

    times: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, results: Path) -> Self | None:
        """The study in a folder of results, with its times."""
        found, times = super().read(results), results / cls.id / TIMES
        return replace(found, times=read_json(times)) if found and times.is_file() else found

    @cached_property
    def found(self) -> PresetResults:
        """The results by model and seed."""
        return PresetResults(self.study.stages[0].preset, self.results)

    @cached_property
    def points(self) -> list[Point]:
        """Every model with a seed in common with the baseline."""
        models = dict.fromkeys(result.trial.model for result in self.results)
        points = []
        for model in models:
            gain = self.found.difference(TASK, model, BASELINE)
            if gain is None:
                continue
            trials = self.found.trials(TASK, model)
            points.append(
                Point(
                    model=model.name,
                    title=model.title,
                    seeds=len(trials),
                    bits=fmean(trial.test for trial in trials),
                    gain=gain,
                    costs=costs(trials[0]) | self.times.get("models", {}).get(model.name, {}),
                )
            )
        return points

    def front(self, cost: str) -> list[Point]:
        """The models that no cheaper one beats, the cheapest first."""
        found: list[Point] = []
        rest = (point for point in self.points if cost in point.costs)
        for point in sorted(rest, key=lambda point: (point.costs[cost], -point.gain.estimate)):
            if not found or point.gain.estimate > found[-1].gain.estimate:
                found.append(point)
        return found

    @cached_property
    def evidence(self) -> list[tuple[Pair, Evidence]]:
        """The pairs of the plan, decided by the rules."""
        return [
            (pair, compare_pair(self.found, [TASK], *pair.specs, is_comparable=pair.asks == "comparable"))
            for pair in self.study.pairs
        ]

    def answers(self) -> list[tuple[Pair, Evidence]]:
        """The pairs that say who should use what, as far as they are measured."""
        return [(pair, item) for pair, item in self.evidence if pair.use and item.outcome != NOT_MEASURED]

    def comparisons(self) -> list[str]:
        """The answers, a line for each outcome: the models and their use."""
        lines: dict[str, list[str]] = {}
        for pair, item in self.answers():
            use = pair.use[0].lower() + pair.use[1:]
            candidate, baseline = (spec.phrase for spec in pair.specs)
            lines.setdefault(_OUTCOMES[item.outcome], []).append(f"{candidate} vs {baseline} ({use})")
        return [f"**{name}**: {'; '.join(lines[name])}." for name in _OUTCOMES.values() if name in lines]

    def sentences(self) -> list[str]:
        """Who should use what, then the front of each cost."""
        lines = []
        for pair, item in self.answers():
            names = dict(zip(("candidate", "baseline"), (spec.phrase for spec in pair.specs), strict=True))
            advice = _ADVICE[item.outcome].format(**names, margin=MARGINS["bits_per_byte"])
            lines.append(f"{pair.use}: {advice}.")
        for cost, heading in COSTS.items():
            if front := self.front(cost):
                names_of_front = ", ".join(f"{point.model} ({short(point.costs[cost])})" for point in front)
                lines.append(f"Pareto front of quality and {heading}, the cheapest first: {names_of_front}.")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Points, fronts and verdicts as JSON data."""
        pairs = [{**asdict(pair), **asdict(item)} for pair, item in self.evidence]
        data: dict[str, Any] = json_safe(
            {
                **super().to_json(),
                "baseline": BASELINE.name,
                "points": [asdict(point) for point in self.points],
                "fronts": {cost: [point.model for point in self.front(cost)] for cost in COSTS},
                "pairs": pairs,
                "sentences": self.sentences(),
                "times": {name: value for name, value in self.times.items() if name != "models"},
            }
        )
        return data

    def markdown(self) -> str:
        """Who should use what, the pairs, the table, and the machine."""
        fronts = {cost: {point.model for point in self.front(cost)} for cost in COSTS}
        rows = []
        for point in self.points:
            cells = [
                f"**{short(point.costs[cost])}**" if point.model in fronts[cost] else short(point.costs[cost])
                for cost in COSTS
                if cost in point.costs
            ]
            cells += [DASH] * (len(COSTS) - len(cells))
            gain = DASH if point.model == BASELINE.name else interval_text(point.gain, signed)
            rows.append([point.title, str(point.seeds), f"{point.bits:.3f}", gain, *cells])
        columns = ["model", "seeds", "bits per byte", f"gain over {BASELINE.title}, %", *COSTS.values()]
        label = self.results[0].data.label
        times = text("frontier_times", **self.times) if self.times else text("frontier_no_times")
        return "\n\n".join(
            [
                " ".join([f"{self.progress}.", *self.sentences()]),
                "\n".join(
                    f"- {item.sentence} {_QUESTIONS[pair.asks]}: **{item.outcome}**."
                    for pair, item in self.evidence
                ),
                text("frontier_table", label=label),
                markdown_table(columns, rows),
                times,
                *(f"- {line}" for line in machines(self.results)),
            ]
        )

    def figure(self) -> Figure:
        """The gain over each cost, a panel for each family."""
        panels = []
        for cost, heading in COSTS.items():
            for family in ("softmax", "linear"):
                panels.append(
                    FewPoints(
                        title=f"{family} and its mixtures",
                        x_label=heading,
                        y_label=f"gain over {BASELINE.title}, %",
                        series=tuple(self._series(cost, family)),
                    )
                )
        return Figure(
            id=self.id,
            title="The frontier of quality and cost",
            preset=self.found.preset,
            caption=text("frontier"),
            panels=tuple(panel for panel in panels if panel.series),
            command=f"mgk reproduce {self.id}",
        )

    def _series(self, cost: str, family: str) -> Iterable[Series]:
        """A curve for each variant, over its heads; then the Pareto front."""
        curves: dict[str, list[Point]] = {}
        for point in self.points:
            model, has_options = point.spec, " " in point.model
            if cost in point.costs and not has_options and model.variant.family == family:
                grouped = "" if model.key_value_heads is None else "grouped "
                curves.setdefault(grouped + model.attention, []).append(point)
        front = [point for point in self.front(cost) if point.spec.variant.family == family]
        for name, points in [*curves.items(), ("Pareto front", front)]:
            if points:
                points = sorted(points, key=lambda point: point.costs[cost])
                band = _band(points, cost) if name in curves else ()
                yield Series(name, [(point.costs[cost], point.gain.estimate) for point in points], band)


def costs(result: TrialResult) -> dict[str, float]:
    """Cache and FLOPs a token by formula; parameters as counted."""
    sizes = sizes_of(result.recipe)

    def per_token(count: Callable[[cost_model.Sizes], Any], layers: int) -> float:
        return float(count(sizes).value * layers / sizes.length)

    return {
        "cache": per_token(cost_model.cache_bytes, 1),
        "flops": per_token(cost_model.attention_flops, sizes.layers),
        "parameters": float(result.summary.parameters),
    }


def _band(points: Sequence[Point], cost: str) -> list[tuple[float, float, float]]:
    """The intervals of the points, where they are finite."""
    return [
        (point.costs[cost], point.gain.low, point.gain.high)
        for point in points
        if abs(point.gain.low) < float("inf")
    ]
