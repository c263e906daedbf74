"""The M-step from the statistics of a backend (identity 5).

N_jr = sum_i gamma_ijr, sum_i gamma_ijr x_i and sum_i gamma_ijr |x_i|^2, with gamma_ijr the softmax over r of s_ijr
(Eq. 11). The points x_i = q_i - c are queries relative to the mean key, which keeps the variances precise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.functional.backends import Task, select
from mgk.functional.masks import divide
from mgk.functional.mixture.inputs import AttentionInputs
from mgk.functional.validation import without_autocast

VARIANCE_FLOOR = 1e-6


class MStep(NamedTuple):
    """The result of the M-step (Eq. 11, 13). A component without responsibility for any query keeps its values.

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


class Moments(NamedTuple):
    """Sums over the queries, weighted by the responsibilities, of points x_i = q_i - centre."""

    counts: Tensor  # sum_i gamma_ijr (B, H, M, S)
    first: Tensor  # sum_i gamma_ijr x_i (B, H, M, S, D)
    second: Tensor  # sum_i gamma_ijr |x_i|^2 (B, H, M, S)
    centre: Tensor  # (B, H, 1, D)


@torch.no_grad()
def counts(inputs: AttentionInputs, query_mask: Tensor | None = None, backend: str = "auto") -> Tensor:
    """N_jr = sum_i gamma_ijr (B, H, M, S), over the queries of ``query_mask`` (B, L) and the pairs that masks admit."""
    return _statistics(inputs.with_key_mask_in_prior().at_full_precision(), query_mask, None, backend)[0]


@torch.no_grad()
def moments(inputs: AttentionInputs, query_mask: Tensor | None = None, backend: str = "auto") -> Moments:
    """The counts with the first and second moments of the queries about the mean key."""
    inputs = inputs.with_key_mask_in_prior().at_full_precision().with_expanded_keys()
    centre = inputs.centre()
    counts, first, second = _statistics(inputs, query_mask, inputs.query - centre, backend)
    return Moments(counts, first, second, centre)


@torch.no_grad()
def squared_distances(inputs: AttentionInputs, sums: Moments) -> Tensor:
    """sum_i gamma_ijr |q_i - k_jr|^2 (B, H, M, S), the numerator of the variance about the present keys."""
    keys = inputs.at_full_precision().with_expanded_keys().keys - sums.centre.unsqueeze(2)
    distances = sums.second - 2 * (sums.first * keys).sum(-1) + sums.counts * keys.square().sum(-1)
    return distances.clamp_min(0.0)


def m_step(
    inputs: AttentionInputs,
    query_mask: Tensor | None = None,
    log_prior: Tensor | None = None,
    backend: str = "auto",
) -> MStep:
    """N_jr = sum_i gamma_ijr, pi = N_jr / N_j, k = sum_i gamma q_i / N_jr, sigma^2 = sum_i gamma |q_i - k|^2 / D N_jr.

    Eq. 13, with the 1/D of an isotropic Gaussian in D dimensions. Without evidence the result is the old key and
    variance and the prior of ``log_prior``.
    """
    inputs = inputs.at_full_precision().with_expanded_keys()
    sums = moments(inputs, query_mask, backend)
    counts, shape = sums.counts, sums.counts.shape
    seen, per_position = counts > 0, counts.sum(2, keepdim=True)
    mean = divide(sums.first, counts.unsqueeze(-1))
    variance = (divide(sums.second, counts) - mean.square().sum(-1)) / mean.shape[-1]
    old_prior = torch.full_like(counts, 1 / shape[2]) if log_prior is None else log_prior.softmax(2).expand(shape)
    old_variance = torch.as_tensor(inputs.variance, dtype=counts.dtype, device=counts.device).expand(shape)
    return MStep(
        counts=counts,
        prior=torch.where(per_position > 0, divide(counts, per_position), old_prior),
        keys=torch.where(seen.unsqueeze(-1), mean + sums.centre.unsqueeze(2), inputs.keys),
        variance=torch.where(seen, variance.clamp_min(VARIANCE_FLOOR), old_variance),
    )


def _statistics(
    inputs: AttentionInputs, query_mask: Tensor | None, points: Tensor | None, backend: str
) -> list[Tensor]:
    task: Task = "counts" if points is None else "moments"
    if inputs.num_scores == 0:  # blocks and kernels need at least one score
        backend = "auto"
    with without_autocast(inputs.query):
        sums = select("softmax", inputs, backend, task).statistics(inputs, query_mask, points)
    return [x.to(inputs.query.dtype) for x in sums]
