"""Blocks of the score matrix that fit a cache."""

from collections.abc import Callable, Iterator
from math import isqrt

import torch
from torch import Tensor

from mgk.functional import masks
from mgk.functional.masks import KeyRange
from mgk.functional.mixture.features import ForwardResult, OperatorInputs, ScoreFeatures

# Scores of a block: on the CPU 4 MB of float32 stay in the cache with two or three temporaries; other devices need
# larger pieces of work.
SCORES_PER_BLOCK = {"cpu": 2**20}
SCORES_PER_BLOCK_ELSEWHERE = 2**25


def block_length(features: ScoreFeatures) -> int:
    """The side of a square block, a power of two from 32 to 4,096."""
    batch, heads = features.query.shape[:2]
    budget = SCORES_PER_BLOCK.get(features.query.device.type, SCORES_PER_BLOCK_ELSEWHERE)
    side = isqrt(max(1, budget // max(1, batch * heads * features.key_bias.shape[2])))
    return min(4096, max(32, 1 << (side.bit_length() - 1)))


def blocks(features: ScoreFeatures, key_range: KeyRange) -> Iterator[tuple[slice, list[slice]]]:
    """Each block of queries with the blocks of keys that it sees."""
    return key_range.blocks(features.query.shape[2], features.key_bias.shape[3], block_length(features))


def block_number(features: ScoreFeatures, queries: slice, keys: slice) -> int:
    """The index of a block, in row-major order."""
    side = block_length(features)
    per_row = -(-features.key_bias.shape[3] // side)
    return (queries.start // side) * per_row + keys.start // side


def block_scores(
    features: ScoreFeatures, mask: Tensor | None, key_range: KeyRange, queries: slice, keys: slice
) -> Tensor:
    """s_ijr of a block, -inf where excluded: (B, Hq, M, l, s)."""
    group = features.group
    key_bias = repeat_heads(features.key_bias[:, :, :, None, keys], group)
    q, k = features.query[:, :, None, queries], repeat_heads(features.keys[:, :, :, keys], group)
    # two partial sums halve the accumulation error
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
    addend = _mask_addend(features, mask, key_range, queries, keys)
    if addend is None:
        return scores
    is_float = mask is not None and mask.is_floating_point()
    return masks.add(scores, addend.unsqueeze(2)) if is_float else scores.add_(addend.unsqueeze(2))


def attention_tangent(
    inputs: OperatorInputs,
    tangents: OperatorInputs,
    result: ForwardResult,
    dropout_factors: Callable[[Tensor, slice, slice], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """dh_i = sum_j dA_ij v_j + A_ij dv_j with dA_ij = sum_r P_ijr (ds_ijr - sum_j'r' P_ij'r' ds_ij'r').

    The sum over j' and r' is the lse's. P_ijr = exp(s_ijr - row_max_i) / row_sum_i. A
    tangent of 0 is None. Nothing is in place: torch.func may add dimensions to tangents.
    A gradient of the tangent reaches row_sum_i through the lse.
    """
    features, value, mask, _, _, options = inputs
    group, key_range = features.group, inputs.key_range
    rows, means = [], []
    assert result.lse is not None
    lse = result.lse.masked_fill(result.lse == -torch.inf, 0.0)
    row_sum = result.row_sum * (lse - lse.detach()).exp()  # times 1, with a gradient
    for queries, key_blocks in blocks(features, key_range):
        out = result.out[:, :, queries]
        row_max = result.row_max[:, :, None, queries, None]
        numerator, mean = torch.zeros_like(out), torch.zeros_like(out[..., :1])
        for keys in key_blocks:
            scores = block_scores(features, mask, key_range, queries, keys)
            d_scores = _block_tangent(features, tangents, scores, queries, keys)
            if features.score_affine is not None:
                affine = _affine(features.score_affine, scores, queries)
                scores = affine.masked_fill(scores == -torch.inf, -torch.inf)
            if options.is_hard:
                scores, winner = scores.max(2, keepdim=True)
                d_scores = d_scores.gather(2, winner)
            weights = (scores - row_max).exp() / row_sum[:, :, None, queries, None]
            d_weights = (weights * d_scores).sum(2)
            mean = mean + d_weights.sum(-1, keepdim=True)
            weights = weights.sum(2)
            if dropout_factors is not None:
                factors = dropout_factors(weights, queries, keys)
                weights, d_weights = weights * factors, d_weights * factors
            numerator = numerator + d_weights @ repeat_heads(value[:, :, keys], group)
            if tangents.value is not None:
                numerator = numerator + weights @ repeat_heads(tangents.value[:, :, keys], group)
        rows.append(numerator - mean * out)
        means.append(mean.squeeze(-1))
    return torch.cat(rows, 2), torch.cat(means, 2)


def _block_tangent(
    features: ScoreFeatures, tangents: OperatorInputs, scores: Tensor, queries: slice, keys: slice
) -> Tensor:
    """ds_ijr of a block (B, Hq, M, l, s)."""
    of, group = tangents.features, features.group
    total = torch.zeros_like(scores)
    if of.query is not None:
        total = total + of.query[:, :, None, queries] @ repeat_heads(features.keys[:, :, :, keys], group).mT
    if of.keys is not None:
        total = total + features.query[:, :, None, queries] @ repeat_heads(of.keys[:, :, :, keys], group).mT
    if of.query_bias is not None:
        total = total + of.query_bias[:, :, :, queries, None]
    if of.key_bias is not None:
        total = total + repeat_heads(of.key_bias[:, :, :, None, keys], group)
    if features.score_affine is not None:  # 1 and 0, for a gradient of the tangent
        factor, _ = features.score_affine.to(scores.dtype)[..., queries, None]
        total = factor * total
    if of.score_affine is not None:
        total = total + _affine(of.score_affine, scores, queries)
    if tangents.mask is not None:
        total = total + block_of_mask(tangents.mask, queries, keys).unsqueeze(2)
    return total


def _affine(score_affine: Tensor, scores: Tensor, queries: slice) -> Tensor:
    """a_ir s_ijr + b_ir of a block, b_ir where s_ijr is -inf."""
    factor, addend = score_affine.to(scores.dtype)[..., queries, None]
    return factor * scores.masked_fill(scores == -torch.inf, 0.0) + addend


def repeat_heads(x: Tensor, group: int) -> Tensor:
    """(B, H, ...) with each head repeated for its query heads: (B, Hq, ...)."""
    return x if group == 1 else x.repeat_interleave(group, 1)


def block_of_mask(mask: Tensor, queries: slice, keys: slice) -> Tensor:
    """A view of the mask (B, Hq, L, S), any of them 1, over a block."""
    return mask[:, :, queries if mask.shape[2] > 1 else slice(None), keys if mask.shape[3] > 1 else slice(None)]


def _mask_addend(
    features: ScoreFeatures, mask: Tensor | None, key_range: KeyRange, queries: slice, keys: slice
) -> Tensor | None:
    """What a block's masks add to its scores, broadcastable to (B, Hq, l, s)."""
    sizes = (features.query.shape[2], features.key_bias.shape[3])
    if mask is not None:
        mask = block_of_mask(mask, queries, keys)
    if not key_range.is_whole_in(queries, keys, *sizes):
        mask = masks.join(mask, key_range.mask(*sizes, features.query.device, queries, keys))
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=features.query.dtype).masked_fill_(~mask, -torch.inf)
