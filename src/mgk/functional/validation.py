"""Public arguments: checks, whose errors name the argument, what came and what is wanted, and their autocast dtype."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

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


def matching_sizes(query: Tensor, keys: Tensor, value: Tensor, name: str = "keys") -> None:
    """Query (B, H, L, D), keys (B, H, M, S, D), ``name`` in messages, and value (B, H, S, E) fit each other."""
    for label, other in ((name, keys), ("value", value)):
        if other.dtype != query.dtype:
            raise TypeError(f"{label} must have the dtype of query, {query.dtype}, got {other.dtype}")
        on_device(label, other, query)
        size(label, other, 0, query.shape[0], "the batch of query")
        size(label, other, 1, query.shape[1], "the heads of query")
    size(name, keys, -1, query.shape[-1], "the features of query")
    size("value", value, 2, keys.shape[3], f"the positions of {name}")


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


def positive_ints(**sizes: object) -> None:
    """Each size is a whole number from 1 up."""
    for name, value in sizes.items():
        positive_int(name, value)


def log_prior(value: Any, query: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """None, or a 4-D float tensor broadcastable to (B, H, M, S)."""
    return None if value is None else _mixture_parameter("log_prior", value, query, shape)


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
    return _mixture_parameter("variance", value, query, shape)


def _mixture_parameter(name: str, value: Any, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    tensor(name, value, "BHMS")
    broadcastable(name, value, shape, "BHMS")
    on_device(name, value, query)
    return cast("Tensor", value)


def attn_mask(value: Any, query: Tensor, num_keys: int) -> Tensor | None:
    """None, or a bool or float tensor broadcastable to (B, H, L, S), as a 4-D tensor."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(value).__name__}")
    if value.dtype != torch.bool and value.dtype not in _DTYPES:
        raise TypeError(f"attn_mask must be bool (True takes part) or an additive float, got {value.dtype}")
    if value.ndim <= 4:
        value = value[(None,) * (4 - value.ndim)]
    broadcastable("attn_mask", value, (*query.shape[:3], num_keys), "BHLS")
    on_device("attn_mask", value, query)
    return value


def token_mask(name: str, value: Any, query: Tensor, length: int, dims: str) -> Tensor | None:
    """None, or a bool tensor (B, length)."""
    if value is None:
        return None
    tensor(name, value, dims, dtypes=(torch.bool,))
    wanted = (query.shape[0], length)
    if value.shape != wanted:
        raise ValueError(f"{name} must have shape {_shape(dims)} = {wanted}, got {tuple(value.shape)}")
    on_device(name, value, query)
    return value


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the autocast dtype of their device, as SDPA takes them, where autocast is on; float64 stays."""
    if not _is_autocast_on(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which no operator changes the dtype of its inputs."""
    return torch.autocast(tensor.device.type, enabled=False) if _is_autocast_on(tensor) else nullcontext()


def _is_autocast_on(tensor: Tensor) -> bool:
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _shape(dims: str) -> str:
    return f"({', '.join(dims)})"
