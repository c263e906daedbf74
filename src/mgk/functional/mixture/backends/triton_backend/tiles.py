"""The sizes of tiles: a plain table, no autotuning.

Chosen by compiling, not by running: of a few tiles that fit in shared memory and do not spill in their loop,
the one that ``mgk.bench.triton_model`` finds fastest. Entries of ``TABLE`` may be replaced.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and columns of a tile, and how the compiler is asked to schedule it."""

    queries: int
    keys: int
    warps: int
    stages: int
    splits_columns: bool = False  # warps share the columns of a tile, not only its rows
    mixes_exp2: bool = False  # some exponentials are polynomials, where exponentials are the bottleneck
    queries_first: bool = False  # rows are queries even where programs own keys, but for shifted ones


# Of kernels that stream memory or run rarely, and of the interpreter.
SMALL = Tile(64, 64, 4, 1)

_WIDE = Tile(128, 128, 8, 2)
_LONG = Tile(128, 64, 8, 2)
_ONCE = Tile(128, 64, 8, 1)
_SLIM = Tile(128, 32, 8, 2)
_EVEN = Tile(64, 64, 4, 2)
_KEYS = Tile(64, 128, 8, 2)
_SQUARE = Tile(64, 64, 8, 1)
_FEW_QUERIES = Tile(32, 128, 8, 2)
_FEW = Tile(32, 64, 4, 2)
_FEW_ONCE = Tile(32, 64, 4, 1)
_FLAT = Tile(64, 32, 8, 1, splits_columns=True)
_THIN = Tile(32, 16, 4, 1, splits_columns=True)
_DEEP = Tile(32, 32, 8, 1)
_SHORT = Tile(16, 64, 4, 2)
_ACROSS = Tile(128, 64, 8, 1, queries_first=True)
_ACROSS_SLIM = Tile(128, 32, 8, 1, queries_first=True)
_MIXED = Tile(128, 128, 8, 2, mixes_exp2=True)
_AMD_ROWS, _AMD_SLIM = Tile(128, 64, 4, 1), Tile(128, 32, 4, 1)
_AMD_KEYS, _AMD_SPLIT = Tile(32, 128, 4, 1), Tile(32, 32, 4, 1, splits_columns=True)

# By target, kernel and padded width, of float16 and bfloat16: for shifted keys with M up to 2, softmax, M up to 2, and
# above, and shifted keys above.
TABLE = {
    ("sm_80", "forward", 64): (_LONG, _WIDE, _LONG, _LONG, _LONG),
    ("sm_80", "forward", 128): (_LONG, Tile(128, 64, 8, 3), _SLIM, _SLIM, _SLIM),
    ("sm_80", "keys", 64): (_FEW, _KEYS, _FEW, _FLAT, Tile(32, 32, 4, 1)),
    ("sm_80", "keys", 128): (_SQUARE, _EVEN, _FLAT, _FLAT, _SQUARE),
    ("sm_80", "queries", 64): (_SLIM, _LONG, _SLIM, _SLIM, _SLIM),
    ("sm_80", "queries", 128): (_SLIM, _EVEN, _SLIM, _SLIM, _SLIM),
    ("sm_90", "forward", 64): (_WIDE, _WIDE, _MIXED, _LONG, _ONCE),
    ("sm_90", "forward", 128): (_LONG, _WIDE, _LONG, _SLIM, _LONG),
    ("sm_90", "keys", 64): (_FEW, _EVEN, _FEW_QUERIES, _FLAT, _FEW),
    ("sm_90", "keys", 128): (_SHORT, _ACROSS, _ACROSS_SLIM, _FLAT, _SQUARE),
    ("sm_90", "queries", 64): (_LONG, _EVEN, _LONG, _SLIM, _LONG),
    ("sm_90", "queries", 128): (_LONG, _LONG, _LONG, _SLIM, _LONG),
    ("sm_100", "forward", 64): (_WIDE, _WIDE, _LONG, _ONCE, _ONCE),
    ("sm_100", "forward", 128): (_LONG, _LONG, _LONG, _SLIM, _ONCE),
    ("sm_100", "keys", 64): (_KEYS, _KEYS, _FEW_QUERIES, _FEW_ONCE, _FEW_ONCE),
    ("sm_100", "keys", 128): (_FEW, _KEYS, SMALL, _FEW_ONCE, _FEW_ONCE),
    ("sm_100", "queries", 64): (_LONG, _LONG, _LONG, SMALL, _LONG),
    ("sm_100", "queries", 128): (_LONG, _LONG, _LONG, SMALL, _SLIM),
    ("gfx942", "forward", 64): (_AMD_ROWS, _AMD_ROWS, _AMD_ROWS, _AMD_ROWS, _AMD_ROWS),
    ("gfx942", "forward", 128): (_AMD_ROWS, _AMD_ROWS, _AMD_ROWS, _AMD_ROWS, _AMD_ROWS),
    ("gfx942", "keys", 64): (_AMD_KEYS, _AMD_KEYS, _AMD_KEYS, _AMD_SPLIT, _AMD_KEYS),
    ("gfx942", "keys", 128): (_AMD_KEYS, _AMD_KEYS, _AMD_SPLIT, _AMD_SPLIT, _AMD_KEYS),
    ("gfx942", "queries", 64): (_AMD_SLIM, _AMD_SLIM, _AMD_SLIM, _AMD_SLIM, _AMD_SLIM),
    ("gfx942", "queries", 128): (_AMD_SLIM, _AMD_SLIM, _AMD_SLIM, _AMD_SLIM, _AMD_SLIM),
}
# Wider than that, and of exact float32 products: by kernel or by width alone.
_WIDEST = {"forward": _DEEP, "keys": _THIN, "queries": _DEEP, "counts": _DEEP}
_EXACT = {64: Tile(32, 32, 8, 1), 128: Tile(16, 16, 8, 1), 256: Tile(16, 16, 8, 1)}


def tile(
    target: str, kernel: str, width: int, mixtures: int, precision: str, *, is_shifted: bool = False
) -> Tile:
    """The tile of a kernel.

    Args:
        target: "sm_80", "sm_90", "sm_100" or "gfx942".
        kernel: "forward", "keys", "queries", or one that runs rarely.
        width: the padded width of keys or values, whichever is larger.
        mixtures: M; 1 is softmax attention.
        precision: "half", "tf32" or "ieee".
        is_shifted: whether all components share one product.
    """
    if kernel not in _WIDEST:
        return SMALL
    width = max(width, 64)
    if precision == "ieee" and target != "gfx942":
        return _EXACT[width]
    if precision != "half":
        width *= 2
    if width > 128:
        return _WIDEST[kernel]
    if kernel == "counts":
        return SMALL
    if precision == "tf32" and kernel == "keys" and target != "gfx942":
        return _FLAT
    column = (4 if mixtures > 2 else 0) if is_shifted else min(mixtures, 3)
    return TABLE[target, kernel, width][column]
