"""Estimates with their 95% confidence intervals."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% confidence interval."""

    estimate: float
    low: float
    high: float


def wilson_interval(correct: int, total: int) -> Interval:
    """Wilson's: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    if not 0 <= correct <= total or total == 0:
        raise ValueError(f"correct must be from 0 to total, and total above 0, got {correct} of {total}")
    from scipy.stats import binomtest

    bounds = binomtest(correct, total).proportion_ci(method="wilson")
    return Interval(correct / total, float(bounds.low), float(bounds.high))
