"""Linear attention in O(N): one state of all keys; under causality chunks, each with the state before it."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.functional import masks
from mgk.functional.backends import Backend, define_operator
from mgk.functional.linear.inputs import LinearInputs
from mgk.functional.mixture.blocks import block_scores, blocks
from mgk.functional.mixture.features import ScoreFeatures
from mgk.functional.mixture.reference import weighted_sums


class Chunked(Backend[LinearInputs]):
    """Attention in time and memory O(N); counts in memory O(N) and time O(N^2)."""

    name = "blockwise"
    priority = 1

    def attention(self, inputs: LinearInputs) -> tuple[Tensor, Tensor]:
        """Numerator and denominator (B, H, L, E + 1) of Eq. 14, and the state after all keys (B, H, F, E + 1)."""
        phi_q, phi_k, values = inputs.query, inputs.mixed_keys(), inputs.values_and_ones()
        offset = phi_k.shape[2] - phi_q.shape[2]
        if not inputs.is_causal:
            state = _next_state(phi_k, values, inputs.state)
            return phi_q @ state, state
        if offset > 0:  # keys before the first query
            past = _next_state(phi_k[:, :, :offset], values[:, :, :offset], inputs.state)
            return _causal(phi_q, phi_k[:, :, offset:], values[:, :, offset:], past)
        if offset == 0:
            return _causal(phi_q, phi_k, values, inputs.state)
        early = _causal(phi_q[:, :, :-offset], phi_k[:, :, :0], values[:, :, :0], inputs.state)[0]
        late, state = _causal(phi_q[:, :, -offset:], phi_k, values, inputs.state)
        return torch.cat([early, late], 2), state

    def statistics(self, inputs: LinearInputs, query_mask: Tensor | None, points: Tensor | None) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr."""
        return [torch.ops.mgk.linear_counts(inputs.query, inputs.keys, query_mask, inputs.is_causal)]


def _next_state(phi_k: Tensor, values: Tensor, state: Tensor | None) -> Tensor:
    """The state with the keys added."""
    added = phi_k.mT @ values
    return added if state is None else state + added


def _causal(phi_q: Tensor, phi_k: Tensor, values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal sums for L = S: products within a chunk, the running state from the chunks before it."""
    length, num_features = phi_k.shape[2:]
    if length <= 1:
        state = _next_state(phi_k, values, state)
        return phi_q @ state, state
    size = _chunk_length(num_features, values.shape[-1])
    q, k, v = (_split(x, size) for x in (phi_q, phi_k, values))  # (B, H, n, C, ...)
    added = k.mT @ v  # (B, H, n, F, E + 1)
    first = torch.zeros_like(added[:, :, 0]) if state is None else state
    states = torch.cat([first.unsqueeze(2), added], 2).cumsum(2)
    sums = q @ states[:, :, :-1] + (q @ k.mT).tril() @ v
    return sums.flatten(2, 3)[:, :, :length], states[:, :, -1]


def _chunk_length(num_features: int, value_width: int) -> int:
    """Long enough to amortise the state's F x E products, short enough for few C x C products."""
    return min(256, max(64, 1 << (max(num_features, value_width) - 1).bit_length()))


def _split(x: Tensor, size: int) -> Tensor:
    """(B, H, N, F) as (B, H, n, C, F), zeros appended."""
    return pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _linear_counts(query: Tensor, keys: Tensor, query_mask: Tensor | None, is_causal: bool) -> Tensor:
    features = ScoreFeatures(query, keys, None, keys.new_zeros(keys.shape[:-1]))
    counts = torch.zeros_like(features.key_bias)
    for queries, key_blocks in blocks(features, is_causal):
        block_mask = None if query_mask is None else query_mask[:, queries]
        for positions in key_blocks:
            products = block_scores(features, None, is_causal, queries, positions)
            products.masked_fill_(products == -torch.inf, 0.0)
            gamma = masks.divide(products, products.sum(2, keepdim=True))
            counts[:, :, :, positions] += weighted_sums(gamma, block_mask, None)[0]
    return counts


define_operator(
    "linear_counts(Tensor query, Tensor keys, Tensor? query_mask, bool is_causal) -> Tensor",
    _linear_counts,
    lambda query, keys, *others: keys.new_empty(keys.shape[:-1]),
)
