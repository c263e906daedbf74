"""Numbers as people read them."""

from collections.abc import Callable
from math import floor, log10

from mgk.analysis.confidence_intervals import Interval

_FACTORS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def short(value: float) -> str:
    """Three digits: 41544 -> 41.5k."""
    for suffix, factor in _FACTORS:
        if value >= 0.9995 * factor:
            return f"{_three_digits(value / factor)}{suffix}"
    return _three_digits(value)


def percent(share: float) -> str:
    """A share with a digit after the point."""
    return f"{100 * share:.1f}%"


def points(share: float) -> str:
    """A difference of shares in percentage points, with its sign where it is negative."""
    return f"{100 * share:.1f}".replace("-", "−")


def interval_text(interval: Interval, number: Callable[[float], str]) -> str:
    """The estimate and, in brackets, its interval; a unit that all share is said once."""
    estimate, low, high = (number(value) for value in (interval.estimate, interval.low, interval.high))
    return f"{estimate} ({low.removesuffix('%')} to {high.removesuffix('%')})"


def seconds_text(seconds: float) -> str:
    """A duration in milliseconds or seconds."""
    return f"{_three_digits(1000 * seconds)} ms" if seconds < 1 else f"{_three_digits(seconds)} s"


def bytes_text(value: float) -> str:
    """Bytes in decimal units: 5 MB is 5,000,000."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{value / 1e3:.0f} kB"


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(2 - floor(log10(abs(rounded))), 0)}f}"
