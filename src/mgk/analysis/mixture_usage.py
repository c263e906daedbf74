"""How a model uses the components of its keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgk.analysis.attention_calls import AttentionCall, recorded_calls
from mgk.analysis.attention_maps import Example, inference
from mgk.variants import VARIANTS


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
            with recorded_calls(model) as calls:
                model(**inputs(example))
            by_example.append([_usage(call) for call in calls])
    return [
        MixtureUsage(number, *(torch.stack(values).mean(0).cpu() for values in zip(*layer, strict=True)))
        for number, layer in enumerate(zip(*by_example, strict=True))
    ]


def _usage(call: AttentionCall) -> tuple[Tensor, ...]:
    """Prior, share, certainty and distance of one call."""
    module, found, weights = call.module, call.components(), call.weights()
    keys, gamma = found.keys, found.responsibilities
    sigma: Any = module.head_dim**0.25
    heads = module.num_key_value_heads
    if not module.is_linear:
        by_component = torch.as_tensor(module.variance()).expand(1, heads, keys.shape[1], 1)
        sigma = by_component.mean(2).sqrt().view(-1, 1, 1)
    share = (weights.unsqueeze(1) * gamma).sum(-1).mean(-1)
    certainty = (weights * gamma.amax(1)).sum(-1).mean(-1)
    distance = (keys.unsqueeze(1) - keys.unsqueeze(2)).norm(dim=-1).mean(-1)  # (Hq, M, M)
    # the mean over the query heads that read a key head
    found_values = (found.prior, share, certainty, distance)
    prior, share, certainty, distance = (x.unflatten(0, (heads, -1)).mean(1) for x in found_values)
    return prior, share, certainty, distance / sigma
