"""Mixture attention in blocks: every option, memory O(N).

Forward, over the blocks of keys: m <- max(m, s), p_ij = sum_r exp(s_ijr - m_i), or
exp(max_r s_ijr - m_i) if hard, l <- l exp(m_old - m) + sum_j p_ij, o likewise with
p_ij v_j; h = o / l. Backward recomputes the scores: P_ijr = exp(s_ijr - m_i) / l_i,
dP_ij = dh_i . v_j, delta_i = dh_i . h_i less the gradient of the log-sum-exp,
ds_ijr = P_ijr (dP_ij - delta_i), for the winner alone if hard. ``_AffineGradient`` has
the gradient of ``score_affine``.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mgk.functional.masks import KeyRange
from mgk.functional.mixture.blocks import (
    attention_tangent,
    block_number,
    block_of_mask,
    block_scores,
    blocks,
    repeat_heads,
)
from mgk.functional.mixture.features import (
    ForwardResult,
    Gradients,
    OperatorBackend,
    OperatorInputs,
    ScoreFeatures,
    fake_statistics,
)
from mgk.functional.mixture.reference import component_shares, sum_over_groups, weighted_sums

SHORT_SUM = 64
# exp of less is 0 beside 1 in float64; it stands for -inf, which times 0 is NaN.
SMALLEST_EXPONENT = -100.0


class Blockwise(OperatorBackend):
    """Every option on every device, in memory O(N)."""

    name = "blockwise"
    priority = 1

    def forward(self, inputs: OperatorInputs) -> ForwardResult:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        features, value, mask, seed, _, options = inputs
        group, key_range = features.group, inputs.key_range
        shape = features.query.shape[:3]
        out = value.new_empty(*shape, value.shape[-1])
        row_maxima, row_sums = value.new_empty(shape), value.new_empty(shape)
        for queries, key_blocks in blocks(features, key_range):
            row_max = torch.full_like(row_maxima[:, :, queries], -torch.inf)  # (B, Hq, l)
            row_sum = torch.zeros_like(row_max)
            numerator = torch.zeros_like(out[:, :, queries])
            for keys in key_blocks:
                scores = block_scores(features, mask, key_range, queries, keys)
                if options.is_hard:
                    scores = scores.amax(2, keepdim=True)
                new_max = torch.maximum(row_max, scores.amax((2, 4)))
                finite_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
                weights = scores.sub_(finite_max[:, :, None, :, None]).exp_().sum(2)  # (B, Hq, l, s)
                decay = (row_max - finite_max).exp_()
                row_sum = row_sum * decay + weights.sum(-1)
                if seed is not None:
                    weights *= _dropout_factors(inputs, weights, queries, keys)
                numerator = numerator * decay.unsqueeze(-1) + _in_short_sums(
                    weights, repeat_heads(value[:, :, keys], group)
                )
                row_max = new_max
            empty = row_sum == 0
            row_sums[:, :, queries] = row_sum.masked_fill_(empty, 1.0)
            # +inf: exp(s - row_max) is 0 for a query with no key left
            row_maxima[:, :, queries] = row_max.masked_fill(empty, torch.inf)
            out[:, :, queries] = numerator / row_sum.unsqueeze(-1)
        lse = (row_maxima + row_sums.log()).masked_fill_(row_maxima == torch.inf, -torch.inf)
        return ForwardResult(out, row_maxima, row_sums, lse)

    def backward(
        self,
        grad: Tensor,
        d_lse: Tensor | None,
        inputs: OperatorInputs,
        result: ForwardResult,
        needs_mask_grad: bool,
    ) -> Gradients:
        """ds_ijr = P_ijr (dP_ij - delta_i), and the sums that it enters."""
        features, value, mask, seed, _, options = inputs
        group, key_range = features.group, inputs.key_range
        zeros = partial(torch.zeros_like, memory_format=torch.contiguous_format)
        d_features = ScoreFeatures._make(x if x is None else zeros(x) for x in features)
        d_value = zeros(value)
        d_mask = zeros(mask) if mask is not None and needs_mask_grad else None
        affine = None if features.score_affine is None else _AffineGradient(features, result, d_lse)
        grad = grad / result.row_sum.unsqueeze(-1)  # no weight is divided
        delta = (grad * result.out).sum(-1, keepdim=True)
        if d_lse is not None:
            delta -= (d_lse / result.row_sum).unsqueeze(-1)
        for queries, key_blocks in blocks(features, key_range):
            block_grad, row_max = grad[:, :, queries], result.row_max[:, :, None, queries, None]
            for keys in key_blocks:
                scores = block_scores(features, mask, key_range, queries, keys)
                if options.is_hard:
                    scores, winner = scores.max(2, keepdim=True)
                exponents = scores.sub_(row_max)
                # l_i P_ijr (B, Hq, M, l, s), M = 1 if hard
                weights = exponents.exp_() if affine is None else exponents.exp()
                d_weights = block_grad @ repeat_heads(value[:, :, keys], group).mT  # (B, Hq, l, s)
                used = weights.sum(2) if weights.shape[2] > 1 else weights[:, :, 0]
                if seed is not None:
                    factors = _dropout_factors(inputs, d_weights, queries, keys)
                    d_weights *= factors
                    used = used * factors
                d_value[:, :, keys] += sum_over_groups(used.mT @ block_grad, group)
                d_weights = d_weights.sub_(delta[:, :, queries]).unsqueeze(2)
                if affine is not None:
                    affine.add(queries, exponents, weights, weights * d_weights)
                d_scores = weights.mul_(d_weights)
                if d_mask is not None:
                    window = block_of_mask(d_mask, queries, keys)
                    window += d_scores.sum(2).sum_to_size(window.shape)
                if options.is_hard:
                    shape = (*d_scores.shape[:2], features.key_bias.shape[2], *d_scores.shape[3:])
                    d_scores = d_scores.new_zeros(shape).scatter_(2, winner, d_scores)
                d_features.key_bias[:, :, :, keys] += sum_over_groups(d_scores.sum(3), group)
                if d_features.query_bias is not None:
                    d_features.query_bias[:, :, :, queries] += d_scores.sum(4)
                if features.keys.shape[2] < d_scores.shape[2]:
                    d_scores = d_scores.sum(2, keepdim=True)
                key_block = repeat_heads(features.keys[:, :, :, keys], group)
                d_features.query[:, :, queries] += (d_scores @ key_block).sum(2)
                d_keys = d_scores.mT @ features.query[:, :, None, queries]
                d_features.keys[:, :, :, keys] += sum_over_groups(d_keys, group)
        if affine is not None:
            d_features = d_features._replace(score_affine=affine.gradient())
        return d_features, d_value, d_mask

    def tangent(
        self, inputs: OperatorInputs, tangents: OperatorInputs, result: ForwardResult
    ) -> tuple[Tensor, Tensor]:
        """One block at a time."""
        factors = None if inputs.seed is None else partial(_dropout_factors, inputs)
        return attention_tangent(inputs, tangents, result, factors)

    def flat_statistics(self, *arguments: Any) -> list[Tensor]:
        """sum_i gamma_ijr, and with points the moments, one block at a time."""
        *tensors, mask, query_mask, points, segments, is_hard, left, right = arguments
        features, sums = ScoreFeatures(*tensors), [x.zero_() for x in fake_statistics(*arguments)]
        key_range = KeyRange(left, right, segments)
        for queries, key_blocks in blocks(features, key_range):
            block_mask = None if query_mask is None else query_mask[:, queries]
            block_points = None if points is None else points[:, :, queries]
            for keys in key_blocks:
                gamma = component_shares(block_scores(features, mask, key_range, queries, keys), is_hard)
                parts = weighted_sums(gamma, block_mask, block_points, features.group)
                for total, part in zip(sums, parts, strict=True):
                    total[:, :, :, keys] += part
        return sums


class _AffineGradient:
    """da_ir = sum_j ds_ijr s_ijr and db_ir = sum_j ds_ijr of a_ir s_ijr + b_ir, with x = s - m.

    Rounding leaves sum_jr ds_ijr = e_i in place of 0, or of the gradient of the
    log-sum-exp, most of it from delta_i. P_ijr e_i is taken off: db_ir = sum_j ds -
    e_i sum_j P, da_ir = sum_j ds x - e_i sum_j P x + m_i db_ir.
    """

    def __init__(self, features: ScoreFeatures, result: ForwardResult, d_lse: Tensor | None) -> None:
        assert features.score_affine is not None
        shape = (4, *features.score_affine.shape[1:])
        self._d_lse = 0.0 if d_lse is None else d_lse.unsqueeze(2)
        self._sums = torch.zeros(shape, dtype=features.score_affine.dtype, device=features.query.device)
        self._row_max = result.row_max.masked_fill(result.row_max == torch.inf, 0.0).unsqueeze(2)
        self._row_sum = result.row_sum.unsqueeze(2)

    def add(self, queries: slice, exponents: Tensor, weights: Tensor, d_scores: Tensor) -> None:
        """The sums of a block, of x, l P and ds (B, Hq, M, l, s)."""
        exponents = exponents.clamp_min_(SMALLEST_EXPONENT)
        summed = (d_scores * exponents, d_scores, weights * exponents, weights)
        for sums, terms in zip(self._sums, summed, strict=True):
            sums[..., queries] += terms.sum(4)

    def gradient(self) -> Tensor:
        """The gradients of a and b (2, B, Hq, M, L)."""
        ds_x, ds, p_x, p = self._sums
        defect = (ds.sum(2, keepdim=True) - self._d_lse) / self._row_sum
        of_scores = ds - defect * p
        return torch.stack([ds_x - defect * p_x + self._row_max * of_scores, of_scores])


def _in_short_sums(weights: Tensor, value: Tensor) -> Tensor:
    """A product in sums of 64 positions, for the precision of delta."""
    if weights.shape[-1] % SHORT_SUM:
        return weights @ value
    parts = weights.unflatten(-1, (-1, SHORT_SUM)).movedim(-2, 2) @ value.unflatten(2, (-1, SHORT_SUM))
    return parts.sum(2)


def _dropout_factors(inputs: OperatorInputs, like: Tensor, queries: slice, keys: slice) -> Tensor:
    """1 / (1 - p) for the weights that a block keeps, else 0.

    Four weights share a 64-bit draw, which rounds p to a multiple of 2^-16; or two,
    where p is near 0 or 1: 2^-32.
    """
    assert inputs.seed is not None
    generator = torch.Generator(like.device)
    generator.manual_seed(int(inputs.seed.item()) + block_number(inputs.features, queries, keys))
    dropout_p = inputs.options.dropout_p
    kind = torch.int16 if 2**-8 < dropout_p < 1 - 2**-8 else torch.int32
    size = kind.itemsize
    draws = torch.empty(-(-like.numel() * size // 8), dtype=torch.int64, device=like.device)
    draws.random_(-(2**63), None, generator=generator)
    values = 2 ** (8 * size)
    dropped = min(round(dropout_p * values), values - 1)
    kept = draws.view(kind)[: like.numel()].view(like.shape) >= dropped - values // 2
    return kept.to(like.dtype).mul_(values / (values - dropped))
