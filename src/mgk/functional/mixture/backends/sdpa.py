"""Soft mixtures through ``torch.nn.functional.scaled_dot_product_attention``.

Identity 1, M * S keys: queries [q~, 1], keys [k~_jr, key_bias_jr], values repeated.

Identity 2, S keys (sMGK): sum_r exp(s_ijr) = exp(base_ij) (u_i . w_j), with u and w
the exponentials of the biases less their largest component. Values [w_jr v_j, w_jr]
over r, then sum_r u_ir numerator_ir / sum_r u_ir denominator_ir. u.w underflows where
both spreads over r are large: then identity 1.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from mgk.functional import masks
from mgk.functional.backends import Backend, Task
from mgk.functional.mixture.blocks import block_of_mask
from mgk.functional.mixture.features import ScoreFeatures, score_features
from mgk.functional.mixture.inputs import LOG_ZERO, AttentionInputs, compute_dtype
from mgk.functional.mixture.reference import attention
from mgk.functional.validation import has_tangent, is_plain, is_static, known, needs_grad

# exp(-60) is 1e-26: times a softmax weight it still has float32's full precision.
LARGEST_SPREAD = 60.0
# A mask beyond rounds scores away, in float64 too.
LARGE_MASK = 1e18
VANISHING = 1e-20  # of a score; a removed component's, the lowest, has no weight
# bfloat16 columns of 8 bits that together hold a float32 bias.
BFLOAT16_PARTS = 3
# Queries of one explicit mask, which takes CHUNK * M * S elements, not L * M * S.
CHUNK = 256


class Sdpa(Backend[AttentionInputs]):
    """Soft mixtures without dropout, and softmax attention."""

    name = "sdpa"
    priority = 2
    is_transformable = False

    def unsupported_reason(self, inputs: AttentionInputs, task: Task = "attention") -> str | None:
        """Hard E-steps, gradients of masks, and dropout of several components."""
        if task != "attention":
            return "it does not compute responsibilities"
        if inputs.return_lse:
            return "it has no log-sum-exp that can be differentiated"
        if any(map(has_tangent, inputs)):
            return "it has no forward-mode derivative"
        if inputs.is_hard:
            return "its softmax cannot take the maximum over components that e_step='hard' needs"
        if inputs.dropout_p > 0:
            if not inputs.is_softmax:
                return "its dropout would drop (position, component) pairs, not position weights"
            if inputs.query.device.type == "cpu":
                return "on the CPU its dropout needs N x N memory"
        return "the gradient of attn_mask needs N x N memory there" if needs_grad(inputs.attn_mask) else None

    def is_efficient(self, inputs: AttentionInputs) -> bool:
        """Unless it runs in float64, or loops over chunks of a dynamic length."""
        return not _needs_float64(inputs) and (
            inputs.key_range.is_whole or _has_own_causality(inputs) or is_static(inputs.num_queries)
        )

    def attention(self, inputs: AttentionInputs) -> tuple[Tensor, None]:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        inputs = inputs.with_repeated_heads()
        if _has_large_mask(inputs):
            # beside a large mask the kernels' log-sum-exp loses its digits
            dtype = torch.float64 if _needs_float64(inputs) else compute_dtype(inputs.query)
            return attention(inputs.in_dtype(dtype))[0], None
        if inputs.is_softmax:
            scale = 1 / float(inputs.variance)
            return _attend(inputs, inputs.query, inputs.keys, inputs.value, scale=scale), None
        inputs = _with_dead_keys_in_prior(inputs.with_normalised_prior())
        if _fits_bfloat16(inputs):
            return _split_bias(inputs), None
        inputs = inputs.in_dtype(torch.float64) if _needs_float64(inputs) else inputs.at_full_precision()
        features = _near_zero(inputs, score_features(inputs))
        if features.query_bias is None:
            return _all_components(inputs, features), None
        if _may_factor(features):
            return _factored(inputs, features), None
        features = _near_zero(inputs, score_features(inputs.with_expanded_keys()))
        return _all_components(inputs, features), None


def _needs_float64(inputs: AttentionInputs) -> bool:
    """Whether float32 is too imprecise on the CPU, as for sigma^2's gradient."""
    return needs_grad(inputs.variance) and inputs.query.device.type == "cpu"


def _has_large_mask(inputs: AttentionInputs) -> bool:
    """Whether scores vanish beside finite numbers of a mask or a prior."""
    for x in (inputs.attn_mask, inputs.log_prior):
        if x is None or not x.is_floating_point() or x.device.type != "cpu" or not is_plain(x):
            continue
        if ((x.detach().abs() > LARGE_MASK) & (x > -torch.inf)).any():
            return True
    return False


def _with_dead_keys_in_prior(inputs: AttentionInputs) -> AttentionInputs:
    """A bool key mask as a factor of the prior; an additive one stays."""
    mask = inputs.attn_mask
    if mask is None or not inputs.has_key_mask:
        return inputs
    folded = inputs._replace(attn_mask=masks.admitted(mask)).with_key_mask_in_prior()
    return folded if mask.dtype == torch.bool else folded._replace(attn_mask=mask)


def _near_zero(inputs: AttentionInputs, features: ScoreFeatures) -> ScoreFeatures:
    """key_bias - log sum_jr exp(key_bias_jr): SDPA saves a float32 log-sum-exp, precise near 0.

    Under causality less the first key's bias and log(M S) / 2: no later key may affect an
    earlier output. Not in a window or in segments, where the first key may be unseen.
    """
    bias = features.key_bias.detach()
    if inputs.is_causal and not inputs.key_range.is_local:
        first = bias[..., :1].amax(2, keepdim=True)
        level = first.where(first > LOG_ZERO, 0.0) + math.log(inputs.num_mixtures * inputs.num_keys) / 2
    else:
        level = bias.clamp_min(LOG_ZERO).logsumexp((2, 3), keepdim=True)
    # beside a large one all others would be lost
    level = level.masked_fill(level.abs() > LARGE_MASK, 0.0)
    return features._replace(key_bias=features.key_bias - level)


def _all_components(inputs: AttentionInputs, features: ScoreFeatures) -> Tensor:
    """Identity 1; queries [0, 1, q~] and keys [1, bias, k~] for unknown priors."""
    bias = _finite_bias(features.key_bias)
    prior = inputs.log_prior
    if prior is None or (prior.device.type == "cpu" and is_plain(prior)):
        query, keys = _biased(features, bias, inputs.value.shape[-1])
        return _attend(inputs, query, keys, inputs.value)
    query = pad(pad(features.query, (1, 0), value=1.0), (1, 0))
    keys = pad(torch.cat([bias.unsqueeze(-1), features.keys], -1), (1, 0), value=1.0)
    return _attend(inputs, query, keys, inputs.value, largest=bias.detach().amax(2))


def _biased(features: ScoreFeatures, bias: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    """Queries [q~, 1] and keys [k~, bias], as wide as the values."""
    rest = max(0, value_width - features.query.shape[-1] - 1)
    ones = pad(features.query.new_ones(1), (0, rest)).expand(*features.query.shape[:-1], -1)
    zeros = bias.new_zeros(1).expand(*bias.shape, rest)
    return torch.cat([features.query, ones], -1), torch.cat([features.keys, bias.unsqueeze(-1), zeros], -1)


def _finite_bias(bias: Tensor) -> Tensor:
    """-inf as the lowest number; others stay above it, in order."""
    lowest = torch.finfo(bias.dtype).min
    value = bias.detach()
    compressed = value / 2 + lowest / 8  # from lowest / 4 on, for values below it
    is_low = (value < lowest / 4) & (value > -torch.inf)
    bias = torch.where(is_low, bias + (compressed - value), bias)
    return bias.masked_fill(value == -torch.inf, lowest)


def _fits_bfloat16(inputs: AttentionInputs) -> bool:
    """Whether bfloat16 is exact, with one scale for all, and faster.

    On the CPU it is not faster, and not finite where scores pass 1e9.
    """
    return (
        inputs.query.dtype == torch.bfloat16
        and inputs.query.device.type != "cpu"
        and inputs.kernel == "gaussian"
        and inputs.shifts is None
        and not isinstance(inputs.variance, Tensor)
    )


def _split_bias(inputs: AttentionInputs) -> Tensor:
    """Identity 1 in bfloat16: the bias of 24 bits as three columns of 8."""
    assert not isinstance(inputs.variance, Tensor)
    rest = -inputs.keys.float().square().sum(-1, keepdim=True) / 2
    if inputs.log_prior is not None:
        prior = inputs.log_prior.float().unsqueeze(-1)
        rest = masks.add(rest, masks.to_dtype(inputs.variance * prior.double(), torch.float32))
    rest = _finite_bias(rest)
    parts = []
    for _ in range(BFLOAT16_PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    query = pad(inputs.query, (0, BFLOAT16_PARTS), value=1.0)
    return _attend(inputs, query, torch.cat([inputs.keys, *parts], -1), inputs.value, scale=1 / inputs.variance)


def _may_factor(features: ScoreFeatures) -> bool:
    """Whether u.w keeps its precision: a look at CPU values."""
    assert features.query_bias is not None
    if features.query.device.type != "cpu" or not all(is_plain(x) for x in features if x is not None):
        return False
    biases = (features.query_bias.detach(), features.key_bias.detach())
    query_spread, key_spread = ((bias.amax(2) - bias.amin(2)).amax() for bias in biases)
    return bool(torch.minimum(query_spread, key_spread) < LARGEST_SPREAD)


def _factored(inputs: AttentionInputs, features: ScoreFeatures) -> Tensor:
    """Identity 2."""
    assert features.query_bias is not None
    key_max = features.key_bias.detach().amax(2, keepdim=True)  # (B, H, 1, S)
    factor = (features.key_bias - key_max.masked_fill(key_max == -torch.inf, 0.0)).exp()
    factor = factor.movedim(2, 3).unsqueeze(-1)  # w (B, H, S, M, 1)
    values = torch.cat([factor * inputs.value.unsqueeze(3), factor], -1).flatten(3)
    query, keys = _biased(features, _finite_bias(key_max), values.shape[-1])
    parts = _attend(inputs, query, keys, values).unflatten(3, (inputs.num_mixtures, -1))  # (B, H, L, M, E + 1)
    bias = features.query_bias.movedim(2, 3).unsqueeze(-1)  # (B, H, L, M, 1)
    sums = ((bias - bias.detach().amax(3, keepdim=True)).exp() * parts).sum(3)
    return masks.divide(sums[..., :-1], sums[..., -1:])


def _has_own_causality(inputs: AttentionInputs) -> bool:
    """Whether ``is_causal`` of SDPA itself serves the call."""
    is_single = inputs.num_mixtures == 1 and inputs.is_causal and not inputs.key_range.is_local
    return is_single and known(inputs.num_queries == inputs.num_keys) and inputs.attn_mask is None


def _attend(
    inputs: AttentionInputs,
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    scale: float = 1.0,
    largest: Tensor | None = None,  # biases of keys (B, H, S)
) -> Tensor:
    """SDPA of features (B, H, L, F) over keys (B, H, M, S, F)."""
    num_queries, num_keys, width = inputs.num_queries, inputs.num_keys, value.shape[-1]
    query, keys, value = _to_one_width(query, keys, value)
    alive = (
        None if inputs.log_prior is None else (inputs.log_prior > -torch.inf).any(2)
    )  # (B, H, S), broadcastable
    options: dict[str, Any] = {
        "largest": largest,
        "dropout_p": inputs.dropout_p,
        "scale": scale,
    }
    key_range = inputs.key_range
    if key_range.is_whole or (keys.shape[2] == 1 and _has_own_causality(inputs)):
        out = _masked_sdpa(query, keys, value, inputs.attn_mask, alive, is_causal=inputs.is_causal, **options)
        return out[..., :width]
    window, chunks = (
        key_range._replace(segments=None),
        [],
    )  # segments are values, which torch.compile does not know
    for start in range(0, num_queries, CHUNK):
        rows = slice(start, min(start + CHUNK, num_queries))
        seen = slice(*window.block_bounds(rows, num_queries, num_keys))
        if seen.start == seen.stop:
            chunks.append(query.new_zeros(*query.shape[:2], rows.stop - rows.start, value.shape[-1]))
            continue
        mask = key_range.mask(num_queries, num_keys, query.device, rows, seen)
        if inputs.attn_mask is not None:
            mask = masks.join(block_of_mask(inputs.attn_mask, rows, seen), mask)
        chunk_alive = alive if alive is None or alive.shape[-1] == 1 else alive[..., seen]
        tensors = (query[:, :, rows], keys[:, :, :, seen], value[:, :, seen])
        options["largest"] = None if largest is None else largest[..., seen]
        chunks.append(_masked_sdpa(*tensors, mask, chunk_alive, is_causal=False, **options))
    return torch.cat(chunks, 2)[..., :width]


def _masked_sdpa(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    mask: Tensor | None,
    alive: Tensor | None,
    largest: Tensor | None,
    **options: Any,
) -> Tensor:
    """SDPA over the flattened keys; a row with no key left is zeroed."""
    mixtures = keys.shape[2]
    if largest is not None:
        query = _relative_to_bias(query, largest, mask, options["is_causal"])
    filled = None  # the rows with a key left (B, H, L, 1)
    if mask is not None:
        allowed = masks.admitted(mask) if alive is None else masks.admitted(mask) & alive.unsqueeze(2)
        filled = allowed.any(-1, keepdim=True)
        if mask.dtype == torch.bool:
            mask = mask | ~filled
        else:
            query, mask = _relative(query, mask, allowed, filled)
        if mask.shape[3] > 1:
            mask = mask.repeat(1, 1, 1, mixtures)
    elif alive is not None:
        filled = (
            (alive.cumsum(-1) > 0).unsqueeze(-1) if options["is_causal"] else alive.any(-1)[..., None, None]
        )
    value = value.repeat(1, 1, mixtures, 1) if mixtures > 1 else value
    out = scaled_dot_product_attention(query, keys.flatten(2, 3), value, attn_mask=mask, **options)
    return out if filled is None else out.masked_fill(~filled, 0.0)


def _relative(query: Tensor, mask: Tensor, allowed: Tensor, filled: Tensor) -> tuple[Tensor, Tensor]:
    """An additive mask less each row's largest: SDPA's log-sum-exp is precise near 0.

    Beside a large number scores vanish, but for those of removed components.
    """
    top = mask.masked_fill(~allowed, -torch.inf).amax(-1, keepdim=True).masked_fill(~filled, 0.0)
    query = query * torch.where(top.abs() > LARGE_MASK, VANISHING, 1.0).to(query.dtype)
    dtype = torch.promote_types(query.dtype, torch.float32)  # a float32 mask needs it
    return query, masks.to_dtype(masks.add(mask.masked_fill(~filled, 0.0), -top), dtype)


def _relative_to_bias(query: Tensor, bias: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Queries [-top, 1, 0] of rows whose largest bias is large."""
    if mask is not None:
        lowest = torch.finfo(bias.dtype).min
        seen = bias.unsqueeze(2).masked_fill(~masks.admitted(mask), lowest)
        top = seen.amax(-1, keepdim=True)
    elif is_causal:
        top = bias.cummax(-1).values.unsqueeze(-1)
    else:
        top = bias.amax(-1)[..., None, None]
    alone = pad(pad(-top, (0, 1), value=1.0), (0, query.shape[-1] - 2))
    return torch.where(top.abs() > LARGE_MASK, alone, query)


def _to_one_width(query: Tensor, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features and values padded to one width, off the CPU in eights."""
    width = max(query.shape[-1], value.shape[-1])
    if query.device.type != "cpu":
        width = -(-width // 8) * 8
    query, keys, value = (
        pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (query, keys, value)
    )
    return query, keys, value
