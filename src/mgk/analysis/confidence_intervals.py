"""Confidence intervals of accuracies and of paired differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mgk.training.run_dir import Interval as Interval
from mgk.training.run_dir import student_interval as student_interval
from mgk.training.run_dir import wilson_interval as wilson_interval


@dataclass(frozen=True)
class PairedDifference:
    """The difference in accuracy of two kinds of models on the same examples."""

    difference: Interval  # candidate minus baseline
    gained: int  # (seed, example) that only the candidate has right
    lost: int  # pairs that only the baseline has right
    p_value: float  # of McNemar's exact test
    examples: int
    seeds: int


def mean_accuracy(correct: ArrayLike) -> Interval:
    """The accuracy of ``correct`` (seeds, examples).

    Wilson's interval for one seed, else that of :func:`paired_difference`.
    """
    table = _table("correct", correct)
    if len(table) == 1:
        return wilson_interval(int(table.sum()), table.size)
    return _over_seeds_and_examples(table)


def paired_difference(
    candidate: ArrayLike, baseline: ArrayLike, *, confidence: float = 0.95
) -> PairedDifference:
    """M -+ sqrt((t s / sqrt(n))^2 + (z e / sqrt(k))^2), over seeds and examples.

    s and e are the standard deviations of n seeds' and k examples' differences, t and
    z the quantiles of Student and of the normal. One seed has no first term.

    Args:
        candidate: (seeds, examples), whether each model has each example right.
        baseline: The same, paired by seed: same data in the same order.
        confidence: Of the interval.
    """
    ours = _table("candidate", candidate)
    theirs = _table("baseline", baseline)
    if ours.shape != theirs.shape:
        got = f"{ours.shape} and {theirs.shape}"
        raise ValueError(f"candidate and baseline must have one shape, got {got}")
    gained, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    return PairedDifference(
        difference=_over_seeds_and_examples(ours.astype(np.int8) - theirs.astype(np.int8), confidence),
        gained=gained,
        lost=lost,
        p_value=mcnemar(gained, lost),
        examples=ours.shape[1],
        seeds=ours.shape[0],
    )


def mcnemar(gained: int, lost: int) -> float:
    """min(1, 2 P(X <= min(gained, lost))), X ~ Binomial(gained + lost, 1/2)."""
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def mean_over_blocks(values: ArrayLike) -> Interval:
    """The mean of ``values`` (seeds, blocks of a text), over seeds and blocks.

    M -+ sqrt((t s / sqrt(n))^2 + (t e / sqrt(k))^2), s and e the standard deviations of n
    seeds' and k blocks' means. One seed has no first term.
    """
    table = np.atleast_2d(np.asarray(values, np.float64))
    of_blocks = student_interval(table.mean(0).tolist())
    half_width = of_blocks.high - of_blocks.estimate
    if len(table) > 1:
        of_seeds = student_interval(table.mean(1).tolist())
        half_width = hypot(half_width, of_seeds.high - of_seeds.estimate)
    mean = of_blocks.estimate
    return Interval(mean, mean - half_width, mean + half_width)


def mean_difference(candidate: Sequence[float], baseline: Sequence[float]) -> Interval:
    """The mean difference of values paired by seed, with Student's interval."""
    if len(candidate) != len(baseline) or not len(candidate):
        got = f"{len(candidate)} and {len(baseline)} numbers"
        raise ValueError(f"candidate and baseline must have one length, got {got}")
    pairs = zip(candidate, baseline, strict=True)
    return student_interval([ours - theirs for ours, theirs in pairs])


def _over_seeds_and_examples(table: NDArray[np.generic], confidence: float = 0.95) -> Interval:
    values = table.astype(np.float64)
    seeds, examples = values.shape
    mean = float(values.mean())
    half_width = NormalDist().inv_cdf((1 + confidence) / 2) * float(values.mean(0).std()) / sqrt(examples)
    if seeds > 1:
        of_seeds = student_interval(values.mean(1).tolist(), confidence)
        half_width = hypot(half_width, of_seeds.high - mean)
    return Interval(mean, mean - half_width, mean + half_width)


def _table(name: str, values: ArrayLike) -> NDArray[np.bool_]:
    table = np.atleast_2d(np.asarray(values, np.bool_))
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"{name} must be (seeds, examples), got the shape {np.shape(values)}")
    return table
