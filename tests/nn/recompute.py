"""Modules to test, and what they must compute: from their weights and the public functions, not from their code."""

import torch
from torch import Tensor

import mgk
from mgk import variants
from mgk.nn import MixtureAttention

VARIANTS = tuple(variants.VARIANTS)
MIXTURES = tuple(name for name, spec in variants.VARIANTS.items() if spec.is_mixture)
LINEAR = tuple(name for name, spec in variants.VARIANTS.items() if spec.is_linear)
GAUSSIAN = tuple(name for name in MIXTURES if name not in LINEAR)
PRIORS = variants.CHOICES["prior"]
EMBED_DIM, NUM_HEADS = 12, 3


def make(variant: str = "mgk", *, dtype: torch.dtype = torch.float64, **options) -> MixtureAttention:
    """A module that training has moved: what starts at a constant (biases, priors, variances) no longer is there."""
    attn = MixtureAttention(EMBED_DIM, NUM_HEADS, variant=variant, **options).to(dtype)
    with torch.no_grad():
        for name, parameter in attn.named_parameters():
            if name.endswith(("bias", "logits", "log_variance")):
                parameter.add_(torch.randn_like(parameter) / 2)
        for name, buffer in attn.named_buffers():
            if name == "prior.pi":
                buffer.copy_(torch.randn_like(buffer).softmax(1))
            elif name == "variance.sigma2":
                buffer.mul_((torch.randn_like(buffer) / 2).exp())
    return attn


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random tokens (*shape, EMBED_DIM)."""
    return torch.randn(*shape, EMBED_DIM, dtype=dtype)


def padding_mask(*lengths: int, total: int, side: str = "right") -> Tensor:
    """(B, total): True for the tokens of sequences of these lengths, padded on the side."""
    positions = torch.arange(total)
    rows = [positions < n if side == "right" else positions >= total - n for n in lengths]
    return torch.stack(rows)


KEY_MASK = padding_mask(7, 4, total=7)
MASKS = {
    "none": {},
    "key": {"key_mask": KEY_MASK},
    "causal": {"is_causal": True},
    "key-causal": {"key_mask": KEY_MASK, "is_causal": True},
}


def project(attn: MixtureAttention, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Query (B, H, L, D), keys (B, H, M, S, D) before any shift, value (B, H, S, D)."""
    source = x if context is None else context
    query = _heads(attn.q_proj, x, attn.num_heads, attn.head_dim)
    value = _heads(attn.v_proj, source, attn.num_heads, attn.head_dim)
    mixtures = attn.k_proj.weight.shape[0] // (attn.num_heads * attn.head_dim)
    keys = _heads(attn.k_proj, source, attn.num_heads, mixtures, attn.head_dim)
    return query.movedim(1, 2), keys.movedim(1, 3), value.movedim(1, 2)


def shifted(attn: MixtureAttention, keys: Tensor) -> Tensor:
    """k_jr = k_j + b_r where the variant has shifts."""
    return keys if attn.shifts is None else keys + attn.shifts[:, :, None]


def log_prior_and_variance(attn: MixtureAttention) -> tuple[Tensor | None, Tensor | None]:
    """Log pi with Eq. 7's normaliser, and sigma^2, each (1, H, M, S or 1) or None, from the state dict."""
    state = dict(attn.named_parameters()) | dict(attn.named_buffers())
    log_prior = variance = None
    if "prior.logits" in state:
        log_prior = state["prior.logits"].log_softmax(-1)[None, :, :, None]
    elif "prior.pi" in state:
        log_prior = state["prior.pi"].log()[None]
    if "variance.log_variance" in state:
        variance = state["variance.log_variance"].exp()[None, :, :, None]
    elif "variance.sigma2" in state:
        variance = state["variance.sigma2"][None, :, :, None].clone()
    if variance is not None:
        log_prior = (0 if log_prior is None else log_prior) - attn.head_dim / 2 * variance.log()
    return log_prior, variance


def expected_output(
    attn: MixtureAttention,
    x: Tensor,
    *,
    context: Tensor | None = None,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """o_proj of the public function of the variant on the projections, by the reference."""
    query, keys, value = project(attn, x, context)
    log_prior, variance = log_prior_and_variance(attn)
    options = {"is_causal": is_causal, "backend": "reference"}
    if attn.variant in LINEAR:
        heads = mgk.linear_mixture_attention(
            query,
            shifted(attn, keys),
            value,
            log_prior,
            feature_map=attn.feature_map,
            key_mask=key_mask,
            **options,
        )
    else:
        options |= {"variance": variance, "e_step": attn.e_step, "attn_mask": both_masks(attn_mask, key_mask)}
        if attn.variant == "smgk":
            heads = mgk.shifted_mixture_attention(
                query, keys[:, :, 0], attn.shifts, value, log_prior, **options
            )
        else:
            kernel = "dot" if attn.variant == "softmax" else "gaussian"
            heads = mgk.mixture_attention(query, keys, value, log_prior, kernel=kernel, **options)
    return torch.nn.functional.linear(heads.movedim(1, 2).flatten(2), attn.o_proj.weight, attn.o_proj.bias)


def expected_responsibilities(
    attn: MixtureAttention,
    x: Tensor,
    *,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """gamma_ijr (B, H, L, M, S) of a training forward, zeros for padded queries and keys."""
    query, keys, _ = project(attn, x)
    keys = shifted(attn, keys)
    log_prior, variance = log_prior_and_variance(attn)
    if attn.variant in LINEAR:
        phi_q, phi_k = (torch.nn.functional.elu(features) + 1 for features in (query, keys))
        gamma = torch.einsum("bhlf,bhmsf->bhlms", phi_q, phi_k) * log_prior.exp().unsqueeze(2)
        gamma = gamma / gamma.sum(3, keepdim=True)
        admitted = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        gamma = gamma * (admitted.tril() if is_causal else admitted)[:, None]
    else:
        options = {"variance": variance, "e_step": attn.e_step, "attn_mask": attn_mask, "is_causal": is_causal}
        gamma = mgk.responsibilities(query, keys, log_prior, **options)
    if key_mask is not None:
        gamma = gamma * key_mask[:, None, :, None, None] * key_mask[:, None, None, None, :]
    return gamma.detach()


def squared_distances(attn: MixtureAttention, x: Tensor) -> Tensor:
    """|q_i - k_jr|^2 (B, H, L, M, S)."""
    query, keys, _ = project(attn, x)
    return (query[:, :, :, None, None] - shifted(attn, keys)[:, :, None]).square().sum(-1).detach()


def both_masks(attn_mask: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """One mask for the functions, of the kind (bool or float) of ``attn_mask``."""
    if key_mask is None:
        return attn_mask
    keys = key_mask[:, None, None]
    if attn_mask is None:
        return keys
    return attn_mask & keys if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~keys, -torch.inf)


def _heads(projection: torch.nn.Linear, x: Tensor, *sizes: int) -> Tensor:
    """W x + b with the rows of W viewed as ``sizes``: (B, L, *sizes)."""
    weight = projection.weight.view(*sizes, -1)
    out = torch.einsum("blc,...c->bl...", x, weight)
    return out if projection.bias is None else out + projection.bias.view(sizes)
