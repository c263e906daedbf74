"""How a model uses the components of its keys."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgk.analysis.attention_maps import Example, inference
from mgk.functional import mixture_weights, responsibilities
from mgk.functional.linear import reference as linear
from mgk.functional.linear.inputs import validate_inputs
from mgk.nn import MixtureAttention
from mgk.variants import VARIANTS

# The input and the options of each module.
_Calls = dict[MixtureAttention, tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class MixtureUsage:
    """The components of one layer, means over examples, queries and positions.

    Attributes:
        layer: From 0.
        prior: pi_r (H, M).
        share: sum_j A_ij gamma_ijr (H, M), the attention through component r.
        certainty: sum_j A_ij max_r gamma_ijr (H,), from 1/M to 1.
        distance: |k_jr - k_js| / sigma (H, M, M); sigma is D^(1/4) for the linear
            variants, which have none.
    """

    layer: int
    prior: Tensor
    share: Tensor
    certainty: Tensor
    distance: Tensor


def mixture_usage(model: Any, examples: Sequence[Example]) -> list[MixtureUsage]:
    """The use of the components in every layer, on some examples."""
    if not examples:
        raise ValueError("examples must be at least one, got none")
    attention = model.config.attention
    if not VARIANTS[attention].is_mixture:
        raise ValueError(f"attention={attention!r} has one key a position, not a mixture")
    by_example: list[list[tuple[Tensor, ...]]] = []
    with inference(model) as inputs:
        for example in examples:
            with _first_calls(model) as calls:
                model(**inputs(example))
            by_example.append([_usage(module, *call) for module, call in calls.items()])
    usages = []
    for number, layer in enumerate(zip(*by_example, strict=True)):
        means = (torch.stack(values).mean(0).cpu() for values in zip(*layer, strict=True))
        usages.append(MixtureUsage(number, *means))
    return usages


@contextmanager
def _first_calls(model: torch.nn.Module) -> Iterator[_Calls]:
    """The first call of each attention module: of two documents, the first."""
    calls: _Calls = {}

    def record(module: Any, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        calls.setdefault(module, (args[0], options))

    hooks = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, MixtureAttention)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _usage(module: MixtureAttention, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Prior, share, certainty and distance, of a batch of one."""
    query, keys, _ = module.project(x, rotary=options.get("rotary"))
    if module.shifts is not None:
        keys = keys + module.shifts[None, :, :, None]  # (1, H, M, S, D)
    log_prior = module.log_prior(keys.shape[3])
    is_causal = options.get("is_causal", False)
    sigma: Any = module.head_dim**0.25
    given: dict[str, Any]
    sizes = (module.num_heads, module.num_mixtures)
    if module.is_linear:
        assert module.feature_map is not None
        mapped = {"feature_map": module.feature_map, "is_causal": is_causal}
        inputs = validate_inputs(query, keys, log_prior=log_prior, **mapped)
        weights, gamma = linear.weights(inputs), linear.responsibilities(inputs)  # (1, H, L, S), (1, H, M, L, S)
    else:
        variance = module.variance()
        given = {"variance": variance, "e_step": module.e_step, "is_causal": is_causal}
        weights = mixture_weights(query, keys, log_prior, **given)
        gamma = responsibilities(query, keys, log_prior, **given).transpose(2, 3)
        by_component = torch.as_tensor(variance).expand(1, *sizes, 1)
        sigma = by_component.mean(2).sqrt().view(-1, 1, 1)
    prior = torch.full(sizes, 1 / module.num_mixtures)
    if log_prior is not None:
        prior = log_prior[0].exp().mean(-1).expand_as(prior)
        prior = prior / prior.sum(-1, keepdim=True)
    share = (weights.unsqueeze(2) * gamma).sum(-1).mean(-1)[0]
    certainty = (weights * gamma.amax(2)).sum(-1).mean(-1)[0]
    distance = (keys.unsqueeze(2) - keys.unsqueeze(3)).norm(dim=-1)  # (1, H, M, M, S)
    return prior, share, certainty, distance.mean(-1)[0] / sigma
