"""The backend ``triton`` of linear attention: torch operators with autograd.

Nothing here imports Triton before a call needs it. ``triton_kernels`` has the equations.
"""

from typing import Any

import torch
from torch import Tensor

from mgk.functional.backends import Backend, Task, define_operator, library
from mgk.functional.linear.inputs import LinearInputs
from mgk.functional.mixture.backends.triton_backend.backend import (
    device_reason,
    failed_check,
    no_second_derivative,
    status,
)
from mgk.functional.validation import has_tangent, in_torch_func, is_exporting, needs_grad

MOST_FEATURES = 256
# Tensors of a call that have gradients, and all.
_NUM_GRADIENTS, _NUM_TENSORS = 6, 8


class LinearTriton(Backend[LinearInputs]):
    """Chunks and single steps on GPUs."""

    name = "triton"
    priority = 2

    def status(self) -> str:
        """As of the mixtures' backend."""
        return status()

    def unsupported_reason(self, inputs: LinearInputs, task: Task = "attention") -> str | None:
        """Tensors on a GPU, 256 features, no float64, no counts, no torch.func."""
        if reason := device_reason(inputs.query):
            return reason
        width = max(inputs.query.shape[-1], inputs.value.shape[-1])
        if width > MOST_FEATURES:
            return f"it has room for {MOST_FEATURES} features, not {width}"
        if task != "attention":
            return "it has no statistics of the linear family"
        if inputs.key_range.segments is not None and not inputs.key_range.is_causal:
            return "its segments are causal"
        if in_torch_func() or any(map(has_tangent, inputs[:4])):
            return "it has derivatives of autograd alone, none of torch.func"
        return failed_check(inputs.query)

    def is_efficient(self, inputs: LinearInputs) -> bool:
        """On a GPU, but for exports."""
        return inputs.query.device.type == "cuda" and not is_exporting()

    def attention(self, inputs: LinearInputs) -> tuple[Tensor, Tensor, Tensor]:
        """h_i (Eq. 14) and the state after all keys."""
        starts, mask = None, inputs.key_mask
        if inputs.key_range.segments is not None:
            starts = inputs.key_range.segments[0].to(torch.int32).contiguous()
        if mask is not None:
            mask = mask.contiguous().view(torch.uint8)
        state = (None, None) if inputs.state is None else (x.contiguous() for x in inputs.state)
        tensors = (inputs.query, inputs.keys, inputs.value, inputs.log_prior, *state, mask, starts)
        options = (inputs.is_elu, inputs.key_range.is_causal)
        is_step = inputs.query.shape[2] == inputs.keys.shape[3] == 1 and starts is None
        if is_step and not any(map(needs_grad, tensors)):
            return torch.ops.mgk.triton_linear_step(*tensors, *options)
        out, _, numerator, normaliser = torch.ops.mgk.triton_linear(*tensors, *options)
        return out, numerator, normaliser


_PROBLEM = (
    "Tensor query, Tensor keys, Tensor value, Tensor? log_prior, Tensor? numerator, Tensor? normaliser,"
    " Tensor? key_mask, Tensor? starts, bool is_elu, bool is_causal"
)


def _fake_states(query: Tensor, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*keys.shape[:2], keys.shape[4])
    state = query.new_empty(*shape, value.shape[3], dtype=torch.float32)
    return state, query.new_empty(shape, dtype=torch.float32)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    from mgk.functional.linear import triton_launch

    return triton_launch.forward(triton_launch.LinearParams(*arguments))


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    query, keys, value = arguments[:3]
    out = value.new_empty(*query.shape[:3], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32), *_fake_states(query, keys, value)


def _step(*arguments: Any) -> tuple[Tensor, ...]:
    from mgk.functional.linear import triton_launch

    return triton_launch.step(triton_launch.LinearParams(*arguments))


def _fake_step(*arguments: Any) -> tuple[Tensor, ...]:
    out, _, *state = _fake_forward(*arguments)
    return out, *state


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    from mgk.functional.linear import triton_launch

    params = triton_launch.LinearParams(*arguments[5:])
    gradients = triton_launch.backward(arguments[:5], params)
    tensors: tuple[Any, ...] = params[:_NUM_GRADIENTS]
    return tuple(
        params.query.new_empty(0) if x is None or grad is None else grad.to(x.dtype)
        for x, grad in zip(tensors, gradients, strict=True)
    )


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors = arguments[5 : 5 + _NUM_GRADIENTS]
    return tuple(arguments[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _autograd_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, denominator = ctx.saved_tensors
    given = (grads[0], grads[2], grads[3], out, denominator)
    gradients = torch.ops.mgk.triton_linear_backward(*given, *tensors, *ctx.options)
    wanted = zip(gradients, tensors, strict=False)
    return *(None if x is None else grad for grad, x in wanted), None, None, None, None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[:2])
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.mark_non_differentiable(output[1])


def _define() -> None:
    define_operator(f"triton_linear({_PROBLEM}) -> (Tensor, Tensor, Tensor, Tensor)", _forward, _fake_forward)
    define_operator(f"triton_linear_step({_PROBLEM}) -> (Tensor, Tensor, Tensor)", _step, _fake_step)
    gradients = ", ".join(["Tensor"] * _NUM_GRADIENTS)
    define_operator(
        "triton_linear_backward(Tensor grad, Tensor d_numerator, Tensor d_normaliser, Tensor out,"
        f" Tensor denominator, {_PROBLEM}) -> ({gradients})",
        _backward,
        _fake_backward,
    )
    torch.library.register_autograd(
        "mgk::triton_linear", _autograd_backward, setup_context=_setup_context, lib=library
    )
    torch.library.register_autograd("mgk::triton_linear_backward", no_second_derivative, lib=library)


_define()
