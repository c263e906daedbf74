"""Mixture attention by fused C++ kernels: one value product per position, memory O(N).

The kernels take the same features as ``blockwise``. Shifted keys cost one product per
pair and a rank-M factor (identity 2); where it would underflow, exponents are added.
"""

import functools
import math
from typing import Any, cast

import torch
from torch import Tensor

from mgk.functional import masks
from mgk.functional.backends import Task, define_operator, library
from mgk.functional.mixture.backends import cpu_kernels
from mgk.functional.mixture.blocks import attention_tangent
from mgk.functional.mixture.features import (
    ForwardResult,
    Gradients,
    OperatorBackend,
    OperatorInputs,
    Options,
    ScoreFeatures,
)
from mgk.functional.mixture.inputs import AttentionInputs, compute_dtype
from mgk.functional.validation import (
    has_tangent,
    is_exporting,
    is_inference,
    is_plain,
    is_unobserved,
    known,
    needs_grad,
    without_autocast,
)

# Below, making features in Python, where a variance is a tensor, takes longer than the scores.
MIN_SCORES = 2**16


_MIXTURE = (
    "Tensor query, Tensor keys, Tensor? shifts, Tensor value, Tensor? log_prior, Tensor? mask, Tensor? seed,"
    " Tensor? segments, float variance, bool is_dot, bool is_hard, int? left, int? right, float dropout_p,"
    " bool normalises_prior, bool with_lse"
)
_RESULTS = ("out", "row_max", "row_sum", "lse")


class Cpu(OperatorBackend):
    """Attention and counts on CPU tensors."""

    name = "cpu"
    priority = 5

    def __init__(self) -> None:
        """Define ``mgk::cpu_mixture`` and its backward too, for calls with one variance."""
        super().__init__()
        forward, backward = "cpu_mixture", "cpu_mixture_backward"
        results = "Tensor out, Tensor row_max, Tensor row_sum"
        four, five = (", ".join(["Tensor"] * number) for number in (4, 5))
        define_operator(f"{forward}({_MIXTURE}) -> ({four})", _mixture_forward, _empty_results)
        define_operator(
            f"{backward}(Tensor grad, Tensor? d_lse, {_MIXTURE}, {results}) -> ({five})",
            _mixture_backward,
            _empty_gradients,
        )
        torch.library.register_autograd(
            f"mgk::{forward}", _mixture_autograd, setup_context=_setup_mixture, lib=library
        )
        torch.library.register_autograd(f"mgk::{backward}", self.no_second_derivative, lib=library)

    def status(self) -> str:
        """Whether the kernels are built and loaded."""
        return cpu_kernels.STATUS

    def unsupported_reason(self, inputs: AttentionInputs, task: Task = "attention") -> str | None:
        """CPU tensors, 8 components, no gradient of a mask, no moments."""
        if self.status() != "ready":
            return f"it is {self.status()}"
        if inputs.query.device.type != "cpu":
            return f"the tensors are on {inputs.query.device.type}"
        if inputs.num_mixtures > cpu_kernels.MAX_COMPONENTS:
            return f"it has room for {cpu_kernels.MAX_COMPONENTS} components, not {inputs.num_mixtures}"
        if needs_grad(inputs.attn_mask):
            return "it has no gradient for attn_mask"
        return (
            "it has the counts of prior='em', not the moments of variance='em'" if task == "moments" else None
        )

    def is_efficient(self, inputs: AttentionInputs) -> bool:
        """Where the kernels make the features, or for many scores; not in exports."""
        if is_exporting():
            return False
        if not isinstance(inputs.variance, Tensor) or _is_decoding(inputs):
            return True
        # measured: with gradients the kernels gain at half as many
        limit = MIN_SCORES // 2 if any(map(needs_grad, inputs)) else MIN_SCORES
        return not known(inputs.num_scores <= limit)

    def skips_dead_keys(self, inputs: AttentionInputs) -> bool:
        """Decoding does: it reads the cache once."""
        return _is_decoding(inputs)

    def missing(self, inputs: AttentionInputs) -> str | None:
        """The kernels, for CPU tensors and many scores."""
        is_other = inputs.query.device.type != "cpu" or known(inputs.num_scores <= MIN_SCORES)
        if self.status() == "ready" or is_other:
            return None
        return f"attention on the CPU takes a slower path, as the fused kernels are {self.status()}"

    def attention(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        if _is_decoding(inputs):
            return _decode(inputs)
        if inputs.is_hard and inputs.attn_mask is not None and inputs.attn_mask.is_floating_point():
            # the winner of scores that a large mask has made equal is the first
            inputs = inputs.at_full_precision().with_expanded_keys()
        return _attend(inputs) if _is_direct(inputs) else super().attention(inputs)

    def forward(self, inputs: OperatorInputs) -> ForwardResult:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        features, value = cpu_kernels.contiguous(inputs.features), inputs.value.contiguous()
        shape = features.query.shape[:3]
        result = ForwardResult(
            value.new_empty(*shape, value.shape[-1]), *(value.new_empty(shape) for _ in range(3))
        )
        cpu_kernels.run("forward", features, inputs.options, **_fields(inputs, value, result))
        return result

    def backward(
        self,
        grad: Tensor,
        d_lse: Tensor | None,
        inputs: OperatorInputs,
        result: ForwardResult,
        needs_mask_grad: bool,
    ) -> Gradients:
        """The gradients of the features and the values."""
        del needs_mask_grad  # such inputs are unsupported
        features, value = cpu_kernels.contiguous(inputs.features), inputs.value.contiguous()
        d_features = ScoreFeatures._make(x if x is None else torch.empty_like(x) for x in features)
        d_value = torch.empty_like(value)
        names = ("d_query", "d_keys", "d_query_bias", "d_key_bias", "d_score_affine", "d_value")
        fields = _fields(inputs, value, result) | dict(zip(names, (*d_features, d_value), strict=True))
        fields["d_lse"] = None if d_lse is None else d_lse.contiguous()
        cpu_kernels.run("backward", features, inputs.options, **fields, grad=grad.contiguous())
        return d_features, d_value, None

    def tangent(
        self, inputs: OperatorInputs, tangents: OperatorInputs, result: ForwardResult
    ) -> tuple[Tensor, Tensor]:
        """In PyTorch, one block at a time."""
        if inputs.seed is not None:
            raise NotImplementedError(
                "backend 'cpu' has no forward-mode derivative with dropout; use backend='blockwise'"
            )
        row_max = result.row_max * math.log(2)  # the kernel's units, and its scores lack a bias of the query
        if (bias := inputs.features.query_bias) is not None:
            bias = bias.detach()
            bias = bias[:, :, 0] if inputs.options.is_hard else bias.amax(2)
            row_max = row_max + bias.masked_fill(bias == -torch.inf, 0.0)
        return attention_tangent(inputs, tangents, result._replace(row_max=row_max), None)

    def flat_statistics(self, *arguments: Any) -> list[Tensor]:
        """sum_i gamma_ijr."""
        *tensors, mask, query_mask, _, segments, is_hard, left, right = arguments
        options = Options(is_hard, left, right, 0.0)
        return [cpu_kernels.counts(ScoreFeatures(*tensors), mask, query_mask, segments, options)]


def _fields(inputs: OperatorInputs, value: Tensor, result: ForwardResult) -> dict[str, Any]:
    """The fields of the kernel's struct that forward and backward share."""
    pairs = (*inputs.features.query.shape[:3], inputs.features.key_bias.shape[3])
    return {
        "value": value,
        "value_width": value.shape[-1],
        "out": result.out,
        "row_max": result.row_max,
        "row_sum": result.row_sum,
        "lse": result.lse,
        "segments": inputs.segments,
        **cpu_kernels.mask_fields(inputs.mask, pairs),
        **cpu_kernels.dropout_fields(inputs.seed, inputs.options.dropout_p),
    }


def _is_decoding(inputs: AttentionInputs) -> bool:
    if is_inference():
        return inputs.query.shape[2] == 1
    return known(inputs.num_queries == 1) and not any(map(needs_grad, inputs))


@functools.lru_cache(64)
def _constant(number: float, dtype: torch.dtype) -> Tensor:
    """A number in memory, for reading alone: every token of a text has the same."""
    return torch.tensor(number, dtype=dtype, device="cpu")


def _decode(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """One query: keys and values are read once for its group, in place in the cache."""
    inputs = inputs.at_full_precision()
    if inputs.kernel == "dot":  # q . (k + b) is no score of q - b
        inputs = inputs.with_expanded_keys()
    mask = inputs.attn_mask
    if not inputs.key_range.is_whole:
        mask = masks.join(mask, inputs.key_range.mask(1, inputs.num_keys, inputs.query.device))
    variance, is_eager = inputs.variance, is_unobserved()
    if not isinstance(variance, Tensor):
        make = _constant if is_eager else torch.as_tensor
        variance = make(variance, dtype=inputs.query.dtype)
    tensors = (inputs.query, inputs.keys, inputs.shifts, inputs.value, inputs.log_prior, variance, mask)
    modes = (inputs.kernel == "dot", inputs.is_hard)
    if is_eager and not inputs.return_lse:
        return cpu_kernels.decode(*tensors, *modes, with_lse=False)[0], None
    decode: Any = cpu_kernels.decode if is_eager else torch.ops.mgk.cpu_decode
    out, lse = decode(*tensors, *modes)
    return out, lse + inputs.log_uniform_prior if inputs.return_lse else None


def _is_direct(inputs: AttentionInputs) -> bool:
    """Whether the kernels make the features: one variance, no torch.func."""
    if isinstance(inputs.variance, Tensor):
        return False
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    return torch.compiler.is_compiling() or all(is_plain(x) and not has_tangent(x) for x in tensors)


def _attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """A call with one variance: the kernels make the features and the inputs' gradients."""
    uniform = inputs.log_uniform_prior
    if inputs.kernel == "dot":
        inputs = inputs.with_expanded_keys()
    if inputs.query.dtype not in cpu_kernels.READABLE_DTYPES:
        inputs = inputs.at_full_precision()
    dtype = compute_dtype(inputs.query)
    prior, mask = inputs.log_prior, inputs.attn_mask
    left, right, segments = inputs.key_range
    seed = torch.randint(2**62, (1,), device="cpu") if inputs.dropout_p > 0 else None
    tensors = (
        inputs.query,
        inputs.keys,
        inputs.shifts if inputs.shifts is None else inputs.shifts.to(inputs.query.dtype),
        inputs.value,
        prior if prior is None else masks.to_dtype(prior, dtype),
        mask if mask is None or mask.dtype == torch.bool else masks.to_dtype(mask, dtype),
    )
    with_lse = inputs.return_lse
    normalises = prior is not None and prior.shape[3] == 1 and not with_lse and needs_grad(prior)
    options = (inputs.kernel == "dot", inputs.is_hard, left, right, inputs.dropout_p, normalises, with_lse)
    out, _, _, lse = _run(*tensors, seed, segments, inputs.variance, *options)
    return out, lse + uniform if with_lse else None


def _run(*arguments: Any) -> tuple[Tensor, ...]:
    """The operator, or its implementation where nothing observes the call."""
    if not is_unobserved():
        return cast("tuple[Tensor, ...]", torch.ops.mgk.cpu_mixture(*arguments))
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        return cast("tuple[Tensor, ...]", _Mixture.apply(*arguments))
    return _mixture_forward(*arguments)


def _mixture_forward(*arguments: Any) -> tuple[Tensor, ...]:
    results = _empty_results(*arguments)
    named = {name: x for name, x in zip(_RESULTS, results, strict=True) if x.numel()}
    cpu_kernels.run_mixture("forward", cpu_kernels.Mixture(*arguments), named)
    return results


def _empty_results(*arguments: Any) -> tuple[Tensor, ...]:
    query, value, dtype = arguments[0], arguments[3], compute_dtype(arguments[0])
    shape = query.shape[:3]
    sizes = ((*shape, value.shape[-1]), shape, shape, shape if arguments[-1] else (0,))
    return tuple(query.new_empty(size, dtype=dtype) for size in sizes)


def _mixture_backward(grad: Tensor, d_lse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    gradients = _empty_gradients(grad, d_lse, *arguments)
    names = ("d_query", "d_keys", "d_shifts", "d_value", "d_log_prior")
    named = {name: d for name, d in zip(names, gradients, strict=True) if d.numel()}
    named |= zip(_RESULTS, arguments[-3:])  # noqa: B905  all but lse
    named["grad"] = grad.contiguous()
    if d_lse is not None:
        named["d_lse"] = d_lse.contiguous()
    cpu_kernels.run_mixture("backward", cpu_kernels.Mixture(*arguments[:-3]), named)
    return gradients


def _empty_gradients(grad: Tensor, d_lse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    query, keys, shifts, value, prior = arguments[:5]
    components = keys.shape[2] if shifts is None else shifts.shape[1]
    sizes = [None if x is None else x.shape for x in (query, keys, shifts, value)]
    sizes.append(None if prior is None else (*keys.shape[:2], components, prior.shape[3]))
    dtypes = [query.dtype] * 4 + [grad.dtype]
    return tuple(
        grad.new_empty(0 if size is None else size, dtype=dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    )


def _mixture_autograd(
    ctx: Any, grad: Tensor | None, _max: Any, _sum: Any, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # which gradient checkpointing allows to be read once
    tensors, results = saved[:8], saved[8:]
    grad = torch.zeros_like(results[0]) if grad is None else grad
    d_lse = d_lse if ctx.options[-1] else None
    with without_autocast(grad):
        is_first = not torch.is_grad_enabled() and is_unobserved()
        backward = _mixture_backward if is_first else torch.ops.mgk.cpu_mixture_backward
        gradients = backward(grad, d_lse, *tensors, *ctx.options, *results)
    *others, d_prior = (d if x is not None else None for d, x in zip(gradients, tensors[:5], strict=True))
    if d_prior is not None:
        d_prior = d_prior.sum_to_size(tensors[4].shape)
    return *others, d_prior, *[None] * (3 + len(ctx.options))


def _setup_mixture(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8], *output[:3])
    ctx.options = inputs[8:]
    ctx.set_materialize_grads(False)


class _Mixture(torch.autograd.Function):
    """The operator with its derivative, outside torch's dispatcher."""

    forward = staticmethod(_mixture_forward)
    setup_context = staticmethod(_setup_mixture)
    backward = staticmethod(_mixture_autograd)


define_operator(
    "cpu_decode(Tensor query, Tensor keys, Tensor? shifts, Tensor value, Tensor? log_prior, Tensor variance,"
    " Tensor? mask, bool is_dot, bool is_hard) -> (Tensor, Tensor)",
    cpu_kernels.decode,
    lambda query, keys, shifts, value, *others: (
        value.new_empty(*query.shape[:3], value.shape[-1]),
        value.new_empty(query.shape[:3]),
    ),
)
