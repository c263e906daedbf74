"""The rules by which measurements decide a claim. Does not import torch.

d is the difference of a candidate to a baseline, above 0 where the candidate is
better, with its 95% confidence interval [low, high].

- "better": confirmed if low > 0, contradicted if high < 0.
- "comparable or better": the same with -margin in place of 0, where the margin is
  1 point of accuracy or 2% of perplexity.
- "throughout training": confirmed if the mean over seeds is better at every
  evaluation, contradicted if high < 0 at one of them.
- Several pairs of models: confirmed if all are, contradicted if one is.
- Otherwise inconclusive. Costs follow from formulas.

A task is left out if neither model is above the majority-class baseline.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.evidence.effects import ExperimentResults

Outcome = Literal["confirmed", "inconclusive", "contradicted", "not measured"]
CONFIRMED, INCONCLUSIVE, CONTRADICTED, NOT_MEASURED = get_args(Outcome)

_IDS = {"Table": "table", "Figure": "fig"}

MARGIN_POINTS, MARGIN_PERPLEXITY = 1.0, 2.0


@dataclass(frozen=True)
class Evidence:
    """One comparison: its outcome, the measurement as a sentence, and the interval of the difference if it has one."""

    outcome: Outcome
    sentence: str
    interval: Interval | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim and the comparisons that decide it."""

    outcome: Outcome
    evidence: tuple[Evidence, ...]


def decide(interval: Interval, *, margin: float = 0.0) -> Outcome:
    """The outcome of "better", or with a margin of "comparable or better"."""
    if interval.low > -margin:
        return CONFIRMED
    return CONTRADICTED if interval.high < -margin else INCONCLUSIVE


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    id: str
    text: str
    where: str  # in the paper, with the tables and figures whose trials test it
    rule: Callable[[ExperimentResults], Iterator[Evidence]]

    @property
    def experiments(self) -> tuple[str, ...]:
        """The ids of the tables and figures that ``where`` names."""
        groups = re.findall(r"(Table|Figure)s? (\d+(?: and \d+)*)", self.where)
        return tuple(f"{_IDS[kind]}{number}" for kind, numbers in groups for number in numbers.split(" and "))

    def verdict(self, results: ExperimentResults) -> Verdict:
        """The verdict by the rules above."""
        evidence = tuple(self.rule(results))
        outcomes = [item.outcome for item in evidence]
        if CONTRADICTED in outcomes:
            return Verdict(CONTRADICTED, evidence)
        if not outcomes or NOT_MEASURED in outcomes:
            return Verdict(NOT_MEASURED, evidence)
        return Verdict(CONFIRMED if set(outcomes) == {CONFIRMED} else INCONCLUSIVE, evidence)
