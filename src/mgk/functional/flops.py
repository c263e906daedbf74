"""Formulas of ``torch.utils.flop_counter.FlopCounterMode``.

As for torch's own attention, masks are not subtracted and a multiply-add is two.
"""

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop, sdpa_flop

# which define the operators
from mgk.functional.linear import api as _linear  # noqa: F401
from mgk.functional.mixture import api as _mixture  # noqa: F401

Shape = tuple[int, ...]


def _pairs(query: Shape, keys: Shape) -> int:
    """B H L S, of query (B, H, L, F) and keys (B, H, M or 1, S, F)."""
    batch, heads, num_queries, _ = query
    return batch * heads * num_queries * keys[3]


def forward_flops(query: Shape, keys: Shape, *others: Any, out_shape: Any = None, **options: Any) -> int:
    """2 B H L S (M F + E): queries by keys, and weights by values."""
    value = others[3]
    return 2 * _pairs(query, keys) * (keys[2] * keys[4] + value[-1])


def backward_flops(
    grad: Shape, d_lse: Shape | None, query: Shape, keys: Shape, *others: Any, **options: Any
) -> int:
    """2 B H L S (3 M F + 2 E): the scores, and all gradients."""
    value = others[3]
    return 2 * _pairs(query, keys) * (3 * keys[2] * keys[4] + 2 * value[-1])


def decode_flops(query: Shape, keys: Shape, shifts: Shape | None, *others: Any, **options: Any) -> int:
    """2 B H S (M D + E)."""
    value = others[0]
    components = keys[2] if shifts is None else shifts[1]
    return 2 * _pairs(query, keys) * (components * keys[4] + value[-1])


def mixture_flops(query: Shape, keys: Shape, shifts: Shape | None, *others: Any, **options: Any) -> int:
    """2 B H L S (M D + E); with shifts M = 1, and the products with them."""
    along = 0 if shifts is None else 2 * (_rows(query) + _rows(keys)) * shifts[1] * shifts[2]
    return forward_flops(query, keys, None, None, shifts, *others) + along


def mixture_backward_flops(
    grad: Shape,
    d_lse: Shape | None,
    query: Shape,
    keys: Shape,
    shifts: Shape | None,
    value: Shape,
    *others: Any,
    **options: Any,
) -> int:
    """2 B H L S (3 M D + 2 E); with shifts M = 1, and theirs."""
    along = 0 if shifts is None else 4 * (_rows(query) + _rows(keys)) * shifts[1] * shifts[2]
    return 2 * _pairs(query, keys) * (3 * keys[2] * keys[4] + 2 * value[-1]) + along


def _rows(tensor: Shape) -> int:
    """The number of vectors."""
    return math.prod(tensor[:-1])


def statistics_flops(query: Shape, keys: Shape, *others: Any, out_shape: Any = None, **options: Any) -> int:
    """2 B H L S M F for counts; as much again for the first moments."""
    points = others[4]
    width = keys[2] * keys[4] + (0 if points is None else others[1][2] * points[-1])
    return 2 * _pairs(query, keys) * width


def _counts_flops(query: Shape, keys: Shape, *others: Any, out_shape: Any = None, **options: Any) -> int:
    return 2 * _pairs(query, keys) * keys[2] * keys[4]


def _linear_flops(query: Shape, keys: Shape, value: Shape, *others: Any, **options: Any) -> int:
    """2 F E (B H S + B Hq L): into the state and out of it, chunks aside."""
    return 2 * (keys[3] * math.prod(keys[:2]) + _rows(query)) * keys[4] * value[-1]


def _linear_backward_flops(*shapes: Any, **options: Any) -> int:
    """2 F E (3 B H S + 2 B Hq L): the states again, and the gradients of both products."""
    query, keys, value = shapes[5:8]
    return 2 * (3 * keys[3] * math.prod(keys[:2]) + 2 * _rows(query)) * keys[4] * value[-1]


def _register() -> None:
    ops = torch.ops.mgk
    formulas: dict[Any, Any] = {
        ops.cpu_decode: decode_flops,
        ops.cpu_mixture: mixture_flops,
        ops.cpu_mixture_backward: mixture_backward_flops,
        ops.linear_counts: _counts_flops,
        ops.triton_forward: mixture_flops,
        ops.triton_backward: lambda grad, d_lse, *x, **y: mixture_backward_flops(grad, *x, **y),
        ops.triton_decode: decode_flops,
        ops.triton_counts: _counts_flops,
        ops.triton_linear: _linear_flops,
        ops.triton_linear_step: _linear_flops,
        ops.triton_linear_backward: _linear_backward_flops,
    }
    for name in ("cpu", "blockwise"):
        formulas[getattr(ops, f"{name}_forward")] = forward_flops
        formulas[getattr(ops, f"{name}_backward")] = backward_flops
        formulas[getattr(ops, f"{name}_statistics")] = statistics_flops
    for operator, formula in formulas.items():
        register_flop_formula(operator)(formula)
    aten = torch.ops.aten  # which torch counts on other devices only
    for operator, formula in (
        (aten._scaled_dot_product_flash_attention_for_cpu, sdpa_flop),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward, sdpa_backward_flop),
    ):
        flop_registry.setdefault(operator, formula)


_register()
