"""Which pairs take part: masks, True or not -inf, and ranges of keys by position.

A key with NaN or Inf affects only the queries that see it, whose outputs are NaN. As
0 * NaN is NaN, it is set to 0 before attention, and NaN is added to those outputs. A
finite number whose products overflow is set to 0 where no query sees it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.functional.validation import is_plain, known

# Products of such numbers, and their sums, overflow in no dtype that they are made in.
LARGEST = {torch.float64: 1e150, torch.float32: 1e18}


class KeyRange(NamedTuple):
    """Query i, at p = i + S - L, sees keys max(p - left, start_p) <= j < min(p + right + 1, end_p).

    Causality is right = 0. Neither end falls as i grows. None: no such bound.
    """

    left: int | None = None
    right: int | None = None
    segments: Tensor | None = None  # by :func:`segment_bounds`

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.right == 0

    @property
    def is_whole(self) -> bool:
        """Whether every query sees every key."""
        return self.left is None and self.right is None and self.segments is None

    @property
    def is_local(self) -> bool:
        """Whether there may be no key that all later queries see."""
        return self.left is not None or self.right not in (None, 0) or self.segments is not None

    def for_sizes(self, num_queries: int, num_keys: int) -> "KeyRange":
        """The same range without bounds that exclude no pair."""
        left, right, segments = self
        has_left = left is not None and not known(left >= num_keys - 1)
        has_right = right is not None and not known(right >= num_queries - 1)
        return KeyRange(left if has_left else None, right if has_right else None, segments)

    def first_seen(self, num_queries: int, num_keys: int) -> int:
        """The first key that the window leaves to any query."""
        return 0 if self.left is None else max(0, num_keys - num_queries - self.left)

    def from_key(self, first: int) -> "KeyRange":
        """The same range for the keys from position ``first`` on."""
        if self.segments is None:
            return self
        return self._replace(segments=(self.segments[:, :, first:] - first).clamp_min(0))

    def bounds(
        self, queries: slice, num_queries: int, num_keys: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """First and last key (exclusive) of queries: int64 (B or 1, l)."""
        start, stop = queries.start + num_keys - num_queries, queries.stop + num_keys - num_queries
        positions = torch.arange(start, stop, device=device)[None]
        first = torch.zeros_like(positions) if self.left is None else positions - self.left
        last = torch.full_like(positions, num_keys) if self.right is None else positions + (self.right + 1)
        if self.segments is not None:
            starts, ends = self.segments[:, :, start:stop]
            first, last = torch.maximum(first, starts), torch.minimum(last, ends)
        return first, last

    def mask(
        self,
        num_queries: int,
        num_keys: int,
        device: torch.device,
        queries: slice | None = None,
        keys: slice | None = None,
    ) -> Tensor:
        """Bool (B or 1, 1, l, s): the admitted pairs of a block."""
        queries, keys = queries or slice(0, num_queries), keys or slice(0, num_keys)
        first, last = (x[:, None, :, None] for x in self.bounds(queries, num_queries, num_keys, device))
        positions = torch.arange(keys.start, keys.stop, device=device)
        return (positions >= first) & (positions < last)

    def blocks(self, num_queries: int, num_keys: int, side: int) -> Iterator[tuple[slice, list[slice]]]:
        """Each block of ``side`` queries with its blocks of keys.

        It reads the segments, which torch.compile cannot trace.
        """
        for start in range(0, num_queries, side):
            queries = slice(start, min(start + side, num_queries))
            first, last = self.block_bounds(queries, num_queries, num_keys)
            yield (
                queries,
                [
                    slice(max(key, first), min(key + side, last))
                    for key in range(first // side * side, last, side)
                ],
            )

    def block_bounds(self, queries: slice, num_queries: int, num_keys: int) -> tuple[int, int]:
        """The first and the last key (exclusive) that a block sees."""
        offset = num_keys - num_queries
        first = 0 if self.left is None else max(0, queries.start + offset - self.left)
        last = num_keys if self.right is None else max(0, min(num_keys, queries.stop + offset + self.right))
        if self.segments is not None:
            first = max(first, int(self.segments[0, :, queries.start + offset].min()))
            last = min(last, int(self.segments[1, :, queries.stop - 1 + offset].max()))
        return min(first, last), last

    def is_whole_in(self, queries: slice, keys: slice, num_queries: int, num_keys: int) -> bool:
        """Whether a window alone admits every pair of a block."""
        offset = num_keys - num_queries
        return (
            self.segments is None
            and (self.left is None or keys.start >= queries.stop - 1 + offset - self.left)
            and (self.right is None or keys.stop - 1 <= queries.start + offset + self.right)
        )


WHOLE = KeyRange()


def segment_bounds(segment_ids: Tensor) -> Tensor:
    """Start and end (exclusive) of the run of equal ids: int64 (2, B, S)."""
    batch, length = segment_ids.shape
    positions = torch.arange(length, device=segment_ids.device)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    edge = changes.new_ones(batch, min(1, length))
    starts = torch.where(torch.cat([edge, changes], 1), positions, 0).cummax(1).values
    ends = torch.where(torch.cat([changes, edge], 1), positions + 1, length).flip(1).cummin(1).values.flip(1)
    return torch.stack([starts, ends])


def join(attn_mask: Tensor | None, allowed: Tensor) -> Tensor:
    """Both masks in one, of the kind (bool or float) of ``attn_mask``."""
    if attn_mask is None:
        return allowed
    if attn_mask.dtype == torch.bool:
        return attn_mask & allowed
    return attn_mask.masked_fill(~allowed, -torch.inf)


def admitted(mask: Tensor) -> Tensor:
    """Bool: the pairs that take part; an additive mask excludes with -inf."""
    return mask if mask.dtype == torch.bool else mask > -torch.inf


def add(scores: Tensor, addend: Tensor) -> Tensor:
    """The sum: -inf where the addend is; finite where both are."""
    total = scores + addend
    has_overflowed = (total == -torch.inf) & (scores > -torch.inf)
    return total.masked_fill(has_overflowed, torch.finfo(total.dtype).min).masked_fill(
        addend == -torch.inf, -torch.inf
    )


def to_dtype(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask in a dtype; finite numbers stay finite."""
    if torch.finfo(mask.dtype).max <= torch.finfo(dtype).max:
        return mask.to(dtype)
    limits = torch.finfo(dtype)
    return mask.clamp(limits.min, limits.max).masked_fill(mask == -torch.inf, -torch.inf).to(dtype)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0, with zero gradient, where the denominator is 0."""
    empty = denominator == 0
    return (numerator / denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


class Cleaned(NamedTuple):
    """Finite keys and values, and what to add to the outputs."""

    keys: Tensor  # (B, H, M, S, D)
    value: Tensor  # (B, H, S, E)
    # (B, Hq, L or 1, 1), NaN for queries that see such a key, else 0; None: all 0
    addend: Tensor | None
    overflows: bool = False  # known to hold numbers for which float32 is too narrow


def clean(
    keys: Tensor, value: Tensor, mask: Tensor | None, key_range: KeyRange, queries: Sequence[int]
) -> Cleaned:
    """Keys and value with 0 at positions that hold NaN or Inf, or that overflow unseen.

    ``queries`` is (Hq, L). Where every query sees every key there is nothing to do.
    """
    if (mask is None and key_range.is_whole) or _are_small(keys, value):
        return Cleaned(keys, value, None)
    bad = ~(keys.isfinite().all(-1).all(2) & value.isfinite().all(-1))  # (B, H, S)
    group = queries[0] // max(1, bad.shape[1])
    rows = _queries_that_see(bad.repeat_interleave(group, 1), mask, key_range, queries[1])
    addend = torch.zeros_like(rows, dtype=value.dtype).masked_fill(rows, torch.nan).unsqueeze(-1)
    large = ~(_is_small(keys).all(-1).all(2) & _is_small(value).all(-1))
    seen = _seen_keys(keys, mask, key_range, queries[1], group)
    gone = bad if seen is None else bad | (large & ~seen)
    overflows = keys.device.type == "cpu" and is_plain(keys) and bool((large & ~gone).any())
    keys = keys.masked_fill(gone[:, :, None, :, None], 0.0)
    return Cleaned(keys, value.masked_fill(gone.unsqueeze(-1), 0.0), addend, overflows)


def without_dead(tokens: Tensor, alive: Tensor) -> Tensor:
    """Tokens (B, S, C) with 0 in place of those that are neither alive, bool (B, S), nor small.

    Else the gradients of what projects them would be 0 * NaN.
    """
    if _are_small(tokens):
        return tokens
    dead = ~(alive | _is_small(tokens).all(-1))
    return tokens.masked_fill(dead.unsqueeze(-1), 0.0)


def _are_small(*tensors: Tensor) -> bool:
    """Whether all are known to be finite and small: a look at CPU values."""
    if any(x.device.type != "cpu" or not is_plain(x) for x in tensors):
        return False
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = (torch.linalg.vector_norm(x.detach(), dtype=dtype) for x in tensors)
    return all(norm.item() <= LARGEST[dtype] for norm in norms)  # NaN is not


def _is_small(x: Tensor) -> Tensor:
    """Bool, of each number: it does not overflow in products."""
    return x.detach().abs() <= LARGEST[torch.promote_types(x.dtype, torch.float32)]


def _seen_keys(
    keys: Tensor, mask: Tensor | None, key_range: KeyRange, num_queries: int, group: int
) -> Tensor | None:
    """Bool (B or 1, H or 1, S or 1): the keys that some query sees; None: all."""
    num_keys = keys.shape[3]
    seen = None if mask is None else admitted(mask).any(2)
    if seen is not None and seen.shape[1] > 1 and group > 1:
        seen = seen.unflatten(1, (-1, group)).any(2)
    # a query sees its own position, and the first one the most that are earlier
    if (key_range.left is None and key_range.segments is None) or known(num_queries == 0):
        return seen
    positions = torch.arange(num_keys, device=keys.device)
    first, _ = key_range.bounds(slice(0, 1), num_queries, num_keys, keys.device)
    in_range = (positions >= first)[:, None]
    return in_range if seen is None else seen & in_range


def _queries_that_see(bad: Tensor, mask: Tensor | None, key_range: KeyRange, num_queries: int) -> Tensor:
    """Bool (B, Hq, L or 1): the queries that see a key of ``bad`` (B, Hq, S)."""
    num_keys = bad.shape[-1]
    if mask is not None and mask.shape[2] > 1:
        pairs = admitted(mask)
        if not key_range.is_whole:
            pairs = pairs & key_range.mask(num_queries, num_keys, bad.device)
        return (pairs & bad.unsqueeze(2)).any(-1)
    if mask is not None:
        bad = bad & admitted(mask)[:, :, 0]
    if key_range.is_whole:
        return bad.any(-1, keepdim=True)
    # the number of bad keys before each position
    before = pad(bad.long().cumsum(-1), (1, 0))
    bounds = key_range.bounds(slice(0, num_queries), num_queries, num_keys, bad.device)
    first, last = (
        before.gather(2, x.clamp(0, num_keys)[:, None].expand(*bad.shape[:2], num_queries)) for x in bounds
    )
    return last > first
