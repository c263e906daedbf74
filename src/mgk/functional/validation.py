"""Checks of the public arguments: each error names the argument, what came and what is wanted."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from mgk.functional.mixture.inputs import EStep, Kernel

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensor(name: str, value: Any, dims: str, *, dtypes: Sequence[torch.dtype] = _DTYPES) -> None:
    """``value`` is a tensor with one dimension for each letter of ``dims``, e.g. "BHLD", and one of the dtypes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {_shape(dims)}, got {type(value).__name__}")
    if value.ndim != len(dims):
        raise ValueError(f"{name} must have shape {_shape(dims)}, got {tuple(value.shape)}")
    if value.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must have one of the dtypes {wanted}, got {str(value.dtype).removeprefix('torch.')}")


def size(name: str, value: Tensor, dim: int, wanted: int, why: str) -> None:
    """Dimension ``dim`` of ``value`` is ``wanted`` long."""
    if value.shape[dim] != wanted:
        raise ValueError(f"{name} must have size {wanted} in dimension {dim} ({why}), got shape {tuple(value.shape)}")


def alike(**tensors: Tensor) -> None:
    """All tensors have the dtype and device of the first."""
    (first_name, first), *others = tensors.items()
    for name, other in others:
        if other.dtype != first.dtype:
            raise TypeError(f"{name} must have the dtype of {first_name}, {first.dtype}, got {other.dtype}")
        on_device(name, other, first)


def on_device(name: str, value: Tensor, query: Tensor) -> None:
    """``value`` lives where the query does."""
    if value.device != query.device:
        raise ValueError(f"{name} must be on the query's device, {query.device}, got {value.device}")


def broadcastable(name: str, value: Tensor, shape: tuple[int, ...], dims: str) -> None:
    """``value`` has as many dimensions as ``shape``, each equal to it or 1."""
    if value.ndim != len(shape) or any(have not in (1, want) for have, want in zip(value.shape, shape, strict=True)):
        raise ValueError(f"{name} must be broadcastable to {_shape(dims)} = {shape}, got shape {tuple(value.shape)}")


def option(name: str, value: object, allowed: Sequence[str]) -> None:
    """``value`` is one of the allowed names."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def kernel_and_e_step(kernel: object, e_step: object) -> None:
    """Both options are known."""
    option("kernel", kernel, get_args(Kernel))
    option("e_step", e_step, get_args(EStep))


def flag(name: str, value: object) -> None:
    """``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def probability(name: str, value: object) -> None:
    """``value`` is a number with 0 <= value < 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def positive_int(name: str, value: object) -> None:
    """``value`` is a whole number from 1 up."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def log_prior(value: Any, query: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """None, or a 4-D float tensor broadcastable to (B, H, M, S)."""
    if value is None:
        return None
    tensor("log_prior", value, "BHMS")
    broadcastable("log_prior", value, shape, "BHMS")
    on_device("log_prior", value, query)
    return value


def variance(value: Any, query: Tensor, shape: tuple[int, ...]) -> float | Tensor:
    """None (sqrt(D)), a positive number, or a 4-D float tensor broadcastable to (B, H, M, S)."""
    if value is None:
        return math.sqrt(query.shape[-1])
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value < math.inf:
            raise ValueError(f"variance must be positive and finite, got {value}")
        return float(value)
    if not isinstance(value, Tensor):
        raise TypeError(f"variance must be a number or a tensor of shape (B, H, M, S), got {type(value).__name__}")
    tensor("variance", value, "BHMS")
    broadcastable("variance", value, shape, "BHMS")
    on_device("variance", value, query)
    return value


def attn_mask(value: Any, query: Tensor, num_keys: int) -> Tensor | None:
    """None, or a bool or float tensor broadcastable to (B, H, L, S), as a 4-D tensor."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(value).__name__}")
    if value.dtype != torch.bool and value.dtype not in _DTYPES:
        raise TypeError(f"attn_mask must be bool (True takes part) or an additive float, got {value.dtype}")
    shape = (*query.shape[:3], num_keys)
    if value.ndim <= 4:
        value = value[(None,) * (4 - value.ndim)]
    broadcastable("attn_mask", value, shape, "BHLS")
    on_device("attn_mask", value, query)
    return value


def token_mask(name: str, value: Any, query: Tensor, length: int, dims: str) -> Tensor | None:
    """None, or a bool tensor (B, length)."""
    if value is None:
        return None
    tensor(name, value, dims, dtypes=(torch.bool,))
    if value.shape != (query.shape[0], length):
        raise ValueError(
            f"{name} must have shape {_shape(dims)} = {(query.shape[0], length)}, got {tuple(value.shape)}"
        )
    on_device(name, value, query)
    return value


def _shape(dims: str) -> str:
    return f"({', '.join(dims)})"
