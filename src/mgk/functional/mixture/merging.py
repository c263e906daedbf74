"""Attention over a union of disjoint sets of keys."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.functional.mixture.inputs import compute_dtype


def merge_attention(pieces: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    r"""h_i = sum_c exp(lse_ic - lse_i) h_ic with lse_i = log sum_c exp(lse_ic).

    Args:
        pieces: (output, lse) of :func:`mixture_attention` with ``return_lse=True``,
            (B, Hq, L, E) and (B, Hq, L), for the same queries and disjoint sets of keys.

    Returns:
        The output in the dtype of the pieces and the lse, both for all keys. A query with
        no key in any piece has zeros and -inf. Gradients flow through both.
    """
    outs, lses = zip(*_validated(pieces), strict=True)
    dtype = compute_dtype(outs[0])
    lse = torch.stack([x.to(dtype) for x in lses])  # (pieces, B, Hq, L)
    is_empty = lse == -torch.inf
    has_none = is_empty.all(0)
    row_max = lse.detach().amax(0).masked_fill(has_none, 0.0)
    # empty pieces are filled before exp and after it: neither way makes a NaN
    mass = (lse.masked_fill(is_empty, 0.0) - row_max).exp().masked_fill(is_empty, 0.0)
    total = mass.sum(0).masked_fill(has_none, 1.0)
    out = torch.stack([x.to(dtype) for x in outs]).masked_fill(is_empty.unsqueeze(-1), 0.0)
    merged = ((mass / total).unsqueeze(-1) * out).sum(0)
    return merged.to(outs[0].dtype), (row_max + total.log()).masked_fill(has_none, -torch.inf)


def _validated(pieces: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    checked = list(pieces)
    if not checked:
        raise ValueError("pieces must hold at least one pair (output, lse), got none")
    for number, piece in enumerate(checked):
        if not isinstance(piece, tuple | list) or len(piece) != 2:
            raise TypeError(f"pieces[{number}] must be a pair (output, lse), got {type(piece).__name__}")
        out, lse = piece
        validation.tensor(f"pieces[{number}][0]", out, "BHLE")
        validation.tensor(f"pieces[{number}][1]", lse, "BHL")
        first = checked[0][0]
        if out.shape != first.shape or out.dtype != first.dtype:
            wanted = f"{first.dtype} of shape {tuple(first.shape)} as the first"
            got = f"{out.dtype} of shape {tuple(out.shape)}"
            raise ValueError(f"pieces[{number}][0] must be {wanted}, got {got}")
        if lse.shape != out.shape[:3]:
            wanted = f"shape (B, H, L) = {tuple(out.shape[:3])}"
            raise ValueError(f"pieces[{number}][1] must have {wanted}, got {tuple(lse.shape)}")
    return checked
