"""The M-step from the statistics of a backend (identity 5).

N_jr = sum_i gamma_ijr, sum_i gamma_ijr x_i and sum_i gamma_ijr |x_i|^2, gamma_ijr the
softmax over r of s_ijr (Eq. 11). The points x_i = q_i - c are relative to the mean key,
which keeps the variances precise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.functional.backends import Task, select
from mgk.functional.masks import divide
from mgk.functional.mixture.inputs import AttentionInputs, finest_dtype
from mgk.functional.validation import without_autocast

VARIANCE_FLOOR = 1e-6


class MStep(NamedTuple):
    """The result of the M-step (Eq. 11, 13); N_jr = 0 keeps the old values.

    Attributes:
        counts: N_jr (B, H, M, S).
        prior: N_jr / sum_r N_jr (B, H, M, S), or the given one, normalised.
        keys: k_jr^new (B, H, M, S, D), or the given ones.
        variance: (sigma_jr^2)^new about ``keys``, with the factor 1/D (B, H, M, S).
    """

    counts: Tensor
    prior: Tensor
    keys: Tensor
    variance: Tensor


class Moments(NamedTuple):
    """Sums over queries of points x_i = q_i - centre, weighted by gamma.

    In float64 where possible: variances are differences of moments.
    """

    counts: Tensor  # sum_i gamma_ijr (B, H, M, S)
    first: Tensor  # sum_i gamma_ijr x_i (B, H, M, S, D)
    second: Tensor  # sum_i gamma_ijr |x_i|^2 (B, H, M, S)
    centre: Tensor  # (B, H, 1, D)


@torch.no_grad()
def counts(inputs: AttentionInputs, query_mask: Tensor | None = None, backend: str = "auto") -> Tensor:
    """N_jr = sum_i gamma_ijr (B, H, M, S), over the queries of ``query_mask`` (B, L)."""
    inputs = inputs.for_responsibilities().with_key_mask_in_prior().at_full_precision()
    return _statistics(inputs, query_mask, None, backend)[0].to(inputs.query.dtype)


@torch.no_grad()
def moments(inputs: AttentionInputs, query_mask: Tensor | None = None, backend: str = "auto") -> Moments:
    """Counts, and moments of the queries about the mean key."""
    inputs = inputs.for_responsibilities().with_key_mask_in_prior().at_full_precision()
    centre = inputs.centre().to(finest_dtype(inputs.query))
    points = inputs.query - centre.repeat_interleave(inputs.group, 1)
    counts, first, second = _statistics(inputs, query_mask, points, backend)
    return Moments(counts, first, second, centre)


@torch.no_grad()
def squared_distances(inputs: AttentionInputs, sums: Moments) -> Tensor:
    """sum_i gamma_ijr |q_i - k_jr|^2 (B, H, M, S); 0 without queries."""
    keys = inputs.keys - sums.centre.unsqueeze(2)
    if inputs.shifts is not None:
        keys = keys + inputs.shifts[None, :, :, None]
    distances = sums.second - 2 * (sums.first * keys).sum(-1) + sums.counts * keys.square().sum(-1)
    return distances.clamp_min(0.0).masked_fill(sums.counts == 0, 0.0)


def m_step(
    inputs: AttentionInputs,
    query_mask: Tensor | None = None,
    log_prior: Tensor | None = None,
    backend: str = "auto",
    update_keys: bool = True,
) -> MStep:
    """N_jr = sum_i gamma_ijr, pi = N_jr / N_j, k = sum_i gamma q_i / N_jr (Eq. 13).

    sigma^2 = sum_i gamma |q_i - k|^2 / (D N_jr). Where N_jr is 0, the result is the old key
    and variance and the prior of ``log_prior``.
    """
    sums = moments(inputs, query_mask, backend)
    given = inputs.at_full_precision().keys
    if inputs.shifts is not None:
        given = given + inputs.shifts[None, :, :, None].to(given.dtype)
    dtype, shape = given.dtype, sums.counts.shape
    seen, per_position = sums.counts > 0, sums.counts.sum(2, keepdim=True)
    mean = divide(sums.first, sums.counts.unsqueeze(-1))
    if update_keys:
        squared = divide(sums.second, sums.counts) - mean.square().sum(-1)
        keys = torch.where(seen.unsqueeze(-1), (mean + sums.centre.unsqueeze(2)).to(dtype), given)
    else:
        squared, keys = divide(squared_distances(inputs, sums), sums.counts), given
    variance = (squared / mean.shape[-1]).clamp_min(VARIANCE_FLOOR).to(dtype)
    old_variance = torch.as_tensor(inputs.variance, dtype=dtype, device=given.device).expand(shape)
    counts = sums.counts.to(dtype)
    return MStep(
        counts=counts,
        prior=torch.where(
            per_position > 0, divide(sums.counts, per_position).to(dtype), _prior(log_prior, counts)
        ),
        keys=keys,
        variance=torch.where(seen, variance, old_variance),
    )


def _prior(log_prior: Tensor | None, counts: Tensor) -> Tensor:
    """The given prior (B, H, M, S), normalised over r where it can be."""
    if log_prior is None:
        return torch.full_like(counts, 1 / counts.shape[2])
    prior = log_prior.to(counts.dtype).expand(counts.shape)
    return prior.softmax(2).masked_fill((prior == -torch.inf).all(2, keepdim=True), 0.0)


def _statistics(
    inputs: AttentionInputs, query_mask: Tensor | None, points: Tensor | None, backend: str
) -> list[Tensor]:
    task: Task = "counts" if points is None else "moments"
    if inputs.num_scores == 0:  # blocks and kernels need at least one score
        backend = "auto"
    with without_autocast(inputs.query):
        sums: list[Tensor] = select("softmax", inputs, backend, task).statistics(inputs, query_mask, points)
    return sums
