"""Linear attention in O(N): one state, or one per chunk."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.functional import masks
from mgk.functional.backends import Backend, define_operator
from mgk.functional.linear.inputs import LinearInputs
from mgk.functional.linear.reference import quotients
from mgk.functional.masks import KeyRange
from mgk.functional.mixture.blocks import block_scores, blocks
from mgk.functional.mixture.features import ScoreFeatures
from mgk.functional.mixture.reference import weighted_sums
from mgk.functional.validation import is_exporting, is_static


class Chunked(Backend[LinearInputs]):
    """Attention in O(N); counts in memory O(N) and time O(N^2)."""

    name = "blockwise"
    priority = 1

    def attention(self, inputs: LinearInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The output, and the state after all keys."""
        return quotients(*self._sums(inputs))

    def _sums(self, inputs: LinearInputs) -> tuple[Tensor, Tensor]:
        """Numerator and denominator (B, Hq, L, E + 1), and the last state."""
        phi_q, phi_k, values = inputs.queries(), inputs.mixed_keys(), inputs.values_and_ones()
        first = inputs.joined_state()
        num_queries, offset = phi_q.shape[2], phi_k.shape[2] - phi_q.shape[2]
        if inputs.key_range.is_whole or phi_k.shape[2] == 0:
            state = _next_state(phi_k, values, first)
            return _read(phi_q, state), state
        if inputs.key_range.segments is not None:  # the queries are the last positions
            sums, state = _in_chunks(pad(phi_q, (0, 0, offset, 0)), phi_k, values, first, inputs.key_range)
            return sums[:, :, offset:], state
        if offset > 0:  # keys before the first query
            past = _next_state(phi_k[:, :, :offset], values[:, :, :offset], first)
            return _in_chunks(phi_q, phi_k[:, :, offset:], values[:, :, offset:], past, inputs.key_range)
        early, late = phi_q.split([-offset, num_queries + offset], 2)
        sums, state = _in_chunks(late, phi_k, values, first, inputs.key_range)
        if offset == 0:
            return sums, state
        # queries before the first key see the keys of an earlier state alone
        past = torch.zeros_like(state) if first is None else first
        return torch.cat([_read(early, past), sums], 2), state

    def statistics(
        self, inputs: LinearInputs, query_mask: Tensor | None, points: Tensor | None
    ) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr."""
        _, right, segments = inputs.key_range
        phi = inputs.queries(), inputs.components()
        return [torch.ops.mgk.linear_counts(*phi, query_mask, segments, right == 0)]


def _next_state(phi_k: Tensor, values: Tensor, state: Tensor | None) -> Tensor:
    """The state with the keys added."""
    added = phi_k.mT @ values
    return added if state is None else state + added


def _read(phi_q: Tensor, state: Tensor) -> Tensor:
    """phi(q_i)^T state of its key head: (B, Hq, L, E + 1)."""
    batch, heads, num_queries, width = phi_q.shape
    group = heads // max(1, state.shape[1])
    folded = phi_q.reshape(batch, state.shape[1], group * num_queries, width)
    return (folded @ state).reshape(batch, heads, num_queries, state.shape[-1])


def _in_chunks(
    phi_q: Tensor, phi_k: Tensor, values: Tensor, state: Tensor | None, key_range: KeyRange
) -> tuple[Tensor, Tensor]:
    """Sums for L = S under causality or in segments, and the last state.

    Products within a chunk; from the chunks before it, and without causality after it,
    the state of the segment that they share.
    """
    heads, group, length = phi_k.shape[1], phi_q.shape[1] // max(1, phi_k.shape[1]), phi_q.shape[2]
    if is_exporting() and not is_static(length) and key_range.segments is None:
        # the number of chunks would be fixed
        products = phi_q.unflatten(1, (heads, group)) @ phi_k.mT.unsqueeze(2)  # (B, H, G, L, L)
        sums = (products.tril() @ values.unsqueeze(2)).flatten(1, 2)
        return sums if state is None else sums + _read(phi_q, state), _next_state(phi_k, values, state)
    size = _chunk_length(phi_k.shape[3], values.shape[3])
    k, v = (_split(x, size) for x in (phi_k, values))  # (B, H, n, C, ...)
    q = _split(phi_q, size).unflatten(1, (heads, group)).movedim(2, 3).flatten(3, 4)  # (B, H, n, G C, F)
    first = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    products = (q @ k.mT).unflatten(3, (group, size))  # (B, H, n, G, C, C)
    if key_range.segments is None:
        states = torch.cat([first.unsqueeze(2), k.mT @ v], 2).cumsum(2)
        sums = q @ states[:, :, :-1] + products.tril().flatten(3, 4) @ v
        return _joined(sums, group, length), states[:, :, -1]
    segments = _Segments(key_range.segments, size)
    states = segments.states_before(k, v, first)
    sums = q.where(segments.begins_before.tile(group)[:, None, :, :, None], 0.0) @ states[:, :, :-1]
    if not key_range.is_causal:
        after = segments.states_after(k, v)
        sums = sums + q.where(segments.ends_after.tile(group)[:, None, :, :, None], 0.0) @ after
    within = segments.within(key_range.is_causal)[:, None, :, None]  # (B, 1, n, 1, C, C)
    sums = sums + products.where(within, 0.0).flatten(3, 4) @ v
    return _joined(sums, group, length), states[:, :, -1]


class _Segments:
    """Where segments begin and end, in n chunks of size C."""

    def __init__(self, bounds: Tensor, size: int) -> None:
        length, rest = bounds.shape[2], -bounds.shape[2] % size
        # a position beyond the last is a segment of no keys
        self.starts, self.ends = pad(bounds, (0, rest), value=length).unflatten(2, (-1, size))  # (B, n, C)
        self.positions = torch.arange(length + rest, device=bounds.device).view(-1, size)
        # at least 1: an initial state belongs to the first segment
        self.edges = self.positions[:, 0].clamp_min(1)
        self.begins_before = self.starts < self.edges[:, None]  # (B, n, C)
        self.ends_after = self.ends > self.positions[:, -1:] + 1
        # where the segment that is open after each chunk begins
        self.next_starts = torch.cat([self.starts[:, 1:, 0], bounds[0, :, -1:]], 1)  # (B, n)
        self.previous_ends = pad(self.ends[:, :-1, -1], (1, 0))  # (B, n)

    def within(self, is_causal: bool) -> Tensor:
        """The pairs of a chunk that share a segment: (B, n, C, C)."""
        queries, keys = self.positions.unsqueeze(2), self.positions.unsqueeze(1)
        seen = (keys >= self.starts.unsqueeze(3)) & (keys < self.ends.unsqueeze(3))
        return seen & (keys <= queries) if is_causal else seen

    def states_before(self, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        """The state that reaches each chunk, and that of the last segment."""
        is_open = self.positions >= self.next_starts.unsqueeze(2)  # (B, n, C)
        added = k.where(is_open[:, None, :, :, None], 0.0).mT @ v
        goes_on = self.next_starts < self.edges
        start = added[:, :, 0] + first.where(goes_on[:, None, :1, None], 0.0)
        states = _gated_sums(torch.cat([start.unsqueeze(2), added[:, :, 1:]], 2), goes_on)
        return torch.cat([first.unsqueeze(2), states], 2)

    def states_after(self, k: Tensor, v: Tensor) -> Tensor:
        """The state of the keys after each chunk, of its open segment."""
        is_open = self.positions < self.previous_ends.unsqueeze(2)
        added = k.where(is_open[:, None, :, :, None], 0.0).mT @ v
        goes_on = self.previous_ends > self.positions[:, -1] + 1
        sums = _gated_sums(added.flip(2), goes_on.flip(1)).flip(2)
        return torch.cat([sums[:, :, 1:], torch.zeros_like(sums[:, :, :1])], 2)


def _gated_sums(added: Tensor, goes_on: Tensor) -> Tensor:
    """state_c = added_c + (state_(c-1) where goes_on_c), in log2(n) steps."""
    step = 1
    while step < added.shape[2]:
        earlier = added[:, :, :-step].where(goes_on[:, None, step:, None, None], 0.0)
        added = torch.cat([added[:, :, :step], added[:, :, step:] + earlier], 2)
        goes_on = torch.cat([torch.zeros_like(goes_on[:, :step]), goes_on[:, step:] & goes_on[:, :-step]], 1)
        step *= 2
    return added


def _joined(sums: Tensor, group: int, length: int) -> Tensor:
    """(B, H, n, G C, E + 1) as (B, Hq, L, E + 1)."""
    sums = sums.unflatten(3, (group, sums.shape[3] // group)).movedim(3, 2)  # (B, H, G, n, C, E + 1)
    return sums.flatten(3, 4).flatten(1, 2)[:, :, :length]


def _chunk_length(num_features: int, value_width: int) -> int:
    """Long enough for the F x E products, short enough for the C x C ones."""
    return min(256, max(64, 1 << (max(num_features, value_width) - 1).bit_length()))


def _split(x: Tensor, size: int) -> Tensor:
    """(B, H, N, F) as (B, H, n, C, F), zeros appended; at least one chunk."""
    length = max(size, x.shape[2])
    return pad(x, (0, 0, 0, length - x.shape[2] + -length % size)).unflatten(2, (-1, size))


def _linear_counts(
    query: Tensor, keys: Tensor, query_mask: Tensor | None, segments: Tensor | None, is_causal: bool
) -> Tensor:
    features = ScoreFeatures(query, keys, None, keys.new_zeros(keys.shape[:-1]))
    counts = torch.zeros_like(features.key_bias)
    key_range = KeyRange(None, 0 if is_causal else None, segments)
    for queries, key_blocks in blocks(features, key_range):
        block_mask = None if query_mask is None else query_mask[:, queries]
        for positions in key_blocks:
            products = block_scores(features, None, key_range, queries, positions)
            products.masked_fill_(products == -torch.inf, 0.0)
            gamma = masks.divide(products, products.sum(2, keepdim=True))
            counts[:, :, :, positions] += weighted_sums(gamma, block_mask, None, features.group)[0]
    return counts


define_operator(
    "linear_counts(Tensor query, Tensor keys, Tensor? query_mask, Tensor? segments, bool is_causal) -> Tensor",
    _linear_counts,
    lambda query, keys, *others: keys.new_empty(keys.shape[:-1]),
)
