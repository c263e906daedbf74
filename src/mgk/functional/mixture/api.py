"""Mixture attention: the public functions of Eq. 8 to 13."""

from typing import Any

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.functional.mixture import dispatch, em_statistics, reference
from mgk.functional.mixture.inputs import Call, EStep, Kernel
from mgk.functional.mixture.reference import MStep
from mgk.functional.precision import autocast_inputs, without_autocast


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

    e_ijr is exp(-|q_i - k_jr|^2 / (2 sigma_jr^2)) for the Gaussian kernel and exp(q_i . k_jr / sigma_jr^2) for the
    dot kernel (Eq. 8).

    Args:
        query: (B, H, L, D).
        keys: (B, H, M, S, D), the means of the M Gaussians of each of S positions.
        value: (B, H, S, E).
        log_prior: log pi_jr, 4-D, broadcastable to (B, H, M, S), used as given; -inf removes a component. None:
            uniform.
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
    validation.tensor("query", query, "BHLD")
    validation.tensor("keys", keys, "BHMSD")
    call = checked_call(query, keys, None, value, log_prior, variance, kernel, e_step, attn_mask, is_causal, dropout_p)
    return _with_zero_gradient(attend(call, backend), log_prior, e_step)


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
    r"""h_i = sum_j A_ij v_j (Eq. 9 and 10) with shifted keys k_jr = k_j + b_r (sMGK): q.k is needed once for all r.

    Args:
        query: (B, H, L, D).
        key: (B, H, S, D).
        shifts: b_r, (H, M, D).
        value: (B, H, S, E).
        log_prior: log pi, (H, M) or 4-D, broadcastable to (B, H, M, S). None: uniform.
        variance: sigma^2, a number, (H, M), or 4-D, broadcastable to (B, H, M, S). None: sqrt(D).
        kernel: as in :func:`mixture_attention`; "dot" needs a variance that depends on r, else the shifts cancel.
        e_step: as in :func:`mixture_attention`, and so are the other options.
        attn_mask: as there.
        is_causal: as there.
        dropout_p: as there.
        backend: as there.

    Returns:
        (B, H, L, E), zeros for a query with no key left.
    """
    validation.tensor("query", query, "BHLD")
    validation.tensor("key", key, "BHSD")
    validation.tensor("shifts", shifts, "HMD")
    call = checked_call(
        query,
        key.unsqueeze(2),
        shifts,
        value,
        _per_head_and_component(log_prior),
        _per_head_and_component(variance),
        kernel,
        e_step,
        attn_mask,
        is_causal,
        dropout_p,
    )
    if kernel == "dot" and (not isinstance(call.variance, Tensor) or call.variance.shape[2] == 1):
        raise ValueError(
            "kernel='dot' needs a variance that depends on the component: with a common one the shifts cancel;"
            " give a variance of shape (H, M) or use kernel='gaussian'"
        )
    return _with_zero_gradient(attend(call, backend), log_prior, e_step)


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
    call = _weights_call(query, keys, log_prior, variance, kernel, e_step, attn_mask, is_causal)
    return _with_zero_gradient(weights(call), log_prior, e_step)


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
    call = _weights_call(query, keys, log_prior, variance, kernel, e_step, attn_mask, is_causal)
    with without_autocast(query):
        return reference.responsibilities(call).to(call.query.dtype)


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
    """N_jr = sum_i gamma_ijr, pi_jr = N_jr / N_j, and the means and variances of Eq. 13 (with the 1/D of D dimensions).

    Works in blocks, without N x N memory, and outside autograd. ``query_mask`` (B, L), True takes part, leaves
    padding out; the
    other arguments are those of :func:`mixture_attention`. Without evidence (N_jr = 0) prior, key and variance stay
    as they were.
    """
    call = _weights_call(query, keys, log_prior, variance, kernel, e_step, attn_mask, is_causal)
    mask = validation.token_mask("query_mask", query_mask, query, query.shape[2], "BL")
    with without_autocast(query):
        return em_statistics.m_step(call, mask, log_prior)


def attend(call: Call, backend: str) -> Tensor:
    """The output of a checked call."""
    with without_autocast(call.query):
        return dispatch.attention(call, backend)


def weights(call: Call) -> Tensor:
    """The position weights of a checked call."""
    with without_autocast(call.query):
        return reference.weights(call).to(call.query.dtype)


def checked_call(
    query: Tensor,
    keys: Tensor,
    shifts: Tensor | None,
    value: Any,
    log_prior: Any,
    variance: Any,
    kernel: Any,
    e_step: Any,
    attn_mask: Any,
    is_causal: Any,
    dropout_p: Any,
) -> Call:
    """The arguments, checked; ``query``, ``keys`` and ``shifts`` are known to be tensors of the right dimensions."""
    validation.tensor("value", value, "BHSE")
    name = "keys" if shifts is None else "key"
    query, keys, value = autocast_inputs(query, keys, value)
    validation.alike(query=query, **{name: keys}, value=value)
    batch, heads, _, width = query.shape
    num_keys = keys.shape[3]
    if width == 0:
        raise ValueError(f"query must have at least one feature in its last dimension, got shape {tuple(query.shape)}")
    for label, tensor in (("keys" if shifts is None else "key", keys), ("value", value)):
        validation.size(label, tensor, 0, batch, "the batch of query")
        validation.size(label, tensor, 1, heads, "the heads of query")
    validation.size(name, keys, -1, width, "the features of query")
    validation.size("value", value, 2, num_keys, f"the positions of {name}")
    if shifts is not None:
        validation.size("shifts", shifts, 0, heads, "the heads of query")
        validation.size("shifts", shifts, 2, width, "the features of query")
        validation.on_device("shifts", shifts, query)
    mixtures = keys.shape[2] if shifts is None else shifts.shape[1]
    if mixtures == 0:
        raise ValueError(f"{'keys' if shifts is None else 'shifts'} must have at least one component, got none")
    validation.kernel_and_e_step(kernel, e_step)
    validation.flag("is_causal", is_causal)
    validation.probability("dropout_p", dropout_p)
    shape = (batch, heads, mixtures, num_keys)
    prior = validation.log_prior(log_prior, query, shape)
    return Call(
        query=query,
        keys=keys,
        shifts=shifts,
        value=value,
        log_prior=prior if e_step == "soft" else None,
        variance=validation.variance(variance, query, shape),
        kernel=kernel,
        e_step=e_step,
        attn_mask=validation.attn_mask(attn_mask, query, num_keys),
        is_causal=is_causal and query.shape[2] > 1,  # one query sees every key
        dropout_p=float(dropout_p),
    )


def _weights_call(
    query: Any, keys: Any, log_prior: Any, variance: Any, kernel: Any, e_step: Any, attn_mask: Any, is_causal: Any
) -> Call:
    """A call without values."""
    validation.tensor("query", query, "BHLD")
    validation.tensor("keys", keys, "BHMSD")
    value = query.new_empty(*query.shape[:2], keys.shape[3], 0)
    return checked_call(query, keys, None, value, log_prior, variance, kernel, e_step, attn_mask, is_causal, 0.0)


def _per_head_and_component(value: Any) -> Any:
    """(H, M) as (1, H, M, 1); anything else as it is."""
    return value[None, :, :, None] if isinstance(value, Tensor) and value.ndim == 2 else value


def _with_zero_gradient(out: Tensor, log_prior: Tensor | None, e_step: str) -> Tensor:
    """The output with the prior in its graph: a hard E-step ignores it, and its gradient is zeros, not None."""
    if e_step == "soft" or log_prior is None or not log_prior.requires_grad:
        return out
    return out + torch.zeros_like(log_prior).where(torch.ones_like(log_prior, dtype=torch.bool), log_prior).sum().to(
        out.dtype
    )
