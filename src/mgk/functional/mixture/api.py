"""Mixture attention: the public functions of Eq. 8 to 13."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.functional.backends import register, select
from mgk.functional.mixture import em_statistics, reference
from mgk.functional.mixture.backends.blockwise import Blockwise
from mgk.functional.mixture.backends.cpu import Cpu
from mgk.functional.mixture.backends.sdpa import Sdpa
from mgk.functional.mixture.backends.triton_backend.backend import Triton
from mgk.functional.mixture.em_statistics import MStep
from mgk.functional.mixture.inputs import AttentionInputs, compute_dtype, validate_inputs
from mgk.functional.mixture.reference import Eager, Reference
from mgk.functional.validation import eager_in_old_graphs, without_autocast
from mgk.variants import EStep, Kernel

# (left, right), or one number for both ends
Window = int | tuple[int | None, int | None] | None

register("softmax", Reference(), Eager(), Blockwise(), Sdpa(), Cpu(), Triton())


@overload
def mixture_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    log_prior: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def mixture_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    log_prior: Tensor | None = ...,
    *,
    return_lse: bool = ...,
    **options: Any,
) -> Tensor: ...


@eager_in_old_graphs  # type: ignore[misc]  # the overloads leave the options out
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
    window: Window = None,
    segment_ids: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""h_i = sum_j A_ij v_j with A_ij = sum_r pi_jr e_ijr / sum_j' sum_r pi_j'r e_ij'r (Eq. 9 and 10).

    e_ijr = exp(-|q_i - k_jr|^2 / (2 sigma_jr^2)), or exp(q_i . k_jr / sigma_jr^2) (Eq. 8).

    Args:
        query: (B, Hq, L, D), Hq a multiple of H: query head h reads key head h // (Hq / H).
        keys: (B, H, M, S, D), the means of the M Gaussians of each of S positions.
        value: (B, H, S, E).
        log_prior: log pi_jr, 4-D, broadcastable to (B, H, M, S); -inf removes a component.
            None: uniform.
        variance: sigma_jr^2, a number or 4-D, broadcastable to (B, H, M, S). None: sqrt(D).
        kernel: "gaussian" (Eq. 9) or "dot" (Eq. 8).
        e_step: "soft", or "hard": max_r e_ijr in place of sum_r pi_jr e_ijr (Eq. 12).
        attn_mask: bool, True takes part, or an additive float; broadcastable to
            (B, Hq, L, S).
        is_causal: query i sees keys j <= i + (S - L).
        window: (left, right), each an int or None: -left <= j - (i + S - L) <= right. An
            int w is (w, w), or (w, 0) with ``is_causal``.
        segment_ids: int (B, S), for L <= S queries, the last positions. A query sees the
            keys of its own segment, a maximal run of equal ids.
        dropout_p: the probability of dropping A_ij; rows are not renormalised.
        return_lse: whether to return (output, lse).
        backend: "auto" or a name from :func:`available_backends`.

    Returns:
        (B, Hq, L, E), zeros for a query with no key left. With ``return_lse`` also
        lse_i = log sum_jr pi_jr e_ijr exp(mask_ij), hard log sum_j max_r e_ijr: (B, Hq, L),
        float32 or float64, -inf where no key is left. See :func:`merge_attention`.
    """
    validation.required("value", value, "BHSE")
    inputs = validate_inputs(
        query,
        keys,
        value,
        log_prior=log_prior,
        variance=variance,
        kernel=kernel,
        e_step=e_step,
        attn_mask=attn_mask,
        is_causal=is_causal,
        window=window,
        segment_ids=segment_ids,
        dropout_p=dropout_p,
        return_lse=return_lse,
    )
    return _results(inputs, backend, log_prior)


@overload
def shifted_mixture_attention(
    query: Tensor,
    key: Tensor,
    shifts: Tensor,
    value: Tensor,
    log_prior: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def shifted_mixture_attention(
    query: Tensor,
    key: Tensor,
    shifts: Tensor,
    value: Tensor,
    log_prior: Tensor | None = ...,
    *,
    return_lse: bool = ...,
    **options: Any,
) -> Tensor: ...


@eager_in_old_graphs  # type: ignore[misc]
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
    window: Window = None,
    segment_ids: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""h_i = sum_j A_ij v_j (Eq. 9, 10) with shifted keys k_jr = k_j + b_r.

    Args:
        key: (B, H, S, D).
        shifts: b_r, (H, M, D).
        log_prior: log pi, (H, M), or broadcastable to (B, H, M, S).
        variance: sigma^2, a number or as ``log_prior``. None: sqrt(D).
        kernel: "gaussian", or "dot" with a variance that depends on r.

    Returns:
        As :func:`mixture_attention`, which has the other arguments.
    """
    validation.tensor("key", key, "BHSD")
    validation.tensor("shifts", shifts, "HMD")
    validation.required("value", value, "BHSE")
    inputs = validate_inputs(
        query,
        key.unsqueeze(2),
        value,
        shifts=shifts,
        log_prior=_per_head_and_component(log_prior),
        variance=_per_head_and_component(variance),
        kernel=kernel,
        e_step=e_step,
        attn_mask=attn_mask,
        is_causal=is_causal,
        window=window,
        segment_ids=segment_ids,
        dropout_p=dropout_p,
        return_lse=return_lse,
    )
    if kernel == "dot" and (not isinstance(inputs.variance, Tensor) or inputs.variance.shape[2] == 1):
        raise ValueError(
            "kernel='dot' needs a variance that depends on the component: with a common one the shifts cancel;"
            " give a variance of shape (H, M) or use kernel='gaussian'"
        )
    return _results(inputs, backend, log_prior)


@eager_in_old_graphs
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
    window: Window = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """A_ij = sum_r pi_jr e_ijr / sum_j' sum_r pi_j'r e_ij'r (Eq. 9, hard Eq. 12): (B, Hq, L, S).

    The arguments are those of :func:`mixture_attention`. Rows sum to 1, or to 0 where no
    key is left.
    """
    options: dict[str, Any] = {"kernel": kernel, "e_step": e_step, "log_prior": log_prior, "variance": variance}
    options |= {"attn_mask": attn_mask, "is_causal": is_causal, "window": window, "segment_ids": segment_ids}
    inputs = validate_inputs(query, keys, **options)
    return _with_zero_gradient(weights(inputs), log_prior if e_step == "hard" else None)


@eager_in_old_graphs
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
    window: Window = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """gamma_ijr = pi_jr e_ijr / sum_r' pi_jr' e_ijr' (Eq. 11), hard one-hot: (B, Hq, L, M, S).

    0 if masked. The arguments are those of :func:`mixture_attention`.
    """
    options: dict[str, Any] = {"kernel": kernel, "e_step": e_step, "log_prior": log_prior, "variance": variance}
    options |= {"attn_mask": attn_mask, "is_causal": is_causal, "window": window, "segment_ids": segment_ids}
    inputs = validate_inputs(query, keys, **options)
    with without_autocast(query):
        gamma = reference.responsibilities(inputs.for_responsibilities())
        return gamma.transpose(2, 3).to(inputs.query.dtype)


@torch.no_grad()
@eager_in_old_graphs
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
    window: Window = None,
    segment_ids: Tensor | None = None,
    query_mask: Tensor | None = None,
    update_keys: bool = True,
) -> MStep:
    """N_jr = sum_i gamma_ijr, pi_jr = N_jr / N_j, and the means and variances of Eq. 13.

    Variances have the 1/D of D dimensions. Needs no N x N memory; outside autograd.

    Args:
        query_mask: bool (B, L), True takes part: excludes padding.
        update_keys: whether to update keys, and to take the variance about the new ones,
            sum_i gamma_ijr |q_i - k_jr^new|^2 / (D N_jr). False: about the given keys, for
            a variance that is updated alone.

    Returns:
        Key and variance as given where N_jr = 0; the prior as given, normalised over r,
        where N_j = 0. All have the H heads of the keys: sums go over all query heads of a
        group. Other arguments: :func:`mixture_attention`.
    """
    validation.flag("update_keys", update_keys)
    options: dict[str, Any] = {"kernel": kernel, "e_step": e_step, "log_prior": log_prior, "variance": variance}
    options |= {"attn_mask": attn_mask, "is_causal": is_causal, "window": window, "segment_ids": segment_ids}
    inputs = validate_inputs(query, keys, **options)
    mask = validation.token_mask("query_mask", query_mask, query, query.shape[2], "BL")
    return em_statistics.m_step(inputs, mask, log_prior, update_keys=update_keys)


def attend(inputs: AttentionInputs, backend: str) -> tuple[Tensor, Tensor | None]:
    """The output (B, Hq, L, E), zeros without keys; and the lse."""
    query, value, inputs = inputs.query, inputs.value, inputs.with_seen_keys()
    with without_autocast(query):
        chosen = select("softmax", inputs, backend)
        if 0 in query.shape or 0 in value.shape:
            out = _with_zero_gradient(query.new_zeros(*query.shape[:3], value.shape[-1]), *inputs)
            lse = None
            if inputs.return_lse and inputs.num_keys:
                lse = reference.attention(inputs)[1]
            elif inputs.return_lse:
                lse = _with_zero_gradient(query.new_zeros(query.shape[:3]), *inputs) - torch.inf
            return out, lse if lse is None else lse.to(compute_dtype(query))
        cleaned, addend = (inputs, None) if chosen.skips_dead_keys(inputs) else inputs.cleaned()
        out, lse = chosen.attention(cleaned)
        if addend is not None:
            out, lse = out + addend, lse if lse is None else lse + addend.squeeze(-1)
        out = out if out.dtype == query.dtype else out.to(query.dtype)
        return out, None if lse is None else lse.to(compute_dtype(query))


def _results(inputs: AttentionInputs, backend: str, log_prior: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """What an attention function returns."""
    out, lse = attend(inputs, backend)
    out = _with_zero_gradient(out, log_prior if inputs.e_step == "hard" else None)
    return out if lse is None else (out, lse)


def weights(inputs: AttentionInputs) -> Tensor:
    """The position weights (B, Hq, L, S) of validated inputs."""
    with without_autocast(inputs.query):
        cleaned, addend = inputs.cleaned()
        out = reference.weights(cleaned).to(inputs.query.dtype)
        return out if addend is None else out + addend


def _per_head_and_component(value: Any) -> Any:
    """(H, M) as (1, H, M, 1); anything else as it is."""
    is_table = isinstance(value, Tensor) and value.ndim == 2
    return value.view(1, *value.shape, 1) if is_table else value


def _with_zero_gradient(out: Tensor, *unused: object) -> Tensor:
    """The output with further tensors in its graph, of gradient 0."""
    for x in unused:
        if isinstance(x, Tensor) and x.requires_grad:
            zeros = torch.zeros_like(x).where(torch.ones_like(x, dtype=torch.bool), x)
            out = out + zeros.sum().to(out.dtype)
    return out
