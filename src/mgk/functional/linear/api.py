"""Linear attention with features phibar_j = sum_r pi_jr phi(k_jr) (Eq. 14).

    h_i = phi(q_i)^T sum_j phibar_j v_j^T / phi(q_i)^T sum_j phibar_j

O(N) with and without causality; token by token with a state of constant size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.functional.backends import register, select
from mgk.functional.linear import reference
from mgk.functional.linear.chunked import Chunked
from mgk.functional.linear.feature_maps import FeatureMap
from mgk.functional.linear.inputs import LinearInputs, validate_inputs
from mgk.functional.linear.triton_backend import LinearTriton
from mgk.functional.validation import eager_in_old_graphs, without_autocast

register("linear", reference.LinearReference(), Chunked(), LinearTriton())


class LinearState(NamedTuple):
    """The sums over all keys so far, of constant size.

    Attributes:
        numerator: sum_j phibar_j v_j^T (B, H, F, E).
        normaliser: sum_j phibar_j (B, H, F).
    """

    numerator: Tensor
    normaliser: Tensor


@eager_in_old_graphs
def linear_mixture_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    log_prior: Tensor | None = None,
    *,
    feature_map: FeatureMap = "elu",
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    window: None = None,
    segment_ids: Tensor | None = None,
    initial_state: LinearState | tuple[Tensor, Tensor] | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    r"""h_i = phi(q_i)^T sum_j phibar_j v_j^T / phi(q_i)^T sum_j phibar_j (Eq. 14), in O(N).

    phibar_j = sum_r pi_jr phi(k_jr).

    Args:
        query: (B, Hq, L, D), Hq a multiple of H: query head h reads key head h // (Hq / H).
        keys: (B, H, M, S, D).
        value: (B, H, S, E).
        log_prior: log pi_jr, 4-D, broadcastable to (B, H, M, S). None: uniform.
        feature_map: phi: "elu", "favor", "dpfp", or a callable of one token.
        key_mask: bool (B, S), True takes part.
        is_causal: query i sees keys j <= i + (S - L).
        window: None: a state is a sum over all keys; a window raises.
        segment_ids: int (B, S), as of :func:`mgk.mixture_attention`.
        initial_state: of earlier keys, for the first position's segment.
        return_state: whether to return (output, state).
        backend: "auto", "triton" (GPUs), "blockwise" (O(N)) or "reference".

    Returns:
        (B, Hq, L, E), zeros where the normaliser is 0; or (output, state).
    """
    validation.flag("return_state", return_state)
    validation.tensor("value", value, "BHSE")
    options: dict[str, Any] = {"feature_map": feature_map, "key_mask": key_mask, "is_causal": is_causal}
    options |= {"window": window, "segment_ids": segment_ids, "initial_state": initial_state}
    inputs = validate_inputs(query, keys, value, log_prior, **options)
    out, state = attend(inputs, backend)
    return (out, state) if return_state else out


@eager_in_old_graphs
def linear_mixture_weights(
    query: Tensor,
    keys: Tensor,
    log_prior: Tensor | None = None,
    *,
    feature_map: FeatureMap = "elu",
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """A_ij = phi(q_i) . phibar_j / sum_j' phi(q_i) . phibar_j' (Eq. 14): (B, Hq, L, S).

    The arguments are those of :func:`linear_mixture_attention`. Rows sum to 1, or to 0
    where the normaliser is 0.
    """
    options: dict[str, Any] = {"feature_map": feature_map, "key_mask": key_mask, "is_causal": is_causal}
    options |= {"segment_ids": segment_ids}
    return weights(validate_inputs(query, keys, log_prior=log_prior, **options))


def attend(inputs: LinearInputs, backend: str) -> tuple[Tensor, LinearState]:
    """The output (B, Hq, L, E), and the state after all keys."""
    with without_autocast(inputs.value):
        out, numerator, normaliser = select("linear", inputs, backend).attention(inputs)
        out = out.to(inputs.value.dtype)
        if inputs.addend is not None:
            last = inputs.addend[:, :: inputs.group, -1:]  # as of the last query
            out = out + inputs.addend
            numerator, normaliser = numerator + last, normaliser + last.squeeze(3)
    return out, LinearState(numerator, normaliser)


def weights(inputs: LinearInputs) -> Tensor:
    """The position weights (B, Hq, L, S) of validated inputs."""
    with without_autocast(inputs.value):
        out = reference.weights(inputs).to(inputs.value.dtype)
        return out if inputs.addend is None else out + inputs.addend


@torch.no_grad()
def counts(inputs: LinearInputs, query_mask: Tensor | None = None, backend: str = "auto") -> Tensor:
    """N_jr = sum_i gamma_ijr (B, H, M, S), over the queries of ``query_mask`` (B, L)."""
    with without_autocast(inputs.value):
        return select("linear", inputs, backend, "counts").statistics(inputs, query_mask, None)[0]
