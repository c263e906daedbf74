"""How sure a measured accuracy is, and a difference between two models that saw the same examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, hypot, inf, sqrt
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mgk._util.interval import Interval as Interval
from mgk._util.interval import wilson_interval as wilson_interval

_Z95 = NormalDist().inv_cdf(0.975)
# Student's t, 97.5%, by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class PairedDifference:
    """How much more often the candidate is right than the baseline, on the same examples.

    Attributes:
        difference: the candidate's accuracy less the baseline's, with its 95% interval.
        gained: pairs that only the candidate has right.
        lost: pairs that only the baseline has right.
        p_value: of McNemar's exact test: how likely so uneven a split is when neither is better.
        examples: distinct test examples.
        seeds: models of each kind.
    """

    difference: Interval
    gained: int
    lost: int
    p_value: float
    examples: int
    seeds: int


def student_interval(values: Sequence[float]) -> Interval:
    """[m - t s / sqrt(n), m + t s / sqrt(n)] of a mean m, by Student's t with n - 1 degrees of freedom.

    For a few numbers, one a seed, where a bootstrap would be too sure, as it never leaves what was seen. One number
    alone tells no interval: it is unbounded.
    """
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, -inf, inf)
    free = len(values) - 1
    t = _T95[free - 1] if free <= len(_T95) else _Z95 + 2.5 / free
    reach = t * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - reach, mean + reach)


def mean_accuracy(correct: ArrayLike) -> Interval:
    """The accuracy over seeds and examples: Wilson's interval for one seed, for several as of a paired difference.

    Args:
        correct: (seeds, examples), whether each model has each example right.
    """
    table = _table("correct", correct)
    if len(table) == 1:
        return wilson_interval(int(table.sum()), table.size)
    return _of_seeds_and_examples(table)


def paired_difference(candidate: ArrayLike, baseline: ArrayLike) -> PairedDifference:
    """Compare two kinds of models example by example.

    The interval is m -+ sqrt((t s / sqrt(n))^2 + (z e / sqrt(k))^2): s is the standard deviation of the n seeds'
    differences, t Student's; e that of the k examples' differences, z the normal law's. It covers the luck of training,
    with several seeds, and that of the test set. Each model is paired with the one of the same seed, which saw the same
    data in the same order.

    Args:
        candidate: (seeds, examples), whether each model has each example right.
        baseline: the same for the other kind.
    """
    ours, theirs = _table("candidate", candidate), _table("baseline", baseline)
    if ours.shape != theirs.shape:
        raise ValueError(f"candidate and baseline must have one shape, got {ours.shape} and {theirs.shape}")
    gained, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    return PairedDifference(
        difference=_of_seeds_and_examples(ours.astype(np.int8) - theirs.astype(np.int8)),
        gained=gained,
        lost=lost,
        p_value=mcnemar(gained, lost),
        examples=ours.shape[1],
        seeds=ours.shape[0],
    )


def mcnemar(gained: int, lost: int) -> float:
    """min(1, 2 P(X <= min(gained, lost))), X ~ Binomial(gained + lost, 1/2): the exact two-sided test."""
    total, fewer = gained + lost, min(gained, lost)
    if total > 1000:  # where the normal law, with its continuity correction, has the same digits
        return min(1.0, 2 * NormalDist().cdf((fewer + 0.5 - total / 2) / (sqrt(total) / 2)))
    return min(1.0, 2 * sum(comb(total, k) for k in range(fewer + 1)) / 2**total)


def mean_difference(candidate: Sequence[float], baseline: Sequence[float]) -> Interval:
    """The mean difference of two lists of numbers, one a seed, paired by seed; its 95% interval by Student's t."""
    if len(candidate) != len(baseline) or not len(candidate):
        raise ValueError(
            f"candidate and baseline must be two lists of one length, got {len(candidate)} and {len(baseline)} numbers"
        )
    return student_interval([ours - theirs for ours, theirs in zip(candidate, baseline, strict=True)])


def _of_seeds_and_examples(table: NDArray[np.generic]) -> Interval:
    """The mean of (seeds, examples), with what both are uncertain by."""
    values = table.astype(np.float64)
    seeds, examples = values.shape
    mean, reach = float(values.mean()), _Z95 * float(values.mean(0).std()) / sqrt(examples)
    if seeds > 1:
        reach = hypot(reach, student_interval(values.mean(1).tolist()).high - mean)
    return Interval(mean, mean - reach, mean + reach)


def _table(name: str, values: ArrayLike) -> NDArray[np.bool_]:
    table = np.atleast_2d(np.asarray(values, np.bool_))
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"{name} must be (seeds, examples), got the shape {np.shape(values)}")
    return table
