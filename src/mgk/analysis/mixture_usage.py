"""How a trained model uses the components of its keys: priors, shares of the attention, and distances."""

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


@dataclass(frozen=True)
class MixtureUsage:
    """The components of one layer, means over examples.

    Attributes:
        layer: its index, from 0.
        prior: pi_r (H, M), the mean over positions where they have their own.
        share: sum_j A_ij gamma_ijr (H, M), the mean over queries i of the attention through component r.
        certainty: sum_j A_ij max_r gamma_ijr (H,): 1 for one component per pair, 1/M where all contribute equally.
        distance: |k_jr - k_js| / sigma (H, M, M), the mean over positions of the distance between two components in
            standard deviations; for the linear variants, which have none, in units of D^(1/4).
    """

    layer: int
    prior: Tensor
    share: Tensor
    certainty: Tensor
    distance: Tensor


def mixture_usage(model: Any, examples: Sequence[Example]) -> list[MixtureUsage]:
    """The use of the components in every layer.

    Args:
        model: one of :mod:`mgk.models`, with a mixture of keys.
        examples: as the data sets of :mod:`mgk.data` give them, without a batch dimension.
    """
    if not examples:
        raise ValueError("examples must be at least one, got none")
    if not VARIANTS[model.config.attention].is_mixture:
        raise ValueError(f"attention={model.config.attention!r} has one key a position, not a mixture")
    by_example: list[list[tuple[Tensor, ...]]] = []
    with inference(model) as inputs:
        for example in examples:
            with _recorded_calls(model) as calls:
                model(**inputs(example))
            # A retrieval model calls each layer twice, first for the first document.
            first = {module: (x, options) for module, x, options in reversed(calls)}
            layers = dict.fromkeys(module for module, _, _ in calls)
            by_example.append([_usage(module, *first[module]) for module in layers])
    return [
        MixtureUsage(number, *(torch.stack(values).mean(0).cpu() for values in zip(*layer, strict=True)))
        for number, layer in enumerate(zip(*by_example, strict=True))
    ]


@contextmanager
def _recorded_calls(model: torch.nn.Module) -> Iterator[list[tuple[MixtureAttention, Tensor, dict[str, Any]]]]:
    """Every call of an attention module within the block: the module, its input and its options."""
    calls: list[tuple[MixtureAttention, Tensor, dict[str, Any]]] = []

    def record(module: torch.nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        assert isinstance(module, MixtureAttention)
        calls.append((module, args[0], options))

    modules = [module for module in model.modules() if isinstance(module, MixtureAttention)]
    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _usage(module: MixtureAttention, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Prior, share, certainty and distance of one call with a batch of one."""
    query, keys, _ = module.project(x, rotary=options.get("rotary"))
    if module.shifts is not None:
        keys = keys + module.shifts[None, :, :, None]  # (1, H, M, S, D)
    log_prior = module.log_prior(keys.shape[3])
    is_causal = options.get("is_causal", False)
    sigma: Any = module.head_dim**0.25
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
        by_component = torch.as_tensor(variance).expand(1, module.num_heads, module.num_mixtures, 1)
        sigma = by_component.mean(2).sqrt().view(-1, 1, 1)
    prior = torch.full((module.num_heads, module.num_mixtures), 1 / module.num_mixtures)
    if log_prior is not None:
        prior = log_prior[0].exp().mean(-1).expand_as(prior)
        prior = prior / prior.sum(-1, keepdim=True)
    share = (weights.unsqueeze(2) * gamma).sum(-1).mean(-1)[0]
    certainty = (weights * gamma.amax(2)).sum(-1).mean(-1)[0]
    distance = (keys.unsqueeze(2) - keys.unsqueeze(3)).norm(dim=-1).mean(-1)[0] / sigma  # (H, M, M)
    return prior, share, certainty, distance
