"""The eight variants, as calls of the public functions on one set of inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.bench.settings import Settings
from mgk.functional import backends, linear_mixture_attention, mixture_attention, shifted_mixture_attention
from mgk.functional.linear.inputs import LinearInputs
from mgk.functional.linear.inputs import validate_inputs as validate_linear_inputs
from mgk.functional.mixture.inputs import AttentionInputs, compute_dtype, validate_inputs
from mgk.variants import Family


class Inputs(NamedTuple):
    """Leaves of the graph: what the variants of a model would compute from its tokens, or learn."""

    query: Tensor  # (B, H, N, D)
    key: Tensor  # (B, H, N, D)
    keys: Tensor  # (B, H, M, N, D)
    shifts: Tensor  # (H, M, D)
    value: Tensor  # (B, H, N, D)
    log_prior: Tensor  # (H, M)


@dataclass(frozen=True)
class Variant:
    """One way to attend: its function, which takes ``backend`` and ``is_causal``, and its leaves with gradients."""

    attend: Callable[..., Any]
    leaves: tuple[str, ...]
    is_linear: bool = False


def make_inputs(settings: Settings, device: torch.device) -> Inputs:
    """Standard normal inputs, always the same ones, and a prior as learning might leave it."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    batch, heads, mixtures = settings.batch, settings.heads, settings.mixtures
    tokens = (settings.length, settings.head_dim)
    query = normal(batch, heads, *tokens)
    prior = torch.randn(heads, mixtures, generator=generator).log_softmax(-1)
    return Inputs(
        query=query,
        key=normal(batch, heads, *tokens),
        keys=normal(batch, heads, mixtures, *tokens),
        shifts=normal(heads, mixtures, settings.head_dim),
        value=normal(batch, heads, *tokens),
        log_prior=prior.to(device, compute_dtype(query)).requires_grad_(),
    )


def _softmax(x: Inputs, **options: Any) -> Tensor:
    return mixture_attention(x.query, x.key.unsqueeze(2), x.value, kernel="dot", **options)


def _mgk(x: Inputs, **options: Any) -> Tensor:
    return mixture_attention(x.query, x.keys, x.value, _per_position(x.log_prior), **options)


def _mgk_hard(x: Inputs, **options: Any) -> Tensor:
    return _mgk(x, e_step="hard", **options)


def _smgk(x: Inputs, **options: Any) -> Tensor:
    return shifted_mixture_attention(x.query, x.key, x.shifts, x.value, x.log_prior, **options)


def _smgk_hard(x: Inputs, **options: Any) -> Tensor:
    return _smgk(x, e_step="hard", **options)


def _linear(x: Inputs, **options: Any) -> Any:
    return linear_mixture_attention(x.query, x.key.unsqueeze(2), x.value, **options)


def _mlk(x: Inputs, **options: Any) -> Any:
    return linear_mixture_attention(x.query, x.keys, x.value, _per_position(x.log_prior), **options)


def _smlk(x: Inputs, **options: Any) -> Any:
    keys = x.key.unsqueeze(2) + x.shifts[None, :, :, None]
    return linear_mixture_attention(x.query, keys, x.value, _per_position(x.log_prior), **options)


def _per_position(log_prior: Tensor) -> Tensor:
    return log_prior[None, :, :, None]  # (1, H, M, 1)


_ONE_KEY = ("query", "key", "value")
_MANY_KEYS = ("query", "keys", "value", "log_prior")
_SHIFTED_KEY = ("query", "key", "shifts", "value", "log_prior")

BY_NAME = {
    "softmax": Variant(_softmax, _ONE_KEY),
    "mgk": Variant(_mgk, _MANY_KEYS),
    "mgk-hard": Variant(_mgk_hard, _MANY_KEYS),
    "smgk": Variant(_smgk, _SHIFTED_KEY),
    "smgk-hard": Variant(_smgk_hard, _SHIFTED_KEY),
    "linear": Variant(_linear, _ONE_KEY, is_linear=True),
    "mlk": Variant(_mlk, _MANY_KEYS, is_linear=True),
    "smlk": Variant(_smlk, _SHIFTED_KEY, is_linear=True),
}


def backends_of(name: str) -> tuple[str, ...]:
    """The backends that there are for the variant, ready or not."""
    return backends.backend_names(_family(name))[1:]


def unsupported_reason(name: str, backend: str, inputs: Inputs, is_causal: bool) -> str | None:
    """Why the backend cannot serve the variant; None when it can."""
    if backend not in backends_of(name):
        return "it has no such backend"
    return backends.BACKENDS[_family(name)][backend].unsupported_reason(_validated(name, inputs, is_causal))


def auto_backend(name: str, inputs: Inputs, is_causal: bool) -> str:
    """The backend that ``backend="auto"`` takes."""
    return backends.select(_family(name), _validated(name, inputs, is_causal)).name


def _family(name: str) -> Family:
    return "linear" if BY_NAME[name].is_linear else "softmax"


def _validated(name: str, x: Inputs, is_causal: bool) -> AttentionInputs | LinearInputs:
    """The inputs that a backend is selected for."""
    if BY_NAME[name].is_linear:
        return validate_linear_inputs(x.query, x.keys, x.value, is_causal=is_causal)
    is_softmax, is_shifted = name == "softmax", name.startswith("smgk")
    return validate_inputs(
        x.query,
        x.key.unsqueeze(2) if is_softmax or is_shifted else x.keys,
        x.value,
        shifts=x.shifts if is_shifted else None,
        log_prior=None if is_softmax else _per_position(x.log_prior),
        kernel="dot" if is_softmax else "gaussian",
        e_step="hard" if name.endswith("-hard") else "soft",
        is_causal=is_causal,
    )
