"""What the components of a mixture do in a trained model: their priors, their work, and how far apart they are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgk.functional.linear import reference as linear
from mgk.functional.linear.inputs import validate_inputs
from mgk.functional.mixture import api as attention
from mgk.nn import MixtureAttention


@dataclass(frozen=True)
class MixtureUsage:
    """The components of one layer, means over examples.

    Attributes:
        layer: its number, from 0.
        prior: pi_r (H, M), over positions where they have their own.
        share: sum_j A_ij gamma_ijr (H, M), the mean over queries i of the attention that goes through component r.
        certainty: sum_j A_ij max_r gamma_ijr (H,): 1 where one component has all of a pair, 1/M where all share it.
        distance: |k_jr - k_js| / sigma (H, M, M), the mean over positions of how far two components are apart, in
            standard deviations; of the linear variants, which have none, in units of D^(1/4).
    """

    layer: int
    prior: Tensor
    share: Tensor
    certainty: Tensor
    distance: Tensor


@torch.no_grad()
def mixture_usage(model: Any, examples: Sequence[Mapping[str, Tensor]]) -> list[MixtureUsage]:
    """The work of the components in every layer.

    Args:
        model: one of :mod:`mgk.models`, with a mixture of keys.
        examples: as the data sets of :mod:`mgk.data` give them, without a batch dimension.
    """
    if not examples:
        raise ValueError("examples must be at least one, got none")
    if model.config.attention in ("softmax", "linear"):
        raise ValueError(f"attention={model.config.attention!r} has one key a position: there is no mixture to look at")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    found: list[list[MixtureUsage]] = []
    try:
        for example in examples:
            inputs = {name: x[None].to(device) for name, x in example.items() if "labels" not in name}
            with _watched(model) as calls:
                model(**inputs)
            # a retrieval model calls each layer twice: the first time for the first document
            layers = list(dict.fromkeys(module for module, _, _ in calls))
            first = {module: (x, options) for module, x, options in reversed(calls)}
            found.append([_usage(number, module, *first[module]) for number, module in enumerate(layers)])
    finally:
        model.train(was_training)
    return [_mean(parts) for parts in zip(*found, strict=True)]


_Calls = list[tuple[MixtureAttention, Tensor, dict[str, Any]]]


@contextmanager
def _watched(model: torch.nn.Module) -> Iterator[_Calls]:
    """Every call of a layer's attention while the block runs."""
    calls: _Calls = []

    def note(module: torch.nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        assert isinstance(module, MixtureAttention)
        calls.append((module, args[0], options))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, MixtureAttention)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _usage(layer: int, module: MixtureAttention, x: Tensor, options: dict[str, Any]) -> MixtureUsage:
    query, keys, _ = module.project(x, rotary=options.get("rotary"))
    if module.shifts is not None:
        keys = keys + module.shifts[None, :, :, None]  # (1, H, M, S, D)
    log_prior = module.log_prior(keys.shape[3])
    is_causal = options.get("is_causal", False)
    if module.is_linear:
        assert module.feature_map is not None
        mapped = {"feature_map": module.feature_map, "is_causal": is_causal}
        inputs = validate_inputs(query, keys, log_prior=log_prior, **mapped)
        weights, gamma = linear.weights(inputs), linear.responsibilities(inputs)  # (1, H, L, S), (1, H, M, L, S)
        deviation: Any = module.head_dim**0.25
    else:
        given = {"variance": module.variance(), "e_step": module.e_step, "is_causal": is_causal}
        weights = attention.mixture_weights(query, keys, log_prior, **given)
        gamma = attention.responsibilities(query, keys, log_prior, **given).transpose(2, 3)
        variance = torch.as_tensor(module.variance()).expand(1, module.num_heads, module.num_mixtures, 1)
        deviation = variance.mean(2).sqrt().view(-1, 1, 1)
    through = weights.unsqueeze(2) * gamma  # (1, H, M, L, S)
    most = weights * gamma.amax(2)
    prior = torch.full((module.num_heads, module.num_mixtures), 1 / module.num_mixtures)
    if log_prior is not None:
        prior = log_prior[0].exp().mean(-1).expand_as(prior)
        prior = prior / prior.sum(-1, keepdim=True)
    apart = (keys.unsqueeze(2) - keys.unsqueeze(3)).norm(dim=-1).mean(-1)[0]  # (H, M, M)
    return MixtureUsage(
        layer,
        prior.cpu(),
        through.sum(-1).mean(-1)[0].cpu(),
        most.sum(-1).mean(-1)[0].cpu(),
        (apart / deviation).cpu(),
    )


def _mean(parts: Sequence[MixtureUsage]) -> MixtureUsage:
    def over(name: str) -> Tensor:
        return torch.stack([getattr(part, name) for part in parts]).mean(0)

    return MixtureUsage(parts[0].layer, over("prior"), over("share"), over("certainty"), over("distance"))
