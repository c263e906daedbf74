"""The sizes of tiles, by kind of device, kernel, widths, components and dtype: a plain table, no autotuning."""

from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and columns of a tile, and how the compiler is asked to schedule it."""

    queries: int
    keys: int
    warps: int
    stages: int


# The feature, row and counting kernels stream memory or run rarely.
SMALL = Tile(64, 64, 4, 1)


def tile(target: str, kernel: str, width: int, mixtures: int, itemsize: int) -> Tile:
    """The tile of a kernel. ``width`` is the padded width of keys or values, whichever is larger."""
    return SMALL
