"""Mixture attention by fused C++ kernels: tiles of queries and keys, one value product per position, memory O(N).

The kernels take the same bilinear features as ``blockwise``. Shifted keys cost one product per pair and a rank-M factor
(identity 2); tiles where the factor would underflow add exponents instead.
"""

import torch
from torch import Tensor

from mgk.functional.mixture import operators
from mgk.functional.mixture.backends import cpu_kernels
from mgk.functional.mixture.inputs import Call
from mgk.functional.mixture.operators import Gradients, Options, Saved
from mgk.functional.mixture.score_features import Bilinear

NAME = "cpu"


def refusal(call: Call) -> str | None:
    """Why this backend cannot serve the call; None when it can."""
    if cpu_kernels.STATUS != "ready":
        return f"it is {cpu_kernels.STATUS}"
    if call.query.device.type != "cpu":
        return f"the tensors are on {call.query.device.type}"
    if call.num_mixtures > cpu_kernels.MAX_COMPONENTS:
        return f"it has room for {cpu_kernels.MAX_COMPONENTS} components, not {call.num_mixtures}"
    if call.attn_mask is not None and call.attn_mask.requires_grad and torch.is_grad_enabled():
        return "it has no gradient for attn_mask"
    return None


def attention(call: Call) -> Tensor:
    """h_i = sum_j A_ij v_j (Eq. 10)."""
    return _decode(call) if _is_decoding(call) else operators.attention(NAME, call)


def can_decode(call: Call) -> bool:
    """Whether the kernel for one query serves the call: it beats any other way, however few the keys are."""
    return _is_decoding(call) and refusal(call) is None


def _is_decoding(call: Call) -> bool:
    return call.num_queries == 1 and not _needs_grad(call)


def _needs_grad(call: Call) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call)


def _decode(call: Call) -> Tensor:
    """One query: keys and values are read once, where they lie in the cache."""
    call = call.at_full_precision()
    if call.kernel == "dot":  # q . (k + b) is no score of q - b
        call = call.with_expanded_keys()
    variance = torch.as_tensor(call.variance, dtype=call.query.dtype)
    is_dot, is_hard = call.kernel == "dot", call.is_hard
    tensors = (call.query, call.keys, call.shifts, call.value, call.log_prior, variance, call.attn_mask)
    return torch.ops.mgk.cpu_decode(*tensors, is_dot, is_hard)


def _fake_decode(query: Tensor, keys: Tensor, shifts: Tensor | None, value: Tensor, *others: object) -> Tensor:
    return value.new_empty(*query.shape[:3], value.shape[-1])


def _forward(form: Bilinear, value: Tensor, mask: Tensor | None, seed: Tensor | None, options: Options) -> Saved:
    form, value = cpu_kernels.contiguous(form), value.contiguous()
    out = value.new_empty(*form.query.shape[:3], value.shape[-1])
    peak, total = value.new_empty(form.query.shape[:3]), value.new_empty(form.query.shape[:3])
    fields = _fields(form, value, mask, seed, options)
    cpu_kernels.run("forward", form, options, **fields, out=out, row_max=peak, row_sum=total)
    return Saved(out, peak, total)


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
    del needs_mask_grad  # such calls are refused
    form, value, grad = cpu_kernels.contiguous(form), value.contiguous(), grad.contiguous()
    d_query, d_keys, d_column, d_value = (torch.empty_like(x) for x in (form.query, form.keys, form.column, value))
    d_row, d_affine = (x if x is None else torch.empty_like(x) for x in (form.row, form.affine))
    gradients = {"d_query": d_query, "d_keys": d_keys, "d_query_bias": d_row, "d_key_bias": d_column}
    gradients |= {"d_score_affine": d_affine, "d_value": d_value, "grad": grad}
    gradients |= {"out": saved.out, "row_max": saved.peak, "row_sum": saved.total}
    fields = _fields(form, value, mask, seed, options)
    cpu_kernels.run("backward", form, options, **fields, **gradients)
    return Gradients(d_query, d_keys, d_row, d_column, d_affine, d_value, None)


def _fields(
    form: Bilinear, value: Tensor, mask: Tensor | None, seed: Tensor | None, options: Options
) -> dict[str, object]:
    pairs = (*form.query.shape[:3], form.column.shape[3])
    return {
        "value": value,
        "value_width": value.shape[-1],
        **cpu_kernels.mask_fields(mask, pairs),
        **cpu_kernels.dropout_fields(seed, options.dropout_p),
    }


operators.register(NAME, _forward, _backward)

_library = torch.library.Library("mgk", "FRAGMENT")
_library.define(
    "cpu_decode(Tensor query, Tensor keys, Tensor? shifts, Tensor value, Tensor? log_prior, Tensor variance,"
    " Tensor? mask, bool is_dot, bool is_hard) -> Tensor"
)
_library.impl("cpu_decode", cpu_kernels.decode, "CompositeExplicitAutograd")
torch.library.register_fake("mgk::cpu_decode", _fake_decode, lib=_library)
