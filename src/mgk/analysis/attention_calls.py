"""The calls of mixture attention in a model, and the components of their keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mgk.functional import responsibilities
from mgk.functional.linear import reference as linear
from mgk.functional.linear.inputs import validate_inputs
from mgk.nn import MixtureAttention


@dataclass(frozen=True)
class AttentionCall:
    """A call ``module(x, **options)`` with a batch of one."""

    module: MixtureAttention
    x: Tensor
    options: dict[str, Any]

    def weights(self) -> Tensor:
        """A_ij (H, L, S), whatever the masks."""
        options = {**self.options, "cache": None, "need_weights": True}
        return self.module(self.x, **options)[1][0]

    def components(self) -> "Components":
        """The components of its keys."""
        module = self.module
        query, keys, _ = module.project(self.x, rotary=self.options.get("rotary"))
        if module.shifts is not None:
            keys = keys + module.shifts[None, :, :, None]
        group = query.shape[1] // keys.shape[1]  # query heads that share a key
        keys = keys.repeat_interleave(group, 1)
        length = keys.shape[3]
        log_prior = _for_queries(module.log_prior(length), group)
        if module.is_linear:
            assert module.feature_map is not None
            inputs = validate_inputs(query, keys, log_prior=log_prior, feature_map=module.feature_map)
            gamma = linear.responsibilities(inputs)
        else:
            variance: Any = module.variance()
            if isinstance(variance, Tensor):
                variance = _for_queries(variance, group)
            options: dict[str, Any] = {"variance": variance, "e_step": module.e_step}
            gamma = responsibilities(query, keys, log_prior, **options).transpose(2, 3)
        prior = torch.full(keys.shape[1:3], 1 / keys.shape[2])
        own: Tensor | None = _for_queries(module.prior(length), group)
        if own is not None:
            prior = own[0].exp().mean(-1).expand_as(prior)
        return Components(keys[0], gamma[0], prior)


@dataclass(frozen=True)
class Components:
    """The components of the keys in one call.

    Attributes:
        keys: k_jr (H, M, S, D), shifts included.
        responsibilities: gamma_ijr (H, M, L, S), of masked pairs too.
        prior: pi_r (H, M), the mean over positions where they have their own.
    """

    keys: Tensor
    responsibilities: Tensor
    prior: Tensor


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[list[AttentionCall]]:
    """The first call of every mixture attention within the block, in their order.

    A retrieval model calls each twice, first for the first document.
    """
    calls: list[AttentionCall] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        assert isinstance(module, MixtureAttention)
        if all(call.module is not module for call in calls):
            calls.append(AttentionCall(module, args[0], options))

    modules = [module for module in model.modules() if isinstance(module, MixtureAttention)]
    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _for_queries(values: Any, group: int) -> Any:
    """Values (B, H, M, S) of key heads, for query heads."""
    return values if values is None or values.shape[1] == 1 else values.repeat_interleave(group, 1)
