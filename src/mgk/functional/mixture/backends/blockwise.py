"""Mixture attention in blocks of queries and keys with a running log-sum-exp: pure PyTorch, every option, memory O(N).

Forward, for a block of queries, over the blocks of keys: m <- max(m, s), p_ij = sum_r exp(s_ijr - m_i) (soft) or
exp(max_r s_ijr - m_i) (hard), l <- l exp(m_old - m) + sum_j p_ij, o likewise with p_ij v_j; h = o / l.
Backward recomputes the scores: with P_ijr = exp(s_ijr - m_i) / l_i, dP_ij = dh_i . v_j and delta_i = dh_i . h_i,
ds_ijr = P_ijr (dP_ij - delta_i), for the winner alone when the E-step is hard. Of an affine map of the scores: see
:class:`_Affine`.
"""

import torch
from torch import Tensor

from mgk.functional.mixture import operators, score_features
from mgk.functional.mixture.inputs import Call
from mgk.functional.mixture.operators import Gradients, Options, Saved
from mgk.functional.mixture.score_features import Bilinear
from mgk.functional.mixture.tiles import block_number, blocks

NAME = "blockwise"
SHORT_SUM = 64
# exp of less is nothing beside 1, in float64 too; it stands for -inf, which times 0 is not 0.
SMALLEST_EXPONENT = -100.0


def refusal(call: Call) -> str | None:
    """Why this backend cannot serve the call; None when it can."""
    del call
    return None


def attention(call: Call) -> Tensor:
    """h_i = sum_j A_ij v_j (Eq. 10)."""
    return operators.attention(NAME, call)


def _forward(form: Bilinear, value: Tensor, mask: Tensor | None, seed: Tensor | None, options: Options) -> Saved:
    query = form.query
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    peaks, totals = query.new_empty(query.shape[:3]), query.new_empty(query.shape[:3])
    for rows, column_blocks in blocks(form, options.is_causal):
        peak = torch.full_like(peaks[:, :, rows], -torch.inf)  # (B, H, l)
        total = torch.zeros_like(peak)
        numerator = torch.zeros_like(out[:, :, rows])
        for columns in column_blocks:
            scores = score_features.scores_of_block(form, mask, options.is_causal, rows, columns)
            if options.is_hard:
                scores = scores.amax(2, keepdim=True)
            new_peak = torch.maximum(peak, scores.amax((2, 4)))
            shift = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
            weights = scores.sub_(shift[:, :, None, :, None]).exp_().sum(2)  # (B, H, l, s)
            decay = (peak - shift).exp_()
            total = total * decay + weights.sum(-1)
            if seed is not None:
                weights *= _kept(seed, options.dropout_p, weights, form, rows, columns)
            numerator = numerator * decay.unsqueeze(-1) + _in_short_sums(weights, value[:, :, columns])
            peak = new_peak
        empty = total == 0
        totals[:, :, rows] = total.masked_fill_(empty, 1.0)
        # +inf makes exp(s - peak) zero in the backward of a query with no key left
        peaks[:, :, rows] = peak.masked_fill(empty, torch.inf)
        out[:, :, rows] = numerator / total.unsqueeze(-1)
    return Saved(out, peaks, totals)


def _backward(
    grad: Tensor,
    form: Bilinear,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    saved: Saved,
    options: Options,
    needs_mask_grad: bool,
) -> Gradients:
    query, keys, row, column, _ = form
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, keys, column, value)]
    d_query, d_keys, d_column, d_value = grads
    d_row = None if row is None else torch.zeros_like(row)
    d_mask = torch.zeros_like(mask) if mask is not None and needs_mask_grad else None
    affine = None if form.affine is None else _Affine(form, saved)
    grad = grad / saved.total.unsqueeze(-1)  # dP, delta and dv are linear in it, so no weight needs to be divided
    delta = (grad * saved.out).sum(-1, keepdim=True)
    for rows, column_blocks in blocks(form, options.is_causal):
        block_grad, block_peak = grad[:, :, rows], saved.peak[:, :, None, rows, None]
        for columns in column_blocks:
            scores = score_features.scores_of_block(form, mask, options.is_causal, rows, columns)
            if options.is_hard:
                scores, winner = scores.max(2, keepdim=True)
            exponents = scores.sub_(block_peak)
            # l_i P_ijr (B, H, M, l, s), M = 1 when hard
            weights = exponents.exp_() if affine is None else exponents.exp()
            d_weights = block_grad @ value[:, :, columns].mT  # (B, H, l, s)
            used = weights.sum(2) if weights.shape[2] > 1 else weights[:, :, 0]
            if seed is not None:
                kept = _kept(seed, options.dropout_p, d_weights, form, rows, columns)
                d_weights *= kept
                used = used * kept
            d_value[:, :, columns] += used.mT @ block_grad
            d_weights = d_weights.sub_(delta[:, :, rows]).unsqueeze(2)
            if affine is not None:
                affine.add(rows, exponents, weights, weights * d_weights)
            d_scores = weights.mul_(d_weights)
            if d_mask is not None:
                _add_to_mask_grad(d_mask, d_scores.sum(2), rows, columns)
            if options.is_hard:
                d_scores = d_scores.new_zeros(*column.shape[:3], *d_scores.shape[3:]).scatter_(2, winner, d_scores)
            d_column[:, :, :, columns] += d_scores.sum(3)
            if d_row is not None:
                d_row[:, :, :, rows] += d_scores.sum(4)
            if keys.shape[2] < d_scores.shape[2]:
                d_scores = d_scores.sum(2, keepdim=True)
            d_query[:, :, rows] += (d_scores @ keys[:, :, :, columns]).sum(2)
            d_keys[:, :, :, columns] += d_scores.mT @ query[:, :, None, rows]
    d_affine = None if affine is None else affine.gradient()
    return Gradients(d_query, d_keys, d_row, d_column, d_affine, d_value, d_mask)


class _Affine:
    """da_ir = sum_j ds_ijr s_ijr and db_ir = sum_j ds_ijr of a_ir s_ijr + b_ir, with x = s - m.

    Rounding leaves sum_jr ds_ijr = e_i where it should be 0, most of it from delta_i, so P_ijr e_i is taken off:
    db_ir = sum_j ds - e_i sum_j P, da_ir = sum_j ds x - e_i sum_j P x + m_i db_ir.
    """

    def __init__(self, form: Bilinear, saved: Saved) -> None:
        assert form.affine is not None
        shape = (4, *form.column.shape[:3], form.query.shape[2])
        self._sums = torch.zeros(shape, dtype=form.affine.dtype, device=form.query.device)
        self._peak = saved.peak.masked_fill(saved.peak == torch.inf, 0.0).unsqueeze(2)
        self._total = saved.total.unsqueeze(2)

    def add(self, rows: slice, exponents: Tensor, weights: Tensor, d_scores: Tensor) -> None:
        """The sums of a block, of x, l P and ds (B, H, M, l, s)."""
        exponents = exponents.clamp_min_(SMALLEST_EXPONENT)
        summed = (d_scores * exponents, d_scores, weights * exponents, weights)
        for sums, terms in zip(self._sums, summed, strict=True):
            sums[..., rows] += terms.sum(4)

    def gradient(self) -> Tensor:
        """The gradients of a and b (2, B, H, M, L)."""
        ds_x, ds, p_x, p = self._sums
        defect = ds.sum(2, keepdim=True) / self._total
        of_scores = ds - defect * p
        return torch.stack([ds_x - defect * p_x + self._peak * of_scores, of_scores])


def _in_short_sums(weights: Tensor, value: Tensor) -> Tensor:
    """The product weights @ value, 64 positions at a time: delta needs it more precise than one long sum gives."""
    if weights.shape[-1] % SHORT_SUM:
        return weights @ value
    parts = weights.unflatten(-1, (-1, SHORT_SUM)).movedim(-2, 2) @ value.unflatten(2, (-1, SHORT_SUM))
    return parts.sum(2)


def _kept(seed: Tensor, dropout_p: float, like: Tensor, form: Bilinear, rows: slice, columns: slice) -> Tensor:
    """1 / (1 - p) for the position weights that a block keeps, else 0: the same whenever it is recomputed.

    Four weights share a 64-bit draw, so p is rounded to a multiple of 2^-16.
    """
    generator = torch.Generator(like.device)
    generator.manual_seed(int(seed.item()) + block_number(form, rows, columns))
    bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    bits.random_(-(2**63), None, generator=generator)
    dropped = round(dropout_p * 2**16)
    kept = bits.view(torch.int16)[: like.numel()].view(like.shape) >= dropped - 2**15
    return kept.to(like.dtype).mul_(2**16 / (2**16 - dropped))


def _add_to_mask_grad(d_mask: Tensor, d_scores: Tensor, rows: slice, columns: slice) -> None:
    """Sum a block of (B, H, l, s) over the dimensions that the mask broadcasts, into its place."""
    window = d_mask[:, :, rows if d_mask.shape[2] > 1 else slice(None), columns if d_mask.shape[3] > 1 else slice(None)]
    window += d_scores.sum_to_size(window.shape)


operators.register(NAME, _forward, _backward)
