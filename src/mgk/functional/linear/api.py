"""Mixture of linear keys (Eq. 14, identity 4): linear attention with the features phibar_j = sum_r pi_jr phi(k_jr).

    h_i = phi(q_i)^T sum_j phibar_j v_j^T / phi(q_i)^T sum_j phibar_j

Non-causal in O(N); causal in chunks, parallel inside a chunk with a state across chunks; step by step by handing the
state on.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.functional import masks, validation
from mgk.functional.linear import feature_maps
from mgk.functional.linear.feature_maps import FeatureMap
from mgk.functional.mixture import reference
from mgk.functional.mixture.inputs import compute_dtype
from mgk.functional.precision import autocast_inputs, without_autocast

BACKENDS = ("auto", "reference", "blockwise")


class LinearState(NamedTuple):
    """What linear attention remembers of the keys so far; its size does not depend on their number.

    Attributes:
        numerator: sum_j phibar_j v_j^T (B, H, F, E).
        normaliser: sum_j phibar_j (B, H, F).
    """

    numerator: Tensor
    normaliser: Tensor


def linear_mixture_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    log_prior: Tensor | None = None,
    *,
    feature_map: FeatureMap = "elu",
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    initial_state: LinearState | tuple[Tensor, Tensor] | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    r"""h_i = phi(q_i)^T sum_jr pi_jr phi(k_jr) v_j^T / phi(q_i)^T sum_jr pi_jr phi(k_jr) (Eq. 14), in O(N).

    Args:
        query: (B, H, L, D).
        keys: (B, H, M, S, D).
        value: (B, H, S, E).
        log_prior: log pi_jr, 4-D, broadcastable to (B, H, M, S), used as given. None: uniform, 1 / M.
        feature_map: phi: "elu", "favor", "dpfp", or a callable (..., D) -> (..., F) that acts on one token at a time.
        key_mask: bool (B, S), True takes part; a masked key touches neither numerator nor normaliser.
        is_causal: query i sees keys j <= i + (S - L).
        initial_state: the state of the keys before these, as an earlier call returned it; every query sees it.
        return_state: whether to return (output, state) with the state after all keys.
        backend: "blockwise" (O(N), what "auto" takes) or "reference" (the L x S products, materialised).

    Returns:
        (B, H, L, E), zeros for a query whose normaliser is 0; with ``return_state``, the state too.
    """
    validation.option("backend", backend, BACKENDS)
    validation.flag("return_state", return_state)
    validation.tensor("query", query, "BHLD")
    validation.tensor("keys", keys, "BHMSD")
    validation.tensor("value", value, "BHSE")
    query_in, keys_in, value_in = autocast_inputs(query, keys, value)
    with without_autocast(query_in):
        phi_q, phi_k = _mixed_features(query_in, keys_in, log_prior, feature_map, key_mask, is_causal)
        validation.alike(query=query_in, value=value_in)
        for dim, why in ((0, "the batch of query"), (1, "the heads of query")):
            validation.size("value", value_in, dim, query_in.shape[dim], why)
        validation.size("value", value_in, 2, keys_in.shape[3], "the positions of keys")
        v = pad(value_in.to(phi_q.dtype), (0, 1), value=1.0)  # the column of ones makes the normaliser
        state = _checked_state(initial_state, phi_k, value_in)
        if not is_causal:
            sums, state = _everywhere(phi_q, phi_k, v, state, backend)
        else:
            sums, state = _causal(phi_q, phi_k, v, state, backend)
        denominator = sums[..., -1:]
        empty = denominator == 0
        out = (sums[..., :-1] / denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0).to(query_in.dtype)
    return (out, LinearState(state[..., :-1], state[..., -1])) if return_state else out


def linear_mixture_weights(
    query: Tensor,
    keys: Tensor,
    log_prior: Tensor | None = None,
    *,
    feature_map: FeatureMap = "elu",
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """A_ij = sum_r pi_jr phi(q_i) . phi(k_jr) / sum_j' sum_r pi_j'r phi(q_i) . phi(k_j'r) (Eq. 14): (B, H, L, S).

    The arguments are those of :func:`linear_mixture_attention`. Rows sum to 1; a query
    whose normaliser is 0 has a row of zeros.
    """
    validation.tensor("query", query, "BHLD")
    validation.tensor("keys", keys, "BHMSD")
    query_in, keys_in = autocast_inputs(query, keys)
    with without_autocast(query_in):
        phi_q, phi_k = _mixed_features(query_in, keys_in, log_prior, feature_map, key_mask, is_causal)
        allowed = _causal_mask(phi_q, phi_k) if is_causal else None
        return reference.linear_weights(phi_q, phi_k, allowed).to(query_in.dtype)


def features(query: Tensor, keys: Tensor, feature_map: Any) -> tuple[Tensor, Tensor]:
    """phi(q_i) (B, H, L, F) and phi(k_jr) (B, H, M, S, F), in float32 or better."""
    validation.alike(query=query, keys=keys)
    for dim, why in ((0, "the batch of query"), (1, "the heads of query"), (-1, "the features of query")):
        validation.size("keys", keys, dim, query.shape[dim], why)
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


def _mixed_features(
    query: Tensor, keys: Tensor, log_prior: Any, feature_map: Any, key_mask: Any, is_causal: Any
) -> tuple[Tensor, Tensor]:
    """phi(q_i) (B, H, L, F) and phibar_j = sum_r pi_jr phi(k_jr) (B, H, S, F), 0 where masked."""
    phi_q, phi_k = features(query, keys, feature_map)
    validation.flag("is_causal", is_causal)
    prior = validation.log_prior(log_prior, query, keys.shape[:4])
    mask = validation.token_mask("key_mask", key_mask, query, keys.shape[3], "BS")
    mixed = phi_k.mean(2) if prior is None else (prior.to(phi_k.dtype).exp().unsqueeze(-1) * phi_k).sum(2)
    return phi_q, mixed if mask is None else mixed.masked_fill(~mask[:, None, :, None], 0.0)


def _checked_state(state: Any, phi_k: Tensor, value: Tensor) -> Tensor | None:
    """None, or numerator and normaliser side by side (B, H, F, E + 1)."""
    if state is None:
        return None
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"initial_state must be the state that an earlier call returned, got {type(state).__name__}")
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


def _causal_mask(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    num_queries, num_keys = phi_q.shape[2], phi_k.shape[2]
    return masks.causal_mask(num_queries, num_keys, phi_q.device, offset=num_keys - num_queries)


def _everywhere(phi_q: Tensor, phi_k: Tensor, v: Tensor, state: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    """Every query sees every key: sums (B, H, L, E + 1) and the state after all keys."""
    past, total = _past_and_total(phi_q, phi_k, v, state)
    if backend == "reference":
        return phi_q @ phi_k.mT @ v + past, total
    return phi_q @ total, total


def _causal(phi_q: Tensor, phi_k: Tensor, v: Tensor, state: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    """Query i sees keys j <= i + (S - L)."""
    if backend == "reference":
        past, total = _past_and_total(phi_q, phi_k, v, state)
        return (phi_q @ phi_k.mT).masked_fill(~_causal_mask(phi_q, phi_k), 0.0) @ v + past, total
    offset = phi_k.shape[2] - phi_q.shape[2]
    if offset > 0:  # keys before the first query
        _, state = _past_and_total(phi_q, phi_k[:, :, :offset], v[:, :, :offset], state)
        return _chunked(phi_q, phi_k[:, :, offset:], v[:, :, offset:], state)
    if offset < 0:  # queries before the first key
        early, _ = _past_and_total(phi_q[:, :, :-offset], phi_k, v, state)
        late, total = _chunked(phi_q[:, :, -offset:], phi_k, v, state)
        return torch.cat([early, late], 2), total
    return _chunked(phi_q, phi_k, v, state)


def _past_and_total(phi_q: Tensor, phi_k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the queries get from the initial state, and the state with the keys added."""
    here = phi_k.mT @ v
    if state is None:
        return phi_q.new_zeros(*phi_q.shape[:-1], v.shape[-1]), here
    return phi_q @ state, state + here


def _chunked(phi_q: Tensor, phi_k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal sums for L = S: products inside a chunk, the running state from the chunks before it."""
    length, num_features = phi_k.shape[2:]
    if length <= 1:
        past, total = _past_and_total(phi_q, phi_k, v, state)
        return phi_q @ total if length else past, total
    size = _chunk_length(num_features, v.shape[-1])
    q, k, w = (_split(x, size) for x in (phi_q, phi_k, v))  # (B, H, n, C, ...)
    states = k.mT @ w  # (B, H, n, F, E + 1)
    if state is not None:
        states = torch.cat([state.unsqueeze(2), states], 2)
        states = states.cumsum(2)
    else:
        states = pad(states.cumsum(2), (0, 0, 0, 0, 1, 0))
    sums = q @ states[:, :, :-1] + (q @ k.mT).tril() @ w
    return sums.flatten(2, 3)[:, :, :length], states[:, :, -1]


def _chunk_length(num_features: int, value_width: int) -> int:
    """Long enough that the state's F x E products are amortised, short enough that the C x C products are few."""
    return min(256, max(64, 1 << (max(num_features, value_width) - 1).bit_length()))


def _split(x: Tensor, size: int) -> Tensor:
    """(B, H, N, F) as (B, H, n, C, F), zeros appended."""
    return pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))
