"""The rules by which measurements decide a claim.

d is the difference of a candidate to a baseline, above 0 where the candidate is
better, with its 95% confidence interval [low, high].

- "better": confirmed if low > 0, contradicted if high < 0, else equivalent if the 90%
  interval lies within -+ the margin (two one-sided tests at 5% each).
- "comparable or better": confirmed if low > -margin, contradicted if high < -margin.
- The margin is 1.5 points of accuracy, 1% of bits per byte or 2% of perplexity.
- "throughout training": confirmed if the mean over seeds is better at every
  evaluation, contradicted if high < 0 at one of them.
- Several pairs of models: confirmed if all are, contradicted if one is, equivalent if
  each is confirmed or equivalent.
- Otherwise inconclusive. Costs follow from formulas.

A task is left out if neither model is above the majority-class baseline.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.evidence.effects import PresetResults

Outcome = Literal["confirmed", "equivalent", "inconclusive", "contradicted", "not measured"]
CONFIRMED, EQUIVALENT, INCONCLUSIVE, CONTRADICTED, NOT_MEASURED = get_args(Outcome)

_IDS = {"Table": "table", "Figure": "fig"}

# Margins by metric, in points or per cent, and the names of their units.
MARGINS = {"accuracy": 1.5, "bits_per_byte": 1.0, "perplexity": 2.0}
UNITS = {"accuracy": " points", "bits_per_byte": "% of bits per byte", "perplexity": "% of perplexity"}


@dataclass(frozen=True)
class Evidence:
    """One comparison: its outcome and the measurement as a sentence.

    Attributes:
        interval: of the difference, in ``unit``, over so many seeds.
    """

    outcome: Outcome
    sentence: str
    interval: Interval | None = None
    unit: str = ""
    seeds: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim and the comparisons that decide it."""

    outcome: Outcome
    evidence: tuple[Evidence, ...]


def decide_better(interval: Interval, *, at_90: Interval | None = None, margin: float = 0.0) -> Outcome:
    """The outcome of "better"; by a margin it can be "equivalent"."""
    if interval.low > 0:
        return CONFIRMED
    if interval.high < 0:
        return CONTRADICTED
    is_equivalent = at_90 is not None and -margin < at_90.low and at_90.high < margin
    return EQUIVALENT if is_equivalent else INCONCLUSIVE


def decide_comparable(interval: Interval, *, margin: float) -> Outcome:
    """The outcome of "comparable or better"."""
    if interval.low > -margin:
        return CONFIRMED
    return CONTRADICTED if interval.high < -margin else INCONCLUSIVE


def deciding_half_width(interval: Interval, margin: float, *, is_comparable: bool) -> float:
    """The half-width that would decide an inconclusive interval.

    It reaches the margin; for "better" 0 or the margin, whichever is further.
    """
    if is_comparable:
        return abs(interval.estimate + margin)
    return max(abs(interval.estimate), margin - abs(interval.estimate))


def regrets(values: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Regrets by column and row: value / the row's least value - 1."""
    columns = [name for name in next(iter(values.values()), {}) if all(name in row for row in values.values())]
    best = {name: min(row[column] for column in columns) for name, row in values.items() if columns}
    return {column: {name: values[name][column] / best[name] - 1 for name in best} for column in columns}


def least_regret(values: Mapping[str, Mapping[str, float]], *, tolerance: float) -> str:
    """The column of the least largest regret, or the first within tolerance."""
    largest = {column: max(found.values()) for column, found in regrets(values).items()}
    least = min(largest.values())
    return next(column for column, value in largest.items() if value <= least + tolerance)


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    id: str
    text: str
    where: str  # in the paper, with its tables and figures
    rule: Callable[[PresetResults], Iterator[Evidence]]

    @property
    def experiments(self) -> tuple[str, ...]:
        """The ids of the tables and figures that ``where`` names."""
        groups = re.findall(r"(Table|Figure)s? (\d+(?: and \d+)*)", self.where)
        return tuple(f"{_IDS[kind]}{number}" for kind, numbers in groups for number in numbers.split(" and "))

    def verdict(self, results: PresetResults) -> Verdict:
        """The verdict by the rules above."""
        evidence = tuple(self.rule(results))
        outcomes = [item.outcome for item in evidence]
        if CONTRADICTED in outcomes:
            return Verdict(CONTRADICTED, evidence)
        if not outcomes or NOT_MEASURED in outcomes:
            return Verdict(NOT_MEASURED, evidence)
        if set(outcomes) == {CONFIRMED}:
            return Verdict(CONFIRMED, evidence)
        is_equivalent = set(outcomes) <= {CONFIRMED, EQUIVALENT}
        return Verdict(EQUIVALENT if is_equivalent else INCONCLUSIVE, evidence)
