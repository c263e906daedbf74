"""Soft mixtures through ``torch.nn.functional.scaled_dot_product_attention``: its fused kernels, O(N) memory, autograd.

Identity 1, M * S keys. h_i = sum_(j,r) softmax_(j,r)(q~_i . k~_jr + column_jr) v_j: queries [q~, 1], keys
[k~_jr, column_jr] and the values repeated M times.

Identity 2, S keys (sMGK). sum_r exp(s_ijr) = exp(base_ij) (u_i . w_j) with u_ir = exp(row_ir - max_r row),
w_jr = exp(column_jr - max_r column) and max_r column moved into the base: values [w_jr v_j, w_jr] over r, then
sum_r u_ir numerator_ir / sum_r u_ir denominator_ir. u.w vanishes in floating point where both spreads over r are large,
so such calls take identity 1.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from mgk.functional import masks
from mgk.functional.mixture import score_features
from mgk.functional.mixture.inputs import LOG_ZERO, Call
from mgk.functional.mixture.score_features import Bilinear

NAME = "sdpa"
# exp(-60) is 1e-26: a rank-M factor that small times a softmax weight still keeps float32's full precision.
LARGEST_SPREAD = 60.0
# Columns of 8 bits that together hold a float32 bias.
BFLOAT16_PARTS = 3
# Queries that share one explicit causal mask: the mask takes CAUSAL_CHUNK * M * S elements, not L * M * S.
CAUSAL_CHUNK = 256


def refusal(call: Call) -> str | None:
    """Why this backend cannot serve the call; None when it can."""
    if call.is_hard:
        return "its softmax cannot take the maximum over components that e_step='hard' needs"
    if call.dropout_p > 0:
        if not _is_softmax(call):
            return "its dropout would drop (position, component) pairs, not position weights"
        if call.query.device.type == "cpu":
            return "on the CPU its dropout needs N x N memory"
    if call.attn_mask is not None and call.attn_mask.requires_grad and torch.is_grad_enabled():
        return "the gradient of attn_mask needs N x N memory there"
    return None


def takes_float64(call: Call) -> bool:
    """Whether the CPU's float32 kernels would leave too little of the gradient of sigma^2, a sum over every pair."""
    return call.learns_variance and call.query.device.type == "cpu"


def attention(call: Call) -> Tensor:
    """h_i = sum_j A_ij v_j (Eq. 10)."""
    if _is_softmax(call):
        return _attend(call, call.query, call.keys, call.value, scale=1 / float(call.variance))
    call = call.with_normalised_prior().with_key_mask_in_prior()
    if _fits_bfloat16(call):
        return _split_bias(call)
    call = call.in_dtype(torch.float64) if takes_float64(call) else call.at_full_precision()
    form = _near_zero(call, score_features.from_call(call))
    if form.row is None:
        return _all_components(call, form)
    if _may_factor(form):
        return _factored(call, form)
    return _all_components(call, _near_zero(call, score_features.from_call(call.with_expanded_keys())))


def _is_softmax(call: Call) -> bool:
    """Eq. 1: one key, the dot product and a scale, with masks that SDPA takes as they are."""
    return (
        call.num_mixtures == 1
        and call.kernel == "dot"
        and call.log_prior is None
        and call.shifts is None
        and not isinstance(call.variance, Tensor)
        and not (call.is_causal and call.has_key_mask)
    )


def _near_zero(call: Call, form: Bilinear) -> Bilinear:
    """The form less log sum_jr exp(column_jr): the kernels save a log-sum-exp in float32, which is finer near 0.

    Under causality less the first key's column and log(M S) / 2, so that no later key touches an earlier output.
    """
    if call.is_causal:
        first = form.column.detach()[..., :1].amax(2, keepdim=True)
        level = first.where(first > LOG_ZERO, 0.0) + math.log(call.num_mixtures * call.num_keys) / 2
        return form._replace(column=form.column - level)
    level = form.column.detach().clamp_min(LOG_ZERO).logsumexp((2, 3), keepdim=True)
    return form._replace(column=form.column - level)


def _all_components(call: Call, form: Bilinear) -> Tensor:
    """Identity 1."""
    query, keys = _features(form, form.column.clamp_min(LOG_ZERO), call.value.shape[-1])
    return _attend(call, query, keys, call.value)


def _features(form: Bilinear, column: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    """Queries [q~, 1] and keys [k~, column], followed by zeros up to the width of the values: one copy of each."""
    rest = max(0, value_width - form.query.shape[-1] - 1)
    ones = pad(form.query.new_ones(1), (0, rest)).expand(*form.query.shape[:-1], -1)
    zeros = column.new_zeros(1).expand(*column.shape, rest)
    return torch.cat([form.query, ones], -1), torch.cat([form.keys, column.unsqueeze(-1), zeros], -1)


def _fits_bfloat16(call: Call) -> bool:
    """Whether bfloat16 features lose nothing, the inputs as they came and one scale for all, and gain speed.

    The CPU's kernels gain none, and are not finite where scores pass 1e9: there such calls run in float32.
    """
    return (
        call.query.dtype == torch.bfloat16
        and call.query.device.type != "cpu"
        and call.kernel == "gaussian"
        and call.shifts is None
        and not isinstance(call.variance, Tensor)
    )


def _split_bias(call: Call) -> Tensor:
    """Identity 1 in bfloat16: keys unscaled, and the bias column, which needs 24 bits, as three columns of 8."""
    assert not isinstance(call.variance, Tensor)
    column = -call.keys.float().square().sum(-1, keepdim=True) / 2
    if call.log_prior is not None:
        column = column + call.variance * call.log_prior.float().unsqueeze(-1)
    rest = column.clamp_min(LOG_ZERO)
    parts = []
    for _ in range(BFLOAT16_PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    query = pad(call.query, (0, BFLOAT16_PARTS), value=1.0)
    return _attend(call, query, torch.cat([call.keys, *parts], -1), call.value, scale=1 / call.variance)


def _may_factor(form: Bilinear) -> bool:
    """Whether u.w keeps its precision: a look at values, so not while compiling, and on the CPU only."""
    assert form.row is not None
    if torch.compiler.is_compiling() or form.query.device.type != "cpu":
        return False
    rows, columns = form.row.detach(), form.column.detach()
    spread = torch.minimum((rows.amax(2) - rows.amin(2)).amax(), (columns.amax(2) - columns.amin(2)).amax())
    return bool(spread < LARGEST_SPREAD)


def _factored(call: Call, form: Bilinear) -> Tensor:
    """Identity 2."""
    assert form.row is not None
    peak = form.column.detach().amax(2, keepdim=True).clamp_min(LOG_ZERO)  # (B, H, 1, S)
    factor = (form.column - peak).exp().movedim(2, 3).unsqueeze(-1)  # w (B, H, S, M, 1)
    values = torch.cat([factor * call.value.unsqueeze(3), factor], -1).flatten(3)
    query, keys = _features(form, peak, values.shape[-1])
    parts = _attend(call, query, keys, values).unflatten(3, (call.num_mixtures, -1))  # (B, H, L, M, E + 1)
    row = form.row.movedim(2, 3).unsqueeze(-1)  # (B, H, L, M, 1)
    sums = ((row - row.detach().amax(3, keepdim=True)).exp() * parts).sum(3)
    denominator = sums[..., -1:]
    empty = denominator == 0
    return (sums[..., :-1] / denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def _attend(call: Call, query: Tensor, keys: Tensor, value: Tensor, scale: float = 1.0) -> Tensor:
    """SDPA of features (B, H, L, F) over keys (B, H, M, S, F) under the call's masks: zeros where no key is left."""
    num_queries, num_keys, width = call.num_queries, call.num_keys, value.shape[-1]
    query, keys, value = _to_one_width(query, keys, value)
    alive = None if call.log_prior is None else (call.log_prior > -torch.inf).any(2)  # (B, H, S), broadcastable
    has_own_causality = keys.shape[2] == 1 and num_queries == num_keys and call.attn_mask is None
    if not call.is_causal or has_own_causality:
        out = _one_call(query, keys, value, call.attn_mask, alive, call.is_causal, call.dropout_p, scale)
        return out[..., :width]
    offset = num_keys - num_queries
    chunks = []
    for start in range(0, num_queries, CAUSAL_CHUNK):
        stop = min(start + CAUSAL_CHUNK, num_queries)
        seen = stop + offset
        if seen <= 0:
            chunks.append(query.new_zeros(*query.shape[:2], stop - start, value.shape[-1]))
            continue
        mask = masks.causal_mask(stop - start, seen, query.device, first_query=start, offset=offset)[None, None]
        if call.attn_mask is not None:
            rows = slice(start, stop) if call.attn_mask.shape[2] > 1 else slice(None)
            mask = masks.join(call.attn_mask[:, :, rows, :seen], mask)
        chunks.append(
            _one_call(
                query[:, :, start:stop],
                keys[:, :, :, :seen],
                value[:, :, :seen],
                mask,
                alive[..., :seen] if alive is not None else None,
                False,
                call.dropout_p,
                scale,
            )
        )
    return torch.cat(chunks, 2)[..., :width]


def _one_call(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    mask: Tensor | None,
    alive: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """One SDPA over the flattened (component, position) keys. A row with no key left sees them all, then is zeroed."""
    mixtures = keys.shape[2]
    filled = None  # the rows with a key left (B, H, L, 1)
    if mask is not None:
        allowed = masks.admitted(mask) if alive is None else masks.admitted(mask) & alive.unsqueeze(2)
        filled = allowed.any(-1, keepdim=True)
        mask = mask | ~filled if mask.dtype == torch.bool else mask.masked_fill(~filled, 0.0).to(query.dtype)
        if mask.shape[3] > 1:
            mask = mask.repeat(1, 1, 1, mixtures)
    elif alive is not None:
        filled = (alive.cumsum(-1) > 0).unsqueeze(-1) if is_causal else alive.any(-1)[..., None, None]
    out = scaled_dot_product_attention(
        query,
        keys.flatten(2, 3),
        value.repeat(1, 1, mixtures, 1) if mixtures > 1 else value,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )
    return out if filled is None else out.masked_fill(~filled, 0.0)


def _to_one_width(query: Tensor, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros appended until features and values are equally wide, as fused kernels ask (off the CPU: in eights)."""
    width = max(query.shape[-1], value.shape[-1])
    if query.device.type != "cpu":
        width = -(-width // 8) * 8
    query, keys, value = (pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (query, keys, value))
    return query, keys, value
