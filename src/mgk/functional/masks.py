"""Masks: True takes part; bottom-right causality, query i sees keys j <= i + (S - L)."""

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


def add_to_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores (B, H, M, L, S) with -inf, or the float mask's addend, where the mask (B, H, L, S) says so."""
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask.unsqueeze(2), -torch.inf)
    return scores + mask.unsqueeze(2)


def admitted(mask: Tensor) -> Tensor:
    """Bool: the pairs that take part; an additive mask excludes with -inf."""
    return mask if mask.dtype == torch.bool else mask > -torch.inf
