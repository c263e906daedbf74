"""The backend ``triton``: torch operators with autograd for CUDA and ROCm.

Nothing here imports Triton before a call needs it. With ``TRITON_INTERPRET=1`` in the environment the kernels run in
Triton's interpreter and serve CPU tensors, for tests.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mgk.functional import masks
from mgk.functional.backends import Backend, Task, define_operator, library
from mgk.functional.mixture.features import one_call
from mgk.functional.mixture.inputs import AttentionInputs
from mgk.functional.validation import has_tangent, is_exporting, known, needs_grad, without_autocast

# The oldest release that the kernels have been compiled with.
OLDEST_TRITON = (3, 7)
MOST_MIXTURES = 8
MOST_FEATURES = 256
# Tensors of the parameters, and those of a result.
_NUM_TENSORS, _NUM_RESULTS = 9, 12


class Triton(Backend[AttentionInputs]):
    """Attention, decoding and counts on GPUs."""

    name = "triton"
    priority = 4
    is_transformable = False

    def status(self) -> str:
        """Whether Triton is installed, new enough, and has a device to run on."""
        return status()

    def unsupported_reason(self, inputs: AttentionInputs, task: Task = "attention") -> str | None:
        """Tensors on a GPU, 8 components, 256 features, no float64, no moments."""
        if reason := device_reason(inputs.query):
            return reason
        if inputs.num_mixtures > MOST_MIXTURES:
            return f"it has room for {MOST_MIXTURES} components, not {inputs.num_mixtures}"
        width = max(inputs.query.shape[-1], inputs.value.shape[-1])
        if width > MOST_FEATURES:
            return f"it has room for {MOST_FEATURES} features, not {width}"
        if task == "moments":
            return "it has the counts of prior='em', not the moments of variance='em'"
        if any(map(has_tangent, inputs)):
            return "it has no forward-mode derivative"
        return failed_check(inputs.query)

    def is_efficient(self, inputs: AttentionInputs) -> bool:
        """On a GPU, but for softmax attention and exports."""
        is_gpu = inputs.query.device.type == "cuda"
        return is_gpu and not inputs.is_softmax and not is_exporting()

    def skips_dead_keys(self, inputs: AttentionInputs) -> bool:
        """Unless pairs have a mask."""
        return inputs.attn_mask is None or inputs.has_key_mask or _is_decoding(inputs)

    def attention(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """h_i = sum_j A_ij v_j (Eq. 10), and the log-sum-exp where it is wanted."""
        params = _params(inputs.with_normalised_prior().with_key_mask_in_prior())
        if _is_decoding(inputs):
            out, lse = torch.ops.mgk.triton_decode(*params)
        elif torch.compiler.is_compiling():
            out, lse = torch.ops.mgk.triton_forward(*params)[:2]
        else:
            out, lse = _Forward.apply(*params)[:2]
        return out, lse + inputs.log_uniform_prior if inputs.return_lse else None

    def statistics(
        self, inputs: AttentionInputs, query_mask: Tensor | None, points: Tensor | None
    ) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr."""
        del points  # moments are unsupported
        counts: Tensor = torch.ops.mgk.triton_counts(*_params(inputs), query_mask)
        return [counts]


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_known_status = ""


def status() -> str:
    """Ready, or why it cannot run on this machine."""
    global _known_status
    _known_status = _known_status or _find_status()
    return _known_status


def _find_status() -> str:
    oldest = ".".join(map(str, OLDEST_TRITON))
    if find_spec("triton") is None:
        return f"not installed: it needs triton {oldest} or newer (pip install 'mgk[triton]', on Linux)"
    if not is_interpreted() and not torch.cuda.is_available():
        return "without a device: it needs a CUDA or ROCm GPU"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        return f"not usable: triton {triton.__version__} is installed, {oldest} is the oldest that works"
    return "ready"


def device_reason(query: Tensor) -> str | None:
    """Why tensors of this device and dtype cannot be served."""
    device = query.device.type
    if device != "cuda" and not (device == "cpu" and is_interpreted()):
        return f"the tensors are on {device}, not on a CUDA or ROCm device"
    if status() != "ready":
        return f"it is {status()}"
    if query.dtype == torch.float64:
        return "it computes in float32 at most, and the tensors are float64"
    return None


def failed_check(query: Tensor) -> str | None:
    """What the device's self-check found wrong; never run inside a graph."""
    if query.device.type == "cpu":
        return None
    from mgk.functional.mixture.backends.triton_backend import self_check

    return self_check.failure(query)


def _is_decoding(inputs: AttentionInputs) -> bool:
    return known(inputs.num_queries == 1) and inputs.dropout_p == 0 and not any(map(needs_grad, inputs))


def _params(inputs: AttentionInputs) -> tuple[Any, ...]:
    """The arguments of the operators, in the order of ``launch.AttentionParams``."""
    device = inputs.query.device
    variance = inputs.variance
    if not isinstance(variance, Tensor):
        variance = torch.full((1, 1, 1, 1), variance, device=device)
    seed = torch.randint(2**62, (1,), device=device) if inputs.dropout_p > 0 else None
    left, right, segments = inputs.key_range
    if segments is not None:
        segments = segments.transpose(0, 1).to(torch.int32).contiguous()
    prior, mask = (
        masks.to_dtype(x, torch.float32) if x is not None and x.dtype == torch.float64 else x
        for x in (inputs.log_prior, inputs.attn_mask)
    )
    tensors = (inputs.query, inputs.keys, inputs.shifts, inputs.value, prior, variance, mask)
    options = (inputs.kernel == "dot", inputs.is_hard, left, right, inputs.dropout_p)
    return (*tensors, segments, seed, *options)


_PROBLEM = (
    "Tensor query, Tensor keys, Tensor? shifts, Tensor value, Tensor? log_prior, Tensor variance, Tensor? mask,"
    " Tensor? segments, Tensor? seed, bool is_dot, bool is_hard, int? left, int? right, float dropout_p"
)
_RESULT = (
    "Tensor out, Tensor lse, Tensor row_max, Tensor row_sum, Tensor query_features, Tensor key_features,"
    " Tensor key_bias, Tensor query_norm, Tensor least, Tensor query_bias, Tensor excess, Tensor living_value"
)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    from mgk.functional.mixture.backends.triton_backend import launch

    params = launch.AttentionParams(*arguments)
    result = launch.forward(params)
    # an operator may not return its input
    value = result.value if params.has_dead_keys else params.value.new_empty(0)
    return *result[:4], *result.features, value


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    query, keys, shifts, value, log_prior, variance = arguments[:6]
    batch, heads, num_queries, width = query.shape
    key_heads, num_keys = keys.shape[1], keys.shape[3]
    mixtures = keys.shape[2] if shifts is None else shifts.shape[1]
    is_varying = variance.shape[2] != 1 or variance.shape[3] != 1
    is_shifted = shifts is not None and not is_varying and not arguments[_NUM_TENSORS]
    has_dead_keys = log_prior is not None and log_prior.shape[3] != 1
    components = (batch, key_heads, mixtures, num_keys)

    def numbers(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    return (
        query.new_empty(batch, heads, num_queries, value.shape[-1]),
        *(numbers(batch, heads, num_queries) for _ in range(3)),
        query.new_empty(query.shape),
        query.new_empty(batch, key_heads, 1 if is_shifted else mixtures, num_keys, width),
        numbers(batch, key_heads, 2 * mixtures + 2 if is_shifted else mixtures, num_keys),
        numbers(batch, heads, num_queries),
        numbers(batch, key_heads),
        numbers(*((batch, heads, 2 * mixtures + 1, num_queries) if is_shifted else (0,))),
        numbers(*(components if is_varying else (0,))),
        value.new_empty(value.shape if has_dead_keys else 0),
    )


def _backward(grad: Tensor, lse_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    from mgk.functional.mixture.backends.triton_backend import launch, spec

    *flat, needs_variance, needs_mask = arguments
    params = launch.AttentionParams(*flat[:-_NUM_RESULTS])
    out, lse, row_max, row_sum, *features, value = flat[-_NUM_RESULTS:]
    value = value if params.has_dead_keys else params.value
    result = launch.Result(out, lse, row_max, row_sum, spec.Features(*features), value)
    gradients = launch.backward(grad, lse_grad, params, result, (needs_variance, needs_mask))
    wanted = _differentiable(params, needs_variance, needs_mask)
    # an operator has no optional results
    return tuple(
        grad.new_empty(0) if x is None or given is None else x.to(given.dtype)
        for x, given in zip(gradients, wanted, strict=True)
    )


def _differentiable(arguments: Any, needs_variance: bool, needs_mask: bool) -> tuple[Tensor | None, ...]:
    """What has gradients, in the order of ``launch.Gradients``."""
    *others, variance, mask = arguments[:7]
    return *others, variance if needs_variance else None, mask if needs_mask else None


def _fake_backward(grad: Tensor, lse_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    wanted = _differentiable(arguments, *arguments[-2:])
    return tuple(grad.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _gradients(operator: Any, ctx: Any, grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the forward's arguments by a backward operator."""
    saved = ctx.saved_tensors  # which gradient checkpointing allows to be read once
    tensors, results = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
    needs = ctx.needs_input_grad[5], tensors[6] is not None and ctx.needs_input_grad[6]
    with without_autocast(grad):
        gradients = operator(grad, lse_grad, *tensors, *ctx.options, *results, *needs)
    wanted = _differentiable(tensors, *needs)
    given = (None if x is None else d for d, x in zip(gradients, wanted, strict=True))
    return *given, None, None, *(None for _ in ctx.options)


def _autograd_backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
    return _gradients(torch.ops.mgk.triton_backward, ctx, *grads[:2])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output)
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.mark_non_differentiable(*output[2:])


def no_second_derivative(ctx: Any, *grads: Any) -> None:
    """The derivative of a backward operator."""
    raise RuntimeError("backend 'triton' has first derivatives only; use backend='reference' for second ones")


class _Forward(torch.autograd.Function):
    """The forward operator for torch.func: each call of a vmap by itself."""

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ops.mgk.triton_forward(*arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _gradients(_Backward.apply, ctx, *grads[:2])

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _each(_Forward, info.batch_size, dims, arguments)


class _Backward(torch.autograd.Function):
    """The backward operator likewise."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ops.mgk.triton_backward(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        no_second_derivative(ctx)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _each(_Backward, info.batch_size, dims, arguments)


def _each(function: Any, size: int, dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    calls = (function.apply(*one_call(arguments, dims, i)) for i in range(size))
    results = tuple(map(torch.stack, zip(*calls, strict=True)))
    return results, (0,) * len(results)


def _decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    from mgk.functional.mixture.backends.triton_backend import launch

    return launch.decode(launch.AttentionParams(*arguments))


def _fake_decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, value = arguments[0], arguments[3]
    shape = query.shape[:3]
    return query.new_empty(*shape, value.shape[-1]), query.new_empty(shape, dtype=torch.float32)


def _counts(*arguments: Any) -> Tensor:
    from mgk.functional.mixture.backends.triton_backend import launch

    return launch.counts(launch.AttentionParams(*arguments[:-1]), arguments[-1])


def _fake_counts(*arguments: Any) -> Tensor:
    query, keys, shifts = arguments[:3]
    mixtures = keys.shape[2] if shifts is None else shifts.shape[1]
    return query.new_empty(*keys.shape[:2], mixtures, keys.shape[3], dtype=torch.float32)


def _define() -> None:
    tensors = ", ".join(["Tensor"] * _NUM_RESULTS)
    define_operator(f"triton_forward({_PROBLEM}) -> ({tensors})", _forward, _fake_forward)
    gradients = ", ".join(["Tensor"] * 7)
    define_operator(
        f"triton_backward(Tensor grad, Tensor lse_grad, {_PROBLEM}, {_RESULT}, bool needs_variance, bool needs_mask)"
        f" -> ({gradients})",
        _backward,
        _fake_backward,
    )
    define_operator(f"triton_decode({_PROBLEM}) -> (Tensor, Tensor)", _decode, _fake_decode)
    define_operator(f"triton_counts({_PROBLEM}, Tensor? query_mask) -> Tensor", _counts, _fake_counts)
    torch.library.register_autograd(
        "mgk::triton_forward", _autograd_backward, setup_context=_setup_context, lib=library
    )
    torch.library.register_autograd("mgk::triton_backward", no_second_derivative, lib=library)


_define()
