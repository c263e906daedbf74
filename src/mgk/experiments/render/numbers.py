"""Numbers as text, and the sentences of ``texts.toml``."""

import tomllib
from collections.abc import Callable
from importlib import resources
from math import floor, isfinite, log10
from typing import Any

from mgk.analysis.confidence_intervals import Interval

_FILE = resources.files("mgk.experiments.render") / "texts.toml"
_TEXTS: dict[str, str] = tomllib.loads(_FILE.read_text("utf-8"))
_FACTORS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def text(name: str, /, **values: Any) -> str:
    """The sentence of this name, with values in its places."""
    return _TEXTS[name].format(**values)


def short(value: float) -> str:
    """Three significant digits: 41544 -> 41.5k."""
    for suffix, factor in _FACTORS:
        if value >= 0.9995 * factor:
            return f"{_three_digits(value / factor)}{suffix}"
    return _three_digits(value)


def percent(share: float) -> str:
    """A share with one decimal."""
    return f"{100 * share:.1f}%"


def points(share: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * share:.1f}".replace("-", "−")


def signed(value: float) -> str:
    """``+0.50`` or ``−0.50``."""
    return f"{value:+.2f}".replace("-", "−")


def interval_text(interval: Interval, number: Callable[[float], str]) -> str:
    """The estimate and its interval; a shared unit is written once."""
    estimate, low, high = (number(value) for value in (interval.estimate, interval.low, interval.high))
    return f"{estimate} ({low.removesuffix('%')} to {high.removesuffix('%')})"


def confidence_text(interval: Interval) -> str:
    """``95% CI −0.20 to +1.20``, or that one seed gives none."""
    if not isfinite(interval.low):
        return "one seed: no confidence interval"
    return f"95% CI {signed(interval.low)} to {signed(interval.high)}"


def seconds_text(seconds: float) -> str:
    """A duration in milliseconds or seconds."""
    return f"{_three_digits(1000 * seconds)} ms" if seconds < 1 else f"{_three_digits(seconds)} s"


def bytes_text(value: float) -> str:
    """Bytes in decimal units: 5 MB is 5,000,000."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{value / 1e3:.0f} kB"


def plural(count: int, noun: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def json_safe(value: Any) -> Any:
    """JSON data with null in place of infinite numbers."""
    if isinstance(value, dict):
        return {name: json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(2 - floor(log10(abs(rounded))), 0)}f}"
