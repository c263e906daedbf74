"""Eq. 14 with the L x S products materialised: the oracle of the linear family."""

from torch import Tensor

from mgk.functional import masks
from mgk.functional.backends import Backend
from mgk.functional.linear.inputs import LinearInputs
from mgk.functional.mixture.reference import weighted_sums


class LinearReference(Backend[LinearInputs]):
    """The sums over all pairs, in time and memory O(N^2)."""

    name = "reference"

    def attention(self, inputs: LinearInputs) -> tuple[Tensor, Tensor]:
        """Numerator and denominator (B, H, L, E + 1) of Eq. 14, and the state after all keys (B, H, F, E + 1)."""
        phi_k, values = inputs.mixed_keys(), inputs.values_and_ones()
        sums, state = _products(inputs.query, phi_k, inputs.is_causal) @ values, phi_k.mT @ values
        if inputs.state is None:
            return sums, state
        return sums + inputs.query @ inputs.state, state + inputs.state

    def statistics(self, inputs: LinearInputs, query_mask: Tensor | None, points: Tensor | None) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr."""
        return weighted_sums(responsibilities(inputs), query_mask, points)


def weights(inputs: LinearInputs) -> Tensor:
    """A_ij = phi(q_i) . phibar_j / sum_j' phi(q_i) . phibar_j' (Eq. 14): (B, H, L, S)."""
    products = _products(inputs.query, inputs.mixed_keys(), inputs.is_causal)
    return masks.divide(products, products.sum(-1, keepdim=True))


def responsibilities(inputs: LinearInputs) -> Tensor:
    """gamma_ijr = pi_jr phi(q_i) . phi(k_jr) / sum_r' pi_jr' phi(q_i) . phi(k_jr') (B, H, M, L, S), 0 if masked."""
    products = _products(inputs.query.unsqueeze(2), inputs.keys, inputs.is_causal)
    return masks.divide(products, products.sum(2, keepdim=True))


def _products(phi_q: Tensor, phi_k: Tensor, is_causal: bool) -> Tensor:
    """phi(q_i) . phi(k_j) (..., L, S), 0 beyond the causal diagonal."""
    products = phi_q @ phi_k.mT
    if not is_causal:
        return products
    num_queries, num_keys = products.shape[-2:]
    causal = masks.causal_mask(num_queries, num_keys, products.device, offset=num_keys - num_queries)
    return products.masked_fill(~causal, 0.0)
