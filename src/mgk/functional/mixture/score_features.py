"""The score of a pair as a product of features, for the backends that never materialise it.

    s_ijr = query_i . keys_jr + row_ir + column_jr,   up to a term of i alone, which no softmax over (j, r) sees.

Gaussian kernel, expanded about the mean key c (identity 1):

    -|q - k|^2 / (2 sigma^2) = (q-c).(k-c) / sigma^2 - |k-c|^2 / (2 sigma^2) - |q-c|^2 / (2 sigma^2)

The last term is of i alone when sigma is common; when it is not, what the components do not share of it is one more
feature.
Shifted keys (identity 2): s_ijr = base_ij + row_ir + column_jr, so the product q.k is needed once for all r.

A variance and a prior that the positions of a component share are a factor and an addend of its scores, a_ir s_ijr +
b_ir with a = 1 and b = 0: their gradients sum_j ds_ijr s_ijr and sum_j ds_ijr are sums that backends can take as they
go, and more precisely than through the features, whose gradients are large and nearly cancel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.functional import masks
from mgk.functional.mixture.inputs import LOG_ZERO, Call, finest_dtype


class Bilinear(NamedTuple):
    """s_ijr = query_i . keys_jr + row_ir + column_jr."""

    query: Tensor  # (B, H, L, F)
    keys: Tensor  # (B, H, M, S, F), or (B, H, 1, S, F) when all components share the product
    row: Tensor | None  # (B, H, M, L)
    column: Tensor  # (B, H, M, S)
    # a = 1 and b = 0 (2, B, H, M, L), in the finest dtype: there for their gradients, where a variance is learned
    affine: Tensor | None = None


def from_call(call: Call, takes_affine: bool = False) -> Bilinear:
    """The features of a call in full precision; with an affine map where that serves and the backend takes one.

    Where sigma^2 is learned they are made in float64: its gradient adds up what flows back through them, so neither
    their rounding nor that of the sum may come on top of the scores'.
    """
    if not call.learns_variance:
        return _features(call)
    exact = call.in_dtype(finest_dtype(call.query))
    form = _with_affine(exact) if takes_affine and _is_affine(call) else _features(exact)
    rounded = Bilinear._make(x if x is None else x.to(call.query.dtype) for x in form)
    return rounded._replace(affine=form.affine)


def _is_affine(call: Call) -> bool:
    """Whether the variance divides all scores of a component, but for the prior, and nothing else."""
    assert isinstance(call.variance, Tensor)
    adds_mask = call.attn_mask is not None and call.attn_mask.dtype != torch.bool
    return call.variance.shape[3] == 1 and not adds_mask and not call.is_hard


def _with_affine(call: Call) -> Bilinear:
    """The features of a constant variance and prior, sigma_0^2 and pi_0: s_0 = x / sigma_0^2 + log pi_0.

    a = sigma_0^2 / sigma^2 and b = log pi - a log pi_0 make a s_0 + b = x / sigma^2 + log pi. The features leave y_i
    out of s_0, and a y_i is of i alone only while a = 1: b takes (a - 1) y_i. A prior of positions stays in its column.
    """
    assert isinstance(call.variance, Tensor)
    constant = call._replace(variance=call.variance.detach())
    factor = constant.variance / call.variance  # (B, H, M or 1, 1)
    addend = (factor - 1) * _left_out(constant)  # (B, H, M or 1, L)
    if call.log_prior is None:
        form = _features(constant)
    else:
        constant_prior = call.log_prior.detach().clamp_min(LOG_ZERO)
        if call.log_prior.shape[3] == 1:
            form = _features(constant._replace(log_prior=call.log_prior.detach()))
            addend = addend + call.log_prior.clamp_min(LOG_ZERO) - factor * constant_prior
        else:
            form = _features(constant)
            form = form._replace(column=form.column + (1 - factor) * constant_prior)
    shape = (*form.column.shape[:3], call.num_queries)
    return form._replace(affine=torch.stack([factor.expand(shape), addend.expand(shape)]))


def _features(call: Call) -> Bilinear:
    if call.shifts is not None and call.kernel == "gaussian" and call.has_common_variance:
        form = _shifted(call)
    else:
        call = call.with_expanded_keys()
        form = _dot(call) if call.kernel == "dot" else _gaussian(call)
    if call.log_prior is None:
        return form
    if form.row is not None and call.log_prior.shape[3] == 1 and not call.is_hard:
        # of a query rather than of a key: a row's gradient is the shorter sum, and under causality none is long; a hard
        # E-step has no prior but a key mask
        return form._replace(row=form.row + call.log_prior)
    return form._replace(column=form.column + call.log_prior)


def _dot(call: Call) -> Bilinear:
    empty = call.query.new_zeros(call.keys.shape[:-1])
    if call.has_common_variance:
        return Bilinear(call.query / call.variance, call.keys, None, empty)
    inverse = 1 / torch.as_tensor(call.variance)
    return Bilinear(call.query, call.keys * inverse.unsqueeze(-1), None, empty)


def _gaussian(call: Call) -> Bilinear:
    centre = call.centre()
    query, keys = call.query - centre, call.keys - centre.unsqueeze(2)
    half_norm = keys.square().sum(-1) / 2  # (B, H, M, S)
    if call.has_common_variance:
        return Bilinear(query / call.variance, keys, None, -half_norm / call.variance)
    inverse = 1 / torch.as_tensor(call.variance).expand(keys.shape[:-1])
    query = torch.cat([query, query.square().sum(-1, keepdim=True) / 2], -1)
    keys = torch.cat([keys * inverse.unsqueeze(-1), (_common_inverse(call) - inverse).unsqueeze(-1)], -1)
    return Bilinear(query, keys, None, -half_norm * inverse)


def _common_inverse(call: Call) -> Tensor:
    """What 1 / sigma_r^2 of all components have in common where positions share it, the least (B, H, 1, 1); else 0.

    No gradient flows through it: what it takes off the scores is of i alone.
    """
    variance = torch.as_tensor(call.variance).detach()
    return 1 / variance.amax(2, keepdim=True) if variance.shape[3] == 1 else torch.zeros_like(variance[:, :, :1, :1])


def _left_out(call: Call) -> Tensor:
    """y_i = -|q_i - c|^2 / 2 times what all 1 / sigma_r^2 have in common: of i alone, and no part of the features."""
    if call.kernel == "dot" or call.has_common_variance:  # a common factor leaves it of i alone
        return call.query.new_zeros(*call.query.shape[:2], 1, 1)
    half_norm = (call.query - call.with_expanded_keys().centre()).square().sum(-1) / 2  # (B, H, L)
    return -half_norm.unsqueeze(2) * _common_inverse(call)


def _shifted(call: Call) -> Bilinear:
    assert call.shifts is not None
    centre = call.centre()
    mean_shift = call.shifts.detach().mean(1, keepdim=True)  # (H, 1, D)
    keys = call.keys - centre.unsqueeze(2)
    shifts = call.shifts - mean_shift
    query = (call.query - (centre + mean_shift)) / call.variance
    along_keys = _along_shifts(keys.squeeze(2), shifts, call.is_hard)
    half_norm = (
        keys.square().sum(-1) + shifts.square().sum(-1)[None, :, :, None]
    ) / 2 + along_keys  # |k_j + b_r|^2 / 2
    return Bilinear(query, keys, _along_shifts(query, shifts, call.is_hard), -half_norm / call.variance)


def _along_shifts(x: Tensor, shifts: Tensor, may_tie: bool) -> Tensor:
    """x_i . b_r (B, H, M, L), of x (B, H, L, D) and shifts (H, M, D)."""
    if may_tie:  # a product for each r: in one product equal shifts may round differently, and a tie would be lost
        return torch.stack([(x @ shifts[:, r, :, None]).squeeze(-1) for r in range(shifts.shape[1])], 2)
    return (x @ shifts.mT).transpose(2, 3)


def scores_of_block(form: Bilinear, mask: Tensor | None, is_causal: bool, queries: slice, keys: slice) -> Tensor:
    """s_ijr of a block of queries and a block of keys, -inf where excluded: (B, H, M, l, s)."""
    batch, heads, mixtures, _ = form.column.shape
    column = form.column[:, :, :, None, keys]
    query, block_keys = form.query[:, :, None, queries], form.keys[:, :, :, keys]
    # the gradients of an affine map add up what the sums over features err, and shorter sums err less
    num_parts = 1 if form.affine is None else 2
    parts = list(zip(query.chunk(num_parts, -1), block_keys.chunk(num_parts, -1), strict=True))
    if form.row is not None:
        scores = sum((q @ k.mT for q, k in parts), column + form.row[:, :, :, queries, None])
    else:
        num_rows, num_columns = query.shape[3], block_keys.shape[3]
        scores = column.reshape(-1, 1, num_columns)
        for q, k in parts:
            flat_query = q.expand(-1, -1, mixtures, -1, -1).reshape(batch * heads * mixtures, num_rows, -1)
            flat_keys = k.reshape(batch * heads * mixtures, num_columns, -1)
            scores = torch.baddbmm(scores, flat_query, flat_keys.mT)
        scores = scores.view(batch, heads, mixtures, num_rows, num_columns)
    bias = _mask_of_block(form, mask, is_causal, queries, keys)
    return scores if bias is None else scores.add_(bias.unsqueeze(2))


def _mask_of_block(form: Bilinear, mask: Tensor | None, is_causal: bool, queries: slice, keys: slice) -> Tensor | None:
    """What the masks add to the scores of a block, broadcastable to (B, H, l, s): 0, -inf, or a float mask's addend."""
    offset = form.column.shape[3] - form.query.shape[2]
    causal = None
    if is_causal and keys.stop - 1 > queries.start + offset:  # the block reaches beyond the diagonal
        num_rows, num_columns = queries.stop - queries.start, keys.stop - keys.start
        first = {"first_query": queries.start, "first_key": keys.start}
        causal = masks.causal_mask(num_rows, num_columns, form.query.device, **first, offset=offset)[None, None]
    if mask is None and causal is None:
        return None
    if mask is not None:
        rows = queries if mask.shape[2] > 1 else slice(None)
        columns = keys if mask.shape[3] > 1 else slice(None)
        mask = mask[:, :, rows, columns]
    joint = mask if causal is None else masks.join(mask, causal)
    assert joint is not None
    if joint.dtype != torch.bool:
        return joint
    return torch.zeros_like(joint, dtype=form.query.dtype).masked_fill_(~joint, -torch.inf)
