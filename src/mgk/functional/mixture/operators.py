"""Attention from bilinear features as operators of torch, for the backends that bring their own forward and backward.

``torch.compile(fullgraph=True)`` sees one node for each; autograd calls the backward with what the forward saved.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.functional.mixture import score_features
from mgk.functional.mixture.inputs import Call
from mgk.functional.mixture.score_features import Bilinear
from mgk.functional.precision import without_autocast


class Options(NamedTuple):
    """What a kernel needs to know beside its tensors."""

    is_hard: bool
    is_causal: bool
    dropout_p: float


class Gradients(NamedTuple):
    """Of the bilinear form, the values and the mask; None where there is nothing to differentiate."""

    query: Tensor
    keys: Tensor
    row: Tensor | None
    column: Tensor
    affine: Tensor | None
    value: Tensor
    mask: Tensor | None


class Saved(NamedTuple):
    """What a forward gives: the output, and what the weights are made of again, P_ijr = exp(s_ijr - peak_i) / total_i.

    The two are kept apart because their log-sum-exp, rounded to float32, would be off by more than the weights are.
    """

    out: Tensor  # h (B, H, L, E)
    peak: Tensor  # the largest score (B, H, L), in the kernel's own units; +inf for a query with no key left
    total: Tensor  # the sum of exp(s - peak) (B, H, L); 1 for a query with no key left


# (form, value, mask, seed, options) -> what is saved
Forward = Callable[[Bilinear, Tensor, Tensor | None, Tensor | None, Options], Saved]
# (grad, form, value, mask, seed, saved, options, needs_mask_grad) -> the gradients
Backward = Callable[[Tensor, Bilinear, Tensor, Tensor | None, Tensor | None, Saved, Options, bool], Gradients]


def attention(name: str, call: Call) -> Tensor:
    """The output of a call by the operators that were registered under ``name``."""
    call = call.with_normalised_prior().with_key_mask_in_prior().at_full_precision()
    form = score_features.from_call(call, takes_affine=True)
    # on the CPU, where it can be read without waiting for a device
    seed = torch.randint(2**62, (1,), device="cpu") if call.dropout_p > 0 else None
    operator = getattr(torch.ops.mgk, f"{name}_forward")
    out, _, _ = operator(*form, call.value, call.attn_mask, seed, call.is_hard, call.is_causal, call.dropout_p)
    return out


# torch.library.custom_op would import torch._dynamo, two seconds, at the first call; the plain registration does not.
_library = torch.library.Library("mgk", "FRAGMENT")
_FORM = "Tensor query, Tensor keys, Tensor? row, Tensor column, Tensor? affine"
_INPUTS = f"{_FORM}, Tensor value, Tensor? mask, Tensor? seed"
_OPTIONS = "bool is_hard, bool is_causal, float dropout_p"


def register(name: str, forward: Forward, backward: Backward) -> None:
    """Define ``mgk::{name}_forward`` and ``mgk::{name}_backward``, with fake implementations and autograd."""
    _library.define(f"{name}_forward({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
    _library.define(
        f"{name}_backward(Tensor grad, {_INPUTS}, Tensor out, Tensor peak, Tensor total, {_OPTIONS},"
        " bool needs_mask_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    _library.impl(f"{name}_forward", _flat_forward(forward), "CompositeExplicitAutograd")
    _library.impl(f"{name}_backward", _flat_backward(backward), "CompositeExplicitAutograd")
    torch.library.register_fake(f"mgk::{name}_forward", _fake_forward, lib=_library)
    torch.library.register_fake(f"mgk::{name}_backward", _fake_backward, lib=_library)
    torch.library.register_autograd(
        f"mgk::{name}_forward", _autograd_backward(name), setup_context=_setup_context, lib=_library
    )
    torch.library.register_autograd(f"mgk::{name}_backward", _no_second_derivative(name), lib=_library)


def _flat_forward(forward: Forward) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def flat(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        form, (value, mask, seed), options = _parted(arguments, len(Bilinear._fields), 3, len(Options._fields))
        return forward(Bilinear(*form), value, mask, seed, Options(*options))

    return flat


def _flat_backward(backward: Backward) -> Callable[..., tuple[Tensor, ...]]:
    def flat(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        sizes = (len(Bilinear._fields), 3, len(Saved._fields), len(Options._fields), 1)
        form, (value, mask, seed), saved, options, (needs_mask_grad,) = _parted(arguments, *sizes)
        parts = (Bilinear(*form), value, mask, seed, Saved(*saved), Options(*options))
        # an operator has no optional results
        return tuple(grad.new_empty(0) if x is None else x for x in backward(grad, *parts, needs_mask_grad))

    return flat


def _parted(arguments: tuple[Any, ...], *sizes: int) -> Iterator[tuple[Any, ...]]:
    """The flat arguments of an operator in groups of these sizes."""
    remaining = iter(arguments)
    return (tuple(itertools.islice(remaining, size)) for size in sizes)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    form, (value,) = _parted(arguments, len(Bilinear._fields), 1)
    query = Bilinear(*form).query
    per_query = query.shape[:3]
    return query.new_empty(*per_query, value.shape[-1]), query.new_empty(per_query), query.new_empty(per_query)


def _fake_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    def like(tensor: Tensor | None) -> Tensor:
        return grad.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    form, (value, mask) = _parted(arguments, len(Bilinear._fields), 2)
    needs_mask_grad = arguments[-1]
    return *map(like, form), like(value), like(mask if needs_mask_grad else None)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, is_hard, is_causal, dropout_p = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (is_hard, is_causal, dropout_p)


def _autograd_backward(name: str) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx, grad, *unused):  # type: ignore[no-untyped-def]
        *inputs, out, peak, total = ctx.saved_tensors
        needs_mask_grad = inputs[6] is not None and ctx.needs_input_grad[6]
        operator = getattr(torch.ops.mgk, f"{name}_backward")
        with without_autocast(out):
            gradients = operator(grad, *inputs, out, peak, total, *ctx.options, needs_mask_grad)
        is_wanted = [*(x is not None for x in inputs[:6]), needs_mask_grad]
        given = [gradient if wanted else None for gradient, wanted in zip(gradients, is_wanted, strict=True)]
        return *given, None, None, None, None

    return backward


def _no_second_derivative(name: str) -> Callable[..., None]:
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise RuntimeError(f"backend {name!r} has first derivatives only; use backend='reference' for second ones")

    return backward
