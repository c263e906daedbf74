"""Differences between models, paired by seed and example."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import ceil, inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import TypeVar

from mgk.analysis.confidence_intervals import Interval, paired_difference, student_interval
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.result_store import TrialResult

_Item = TypeVar("_Item", TrialResult, ModelAnalysis)
_ByModel = dict[tuple[str, ModelSpec], list[_Item]]


class PresetResults:
    """The results and analyses of one preset, by task, model and seed."""

    def __init__(
        self, preset: str, trials: Iterable[TrialResult] = (), analyses: Iterable[ModelAnalysis] = ()
    ) -> None:
        self.preset = preset
        self._trials: _ByModel[TrialResult] = _by_model(trials)
        self._analyses: _ByModel[ModelAnalysis] = _by_model(analyses)

    def trials(self, task: str, model: ModelSpec) -> list[TrialResult]:
        """The results of a model on a task, by seed."""
        return self._trials.get((task, model), [])

    def analyses(self, task: str, model: ModelSpec) -> list[ModelAnalysis]:
        """The analyses of a model on a task, by seed."""
        return self._analyses.get((task, model), [])

    def all_analyses(self) -> list[list[ModelAnalysis]]:
        """The analyses of every task and model, by seed."""
        return list(self._analyses.values())

    def differences(self, task: str, candidate: ModelSpec, baseline: ModelSpec) -> list[float]:
        """Candidate minus baseline by common seed, above 0 where it is better.

        In points of accuracy, or per cent of the baseline's perplexity or bits per byte.
        """
        pairs = paired_by_seed(self.trials(task, candidate), self.trials(task, baseline))
        return [
            100 * (1 - ours.test / theirs.test) if ours.correct is None else ours.test - theirs.test
            for ours, theirs in pairs
        ]

    def difference(
        self, task: str, candidate: ModelSpec, baseline: ModelSpec, *, confidence: float = 0.95
    ) -> Interval | None:
        """The interval of :meth:`differences`; None without a common seed."""
        pairs = paired_by_seed(self.trials(task, candidate), self.trials(task, baseline))
        if not pairs:
            return None
        if pairs[0][0].correct is None:
            return student_interval(self.differences(task, candidate, baseline), confidence)
        ours, theirs = (tuple(trial.correct or () for trial in group) for group in zip(*pairs, strict=True))
        return _accuracy_difference(ours, theirs, confidence)


def _by_model(items: Iterable[_Item]) -> _ByModel[_Item]:
    """The last item of each seed, in the order of seeds."""
    groups: dict[tuple[str, ModelSpec], dict[int, _Item]] = {}
    for item in sorted(items, key=lambda item: (item.trial.task, item.trial.model.slug, item.trial.seed)):
        trial = item.trial
        groups.setdefault((trial.task, trial.model), {})[trial.seed] = item
    return {key: list(by_seed.values()) for key, by_seed in groups.items()}


def paired_by_seed(candidate: Sequence[_Item], baseline: Sequence[_Item]) -> list[tuple[_Item, _Item]]:
    """The results of two models for each seed that both have."""
    theirs = {item.trial.seed: item for item in baseline}
    return [(item, theirs[item.trial.seed]) for item in candidate if item.trial.seed in theirs]


@lru_cache(maxsize=4096)
def _accuracy_difference(
    candidate: tuple[tuple[bool, ...], ...], baseline: tuple[tuple[bool, ...], ...], confidence: float
) -> Interval:
    """The paired difference in points of accuracy."""
    difference = paired_difference(candidate, baseline, confidence=confidence).difference
    return Interval(100 * difference.estimate, 100 * difference.low, 100 * difference.high)


def mean_of(differences: Sequence[Interval]) -> Interval:
    """The mean over independent tasks: the half-widths add in quadrature."""
    mean = fmean(d.estimate for d in differences)
    if not all(isfinite(d.low) and isfinite(d.high) for d in differences):
        return Interval(mean, -inf, inf)
    down = sqrt(sum((d.estimate - d.low) ** 2 for d in differences)) / len(differences)
    up = sqrt(sum((d.high - d.estimate) ** 2 for d in differences)) / len(differences)
    return Interval(mean, mean - down, mean + up)


def difference_of_means(candidate: Sequence[float], baseline: Sequence[float]) -> Interval:
    """The difference of the means of two large samples -+ 1.96 standard errors."""
    estimate = fmean(candidate) - fmean(baseline)
    if min(len(candidate), len(baseline)) < 2:
        return Interval(estimate, -inf, inf)
    half_width = 1.96 * sqrt(sum(stdev(values) ** 2 / len(values) for values in (candidate, baseline)))
    return Interval(estimate, estimate - half_width, estimate + half_width)


def detectable_difference(interval: Interval, seeds: int, planned: int | None = None) -> float:
    """(t_0.975 + t_0.8) s / sqrt(n): what n seeds detect with a power of 80%.

    Args:
        interval: of 95%, over so many seeds; its half-width is t_0.975 s / sqrt(seeds).
        planned: n; as many as were measured if None. Fewer than two find nothing.
    """
    planned = seeds if planned is None else planned
    if min(seeds, planned) < 2:
        return inf
    from scipy.stats import t

    error = (interval.high - interval.low) / 2 / t.ppf(0.975, seeds - 1) * sqrt(seeds / planned)
    return float((t.ppf(0.975, planned - 1) + t.ppf(0.8, planned - 1)) * error)


def seeds_for(interval: Interval, seeds: int, half_width: float) -> int | None:
    """The least n with t_0.975 s / sqrt(n) <= half_width, s by the 95% interval.

    None where they have no variance yet, or for a half-width of 0.
    """
    measured = (interval.high - interval.low) / 2
    if seeds < 2 or not isfinite(measured) or not half_width:
        return None
    from scipy.stats import t

    deviation = measured * sqrt(seeds) / t.ppf(0.975, seeds - 1)
    count = max(2, ceil((1.96 * deviation / half_width) ** 2))  # n is not less
    while t.ppf(0.975, count - 1) * deviation / sqrt(count) > half_width:
        count += 1
    return count


def late_change(trials: Sequence[TrialResult]) -> float | None:
    """The mean change of the validation metric over the last quarter of training."""
    changes = []
    for trial in trials:
        steps = trial.recipe.training.max_steps
        before = [value for step, value in trial.validation if step <= 0.75 * steps]
        if before and trial.validation[-1][0] > 0.75 * steps:
            changes.append(trial.validation[-1][1] - before[-1])
    return fmean(changes) if changes else None


def is_above_chance(trials: Sequence[TrialResult]) -> bool:
    """Whether accuracy is above the majority class's by 1.96 standard errors.

    Of language models: whether the mean perplexity is below a unigram model's.
    """
    chance, mean = trials[0].data.chance, fmean(trial.test for trial in trials)
    if trials[0].summary.metric != "accuracy":
        return mean < chance
    error = sqrt(chance * (1 - chance) / sum(trial.summary.examples for trial in trials))
    return mean > 100 * (chance + 1.96 * error)
