"""Packed rows: several sequences in a row, without padding."""

from typing import TypedDict

import torch
from torch import Tensor

from mgk.functional.masks import segment_bounds
from mgk.functional.mixture.inputs import compute_dtype
from mgk.functional.validation import is_plain


class PackingOptions(TypedDict, total=False):
    """Packed sequences, in the names of ``DataCollatorWithFlattening``."""

    seq_idx: Tensor | None  # int (B, past + L), in runs of equal numbers
    cu_seq_lens_q: Tensor | None  # int (sequences + 1,), of one row
    cu_seq_lens_k: Tensor | None  # the same
    max_length_q: int | None  # not needed
    max_length_k: int | None  # not needed


def find_segments(
    options: PackingOptions,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    sizes: tuple[int, int],
    past: int = 0,
) -> Tensor | None:
    """The segment ids (B, past + L) of packed rows (B, L), or None.

    They are ``seq_idx``, or follow from ``cu_seq_lens_q``, or without mask and cache from
    ``position_ids`` that fall or stay somewhere.
    """
    batch, length = sizes
    if (ids := options.get("seq_idx")) is not None:
        return ids
    bounds = options.get("cu_seq_lens_q")
    if bounds is not None:
        if batch != 1 or bounds.ndim != 1 or past:
            shape = tuple(bounds.shape)
            got = f"{batch} rows of {past + length} tokens and bounds of shape {shape}"
            raise ValueError(f"cu_seq_lens_q must be 1-D, for one row without a cache, got {got}")
        if is_plain(bounds):
            first, last = int(bounds[0]), int(bounds[-1])
            if (first, last) != (0, length):
                wanted = f"go from 0 to the row's {length} tokens"
                raise ValueError(f"cu_seq_lens_q must {wanted}, got {first} to {last}")
        positions = torch.arange(length, device=bounds.device, dtype=bounds.dtype)
        return torch.searchsorted(bounds, positions, right=True).unsqueeze(0)
    if position_ids is None or attention_mask is not None or past or position_ids.shape[-1] < 2:
        return None
    restarts = position_ids.diff(dim=1) <= 0
    # reading it is cheaper than masks that exclude nothing; torch.compile and vmap cannot
    if is_plain(restarts) and not bool(restarts.any()):
        return None
    ids = torch.nn.functional.pad(restarts, (1, 0)).cumsum(1)
    return ids.expand(batch, length)


def restarting_positions(segment_ids: Tensor) -> Tensor:
    """0, 1, 2, ... within every segment: (B, S)."""
    places = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    return places - segment_bounds(segment_ids)[0]


def mean_of_segments(hidden: Tensor, segment_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mean over the real tokens of each segment, in row order.

    A segment of padding alone is none.
    """
    is_first = torch.ones_like(segment_ids, dtype=torch.bool)
    is_first[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    number = is_first.flatten().cumsum(0) - 1  # of each token's segment
    exact = hidden.to(compute_dtype(hidden)).flatten(0, 1)
    is_real = torch.ones_like(number, dtype=exact.dtype)
    if attention_mask is not None:
        is_real = attention_mask.flatten().bool().to(exact.dtype)
        exact = exact * is_real.unsqueeze(-1)
    sums = exact.new_zeros(int(number[-1]) + 1, exact.shape[1]).index_add(0, number, exact)
    counts = exact.new_zeros(len(sums)).index_add(0, number, is_real)
    if attention_mask is not None:
        has_token = counts > 0
        sums, counts = sums[has_token], counts[has_token]
    return (sums / counts.unsqueeze(-1)).to(hidden.dtype)
