"""The forward of mgk and smgk by parts, beside the rates of the machine.

A part is the kernel's own routine on tiles in the cache.
All are interleaved; the fastest round counts.
"""

from functools import partial

import torch

from mgk.bench import calls, timing
from mgk.bench.registry import RooflineSettings
from mgk.bench.runner import OnStep, Outcome, Row
from mgk.bench.timing import Steps, Work
from mgk.functional.mixture.backends.cpu_kernels import PARTS, run_part

VARIANTS = ("smgk", "mgk")
_TILES = {"multiply-add": 2**22}  # rounds that take milliseconds
_SOME_TILES = 2**11


def run(settings: RooflineSettings, on_step: OnStep) -> Outcome:
    """A row per rate, then a row per variant."""
    calls.require_kernels()
    works: dict[str, Work] = {"sgemm": _sgemm(settings.matrix)}
    for part in PARTS:
        works[part] = partial(run_part, part, _TILES.get(part, _SOME_TILES), settings.head_dim)
    for name in VARIANTS:
        works[name] = calls.variant_work(name, calls.make_inputs(settings), "forward", backend="cpu")
    steps = Steps(on_step, len(works) * (settings.rounds + 1))
    rounds = timing.measure(works, rounds=settings.rounds, on_run=steps)
    seconds = {name: min(times) for name, times in rounds.items()}
    operations = {part: run_part(part, _TILES.get(part, _SOME_TILES), settings.head_dim) for part in PARTS}
    operations["sgemm"] = 2 * settings.matrix**3
    rates = {name: count / seconds[name] / 1e9 for name, count in operations.items()}
    rows: list[Row] = [
        {
            "experiment": "rate",
            "operation": name,
            "milliseconds": seconds[name] * 1e3,
            "giga_per_second": rate,
            "share_of_peak": None if name == "softmax" else rate / rates["multiply-add"],
        }
        for name, rate in rates.items()
    ]
    return Outcome(rows + [_account(name, settings, seconds[name], rates) for name in VARIANTS])


def _account(name: str, settings: RooflineSettings, total: float, rates: dict[str, float]) -> Row:
    # Shifted keys share one product (identity 2).
    components = 1 if calls.spec_of(name).is_shifted else settings.mixtures
    pairs = settings.batch * settings.heads * settings.length**2
    product = 2 * pairs * settings.head_dim / 1e9
    seconds = {
        "score_products": components * product / rates["score product"],
        "softmax": components * pairs / rates["softmax"] / 1e9,
        "value_product": product / rates["value product"],
    }
    seconds["rest"] = total - sum(seconds.values())
    gflop = (components + 1) * product
    return {
        "experiment": "forward",
        "variant": name,
        "milliseconds": total * 1e3,
        **{f"{part}_milliseconds": time * 1e3 for part, time in seconds.items()},
        "products_gflop": gflop,
        "products_milliseconds_at_peak": gflop / rates["multiply-add"] * 1e3,
        "share_of_peak": gflop / total / rates["multiply-add"],
    }


def _sgemm(size: int) -> Work:
    a, b, out = (torch.randn(size, size) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)
