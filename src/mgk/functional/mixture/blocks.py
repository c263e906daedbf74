"""Blocks of the score matrix that fit a cache, for everything that works without N x N memory."""

from collections.abc import Iterator
from math import isqrt

import torch
from torch import Tensor

from mgk.functional import masks
from mgk.functional.mixture.features import ScoreFeatures

# Scores of a block: on the CPU 4 MB of float32 stay in the cache with two or three temporaries; other devices need
# larger pieces of work.
SCORES_PER_BLOCK = {"cpu": 2**20}
SCORES_PER_BLOCK_ELSEWHERE = 2**25


def block_length(features: ScoreFeatures) -> int:
    """The side of a square block, a power of two from 32 to 4,096, by the number of batches, heads and components."""
    batch, heads, mixtures, _ = features.key_bias.shape
    budget = SCORES_PER_BLOCK.get(features.query.device.type, SCORES_PER_BLOCK_ELSEWHERE)
    side = isqrt(max(1, budget // max(1, batch * heads * mixtures)))
    return min(4096, max(32, 1 << (side.bit_length() - 1)))


def blocks(features: ScoreFeatures, is_causal: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Each block of queries with its blocks of keys, without those beyond the causal diagonal."""
    side = block_length(features)
    num_queries, num_keys = features.query.shape[2], features.key_bias.shape[3]
    for start in range(0, num_queries, side):
        stop = min(start + side, num_queries)
        last_key = min(num_keys, stop + num_keys - num_queries) if is_causal else num_keys
        yield slice(start, stop), [slice(key, min(key + side, last_key)) for key in range(0, last_key, side)]


def block_number(features: ScoreFeatures, queries: slice, keys: slice) -> int:
    """The index of a block, in row-major order."""
    side = block_length(features)
    per_row = -(-features.key_bias.shape[3] // side)
    return (queries.start // side) * per_row + keys.start // side


def block_scores(features: ScoreFeatures, mask: Tensor | None, is_causal: bool, queries: slice, keys: slice) -> Tensor:
    """s_ijr of a block of queries and a block of keys, -inf where excluded: (B, H, M, l, s)."""
    key_bias = features.key_bias[:, :, :, None, keys]
    q, k = features.query[:, :, None, queries], features.keys[:, :, :, keys]
    # the gradients of score_affine accumulate the error of these sums over features: two partial sums halve it
    num_parts = 1 if features.score_affine is None else 2
    parts = zip(q.chunk(num_parts, -1), k.chunk(num_parts, -1), strict=True)
    if features.query_bias is not None:
        scores = key_bias + features.query_bias[:, :, :, queries, None]
        for q_part, k_part in parts:
            scores = scores + q_part @ k_part.mT
    else:
        shape = (*key_bias.shape[:3], q.shape[3], k.shape[3])
        scores = key_bias.flatten(0, 2)
        for q_part, k_part in parts:
            flat_query = q_part.expand(*shape[:4], -1).flatten(0, 2)
            scores = torch.baddbmm(scores, flat_query, k_part.flatten(0, 2).mT)
        scores = scores.view(shape)
    addend = _mask_addend(features, mask, is_causal, queries, keys)
    return scores if addend is None else scores.add_(addend.unsqueeze(2))


def block_of_mask(mask: Tensor, queries: slice, keys: slice) -> Tensor:
    """A view of the mask (B, H, L, S), any of them 1, over a block."""
    return mask[:, :, queries if mask.shape[2] > 1 else slice(None), keys if mask.shape[3] > 1 else slice(None)]


def _mask_addend(
    features: ScoreFeatures, mask: Tensor | None, is_causal: bool, queries: slice, keys: slice
) -> Tensor | None:
    """The addend of a block's scores, broadcastable to (B, H, l, s): 0, -inf, or a float mask's value."""
    offset = features.key_bias.shape[3] - features.query.shape[2]
    if mask is not None:
        mask = block_of_mask(mask, queries, keys)
    if is_causal and keys.stop - 1 > queries.start + offset:  # the block reaches beyond the diagonal
        sizes = (queries.stop - queries.start, keys.stop - keys.start)
        first = {"first_query": queries.start, "first_key": keys.start}
        mask = masks.join(mask, masks.causal_mask(*sizes, features.query.device, **first, offset=offset)[None, None])
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=features.query.dtype).masked_fill_(~mask, -torch.inf)
