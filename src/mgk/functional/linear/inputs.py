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
    """The arguments of Eq. 14 after validation.

    Query and keys are features, unless ``is_elu`` leaves phi(x) = elu(x) + 1 to be applied.
    """

    query: Tensor  # (B, Hq, L, F)
    keys: Tensor  # (B, H, M, S, F)
    value: Tensor  # (B, H, S, E), in the dtype of the output
    log_prior: Tensor | None  # broadcastable to (B, H, M, S)
    key_mask: Tensor | None  # bool (B, S)
    is_elu: bool
    key_range: KeyRange  # causality and segments
    state: tuple[Tensor, Tensor] | None  # of earlier keys (B, H, F, E), (B, H, F)
    addend: Tensor | None = None  # to the output: see ``masks``

    @property
    def group(self) -> int:
        """Hq / H, the query heads that read one key head."""
        return self.query.shape[1] // max(1, self.keys.shape[1])

    def queries(self) -> Tensor:
        """phi(q_i) (B, Hq, L, F), in float32 or better."""
        return self._features(self.query)

    def components(self) -> Tensor:
        """pi_jr phi(k_jr) (B, H, M, S, F), 0 where masked."""
        phi_k = self._features(self.keys)
        if self.log_prior is not None:
            phi_k = self.log_prior.to(phi_k.dtype).exp().unsqueeze(-1) * phi_k
        elif phi_k.shape[2] > 1:
            phi_k = phi_k / phi_k.shape[2]
        if self.key_mask is not None:
            phi_k = phi_k.masked_fill(~self.key_mask[:, None, None, :, None], 0.0)
        return phi_k

    def mixed_keys(self) -> Tensor:
        """phibar_j = sum_r pi_jr phi(k_jr) (B, H, S, F)."""
        components = self.components()
        return components.sum(2) if components.shape[2] > 1 else components.squeeze(2)

    def values_and_ones(self) -> Tensor:
        """The values with a column of ones (B, H, S, E + 1)."""
        return pad(self.value.to(compute_dtype(self.query)), (0, 1), value=1.0)

    def joined_state(self) -> Tensor | None:
        """Numerator and normaliser side by side (B, H, F, E + 1)."""
        if self.state is None:
            return None
        numerator, normaliser = self.state
        return torch.cat([numerator, normaliser.unsqueeze(-1)], -1).to(compute_dtype(self.query))

    def _features(self, x: Tensor) -> Tensor:
        return feature_maps.elu_features(x.to(compute_dtype(x))) if self.is_elu else x


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
    if keys.shape[2] == 0:
        raise ValueError("keys must have at least one component, got none")
    feature_maps.check(feature_map)
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
    is_elu = feature_map == "elu"
    if not is_elu:
        with validation.without_autocast(query):
            query, keys = features(query, keys, feature_map)
    state = _validated_state(initial_state, keys, value)
    return LinearInputs(query, keys, value, prior, mask, is_elu, key_range, state, addend)


def features(query: Tensor, keys: Tensor, feature_map: Any) -> tuple[Tensor, Tensor]:
    """phi(q_i) (B, H, L, F) and phi(k_jr) (B, H, M, S, F), in float32 or better."""
    dtype = compute_dtype(query)
    phi_q = feature_maps.apply(feature_map, query.to(dtype), is_query=True)
    phi_k = feature_maps.apply(feature_map, keys.to(dtype), is_query=False)
    if phi_q.shape[:-1] != query.shape[:-1] or phi_k.shape != (*keys.shape[:-1], phi_q.shape[-1]):
        raise ValueError(
            "feature_map must map (..., D) to (..., F), got"
            f" {tuple(query.shape)} -> {tuple(phi_q.shape)} and {tuple(keys.shape)} -> {tuple(phi_k.shape)}"
        )
    return phi_q, phi_k


def _validated_state(state: Any, phi_k: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """None, or numerator (B, H, F, E) and normaliser (B, H, F)."""
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
    return numerator, normaliser
