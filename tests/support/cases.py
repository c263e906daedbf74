"""Random inputs of the attention functions, and the comparison of two backends on them: outputs and all gradients."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import mgk
from mgk.functional.mixture.inputs import AttentionInputs, validate_inputs

FUNCTIONS = ("mixture", "shifted")
BACKENDS = tuple(name for name, status in mgk.available_backends().items() if status == "ready")
WITH_HARD = tuple(name for name in BACKENDS if name != "sdpa")
PRIORS = (None, "component", "position")
VARIANCES = (None, 0.7, "head", "component", "position")
MASKS = (None, "key", "pair", "float")
OPTIONS = [
    pytest.param(*options, id="-".join(str(o) for o in options))
    for options in itertools.product(FUNCTIONS, ("gaussian", "dot"), PRIORS, VARIANCES, MASKS, (False, True))
    if not (
        options[0] == "shifted" and options[1] == "dot" and options[3] in (None, 0.7, "head")
    )  # the shifts cancel
]

# B, H, L, S, D, E, M
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 2, 1, 63, 8, 8, 2),
    (2, 1, 63, 1, 5, 3, 3),
    (1, 1, 63, 65, 33, 7, 2),
    (2, 2, 7, 300, 16, 40, 4),
    (1, 1, 300, 7, 4, 1, 8),
    (1, 1, 1030, 1100, 3, 2, 1),  # more than one block in both directions
    (3, 4, 130, 129, 2, 2, 5),
]


@dataclass
class Case:
    """A call of ``mixture_attention`` or ``shifted_mixture_attention``."""

    function: str
    tensors: dict[str, Tensor]  # by argument name, in float64
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, backend: str, dtype: torch.dtype = torch.float64, **more: Any) -> dict[str, Tensor]:
        """The output, the lse where it is wanted, and the gradient of every float argument, all in float64."""
        upstream = {"output": self.tensors["upstream"], "lse": self.tensors["upstream"][..., 0]}
        inputs = {name: _cast(name, x, dtype) for name, x in self.tensors.items() if name != "upstream"}
        for x in inputs.values():
            if x.is_floating_point():
                x.requires_grad_()
        function = mgk.mixture_attention if self.function == "mixture" else mgk.shifted_mixture_attention
        out = function(**inputs, **self.options, backend=backend, **more)
        results = {"output": out} if isinstance(out, Tensor) else dict(zip(("output", "lse"), out, strict=True))
        leaves = {name: x for name, x in inputs.items() if x.requires_grad}
        upstreams = [upstream[name].to(x.dtype) for name, x in results.items()]
        grads = torch.autograd.grad(list(results.values()), list(leaves.values()), upstreams)
        gradients = {name: grad.double() for name, grad in zip(leaves, grads, strict=True)}
        return {name: x.detach().double() for name, x in results.items()} | gradients


def _cast(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameters that may stay in float32 beside half inputs do so."""
    if not x.is_floating_point():
        return x
    keep = name in ("log_prior", "variance") and dtype.itemsize < 4
    return x.detach().to(torch.float32 if keep else dtype).clone()


def make_case(
    function: str = "mixture",
    *,
    sizes: tuple[int, int, int, int, int, int, int] = (2, 3, 13, 17, 5, 4, 2),
    prior: str | None = None,
    variance: str | float | None = None,
    mask: str | None = None,
    seed: int = 0,
    scale: float = 1.0,
    offset: float = 0.0,
    group: int = 1,
    segments: int | None = None,
    **options: Any,
) -> Case:
    """B, H, L, S, D, E, M; priors and variances "head", "component" or "position"; masks "key", "pair" or "float".

    ``group`` query heads read each of the H key heads; ``segments`` is the number of different segment ids.
    """
    batch, heads, num_queries, num_keys, dim, width, mixtures = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = {
        "head": (1, heads, 1, 1),
        "component": (1, heads, mixtures, 1),
        "position": (batch, heads, mixtures, num_keys),
    }
    tensors = {
        "query": normal(batch, heads * group, num_queries, dim) * scale + offset,
        "value": normal(batch, heads, num_keys, width),
        "upstream": normal(batch, heads * group, num_queries, width),
    }
    if function == "mixture":
        tensors["keys"] = normal(batch, heads, mixtures, num_keys, dim) * scale + offset
    else:
        tensors["key"] = normal(batch, heads, num_keys, dim) * scale + offset
        tensors["shifts"] = normal(heads, mixtures, dim) * scale
    if prior is not None:
        tensors["log_prior"] = normal(*shapes[prior]).log_softmax(2)
    if isinstance(variance, str):
        tensors["variance"] = normal(*shapes[variance]).mul(0.3).exp() * dim**0.5
    elif variance is not None:
        options["variance"] = variance
    if mask == "key":
        tensors["attn_mask"] = torch.rand(batch, 1, 1, num_keys, generator=generator) > 0.3
    elif mask == "pair":
        tensors["attn_mask"] = torch.rand(batch, 1, num_queries, num_keys, generator=generator) > 0.5
    elif mask == "float":
        tensors["attn_mask"] = normal(num_queries, num_keys)
    if segments is not None:
        ids = torch.randint(segments, (batch, -(-num_keys // 3)), generator=generator)
        tensors["segment_ids"] = ids.repeat_interleave(3, 1)[:, :num_keys]
    return Case(function, tensors, options)


def largest_errors(result: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """For each tensor the largest error, relative to max(1, the largest element)."""
    return {
        name: _largest_error(result[name], expected) if expected.numel() else 0.0
        for name, expected in truth.items()
    }


def _largest_error(result: Tensor, truth: Tensor) -> float:
    """Equal infinities, as those of an lse, are no error."""
    difference = torch.where(result == truth, 0.0, result - truth).abs().max()
    return (difference / truth.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1.0)).item()


def inputs_of(case: Case) -> AttentionInputs:
    """The validated inputs that a backend receives."""
    tensors = {name: x for name, x in case.tensors.items() if name not in ("key", "upstream")}
    if case.function == "shifted":
        tensors["keys"] = case.tensors["key"].unsqueeze(2)
    return validate_inputs(**tensors, **case.options)
