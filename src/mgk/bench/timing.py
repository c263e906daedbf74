"""Times alternatives side by side: a ratio within one round cancels what slows the whole machine then."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Timing:
    """The time of one alternative, and its ratio to the yardstick of the same round, over all rounds."""

    milliseconds: float  # the median
    ratio: float  # the median
    ratio_min: float
    ratio_max: float


def compare(
    alternatives: Mapping[str, Callable[[], object]],
    yardstick: str,
    *,
    rounds: int,
    device: torch.device,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time the alternatives side by side.

    Args:
        alternatives: what to run, by name.
        yardstick: the name whose time the ratios divide by.
        rounds: how many rounds to time.
        device: where the work happens; waited for before the clock is read.
        on_run: called after each run, (rounds + 1) * len(alternatives) times.

    Returns:
        The timing of every alternative, by name.
    """
    seconds = measure(alternatives, rounds=rounds, device=device, on_run=on_run)
    return {name: summary(seconds[name], seconds[yardstick]) for name in alternatives}


def measure(
    alternatives: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Run every alternative once a round, in an order that rotates, after one round of warm-up: seconds by name."""
    names = list(alternatives)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            elapsed = _seconds(alternatives[name], device)
            if number > 0:  # round 0 warms up
                seconds[name].append(elapsed)
            on_run()
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    torch.get_device_module(device).synchronize()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def summary(seconds: list[float], yardstick: list[float]) -> Timing:
    """The median of the times, and of their ratios to the yardstick's in the same round."""
    ratios = [mine / theirs for mine, theirs in zip(seconds, yardstick, strict=True)]
    return Timing(
        milliseconds=median(seconds) * 1e3, ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios)
    )
