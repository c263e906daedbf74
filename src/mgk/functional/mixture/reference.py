"""The paper's equations, materialised: in float64 the oracle of every backend.

Tensors of scores are (B, Hq, M, L, S): the keys of a head are repeated for the query
heads that read it. The backend ``eager`` is the same for small inputs.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout

from mgk.functional import masks
from mgk.functional.backends import Backend
from mgk.functional.mixture.inputs import AttentionInputs, compute_dtype, finest_dtype
from mgk.functional.validation import is_exporting, known, needs_grad, why_untransformable

# Up to this many scores the set-up of a fused backend takes longer than they do.
MAX_SCORES = 2**16


def attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """h_i = sum_j A_ij v_j (Eq. 10) with dropout of A_ij; and the lse."""
    inputs = inputs.with_repeated_heads()
    mass, row_max = _mass(inputs)
    total = mass.sum(-1, keepdim=True)
    out = dropout(masks.divide(mass, total), inputs.dropout_p) @ inputs.value
    if not inputs.return_lse:
        return out, None
    lse = row_max + total.masked_fill(total == 0, 1.0).log() + inputs.log_uniform_prior
    return out, lse.masked_fill(total == 0, -torch.inf).squeeze(-1)


def weights(inputs: AttentionInputs) -> Tensor:
    """A_ij = sum_r pi_jr e_ijr / sum_j' sum_r pi_j'r e_ij'r (Eq. 9), hard: max_r (Eq. 12)."""
    mass, _ = _mass(inputs)
    return masks.divide(mass, mass.sum(-1, keepdim=True))


def _mass(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """sum_r pi_jr e_ijr / exp(row_max_i) (B, Hq, L, S), hard: max_r; and row_max (B, Hq, L, 1)."""
    scores = _masked_scores(inputs)
    if scores.numel() == 0:
        return scores.sum(2), scores.new_zeros(*scores.shape[:2], scores.shape[3], 1)
    if inputs.is_hard:  # the gradient goes to the winner, the lowest r on a tie
        scores = scores.max(dim=2, keepdim=True).values
    row_max = _finite(scores.detach().amax((2, 4), keepdim=True))
    return (scores - row_max).exp().sum(2), row_max.squeeze(2)


def responsibilities(inputs: AttentionInputs) -> Tensor:
    """gamma_ijr = pi_jr e_ijr / sum_r' pi_jr' e_ijr' (Eq. 11), hard one-hot: (B, Hq, M, L, S)."""
    return component_shares(_masked_scores(inputs), inputs.is_hard)


def component_shares(scores: Tensor, is_hard: bool) -> Tensor:
    """The softmax over r of s_ijr, hard one-hot; 0 if excluded."""
    if is_hard:
        winner = scores.argmax(dim=2, keepdim=True)
        return torch.zeros_like(scores).scatter(2, winner, 1.0) * (scores > -torch.inf)
    likelihood = (scores - _finite(scores.detach().amax(2, keepdim=True))).exp()
    return masks.divide(likelihood, likelihood.sum(2, keepdim=True))


def weighted_sums(
    gamma: Tensor, query_mask: Tensor | None, points: Tensor | None, group: int = 1
) -> list[Tensor]:
    """sum_i gamma_ijr, and with points x_i sum_i gamma_ijr x_i and sum_i gamma_ijr |x_i|^2.

    Args:
        gamma: (B, Hq, M, L, S).
        query_mask: bool (B, L).
        points: (B, Hq, L, D).
        group: Hq / H, the query heads whose sums are added up.
    """
    if query_mask is not None:
        gamma = gamma * query_mask[:, None, None, :, None]
    if points is not None:
        gamma = gamma.to(points.dtype)
    sums = [gamma.sum(3)]
    if points is not None:
        norms = points.square().sum(-1)[:, :, None, :, None]
        sums += [gamma.mT @ points.unsqueeze(2), (gamma * norms).sum(3)]
    return [sum_over_groups(x, group) for x in sums]


def sum_over_groups(x: Tensor, group: int) -> Tensor:
    """(B, Hq, ...) summed over the query heads of each key head: (B, H, ...)."""
    return x if group == 1 else x.unflatten(1, (x.shape[1] // group, group)).sum(2)


def log_kernel(inputs: AttentionInputs) -> Tensor:
    """-|q_i - k_jr|^2 / (2 sigma_jr^2) (Eq. 9) or q_i . k_jr / sigma_jr^2 (Eq. 8): (B, H, M, L, S)."""
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
    inputs = inputs.with_normalised_prior().with_key_mask_in_prior().at_full_precision()
    inputs = inputs.with_expanded_keys().with_repeated_heads()
    scores = log_kernel(inputs)
    if inputs.log_prior is not None:
        scores = masks.add(scores, inputs.log_prior.unsqueeze(-2))
    mask = inputs.attn_mask
    if not inputs.key_range.is_whole:
        mask = masks.join(mask, inputs.key_range.mask(inputs.num_queries, inputs.num_keys, scores.device))
    if mask is None:
        return scores
    mask = mask.unsqueeze(2)
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else masks.add(scores, mask)


def _finite(maximum: Tensor) -> Tensor:
    """A maximum to subtract: 0 in place of -inf."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


class Eager(Backend[AttentionInputs]):
    """Eq. 9 to 12 in the precision of the inputs, float32 or better."""

    name = "eager"
    priority = 3

    def is_efficient(self, inputs: AttentionInputs) -> bool:
        """For few scores, one query, and graphs that need torch's own operators."""
        if is_exporting() or why_untransformable():
            return True
        return known(inputs.num_scores <= MAX_SCORES) or known(inputs.num_queries == 1)

    def dtype(self, inputs: AttentionInputs) -> torch.dtype:
        """float64 where a prior or a variance is learned."""
        is_sum_over_pairs = needs_grad(inputs.log_prior) or needs_grad(inputs.variance)
        return finest_dtype(inputs.query) if is_sum_over_pairs else compute_dtype(inputs.query)

    def attention(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        return attention(inputs.in_dtype(self.dtype(inputs)))

    def statistics(
        self, inputs: AttentionInputs, query_mask: Tensor | None, points: Tensor | None
    ) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr, and with points the moments."""
        inputs = inputs.in_dtype(self.dtype(inputs))
        return weighted_sums(responsibilities(inputs), query_mask, points, inputs.group)


class Reference(Eager):
    """The same equations in float64, for tests and for those who name it."""

    name = "reference"
    priority = 0

    def dtype(self, inputs: AttentionInputs) -> torch.dtype:
        """float64 where the device has it."""
        return finest_dtype(inputs.query)
