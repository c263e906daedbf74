"""How much better one model is than another over the same seeds and test examples, with a 95% interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, sqrt
from statistics import fmean, stdev

from mgk.analysis.confidence_intervals import Interval, paired_difference, student_interval
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.result_store import TrialResult


@dataclass(frozen=True)
class Difference:
    """A candidate less a baseline.

    Attributes:
        interval: in points of accuracy, or in per cent of the baseline's perplexity; above 0 the candidate is better.
        seeds: that both have.
    """

    interval: Interval
    seeds: int


class Measured:
    """The records of a preset, by task, model and seed."""

    def __init__(self, records: Sequence[TrialResult]) -> None:
        self._trials: dict[tuple[str, ModelSpec], dict[int, TrialResult]] = {}
        for record in records:
            self._trials.setdefault((record.trial.task, record.trial.model), {})[record.trial.seed] = record

    def of(self, task: str, model: ModelSpec) -> list[TrialResult]:
        """The records of a model on a task, by seed."""
        return [record for _, record in sorted(self._trials.get((task, model), {}).items())]

    @property
    def tasks(self) -> list[str]:
        """That there are records of."""
        return sorted({task for task, _ in self._trials})

    def difference(self, task: str, candidate: ModelSpec, baseline: ModelSpec) -> Difference | None:
        """How much better the candidate is, over the seeds that both have; None where there is none."""
        ours, theirs = (
            {record.trial.seed: record for record in self.of(task, model)} for model in (candidate, baseline)
        )
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            return None
        mine, other = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
        if mine[0].correct is None:
            return Difference(_of_perplexities([r.test for r in mine], [r.test for r in other]), len(seeds))
        answers = [tuple(record.correct or () for record in group) for group in (mine, other)]
        return Difference(_of_answers(*answers), len(seeds))


@lru_cache(maxsize=4096)
def _of_answers(candidate: tuple[tuple[bool, ...], ...], baseline: tuple[tuple[bool, ...], ...]) -> Interval:
    """In points of accuracy."""
    found = paired_difference(candidate, baseline).difference
    return Interval(100 * found.estimate, 100 * found.low, 100 * found.high)


def _of_perplexities(candidate: Sequence[float], baseline: Sequence[float]) -> Interval:
    """In per cent of the baseline's: 100 (1 - candidate / baseline), seed by seed."""
    return student_interval([100 * (1 - c / b) for c, b in zip(candidate, baseline, strict=True)])


def mean_of(differences: Sequence[Interval]) -> Interval:
    """The mean over tasks: as they are independent, what is uncertain adds in squares."""
    count = len(differences)
    mean = fmean(d.estimate for d in differences)
    if not all(isfinite(d.low) and isfinite(d.high) for d in differences):
        return Interval(mean, -inf, inf)
    down = sqrt(sum((d.estimate - d.low) ** 2 for d in differences)) / count
    up = sqrt(sum((d.high - d.estimate) ** 2 for d in differences)) / count
    return Interval(mean, mean - down, mean + up)


def between_samples(candidate: Sequence[float], baseline: Sequence[float]) -> Interval:
    """The difference of two means, with 1.96 standard errors: of large samples, such as ranks of 1,000 matrices."""
    estimate = fmean(candidate) - fmean(baseline)
    if min(len(candidate), len(baseline)) < 2:
        return Interval(estimate, -inf, inf)
    reach = 1.96 * sqrt(sum(stdev(values) ** 2 / len(values) for values in (candidate, baseline)))
    return Interval(estimate, estimate - reach, estimate + reach)


def has_learned(records: Sequence[TrialResult]) -> bool:
    """Whether models are better than answering without looking: beyond 1.96 standard errors of that accuracy."""
    chance, mean = records[0].data.chance, fmean(record.test for record in records)
    if records[0].summary.metric != "accuracy":
        return mean < chance
    error = sqrt(chance * (1 - chance) / sum(record.summary.examples for record in records))
    return mean > 100 * (chance + 1.96 * error)


def pooled(
    measured: Measured, tasks: Sequence[str], candidate: ModelSpec, baseline: ModelSpec
) -> Mapping[str, Difference]:
    """The difference on every task that both were measured on."""
    found = {task: measured.difference(task, candidate, baseline) for task in tasks}
    return {task: difference for task, difference in found.items() if difference is not None}
