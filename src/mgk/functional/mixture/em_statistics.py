"""The M-step's statistics from blocks of scores, without N x N memory (identity 5).

N_jr = sum_i gamma_ijr, sum_i gamma_ijr q_i and sum_i gamma_ijr |q_i|^2, with gamma_ijr the softmax over r of s_ijr
(Eq. 11). Queries are taken
relative to the mean key, which keeps the variances precise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.functional.mixture import reference, score_features
from mgk.functional.mixture.backends import cpu_kernels
from mgk.functional.mixture.inputs import Call
from mgk.functional.mixture.reference import MStep
from mgk.functional.mixture.score_features import Bilinear
from mgk.functional.mixture.tiles import blocks


class Moments(NamedTuple):
    """Sums over the queries, weighted by the responsibilities, of points x_i = q_i - centre."""

    counts: Tensor  # sum_i gamma_ijr (B, H, M, S)
    first: Tensor  # sum_i gamma_ijr x_i (B, H, M, S, D)
    second: Tensor  # sum_i gamma_ijr |x_i|^2 (B, H, M, S)
    centre: Tensor  # (B, H, 1, D)


@torch.no_grad()
def counts(call: Call, query_mask: Tensor | None = None) -> Tensor:
    """N_jr = sum_i gamma_ijr (B, H, M, S), over the queries of ``query_mask`` and the pairs that the call admits."""
    return _moments(call.with_key_mask_in_prior().at_full_precision(), query_mask, None)[0]


@torch.no_grad()
def moments(call: Call, query_mask: Tensor | None = None) -> Moments:
    """The counts with the first and second moments of the queries about the mean key."""
    call = call.with_key_mask_in_prior().at_full_precision().with_expanded_keys()
    centre = call.centre()
    counts, first, second = _moments(call, query_mask, call.query - centre)
    return Moments(counts, first, second, centre)


@torch.no_grad()
def squared_distances(call: Call, sums: Moments) -> Tensor:
    """sum_i gamma_ijr |q_i - k_jr|^2 (B, H, M, S), the numerator of the variance with the keys as they are."""
    keys = call.at_full_precision().with_expanded_keys().keys - sums.centre.unsqueeze(2)
    distances = sums.second - 2 * (sums.first * keys).sum(-1) + sums.counts * keys.square().sum(-1)
    return distances.clamp_min(0.0)


def m_step(call: Call, query_mask: Tensor | None = None, log_prior: Tensor | None = None) -> MStep:
    """Counts, priors, means and variances of Eq. 13; ``log_prior`` is what a position without evidence keeps."""
    call = call.at_full_precision().with_expanded_keys()
    sums = moments(call, query_mask)
    total = sums.counts.clamp_min(torch.finfo(sums.counts.dtype).tiny)
    mean = sums.first / total.unsqueeze(-1)
    variance = (sums.second / total - mean.square().sum(-1)) / mean.shape[-1]
    return reference.finish_m_step(call, log_prior, sums.counts, mean + sums.centre.unsqueeze(2), variance)


@torch.no_grad()
def linear_counts(
    phi_q: Tensor,
    phi_k: Tensor,
    log_prior: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """N_jr = sum_i gamma_ijr (B, H, M, S) with e_ijr = phi(q_i) . phi(k_jr): O(N) memory, O(N^2) time.

    Features as :func:`mgk.functional.linear.api.features` gives them, (B, H, L, F) and (B, H, M, S, F); the
    masks are (B, S) and (B, L).
    """
    if log_prior is not None:
        phi_k = log_prior.to(phi_k.dtype).exp().unsqueeze(-1) * phi_k
    mask = None if key_mask is None else key_mask[:, None, None]
    return torch.ops.mgk.linear_responsibility_counts(phi_q, phi_k, mask, query_mask, is_causal)


def _moments(call: Call, query_mask: Tensor | None, points: Tensor | None) -> list[Tensor]:
    form = score_features.from_call(call)
    scores = (form.query, form.keys, form.row, form.column)
    masks = (call.attn_mask, query_mask)
    return torch.ops.mgk.responsibility_moments(*scores, *masks, points, call.is_hard, call.is_causal)


def _responsibility_moments(
    query: Tensor,
    keys: Tensor,
    row: Tensor | None,
    column: Tensor,
    mask: Tensor | None,
    query_mask: Tensor | None,
    points: Tensor | None,
    is_hard: bool,
    is_causal: bool,
) -> list[Tensor]:
    form = Bilinear(query, keys, row, column)
    if points is None and cpu_kernels.can_count(form):
        return [cpu_kernels.counts(form, mask, query_mask, is_hard, is_causal)]
    sums = [torch.zeros_like(column)]
    if points is not None:
        sums += [column.new_zeros(*column.shape, points.shape[-1]), torch.zeros_like(column)]
        norms = points.square().sum(-1)
    if query.numel() == 0:
        return sums
    for rows, column_blocks in blocks(form, is_causal):
        for columns in column_blocks:
            gamma = _gamma(
                score_features.scores_of_block(form, mask, is_causal, rows, columns), is_hard
            )  # (B, H, M, l, s)
            if query_mask is not None:
                gamma *= query_mask[:, None, None, rows, None]
            sums[0][:, :, :, columns] += gamma.sum(3)
            if points is not None:
                sums[1][:, :, :, columns] += gamma.mT @ points[:, :, None, rows]
                sums[2][:, :, :, columns] += (gamma * norms[:, :, None, rows, None]).sum(3)
    return sums


def _gamma(scores: Tensor, is_hard: bool) -> Tensor:
    """The responsibilities of a block (Eq. 11); 0 where every component is excluded."""
    peak = scores.amax(2, keepdim=True)
    excluded = peak == -torch.inf
    if is_hard:
        gamma = torch.zeros_like(scores).scatter_(2, scores.argmax(2, keepdim=True), 1.0)
    else:
        gamma = (scores - peak.masked_fill(excluded, 0.0)).exp_()
        gamma /= gamma.sum(2, keepdim=True).masked_fill_(excluded, 1.0)
    return gamma.masked_fill_(excluded, 0.0)


def _fake_responsibility_moments(
    query: Tensor,
    keys: Tensor,
    row: Tensor | None,
    column: Tensor,
    mask: Tensor | None,
    query_mask: Tensor | None,
    points: Tensor | None,
    is_hard: bool,
    is_causal: bool,
) -> list[Tensor]:
    counts = column.new_empty(column.shape)
    if points is None:
        return [counts]
    return [counts, column.new_empty(*column.shape, points.shape[-1]), column.new_empty(column.shape)]


def _linear_responsibility_counts(
    query: Tensor, keys: Tensor, mask: Tensor | None, query_mask: Tensor | None, is_causal: bool
) -> Tensor:
    form = Bilinear(query, keys, None, keys.new_zeros(keys.shape[:-1]))
    total = torch.zeros_like(form.column)
    for rows, column_blocks in blocks(form, is_causal):
        for columns in column_blocks:
            products = score_features.scores_of_block(form, mask, is_causal, rows, columns)
            sums = products.sum(2, keepdim=True)
            # masked pairs are -inf here, and a sum of 0 belongs to no component
            gamma = (products / sums).masked_fill_((sums == 0) | (sums == -torch.inf), 0.0)
            if query_mask is not None:
                gamma *= query_mask[:, None, None, rows, None]
            total[:, :, :, columns] += gamma.sum(3)
    return total


def _fake_linear_responsibility_counts(
    query: Tensor, keys: Tensor, mask: Tensor | None, query_mask: Tensor | None, is_causal: bool
) -> Tensor:
    return keys.new_empty(keys.shape[:-1])


_library = torch.library.Library("mgk", "FRAGMENT")
_library.define(
    "responsibility_moments(Tensor query, Tensor keys, Tensor? row, Tensor column, Tensor? mask, Tensor? query_mask,"
    " Tensor? points, bool is_hard, bool is_causal) -> Tensor[]"
)
_library.impl("responsibility_moments", _responsibility_moments, "CompositeExplicitAutograd")
torch.library.register_fake("mgk::responsibility_moments", _fake_responsibility_moments, lib=_library)
_library.define(
    "linear_responsibility_counts(Tensor query, Tensor keys, Tensor? mask, Tensor? query_mask, bool is_causal)"
    " -> Tensor"
)
_library.impl("linear_responsibility_counts", _linear_responsibility_counts, "CompositeExplicitAutograd")
torch.library.register_fake("mgk::linear_responsibility_counts", _fake_linear_responsibility_counts, lib=_library)
