"""The paper's equations, materialised: in float64 the oracle of every backend, otherwise the path of small inputs.

A log kernel is log exp(-|q_i - k_jr|^2 / (2 sigma_jr^2)) (Eq. 9) or log exp(q_i . k_jr / sigma_jr^2) (Eq. 8). Tensors
of scores are (B, H, M, L, S).
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout

from mgk.functional import masks
from mgk.functional.backends import Backend
from mgk.functional.mixture.inputs import AttentionInputs, compute_dtype, finest_dtype, needs_grad

# Up to this many scores the set-up of a fused backend takes longer than the scores themselves.
MAX_SCORES = 2**16


def attention(inputs: AttentionInputs) -> Tensor:
    """h_i = sum_j A_ij v_j (Eq. 10), dropout acting on A_ij."""
    return dropout(weights(inputs), inputs.dropout_p) @ inputs.value


def weights(inputs: AttentionInputs) -> Tensor:
    """A_ij = sum_r pi_jr e_ijr / sum_j' sum_r pi_j'r e_ij'r (Eq. 9), hard: max_r in place of sum_r pi (Eq. 12)."""
    scores = _masked_scores(inputs)
    if scores.numel() == 0:
        return scores.sum(2)
    if inputs.is_hard:
        scores = scores.max(dim=2, keepdim=True).values  # the gradient goes to the winner, the lowest r on a tie
    row_max = _finite(scores.detach().amax((2, 4), keepdim=True))
    mass = (scores - row_max).exp().sum(2)  # (B, H, L, S)
    return masks.divide(mass, mass.sum(-1, keepdim=True))


def responsibilities(inputs: AttentionInputs) -> Tensor:
    """gamma_ijr = pi_jr e_ijr / sum_r' pi_jr' e_ijr' (Eq. 11); hard: 1 for the nearest component. (B, H, M, L, S)."""
    return component_shares(_masked_scores(inputs), inputs.is_hard)


def component_shares(scores: Tensor, is_hard: bool) -> Tensor:
    """The softmax over r of scores s_ijr, hard: one-hot; 0 for pairs that are excluded."""
    if is_hard:
        winner = scores.argmax(dim=2, keepdim=True)
        return torch.zeros_like(scores).scatter(2, winner, 1.0) * (scores > -torch.inf)
    likelihood = (scores - _finite(scores.detach().amax(2, keepdim=True))).exp()
    return masks.divide(likelihood, likelihood.sum(2, keepdim=True))


def weighted_sums(gamma: Tensor, query_mask: Tensor | None, points: Tensor | None) -> list[Tensor]:
    """sum_i gamma_ijr, and with points x_i sum_i gamma_ijr x_i and sum_i gamma_ijr |x_i|^2, over unmasked queries.

    Args:
        gamma: (B, H, M, L, S).
        query_mask: bool (B, L).
        points: (B, H, L, D).
    """
    if query_mask is not None:
        gamma = gamma * query_mask[:, None, None, :, None]
    if points is None:
        return [gamma.sum(3)]
    norms = points.square().sum(-1)[:, :, None, :, None]
    return [gamma.sum(3), gamma.mT @ points.unsqueeze(2), (gamma * norms).sum(3)]


def log_kernel(inputs: AttentionInputs) -> Tensor:
    """-|q_i - k_jr|^2 / (2 sigma_jr^2), expanded about the mean key, or q_i . k_jr / sigma_jr^2: (B, H, M, L, S)."""
    variance = inputs.variance
    if isinstance(variance, Tensor):
        variance = variance.unsqueeze(-2)  # (B, H, M, 1, S)
    if inputs.kernel == "dot":
        return inputs.query.unsqueeze(2) @ inputs.keys.mT / variance
    centre = inputs.centre()
    query = (inputs.query - centre).unsqueeze(2)
    keys = inputs.keys - centre.unsqueeze(2)
    squared = query.square().sum(-1, keepdim=True) - 2 * query @ keys.mT + keys.square().sum(-1).unsqueeze(-2)
    return -squared / (2 * variance)


def _masked_scores(inputs: AttentionInputs) -> Tensor:
    """s_ijr = log pi_jr + log kernel, -inf where the masks exclude the pair."""
    inputs = inputs.with_normalised_prior().with_key_mask_in_prior().at_full_precision().with_expanded_keys()
    scores = log_kernel(inputs)
    if inputs.log_prior is not None:
        scores = scores + inputs.log_prior.unsqueeze(-2)
    mask = inputs.attn_mask
    if inputs.is_causal:
        num_queries, num_keys = scores.shape[3:]
        causal = masks.causal_mask(num_queries, num_keys, scores.device, offset=num_keys - num_queries)
        mask = masks.join(mask, causal[None, None])
    if mask is None:
        return scores
    mask = mask.unsqueeze(2)
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _finite(maximum: Tensor) -> Tensor:
    """A maximum that can be subtracted: 0 in place of the -inf of a row with no key left."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


class Eager(Backend[AttentionInputs]):
    """Eq. 9 to 12 in the precision of the inputs, float32 or better."""

    name = "eager"
    priority = 3

    def is_efficient(self, inputs: AttentionInputs) -> bool:
        """For few scores, and for one query, whose scores need no blocks."""
        return inputs.num_scores <= MAX_SCORES or inputs.num_queries == 1

    def dtype(self, inputs: AttentionInputs) -> torch.dtype:
        """float64 where a prior or a variance is learned: their gradients accumulate the rounding of every pair."""
        is_sum_over_pairs = needs_grad(inputs.log_prior) or needs_grad(inputs.variance)
        return finest_dtype(inputs.query) if is_sum_over_pairs else compute_dtype(inputs.query)

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        return attention(inputs.in_dtype(self.dtype(inputs)))

    def statistics(self, inputs: AttentionInputs, query_mask: Tensor | None, points: Tensor | None) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr, and with points the moments."""
        inputs = inputs.in_dtype(self.dtype(inputs))
        points = None if points is None else points.to(inputs.query.dtype)
        return weighted_sums(responsibilities(inputs), query_mask, points)


class Reference(Eager):
    """The same equations in float64, for tests and for those who name it."""

    name = "reference"
    priority = 0

    def dtype(self, inputs: AttentionInputs) -> torch.dtype:
        """float64 where the device has it."""
        return finest_dtype(inputs.query)
