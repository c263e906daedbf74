"""The validated inputs of linear attention, as every backend receives them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.functional import masks, validation
from mgk.functional.linear import feature_maps
from mgk.functional.masks import KeyRange
from mgk.functional.mixture.inputs import compute_dtype, validated_key_range


class LinearInputs(NamedTuple):
    """The arguments of Eq. 14 after validation, and the features."""

    query: Tensor  # phi(q_i) (B, Hq, L, F)
    keys: Tensor  # pi_jr phi(k_jr) (B, H, M, S, F), 0 where masked
    value: Tensor  # (B, H, S, E), in the dtype of the output
    key_range: KeyRange  # causality and segments
    state: Tensor | None  # of earlier keys (B, H, F, E + 1)
    addend: Tensor | None = None  # to the output: see ``masks``

    @property
    def group(self) -> int:
        """Hq / H, the query heads that read one key head."""
        return self.query.shape[1] // max(1, self.keys.shape[1])

    def mixed_keys(self) -> Tensor:
        """phibar_j = sum_r pi_jr phi(k_jr) (B, H, S, F)."""
        return self.keys.sum(2) if self.keys.shape[2] > 1 else self.keys.squeeze(2)

    def values_and_ones(self) -> Tensor:
        """The values with a column of ones (B, H, S, E + 1)."""
        return pad(self.value.to(self.query.dtype), (0, 1), value=1.0)


def validate_inputs(
    query: Any,
    keys: Any,
    value: Any = None,
    log_prior: Any = None,
    *,
    feature_map: Any = "elu",
    key_mask: Any = None,
    is_causal: Any = False,
    window: Any = None,
    segment_ids: Any = None,
    initial_state: Any = None,
) -> LinearInputs:
    """The arguments of ``linear_mixture_attention``, checked."""
    validation.tensor("query", query, "BHLD")
    validation.tensor("keys", keys, "BHMSD")
    value = query.new_empty(*keys.shape[:2], keys.shape[3], 0) if value is None else value
    validation.tensor("value", value, "BHSE")
    query, keys, value = validation.autocast_inputs(query, keys, value)
    validation.matching_sizes(query, keys, value)
    validation.flag("is_causal", is_causal)
    if window is not None:
        raise ValueError(
            f"window must be None for linear attention, whose state is a sum over all keys, got {window!r}"
        )
    key_range = validated_key_range(None, is_causal, segment_ids, query, keys.shape[3])
    prior = validation.log_prior(log_prior, query, keys.shape[:4])
    mask = validation.token_mask("key_mask", key_mask, query, keys.shape[3], "BS")
    pairs = None if mask is None else mask[:, None, None]
    keys, value, addend, overflows = masks.clean(keys, value, pairs, key_range, query.shape[1:3])
    if overflows:
        query, keys = query.double(), keys.double()
    with validation.without_autocast(query):
        phi_q, phi_k = features(query, keys, feature_map)
    if prior is not None:
        phi_k = prior.to(phi_k.dtype).exp().unsqueeze(-1) * phi_k
    elif phi_k.shape[2] > 1:
        phi_k = phi_k / phi_k.shape[2]
    if mask is not None:
        phi_k = phi_k.masked_fill(~mask[:, None, None, :, None], 0.0)
    state = _validated_state(initial_state, phi_k, value)
    return LinearInputs(phi_q, phi_k, value, key_range, state, addend)


def features(query: Tensor, keys: Tensor, feature_map: Any) -> tuple[Tensor, Tensor]:
    """phi(q_i) (B, H, L, F) and phi(k_jr) (B, H, M, S, F), in float32 or better."""
    if keys.shape[2] == 0:
        raise ValueError("keys must have at least one component, got none")
    feature_maps.check(feature_map)
    dtype = compute_dtype(query)
    phi_q = feature_maps.apply(feature_map, query.to(dtype), is_query=True)
    phi_k = feature_maps.apply(feature_map, keys.to(dtype), is_query=False)
    if phi_q.shape[:-1] != query.shape[:-1] or phi_k.shape != (*keys.shape[:-1], phi_q.shape[-1]):
        raise ValueError(
            "feature_map must map (..., D) to (..., F), got"
            f" {tuple(query.shape)} -> {tuple(phi_q.shape)} and {tuple(keys.shape)} -> {tuple(phi_k.shape)}"
        )
    return phi_q, phi_k


def _validated_state(state: Any, phi_k: Tensor, value: Tensor) -> Tensor | None:
    """None, or numerator and normaliser side by side (B, H, F, E + 1)."""
    if state is None:
        return None
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(
            f"initial_state must be the state that an earlier call returned, got {type(state).__name__}"
        )
    numerator, normaliser = state
    validation.tensor("initial_state.numerator", numerator, "BHFE")
    validation.tensor("initial_state.normaliser", normaliser, "BHF")
    wanted = (*phi_k.shape[:2], phi_k.shape[-1], value.shape[-1])
    if numerator.shape != wanted or normaliser.shape != wanted[:-1]:
        raise ValueError(
            f"initial_state must have shapes (B, H, F, E) = {wanted} and (B, H, F) = {wanted[:-1]},"
            f" got {tuple(numerator.shape)} and {tuple(normaliser.shape)}"
        )
    return torch.cat([numerator, normaliser.unsqueeze(-1)], -1).to(phi_k.dtype)
