"""Checks of arguments by name, and of autocast, compile and torch.func.

An error names the argument, what came and what is wanted.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import _C, Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn import Parameter

from mgk._util.suggestions import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# torch 2.6 does not tell an export from a compilation.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def tensor(name: str, value: Any, dims: str, *, dtypes: Sequence[torch.dtype] = _DTYPES) -> None:
    """``value`` is a tensor with a dimension per letter of ``dims``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {_shape(dims)}, got {type(value).__name__}")
    if value.ndim != len(dims):
        raise ValueError(f"{name} must have shape {_shape(dims)}, got {tuple(value.shape)}")
    if value.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(
            f"{name} must have one of the dtypes {wanted}, got {str(value.dtype).removeprefix('torch.')}"
        )


def required(name: str, value: object, dims: str) -> None:
    """``value`` is given; what else it is to be is checked later."""
    if value is None:
        tensor(name, value, dims)


def size(name: str, value: Tensor, dim: int, wanted: int, why: str) -> None:
    """Dimension ``dim`` of ``value`` is ``wanted`` long."""
    if value.shape[dim] != wanted:
        raise ValueError(
            f"{name} must have size {wanted} in dimension {dim} ({why}), got shape {tuple(value.shape)}"
        )


def matching_sizes(query: Tensor, keys: Tensor, value: Tensor, name: str = "keys") -> None:
    """Query, keys ``name`` and value (B, H, S, E) fit each other."""
    dtype, device, (batch, query_heads, _, width) = query.dtype, query.device, query.shape
    first, heads, *_, num_keys, last = keys.shape
    if (
        (first, last) == (batch, width)
        and value.shape[:3] == (batch, heads, num_keys)
        and (heads == query_heads or (heads > 0 and query_heads % heads == 0))
        and keys.dtype == value.dtype == dtype
        and keys.device == value.device == device
    ):
        return
    for label, other in ((name, keys), ("value", value)):
        if other.dtype != query.dtype:
            raise TypeError(f"{label} must have the dtype of query, {query.dtype}, got {other.dtype}")
        on_device(label, other, query)
        size(label, other, 0, query.shape[0], "the batch of query")
    if query.shape[1] != keys.shape[1] and (keys.shape[1] == 0 or query.shape[1] % keys.shape[1]):
        raise ValueError(
            f"query must have a multiple of the {keys.shape[1]} heads of {name} in dimension 1,"
            f" got shape {tuple(query.shape)}"
        )
    size("value", value, 1, keys.shape[1], f"the heads of {name}")
    size(name, keys, -1, query.shape[-1], "the features of query")
    size("value", value, 2, keys.shape[3], f"the positions of {name}")


def on_device(name: str, value: Tensor, query: Tensor) -> None:
    """``value`` lives where the query does."""
    if value.device != query.device:
        raise ValueError(f"{name} must be on the query's device, {query.device}, got {value.device}")


def broadcastable(name: str, value: Tensor, shape: tuple[int, ...], dims: str) -> None:
    """``value`` has as many dimensions as ``shape``, each equal to it or 1."""
    fits = value.ndim == len(shape)
    for have, want in zip(value.shape, shape):  # noqa: B905  as many
        fits = fits and have in (1, want)
    if not fits:
        raise ValueError(
            f"{name} must be broadcastable to {_shape(dims)} = {shape}, got shape {tuple(value.shape)}"
        )


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


def positive(name: str, value: object) -> None:
    """``value`` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}")


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
    """None (sqrt(D)), a positive number, or a tensor like (B, H, M, S)."""
    if value is None:
        return math.sqrt(query.shape[-1])
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value < math.inf:
            raise ValueError(f"variance must be positive and finite, got {value}")
        return float(value)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"variance must be a number or a tensor of shape (B, H, M, S), got {type(value).__name__}"
        )
    return _mixture_parameter("variance", value, query, shape)


def _mixture_parameter(name: str, value: Any, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    tensor(name, value, "BHMS")
    broadcastable(name, value, shape, "BHMS")
    on_device(name, value, query)
    return cast("Tensor", value)


def attn_mask(value: Any, query: Tensor, num_keys: int) -> Tensor | None:
    """None, or a bool or float mask (B, H, L, S), broadcastable.

    Three dimensions could be (B, L, S) or (H, L, S): they raise unless the first is 1.
    """
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(value).__name__}")
    if value.dtype != torch.bool and value.dtype not in _DTYPES:
        raise TypeError(f"attn_mask must be bool (True takes part) or an additive float, got {value.dtype}")
    on_device("attn_mask", value, query)
    if value.ndim == 3 and value.shape[0] != 1:
        raise ValueError(
            f"attn_mask must have shape (L, S) or (B, H, L, S), got three dimensions, {tuple(value.shape)}: insert the"
            " missing one, mask[:, None] for one mask a batch entry or mask[None] for one a head"
        )
    expanded = value[(None,) * (4 - value.ndim)] if value.ndim < 4 else value
    shape = (*query.shape[:3], num_keys)
    if expanded.ndim != 4 or any(
        have not in (1, want) for have, want in zip(expanded.shape, shape, strict=True)
    ):
        raise ValueError(
            f"attn_mask must be broadcastable to (B, H, L, S) = {shape}, got shape {tuple(value.shape)}"
        )
    return expanded


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


def window(value: Any, is_causal: bool) -> tuple[int | None, int | None]:
    """(left, right): an int w is (w, w), under causality (w, 0)."""
    ends = (value, value) if value is None or not isinstance(value, tuple | list) else tuple(value)
    if len(ends) != 2:
        raise ValueError(f"window must be an int or a pair (left, right), got {value!r}")
    for end in ends:
        if end is not None and (isinstance(end, bool) or not isinstance(end, int | torch.SymInt)):
            raise TypeError(f"window must be an int or a pair (left, right) of ints or None, got {value!r}")
        if end is not None and end < 0:
            raise ValueError(f"window must be at least 0, got {value!r}")
    return ends[0], 0 if is_causal else ends[1]


def segment_ids(value: Any, query: Tensor, num_keys: int) -> Tensor | None:
    """None, or int32 or int64 (B, S), for at most S queries."""
    if value is None:
        return None
    tensor("segment_ids", value, "BS", dtypes=(torch.int64, torch.int32))
    wanted = (query.shape[0], num_keys)
    if value.shape != wanted:
        raise ValueError(f"segment_ids must have shape (B, S) = {wanted}, got {tuple(value.shape)}")
    if query.shape[2] > num_keys:
        raise ValueError(
            f"segment_ids need no more queries than keys, which are the last positions, got {query.shape[2]} queries"
            f" and {num_keys} keys"
        )
    on_device("segment_ids", value, query)
    return cast("Tensor", value)


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the autocast dtype, where it is on; float64 stays."""
    if not is_autocast_on(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which no operator changes the dtype of its inputs."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast_on(tensor) else nullcontext()


def is_autocast_on(tensor: Tensor) -> bool:
    """Whether operators on the tensor's device choose their dtype themselves."""
    kind = tensor.device.type
    # torch.compile of torch 2.6 cannot trace is_autocast_available
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _shape(dims: str) -> str:
    return f"({', '.join(dims)})"


def explain_unexpected(
    instead: Mapping[str, str], otherwise: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of methods: TypeError for unexpected arguments.

    Args:
        instead: what to do, by argument; "" for too many by position.
        otherwise: the end of these sentences.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        names = sorted(p.name for p in parameters)
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given = len(args) - 1
            if given > len(positional):
                takes = f"takes {' and '.join(positional)} by position, got {given} arguments"
                raise TypeError(f"{type(args[0]).__name__} {takes}: {instead['']}, {otherwise}")
            for name in kwargs.keys() - set(names):
                way = f"{instead[name]}, {otherwise}" if name in instead else did_you_mean(name, names)
                raise TypeError(f"{type(args[0]).__name__} got an unexpected argument {name!r}: {way}")
            return function(*args, **kwargs)

        return checked

    return decorate


def eager_in_old_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: a graph break before torch 2.13, for named tuples."""
    return torch.compiler.disable(function) if torch.__version__ < "2.13" else function


def is_plain(x: Tensor) -> bool:
    """Whether x holds numbers that Python may look at."""
    if torch.compiler.is_compiling():
        return False
    return type(x) in (Tensor, Parameter) and not _functorch.is_functorch_wrapped_tensor(x)


def is_unobserved() -> bool:
    """Whether there is no torch.compile, torch.func or dispatch mode."""
    if torch.compiler.is_compiling():
        return False
    return not (_C._len_torch_dispatch_stack() or in_torch_func())


def in_torch_func() -> bool:
    """Whether a transform of torch.func is active."""
    return not torch.compiler.is_compiling() and _C._are_functorch_transforms_active()


def why_untransformable() -> str | None:
    """Why transforms pass through torch's own operators alone, if so."""
    if torch.compiler.is_compiling():
        if _C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return "torch.compile traces neither torch.func nor tangents through it"
    elif _C._are_functorch_transforms_active():
        levels = [level.key() for level in _functorch.get_interpreter_stack()]
        if levels.count(_functorch.TransformType.Jvp) > 1:
            return "it has no forward-mode derivative of its forward-mode derivative"
    return None


def known(condition: bool) -> bool:
    """A condition on sizes; False, and no guard, where they are dynamic."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def is_static(size: int) -> bool:
    """Whether a size is a number, not dynamic."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size)


def needs_grad(x: object) -> bool:
    """Whether x has a gradient or a tangent to be computed."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    if torch.compiler.is_compiling():
        return x.requires_grad and torch.is_grad_enabled()
    return has_tangent(x) or (torch.is_grad_enabled() and _requires_grad(x))


def is_inference() -> bool:
    """Whether no tensor's gradient or tangent is computed, for certain."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or forward_ad._current_level >= 0)


def has_tangent(x: object) -> bool:
    """Whether x carries a tangent of forward-mode differentiation."""
    if not isinstance(x, Tensor) or torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):  # of grad or of jvp
            return True
        x = _functorch.get_unwrapped(x)
    return forward_ad.unpack_dual(x).tangent is not None


def _requires_grad(x: Tensor) -> bool:
    """Of x or of what torch.func transforms have wrapped in it."""
    while not x.requires_grad and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x.requires_grad
