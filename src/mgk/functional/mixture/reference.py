r"""The paper's equations, written down plainly. Materialises every matrix; every other backend is tested against it.

A log kernel is log exp(-|q_i - k_jr|^2 / (2 sigma_jr^2)) (Eq. 9) or log exp(q_i . k_jr / sigma_jr^2) (Eq. 8). Tensors
of scores
are (B, H, M, L, S).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from mgk.functional import masks
from mgk.functional.mixture.inputs import Call, finest_dtype

NAME = "reference"
VARIANCE_FLOOR = 1e-6


class MStep(NamedTuple):
    """What the M-step makes of the responsibilities (Eq. 11, 13). A component that no query reaches stays as it was.

    Attributes:
        counts: N_jr (B, H, M, S).
        prior: pi_jr = N_jr / sum_r N_jr (B, H, M, S).
        keys: k_jr^new (B, H, M, S, D).
        variance: (sigma_jr^2)^new, with the 1/D of an isotropic Gaussian (B, H, M, S).
    """

    counts: Tensor
    prior: Tensor
    keys: Tensor
    variance: Tensor


def refusal(call: Call) -> str | None:
    """Why this backend cannot serve the call; None when it can."""
    del call
    return None


def attention(call: Call) -> Tensor:
    """h_i = sum_j A_ij v_j (Eq. 10), dropout acting on A_ij.

    In float64 where a prior or a variance learns: their gradients add up the rounding of every pair.
    """
    adds_up_pairs = call.learns_prior or call.learns_variance
    call = call.in_dtype(finest_dtype(call.query)) if adds_up_pairs else call.at_full_precision()
    return dropout(weights(call), call.dropout_p) @ call.value


def weights(call: Call) -> Tensor:
    """A_ij = sum_r pi_jr e_ijr / sum_j' sum_r pi_j'r e_ij'r (Eq. 9), hard: max_r in place of sum_r pi (Eq. 12)."""
    scores = _masked_scores(call)
    if scores.numel() == 0:
        return scores.sum(2)
    if call.is_hard:
        scores = scores.max(dim=2, keepdim=True).values  # the gradient goes to the winner, the lowest r on a tie
    peak = _finite(scores.detach().amax((2, 4), keepdim=True))
    mass = (scores - peak).exp().sum(2)  # (B, H, L, S)
    return _divide(mass, mass.sum(-1, keepdim=True))


def responsibilities(call: Call) -> Tensor:
    """gamma_ijr = pi_jr e_ijr / sum_r' pi_jr' e_ijr' (Eq. 11); hard: 1 for the nearest component. (B, H, L, M, S)."""
    scores = _masked_scores(call)
    if call.is_hard:
        winner = scores.argmax(dim=2, keepdim=True)
        gamma = torch.zeros_like(scores).scatter(2, winner, 1.0) * (scores > -torch.inf)
    else:
        likelihood = (scores - _finite(scores.detach().amax(2, keepdim=True))).exp()
        gamma = _divide(likelihood, likelihood.sum(2, keepdim=True))
    return gamma.transpose(2, 3)


def m_step(call: Call, query_mask: Tensor | None = None, log_prior: Tensor | None = None) -> MStep:
    """N_jr = sum_i gamma_ijr, pi = N_jr / N_j, k = sum_i gamma q_i / N_jr, sigma^2 = sum_i gamma |q_i - k|^2 / D N_jr.

    Eq. 13, with the 1/D of an isotropic Gaussian in D dimensions.
    """
    gamma = responsibilities(call)
    if query_mask is not None:
        gamma = gamma * query_mask[:, None, :, None, None]
    call = call.at_full_precision().with_expanded_keys()
    counts = gamma.sum(2)  # (B, H, M, S)
    keys = torch.einsum("bhlms,bhld->bhmsd", gamma, call.query) / counts.clamp_min(1e-30).unsqueeze(-1)
    squared = (call.query[:, :, None, None] - keys.unsqueeze(-2)).square().sum(-1)  # (B, H, M, S, L)
    spread = torch.einsum("bhlms,bhmsl->bhms", gamma, squared) / call.query.shape[-1]
    return finish_m_step(call, log_prior, counts, keys, spread / counts.clamp_min(1e-30))


def finish_m_step(call: Call, log_prior: Tensor | None, counts: Tensor, keys: Tensor, variance: Tensor) -> MStep:
    """Divide the counts into priors, keep what had no evidence, and floor the variance at 1e-6."""
    shape = counts.shape
    per_position = counts.sum(2, keepdim=True)
    old_prior = torch.full_like(counts, 1 / shape[2]) if log_prior is None else log_prior.softmax(2).expand(shape)
    old_variance = torch.as_tensor(call.variance, dtype=counts.dtype, device=counts.device).expand(shape)
    seen = counts > 0
    return MStep(
        counts=counts,
        prior=torch.where(per_position > 0, _divide(counts, per_position), old_prior),
        keys=torch.where(seen.unsqueeze(-1), keys, call.keys),
        variance=torch.where(seen, variance.clamp_min(VARIANCE_FLOOR), old_variance),
    )


def log_kernel(call: Call) -> Tensor:
    """-|q_i - k_jr|^2 / (2 sigma_jr^2), expanded about the mean key, or q_i . k_jr / sigma_jr^2: (B, H, M, L, S)."""
    variance = call.variance.unsqueeze(-2) if isinstance(call.variance, Tensor) else call.variance  # (B, H, M, 1, S)
    if call.kernel == "dot":
        return call.query.unsqueeze(2) @ call.keys.mT / variance
    centre = call.centre()
    query = (call.query - centre).unsqueeze(2)
    keys = call.keys - centre.unsqueeze(2)
    squared = query.square().sum(-1, keepdim=True) - 2 * query @ keys.mT + keys.square().sum(-1).unsqueeze(-2)
    return -squared / (2 * variance)


def linear_weights(query: Tensor, keys: Tensor, allowed: Tensor | None) -> Tensor:
    """A_ij = phi(q_i) . phibar_j / sum_j' phi(q_i) . phibar_j' (Eq. 14), from features (B, H, L | S, F)."""
    products = query @ keys.mT
    if allowed is not None:
        products = products.masked_fill(~allowed, 0.0)
    return _divide(products, products.sum(-1, keepdim=True))


def _masked_scores(call: Call) -> Tensor:
    """s_ijr = log pi_jr + log kernel, -inf where the masks exclude the pair."""
    call = call.with_normalised_prior().with_key_mask_in_prior().at_full_precision().with_expanded_keys()
    scores = log_kernel(call)
    if call.log_prior is not None:
        scores = scores + call.log_prior.unsqueeze(-2)
    mask = call.attn_mask
    if call.is_causal:
        num_queries, num_keys = scores.shape[3:]
        causal = masks.causal_mask(num_queries, num_keys, scores.device, offset=num_keys - num_queries)
        mask = masks.join(mask, causal[None, None])
    return masks.add_to_scores(scores, mask)


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 (with zero gradient) where the denominator is 0."""
    empty = denominator == 0
    return (numerator / denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def _finite(peak: Tensor) -> Tensor:
    """A maximum that can be subtracted: 0 in place of the -inf of a row with nothing left."""
    return peak.masked_fill(peak == -torch.inf, 0.0)
