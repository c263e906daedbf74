"""Times alternatives side by side: ratios within a round cancel what slows it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from mgk._util.machine import synchronize

Work = Callable[[], object]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Timing:
    """Median time of an alternative, and ratios to the baseline by round."""

    milliseconds: float  # median
    ratio: float  # median
    ratio_min: float
    ratio_max: float


class Steps:
    """Counts finished runs for ``on_step``."""

    def __init__(self, on_step: Callable[[int, int], None], total: int) -> None:
        self.on_step, self.total, self.done = on_step, total, 0

    def __call__(self) -> None:
        """One more run is done."""
        self.done += 1
        self.on_step(self.done, self.total)


def compare(
    alternatives: Mapping[str, Work],
    baseline: str,
    *,
    rounds: int,
    device: torch.device = CPU,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """A timing per name; ``on_run`` is called after each of all runs."""
    seconds = measure(alternatives, rounds=rounds, device=device, on_run=on_run)
    timings = {}
    for name, times in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(times, seconds[baseline], strict=True)]
        timings[name] = Timing(median(times) * 1e3, median(ratios), min(ratios), max(ratios))
    return timings


def measure(
    alternatives: Mapping[str, Work],
    *,
    rounds: int,
    device: torch.device = CPU,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per round; after a warm-up, in an order that rotates."""
    names = list(alternatives)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            synchronize(device)
            start = time.perf_counter()
            alternatives[name]()
            synchronize(device)
            if number > 0:  # round 0 warms up
                seconds[name].append(time.perf_counter() - start)
            on_run()
    return seconds
