"""How sure a measured accuracy is, and a difference between two models that saw the same examples."""

from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Z95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval."""

    estimate: float
    low: float
    high: float


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


def wilson_interval(correct: int, total: int) -> Interval:
    """The 95% interval of a proportion, (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) (Wilson 1927)."""
    if not 0 <= correct <= total or total == 0:
        raise ValueError(f"correct must be from 0 to total, and total above 0, got {correct} of {total}")
    p, z2 = correct / total, _Z95**2 / total
    centre = (p + z2 / 2) / (1 + z2)
    reach = _Z95 * sqrt(p * (1 - p) / total + z2 / (4 * total)) / (1 + z2)
    return Interval(p, max(0.0, centre - reach), min(1.0, centre + reach))


def mean_accuracy(correct: ArrayLike, *, resamples: int = 10_000) -> Interval:
    """The accuracy over seeds and examples: Wilson's interval for one seed, the bootstrap's over both for several.

    Args:
        correct: (seeds, examples), whether each model has each example right.
        resamples: of the bootstrap.
    """
    table = _table("correct", correct)
    if len(table) == 1:
        return wilson_interval(int(table.sum()), table.size)
    return _bootstrap(table, resamples)


def paired_difference(candidate: ArrayLike, baseline: ArrayLike, *, resamples: int = 10_000) -> PairedDifference:
    """Compare two kinds of models example by example.

    The interval is that of a bootstrap which draws seeds and examples, both with replacement and the same ones for
    both kinds: it covers the luck of the test set and, with several seeds, that of training. Each model is paired with
    the one of the same seed, which saw the same data in the same order.

    Args:
        candidate: (seeds, examples), whether each model has each example right.
        baseline: the same for the other kind.
        resamples: of the bootstrap.
    """
    ours, theirs = _table("candidate", candidate), _table("baseline", baseline)
    if ours.shape != theirs.shape:
        raise ValueError(f"candidate and baseline must have one shape, got {ours.shape} and {theirs.shape}")
    gained, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    return PairedDifference(
        difference=_bootstrap(ours.astype(np.int8) - theirs.astype(np.int8), resamples),
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


def mean_difference(candidate: ArrayLike, baseline: ArrayLike, *, resamples: int = 10_000) -> Interval:
    """The mean difference of two lists of numbers, one a seed, paired by seed; its 95% interval by the bootstrap.

    With one seed there is no telling: the interval is then unbounded.
    """
    ours, theirs = np.asarray(candidate, np.float64), np.asarray(baseline, np.float64)
    if ours.shape != theirs.shape or ours.ndim != 1 or not len(ours):
        raise ValueError(f"candidate and baseline must be two lists of one length, got {ours.shape}, {theirs.shape}")
    if len(ours) == 1:
        return Interval(float(ours[0] - theirs[0]), -np.inf, np.inf)
    return _bootstrap((ours - theirs)[:, None], resamples)


def _bootstrap(table: NDArray[np.generic], resamples: int) -> Interval:
    """The mean of (seeds, examples) with the 95% of its resampled means; always the same draws."""
    seeds, examples = table.shape
    values = table.astype(np.float64)
    generator = np.random.Generator(np.random.PCG64(0))
    means = np.empty(resamples)
    for place in range(resamples):
        # Counts of how often each row and column is drawn: a product instead of a copy of the table.
        rows = np.bincount(generator.integers(seeds, size=seeds), minlength=seeds)
        columns = np.bincount(generator.integers(examples, size=examples), minlength=examples)
        means[place] = rows @ values @ columns / values.size
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


def _table(name: str, values: ArrayLike) -> NDArray[np.bool_]:
    table = np.atleast_2d(np.asarray(values, np.bool_))
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"{name} must be (seeds, examples), got the shape {np.shape(values)}")
    return table
