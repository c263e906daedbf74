"""The modelled time of half the heads against softmax with all of them.

Per (query, key) pair and SM, in cycles: the products at the tensor cores' dense rate, and beside them the
slowest of exponentials, float32 arithmetic and issue slots of the loop over full tiles. The optimistic bound
overlaps the two wholly, the pessimistic one not at all; a ratio is given for both, and the larger of them is
the one that counts. Not in the model: memory, latency, occupancy, the edges of the sequence, and the small
kernels around.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rates:
    """What one SM, or AMD's compute unit, does in a cycle."""

    half_flops: int  # products of float16 and bfloat16 tiles; half of it in TF32
    exponentials: int
    arithmetic: int  # float32 additions, multiplications or both at once
    issue: int  # lanes of any instruction


# Of NVIDIA's whitepapers on A100, H100 and Blackwell, and AMD's on CDNA 3.
RATES = {
    "sm_80": Rates(2048, 16, 64, 128),
    "sm_90": Rates(4096, 16, 128, 128),
    "sm_100": Rates(8192, 16, 128, 128),
    "gfx942": Rates(2048, 16, 128, 64),
}
PASSES = {"forward": ("forward",), "backward": ("keys", "queries")}
_KERNELS = ("forward", "keys", "queries")
VARIANTS, MIXTURES = ("mgk", "mgk-hard", "smgk"), 2


def products(kernel: str, key_mixtures: int) -> int:
    """Products of a tile, each of 2 D operations a pair."""
    return {"forward": 1, "queries": 1, "keys": 2}[kernel] + key_mixtures * (1 if kernel == "forward" else 2)


def cycles(row: dict[str, Any]) -> tuple[float, float]:
    """Cycles of a pair: on the tensor cores, and beside them."""
    rates = RATES[row["target"]]
    count = products(row["kernel"], 1 if row["variant"] == "smgk" else row["mixtures"])
    flops = rates.half_flops / (2 if row["dtype"] == "tf32" else 1)
    beside = max(
        row["exponentials"] / rates.exponentials,
        row["arithmetic"] / rates.arithmetic,
        row["instructions"] / rates.issue,
    )
    return 2 * row["width"] * count / flops, beside


def modelled(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Ratios by target, width, pass and variant."""
    found: dict[tuple[Any, ...], tuple[float, float]] = {}
    for row in rows:
        # most tiles of smgk execute the factor alone
        if row["kernel"] in _KERNELS and (row["variant"] != "smgk" or row["is_factored"]):
            names = ("target", "dtype", "width", "variant", "mixtures", "kernel")
            found[tuple(row[name] for name in names)] = cycles(row)
    for target, dtype, width in dict.fromkeys(key[:3] for key in found):
        shape = (target, dtype, width)
        for name, kernels in PASSES.items():
            softmax = [(*shape, "softmax", 1, kernel) for kernel in kernels]
            for variant in VARIANTS:
                mixture = [(*shape, variant, MIXTURES, kernel) for kernel in kernels]
                if dtype == "float32" or not found.keys() >= {*softmax, *mixture}:
                    continue
                overlapped, in_turn = (
                    sum(bound(found[key]) for key in mixture) / sum(bound(found[key]) for key in softmax) / 2
                    for bound in (max, sum)
                )
                yield {
                    "experiment": "model",
                    "target": target,
                    "dtype": dtype,
                    "width": width,
                    "pass": name,
                    "variant": variant,
                    "mixtures": MIXTURES,
                    "overlapped": round(overlapped, 3),
                    "in_turn": round(in_turn, 3),
                    "pessimistic": round(max(overlapped, in_turn), 3),
                }
