"""Masks: True takes part; causality is bottom-right, query i sees keys j <= i + (S - L)."""

import torch
from torch import Tensor


def causal_mask(
    num_queries: int, num_keys: int, device: torch.device, *, first_query: int = 0, first_key: int = 0, offset: int = 0
) -> Tensor:
    """Bool (num_queries, num_keys): ``first_key + j <= first_query + i + offset``, with offset = S - L."""
    queries = torch.arange(first_query, first_query + num_queries, device=device)
    keys = torch.arange(first_key, first_key + num_keys, device=device)
    return keys <= queries[:, None] + offset


def join(attn_mask: Tensor | None, causal: Tensor) -> Tensor:
    """Both masks in one, of the kind (bool or float) of ``attn_mask``."""
    if attn_mask is None:
        return causal
    if attn_mask.dtype == torch.bool:
        return attn_mask & causal
    return attn_mask.masked_fill(~causal, -torch.inf)


def admitted(mask: Tensor) -> Tensor:
    """Bool: the pairs that take part; an additive mask excludes with -inf."""
    return mask if mask.dtype == torch.bool else mask > -torch.inf


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 with zero gradient where the denominator is 0: a query with no key left."""
    empty = denominator == 0
    return (numerator / denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
