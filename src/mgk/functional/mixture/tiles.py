"""How a score matrix is cut into blocks that fit a cache, shared by everything that works without N x N memory."""

from collections.abc import Iterator
from math import isqrt

from mgk.functional.mixture.score_features import Bilinear

# Scores in flight at a time. 4 MB of float32 stay in the CPU's cache with the two or three temporaries of a step; other
# devices want larger pieces of work.
SCORES_PER_BLOCK = {"cpu": 2**20}
SCORES_PER_BLOCK_ELSEWHERE = 2**25


def block_length(form: Bilinear) -> int:
    """The side of a square block: a power of two from 32 to 4,096, by the batch, heads and components that share it."""
    batch, heads, mixtures, _ = form.column.shape
    budget = SCORES_PER_BLOCK.get(form.query.device.type, SCORES_PER_BLOCK_ELSEWHERE)
    side = isqrt(max(1, budget // max(1, batch * heads * mixtures)))
    return min(4096, max(32, 1 << (side.bit_length() - 1)))


def blocks(form: Bilinear, is_causal: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Each block of queries with its blocks of keys; blocks beyond the causal diagonal are left out."""
    side = block_length(form)
    num_queries, num_keys = form.query.shape[2], form.column.shape[3]
    for start in range(0, num_queries, side):
        stop = min(start + side, num_queries)
        last_key = min(num_keys, stop + num_keys - num_queries) if is_causal else num_keys
        yield slice(start, stop), [slice(key, min(key + side, last_key)) for key in range(0, last_key, side)]


def block_number(form: Bilinear, rows: slice, columns: slice) -> int:
    """A number of its own for each block of a form."""
    side = block_length(form)
    per_row = -(-form.column.shape[3] // side)
    return (rows.start // side) * per_row + columns.start // side
