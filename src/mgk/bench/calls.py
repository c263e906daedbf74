"""Calls of attention to be measured."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mgk.bench.registry import HARD, AttentionShape, Passes
from mgk.bench.runner import BenchError
from mgk.bench.timing import Work
from mgk.functional import (
    available_backends,
    backends,
    linear_mixture_attention,
    mixture_attention,
    shifted_mixture_attention,
)
from mgk.functional.linear.inputs import LinearInputs
from mgk.functional.linear.inputs import validate_inputs as validate_linear_inputs
from mgk.functional.mixture.inputs import AttentionInputs, compute_dtype, validate_inputs
from mgk.variants import VARIANTS, VariantSpec


class Inputs(NamedTuple):
    """Leaves of the graph."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, H, N, D)
    keys: Tensor  # (B, H, M, N, D)
    shifts: Tensor  # (H, M, D)
    value: Tensor  # (B, H, N, E)
    log_prior: Tensor  # (H, M)

    def leaves(self, name: str) -> list[Tensor]:
        """The inputs of a variant, the query first."""
        spec = spec_of(name)
        keys = [self.keys] if spec.keys == "projected" else [self.key]
        shifts = [self.shifts] if spec.is_shifted else []
        prior = [self.log_prior] if spec.is_mixture else []
        return [self.query, *keys, *shifts, self.value, *prior]

    def components(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Keys (B, H, M or 1, N, D) and prior (1, H, M, 1) of a variant."""
        spec = spec_of(name)
        keys = self.keys if spec.keys == "projected" else self.key.unsqueeze(2)
        return keys, self.log_prior.unsqueeze(-1).unsqueeze(0) if spec.is_mixture else None


def spec_of(name: str) -> VariantSpec:
    """The variant of a name such as ``mgk`` or ``mgk-hard``."""
    return VARIANTS[name.removesuffix(HARD)]


def make_inputs(
    shape: AttentionShape,
    *,
    num_queries: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Inputs:
    """Standard normal inputs, the same for the same sizes."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype).requires_grad_()

    pairs, mixtures = (shape.batch, shape.heads), shape.mixtures
    length, width = shape.length, shape.head_dim
    query = normal(*pairs, num_queries or length, width)
    prior = torch.randn(shape.heads, mixtures, generator=generator).log_softmax(-1)
    return Inputs(
        query=query,
        key=normal(*pairs, length, width),
        keys=normal(*pairs, mixtures, length, width),
        shifts=normal(shape.heads, mixtures, width),
        value=normal(*pairs, length, value_dim or width),
        log_prior=prior.to(device, compute_dtype(query)).requires_grad_(),
    )


def attend(name: str, x: Inputs, **options: Any) -> Any:
    """The output of a variant; ``options`` are those of the public function."""
    return prepared(name, x, **options)()


def prepared(name: str, x: Inputs, **options: Any) -> Callable[[], Any]:
    """:func:`attend`, without what is not of the call itself."""
    spec = spec_of(name)
    if not spec.is_linear:
        options = {"e_step": "hard" if name.endswith(HARD) else "soft", **options}
        if not spec.is_shifted:
            options = {"kernel": "gaussian" if spec.is_mixture else "dot", **options}
    if spec.is_shifted and not spec.is_linear:
        inputs = (x.query, x.key, x.shifts, x.value, x.log_prior)
        return partial(shifted_mixture_attention, *inputs, **options)

    def run() -> Any:
        keys, log_prior = x.components(name)
        if not spec.is_linear:
            return mixture_attention(x.query, keys, x.value, log_prior, **options)
        keys = keys + x.shifts[None, :, :, None] if spec.is_shifted else keys
        return linear_mixture_attention(x.query, keys, x.value, log_prior, **options)

    return run


def softmax_baseline(x: Inputs, passes: Passes, **options: Any) -> Work:
    """Softmax with twice the heads by ``scaled_dot_product_attention``."""
    single = [t.detach() for t in (x.query, x.key, x.value)]
    query, key, value = (torch.cat([t, t.flip(2)], 1).requires_grad_() for t in single)
    run = partial(scaled_dot_product_attention, query, key, value, **options)
    return work(run, [query, key, value], passes)


def unfused_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    log_prior: Tensor,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Eq. 9 with M matrices of N x N exponentials in memory, mixed and normalised.

    Shapes: (B, H, L, D), (B, H, M, S, D), (B, H, S, E), a prior that broadcasts to
    (B, H, M, S), and a mask (B, S) that is True for keys that take part.
    """
    mass = torch.zeros(())
    width = 2 * math.sqrt(query.shape[-1])
    for r in range(keys.shape[2]):
        distance = torch.cdist(query, keys[:, :, r]).square()
        mass = mass + log_prior[:, :, r, None].exp() * torch.exp(-distance / width)
    if key_mask is not None:
        mass = mass.masked_fill(~key_mask[:, None, None], 0.0)
    return torch.dropout(mass / mass.sum(-1, keepdim=True), dropout, dropout > 0) @ value


def work(forward: Callable[[], Tensor], leaves: Sequence[Tensor], passes: Passes) -> Work:
    """The forward without a graph, or with gradients."""
    if passes == "forward":
        return torch.no_grad()(forward)
    grad = torch.ones_like(leaves[0])
    return lambda: torch.autograd.grad(forward(), leaves, grad)


def variant_work(name: str, x: Inputs, passes: Passes, **options: Any) -> Work:
    """The work of a variant."""
    return work(prepared(name, x, **options), x.leaves(name), passes)


def require_kernels() -> None:
    """Raise where the fused kernels do not work."""
    status = available_backends()["cpu"]
    if status != "ready":
        raise BenchError(f"the fused kernels cannot be measured: backend 'cpu' is {status}")


def backends_of(name: str) -> tuple[str, ...]:
    """The backends of a variant, ready or not."""
    return backends.backend_names(spec_of(name).family)[1:]


def unsupported_reason(name: str, backend: str, x: Inputs, is_causal: bool) -> str | None:
    """Why the backend cannot serve the variant; None if it can."""
    if backend not in backends_of(name):
        return "it has no such backend"
    chosen = backends.BACKENDS[spec_of(name).family][backend]
    return chosen.unsupported_reason(_validated(name, x, is_causal))


def auto_backend(name: str, x: Inputs, is_causal: bool) -> str:
    """The backend that ``backend="auto"`` takes."""
    return backends.select(spec_of(name).family, _validated(name, x, is_causal)).name


def _validated(name: str, x: Inputs, is_causal: bool) -> AttentionInputs | LinearInputs:
    """The inputs that a backend is selected for."""
    spec = spec_of(name)
    if spec.is_linear:
        return validate_linear_inputs(x.query, x.keys, x.value, is_causal=is_causal)
    keys, log_prior = x.components(name)
    return validate_inputs(
        x.query,
        keys,
        x.value,
        shifts=x.shifts if spec.is_shifted else None,
        log_prior=log_prior,
        kernel="gaussian" if spec.is_mixture else "dot",
        e_step="hard" if name.endswith(HARD) else "soft",
        is_causal=is_causal,
    )
