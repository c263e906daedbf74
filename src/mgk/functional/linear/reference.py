"""Eq. 14 with the L x S products in memory: the oracle."""

from torch import Tensor

from mgk.functional import masks
from mgk.functional.backends import Backend
from mgk.functional.linear.inputs import LinearInputs
from mgk.functional.mixture.blocks import repeat_heads
from mgk.functional.mixture.reference import weighted_sums


class LinearReference(Backend[LinearInputs]):
    """The sums over all pairs, in time and memory O(N^2)."""

    name = "reference"

    def attention(self, inputs: LinearInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The output, and the state after all keys."""
        return quotients(*self._sums(inputs))

    def _sums(self, inputs: LinearInputs) -> tuple[Tensor, Tensor]:
        """Numerator and denominator (B, Hq, L, E + 1), and the last state."""
        phi_q, phi_k, values = inputs.queries(), inputs.mixed_keys(), inputs.values_and_ones()
        sums = _products(phi_q, phi_k, inputs) @ repeat_heads(values, inputs.group)
        segments, num_queries = inputs.key_range.segments, inputs.query.shape[2]
        if segments is None:
            in_first, in_last, last_is_first = None, phi_k, None
        else:
            starts = segments[0]  # (B, S)
            in_first = (starts[:, starts.shape[1] - num_queries :] == 0)[:, None, :, None]
            is_last = starts == starts[:, -1:]
            in_last = phi_k.where(is_last[:, None, :, None], 0.0)
            last_is_first = (starts[:, -1:] == 0)[:, None, :, None]
        state = in_last.mT @ values
        first = inputs.joined_state()
        if first is None:
            return sums, state
        earlier = phi_q @ repeat_heads(first, inputs.group)
        if in_first is None or last_is_first is None:
            return sums + earlier, state + first
        return sums + earlier.where(in_first, 0.0), state + first.where(last_is_first, 0.0)

    def statistics(
        self, inputs: LinearInputs, query_mask: Tensor | None, points: Tensor | None
    ) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr."""
        return weighted_sums(responsibilities(inputs), query_mask, points, inputs.group)


def quotients(sums: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B, Hq, L, E), and the state (B, H, F, E), (B, H, F), of sums with their denominators."""
    return masks.divide(sums[..., :-1], sums[..., -1:]), state[..., :-1], state[..., -1]


def weights(inputs: LinearInputs) -> Tensor:
    """A_ij = phi(q_i) . phibar_j / sum_j' phi(q_i) . phibar_j' (Eq. 14): (B, Hq, L, S)."""
    products = _products(inputs.queries(), inputs.mixed_keys(), inputs)
    return masks.divide(products, products.sum(-1, keepdim=True))


def responsibilities(inputs: LinearInputs) -> Tensor:
    """gamma_ijr = pi_jr phi(q_i) . phi(k_jr) / phi(q_i) . phibar_j, 0 if masked: (B, Hq, M, L, S)."""
    products = _products(inputs.queries().unsqueeze(2), inputs.components(), inputs)
    return masks.divide(products, products.sum(2, keepdim=True))


def _products(phi_q: Tensor, phi_k: Tensor, inputs: LinearInputs) -> Tensor:
    """phi(q_i) . phi(k_j) (B, Hq, ..., L, S), 0 for excluded pairs."""
    products = phi_q @ repeat_heads(phi_k, inputs.group).mT
    if inputs.key_range.is_whole:
        return products
    seen = inputs.key_range.mask(products.shape[-2], products.shape[-1], products.device)
    return products.where(seen if products.ndim == 4 else seen.unsqueeze(2), 0.0)
