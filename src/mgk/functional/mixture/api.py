"""Mixture attention: the public functions of Eq. 8 to 13."""

from typing import Any

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.functional.backends import register, select
from mgk.functional.mixture import em_statistics, reference
from mgk.functional.mixture.backends.blockwise import Blockwise
from mgk.functional.mixture.backends.cpu import Cpu
from mgk.functional.mixture.backends.sdpa import Sdpa
from mgk.functional.mixture.em_statistics import MStep
from mgk.functional.mixture.inputs import AttentionInputs, validate_inputs
from mgk.functional.mixture.reference import Eager, Reference
from mgk.functional.validation import without_autocast
from mgk.variants import EStep, Kernel

register("softmax", Reference(), Eager(), Blockwise(), Sdpa(), Cpu())


def mixture_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    log_prior: Tensor | None = None,
    *,
    variance: float | Tensor | None = None,
    kernel: Kernel = "gaussian",
    e_step: EStep = "soft",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    r"""h_i = sum_j A_ij v_j with A_ij = sum_r pi_jr e_ijr / sum_j' sum_r pi_j'r e_ij'r (Eq. 9 and 10).

    e_ijr = exp(-|q_i - k_jr|^2 / (2 sigma_jr^2)), or exp(q_i . k_jr / sigma_jr^2) for the dot kernel (Eq. 8).

    Args:
        query: (B, H, L, D).
        keys: (B, H, M, S, D), the means of the M Gaussians of each of S positions.
        value: (B, H, S, E).
        log_prior: log pi_jr, 4-D, broadcastable to (B, H, M, S); -inf removes a component. None: uniform.
        variance: sigma_jr^2, a number or 4-D, broadcastable to (B, H, M, S). None: sqrt(D).
        kernel: "gaussian" (Eq. 9) or "dot" (Eq. 8).
        e_step: "soft", or "hard": max_r e_ijr in place of the sum over r (Eq. 12), which ignores the prior.
        attn_mask: bool, True takes part, or an additive float; broadcastable to (B, H, L, S).
        is_causal: query i sees keys j <= i + (S - L).
        dropout_p: the probability of dropping a position weight A_ij; rows are not renormalised.
        backend: "auto" or a name from :func:`available_backends`.

    Returns:
        (B, H, L, E), zeros for a query with no key left.
    """
    validation.tensor("value", value, "BHSE")
    options: dict[str, Any] = {"kernel": kernel, "e_step": e_step, "attn_mask": attn_mask, "is_causal": is_causal}
    options |= {"log_prior": log_prior, "variance": variance, "dropout_p": dropout_p}
    inputs = validate_inputs(query, keys, value, **options)
    return _with_zero_gradient(attend(inputs, backend), log_prior, e_step)


def shifted_mixture_attention(
    query: Tensor,
    key: Tensor,
    shifts: Tensor,
    value: Tensor,
    log_prior: Tensor | None = None,
    *,
    variance: float | Tensor | None = None,
    kernel: Kernel = "gaussian",
    e_step: EStep = "soft",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    r"""h_i = sum_j A_ij v_j (Eq. 9, 10) with shifted keys k_jr = k_j + b_r: q.k is needed once for all r.

    Args:
        query: (B, H, L, D).
        key: (B, H, S, D).
        shifts: b_r, (H, M, D).
        value: (B, H, S, E).
        log_prior: log pi, (H, M) or 4-D, broadcastable to (B, H, M, S). None: uniform.
        variance: sigma^2, a number, (H, M), or 4-D, broadcastable to (B, H, M, S). None: sqrt(D).
        kernel: "gaussian" (Eq. 9) or "dot" (Eq. 8), which needs a variance that depends on r.
        e_step: "soft" or "hard" (Eq. 12), which ignores the prior.
        attn_mask: bool, True takes part, or an additive float.
        is_causal: query i sees keys j <= i + (S - L).
        dropout_p: the probability of dropping a position weight.
        backend: "auto" or a name from :func:`available_backends`.

    Returns:
        (B, H, L, E), zeros for a query with no key left.
    """
    for name, tensor, dims in (("key", key, "BHSD"), ("shifts", shifts, "HMD"), ("value", value, "BHSE")):
        validation.tensor(name, tensor, dims)
    options: dict[str, Any] = {"kernel": kernel, "e_step": e_step, "attn_mask": attn_mask, "is_causal": is_causal}
    options |= {"log_prior": _per_head_and_component(log_prior), "variance": _per_head_and_component(variance)}
    inputs = validate_inputs(query, key.unsqueeze(2), value, shifts=shifts, dropout_p=dropout_p, **options)
    if kernel == "dot" and (not isinstance(inputs.variance, Tensor) or inputs.variance.shape[2] == 1):
        raise ValueError(
            "kernel='dot' needs a variance that depends on the component: with a common one the shifts cancel;"
            " give a variance of shape (H, M) or use kernel='gaussian'"
        )
    return _with_zero_gradient(attend(inputs, backend), log_prior, e_step)


def mixture_weights(
    query: Tensor,
    keys: Tensor,
    log_prior: Tensor | None = None,
    *,
    variance: float | Tensor | None = None,
    kernel: Kernel = "gaussian",
    e_step: EStep = "soft",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """A_ij = sum_r pi_jr e_ijr / sum_j' sum_r pi_j'r e_ij'r (Eq. 9; Eq. 12 when hard): (B, H, L, S), rows sum to 1.

    The arguments are those of :func:`mixture_attention`. A query with no key left has a row of zeros.
    """
    options: dict[str, Any] = {"kernel": kernel, "e_step": e_step, "attn_mask": attn_mask, "is_causal": is_causal}
    inputs = validate_inputs(query, keys, log_prior=log_prior, variance=variance, **options)
    return _with_zero_gradient(weights(inputs), log_prior, e_step)


def responsibilities(
    query: Tensor,
    keys: Tensor,
    log_prior: Tensor | None = None,
    *,
    variance: float | Tensor | None = None,
    kernel: Kernel = "gaussian",
    e_step: EStep = "soft",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """gamma_ijr = pi_jr e_ijr / sum_r' pi_jr' e_ijr' (Eq. 11), one-hot when hard: (B, H, L, M, S), 0 for masked pairs.

    The arguments are those of :func:`mixture_attention`.
    """
    options: dict[str, Any] = {"kernel": kernel, "e_step": e_step, "attn_mask": attn_mask, "is_causal": is_causal}
    inputs = validate_inputs(query, keys, log_prior=log_prior, variance=variance, **options)
    with without_autocast(query):
        return reference.responsibilities(inputs).transpose(2, 3).to(inputs.query.dtype)


@torch.no_grad()
def m_step(
    query: Tensor,
    keys: Tensor,
    log_prior: Tensor | None = None,
    *,
    variance: float | Tensor | None = None,
    kernel: Kernel = "gaussian",
    e_step: EStep = "soft",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    query_mask: Tensor | None = None,
) -> MStep:
    """N_jr = sum_i gamma_ijr, pi_jr = N_jr / N_j, and the means and variances of Eq. 13.

    Variances have the 1/D of D dimensions. Needs no N x N memory; outside autograd.
    ``query_mask`` (B, L), True takes part, excludes padding. Without evidence (N_jr = 0)
    prior, key and variance keep their values. Other arguments: :func:`mixture_attention`.
    """
    options: dict[str, Any] = {"kernel": kernel, "e_step": e_step, "attn_mask": attn_mask, "is_causal": is_causal}
    inputs = validate_inputs(query, keys, log_prior=log_prior, variance=variance, **options)
    mask = validation.token_mask("query_mask", query_mask, query, query.shape[2], "BL")
    return em_statistics.m_step(inputs, mask, log_prior)


def attend(inputs: AttentionInputs, backend: str) -> Tensor:
    """The output (B, H, L, E) of validated inputs, in the dtype of the query; zeros without keys."""
    query, value = inputs.query, inputs.value
    with without_autocast(query):
        chosen = select("softmax", inputs, backend)
        if 0 in query.shape or 0 in value.shape:
            return query.sum(-1, keepdim=True).mul(0.0).expand(*query.shape[:3], value.shape[-1])
        out: Tensor = chosen.attention(inputs)
        return out.to(query.dtype)


def weights(inputs: AttentionInputs) -> Tensor:
    """The position weights (B, H, L, S) of validated inputs, in the dtype of the query."""
    with without_autocast(inputs.query):
        return reference.weights(inputs).to(inputs.query.dtype)


def _per_head_and_component(value: Any) -> Any:
    """(H, M) as (1, H, M, 1); anything else as it is."""
    return value[None, :, :, None] if isinstance(value, Tensor) and value.ndim == 2 else value


def _with_zero_gradient(out: Tensor, log_prior: Tensor | None, e_step: str) -> Tensor:
    """The output with the prior in its graph: a hard E-step ignores it, and its gradient is zeros, not None."""
    if e_step == "soft" or log_prior is None or not log_prior.requires_grad:
        return out
    zeros = torch.zeros_like(log_prior).where(torch.ones_like(log_prior, dtype=torch.bool), log_prior)
    return out + zeros.sum().to(out.dtype)
