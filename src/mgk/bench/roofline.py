"""The forward of mgk and smgk by parts, beside the rates of the machine.

All are interleaved, with the same threads; the fastest round counts. Doubling the
widths adds each product once more, and nothing else of order N^2.
"""

from dataclasses import replace

import torch

from mgk.bench import calls, timing
from mgk.bench.registry import RooflineSettings
from mgk.bench.runner import OnStep, Outcome, Row
from mgk.bench.timing import Steps, Work

VARIANTS = ("smgk", "mgk")
TILE = 64  # queries and keys of a tile of the kernel
_TILES = 32  # fit the second-level cache, enough for all threads
_CALLS = 50
_BLOCK = 2**16


def run(settings: RooflineSettings, on_step: OnStep) -> Outcome:
    """Three rows of rates, then a row per variant."""
    calls.require_kernels()
    works = {
        "sgemm": _sgemm(settings.matrix),
        "tile product": _tile_products(settings.head_dim),
        "exp": _exp(),
    }
    for name in VARIANTS:
        works[name] = _forward(name, settings, 1)
        works[_wide(name)] = _forward(name, settings, 2)
    steps = Steps(on_step, len(works) * (settings.rounds + 1))
    rounds = timing.measure(works, rounds=settings.rounds, on_run=steps)
    seconds = {name: min(times) for name, times in rounds.items()}
    operations = {
        "sgemm": 2 * settings.matrix**3,
        "tile product": _CALLS * _TILES * 2 * 2 * TILE**2 * settings.head_dim,
        "exp": _CALLS * _BLOCK,
    }
    rates = {name: count / seconds[name] / 1e9 for name, count in operations.items()}
    rows: list[Row] = [
        {
            "experiment": "rate",
            "operation": name,
            "milliseconds": seconds[name] * 1e3,
            "giga_per_second" if name == "exp" else "gflop_per_second": rate,
        }
        for name, rate in rates.items()
    ]
    return Outcome(rows + [_account(name, settings, seconds, rates) for name in VARIANTS])


def _account(name: str, settings: RooflineSettings, seconds: dict[str, float], rates: dict[str, float]) -> Row:
    # Shifted keys share one product and one exponential (identity 2).
    scores = 1 if calls.spec_of(name).is_shifted else settings.mixtures
    pairs = settings.batch * settings.heads * settings.length**2
    gflop = (scores + 1) * 2 * pairs * settings.head_dim / 1e9
    total, products = seconds[name], seconds[_wide(name)] - seconds[name]
    exponentials = scores * pairs / rates["exp"] / 1e9
    return {
        "experiment": "forward",
        "variant": name,
        "milliseconds": total * 1e3,
        "products": scores + 1,
        "products_gflop": gflop,
        "products_milliseconds": products * 1e3,
        "products_gflop_per_second": gflop / products if products > 0 else None,
        "products_milliseconds_at_tile_rate": gflop / rates["tile product"] * 1e3,
        "products_milliseconds_at_sgemm_rate": gflop / rates["sgemm"] * 1e3,
        "exponentials": scores * pairs,
        "exponentials_milliseconds": exponentials * 1e3,
        "rest_milliseconds": (total - products - exponentials) * 1e3,
    }


def _wide(name: str) -> str:
    return f"{name}, twice the widths"


def _forward(name: str, settings: RooflineSettings, factor: int) -> Work:
    shape = replace(settings, head_dim=factor * settings.head_dim)
    return calls.variant_work(name, calls.make_inputs(shape), "forward", backend="cpu")


def _sgemm(size: int) -> Work:
    a, b, out = (torch.randn(size, size) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def _tile_products(width: int) -> Work:
    query, value, out = (torch.randn(_TILES, TILE, width) for _ in range(3))
    key, scores = torch.randn(_TILES, width, TILE), torch.empty(_TILES, TILE, TILE)

    def run() -> None:
        for _ in range(_CALLS):
            torch.bmm(query, key, out=scores)
            torch.bmm(scores, value, out=out)

    return run


def _exp() -> Work:
    x, out = torch.randn(_BLOCK), torch.empty(_BLOCK)

    def run() -> None:
        for _ in range(_CALLS):
            torch.exp(x, out=out)

    return run
