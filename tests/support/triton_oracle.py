"""The equations in float64, with autograd, for the kernels' own inputs."""

import math
from typing import Any

import torch
from torch import Tensor

from mgk.functional.mixture.backends.triton_backend.launch import AttentionParams


def params(
    *,
    batch: int = 2,
    heads: int = 1,
    groups: int = 1,
    mixtures: int = 2,
    queries: int = 67,
    keys: int = 70,
    width: int = 20,
    value_width: int = 24,
    shifted: bool = False,
    hard: bool = False,
    dot: bool = False,
    variance: str = "number",
    prior: str = "none",
    mask: str = "none",
    left: int | None = None,
    right: int | None = None,
    segments: bool = False,
    dropout_p: float = 0.0,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    offset: float = 0.0,
    seed: int = 0,
) -> AttentionParams:
    """Random inputs of the options; float tensors require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    components = (batch, heads, mixtures, keys)
    variances = {
        "number": torch.full((1, 1, 1, 1), math.sqrt(width)),
        "head": 2 + torch.rand(1, heads, 1, 1, generator=generator),
        "component": 2 + torch.rand(1, heads, mixtures, 1, generator=generator),
        "position": 2 + torch.rand(components, generator=generator),
    }
    log_prior = None
    if prior == "component":
        log_prior = normal(1, heads, mixtures, 1).log_softmax(2)
    if prior in ("position", "dead"):
        log_prior = normal(*components).log_softmax(2)
    if prior == "dead" and log_prior is not None:
        log_prior[0, :, :, 3:60] = -math.inf
        log_prior[-1, 0] = -math.inf
        log_prior[:, :, 0, ::5] = -math.inf
    masks = {
        "none": None,
        "bool": torch.rand(batch, 1, queries, keys, generator=generator) > 0.3,
        "float": normal(1, heads * groups, queries, keys),
        "removing": normal(batch, 1, 1, keys).where(
            torch.rand(1, 1, 1, keys, generator=generator) > 0.3, -math.inf
        ),
    }
    attn_mask = masks[mask]
    if attn_mask is not None and mask != "removing" and queries > 5:
        attn_mask[..., 5, :] = False if mask == "bool" else -math.inf
    shape = (batch, heads, 1 if shifted else mixtures, keys, width)
    tensors: dict[str, Any] = {
        "query": (normal(batch, heads * groups, queries, width) * scale + offset)
        .clamp(-65000, 65000)
        .to(dtype),
        "keys": (normal(*shape) * scale + offset).clamp(-65000, 65000).to(dtype),
        "value": normal(batch, heads, keys, value_width).to(dtype),
        "shifts": normal(heads, mixtures, width).mul(scale).to(dtype) if shifted else None,
        "log_prior": None if hard and prior != "dead" else log_prior,
        "variance": variances[variance],
        "mask": attn_mask,
    }
    if hard and log_prior is not None:
        dead = torch.where(log_prior == -math.inf, -math.inf, 0.0)
        tensors["log_prior"] = dead.amax(2, keepdim=True).expand_as(dead).contiguous()
    ids = torch.randint(3, (batch, keys), generator=generator).sort(1).values if segments else None
    return AttentionParams(
        **tensors,
        segments=None if ids is None else segment_bounds(ids),
        seed=torch.tensor([1234]) if dropout_p > 0 else None,
        is_dot=dot,
        is_hard=hard,
        left=left,
        right=right,
        dropout_p=dropout_p,
    )


def segment_bounds(ids: Tensor) -> Tensor:
    """First and last + 1 position of the run that each position is in (B, 2, S)."""
    same = ids[:, :, None] == ids[:, None]
    return (
        torch.stack([same.int().argmax(2), ids.shape[1] - same.flip(2).int().argmax(2)], 1).int().contiguous()
    )


def scores(x: AttentionParams) -> Tensor:
    """s_ijr (B, Hq, M, L, S), -inf for pairs that do not take part."""
    groups = x.query.shape[1] // x.keys.shape[1]
    keys = x.keys if x.shifts is None else x.keys + x.shifts[None, :, :, None]
    keys = keys.repeat_interleave(groups, 1)[:, :, :, None]
    query = x.query[:, :, None, :, None]
    s = (query * keys).sum(-1) if x.is_dot else -(query - keys).square().sum(-1) / 2
    components = (*x.keys.shape[:2], x.mixtures, x.keys.shape[3])
    s = s / x.variance.expand(components).repeat_interleave(groups, 1).unsqueeze(3)
    alive = torch.ones_like(s, dtype=torch.bool)
    if x.log_prior is not None:
        prior = x.log_prior.expand(components).repeat_interleave(groups, 1).unsqueeze(3)
        alive = alive & (prior > -math.inf)
        s = s + prior.where(prior > -math.inf, 0.0)
    num_queries, num_keys = s.shape[3:]
    distance = torch.arange(num_keys) - (torch.arange(num_queries)[:, None] + num_keys - num_queries)
    if x.left is not None:
        alive = alive & (distance >= -x.left)
    if x.right is not None:
        alive = alive & (distance <= x.right)
    if x.segments is not None:
        first, stop = x.segments[:, :, num_keys - num_queries :].unsqueeze(-1).unbind(1)
        position = torch.arange(num_keys)
        alive = alive & ((position >= first) & (position < stop))[:, None, None]
    if x.mask is not None and x.mask.dtype == torch.bool:
        alive = alive & x.mask.unsqueeze(2)
    elif x.mask is not None:
        alive = alive & (x.mask > -math.inf).unsqueeze(2)
        s = s + x.mask.where(x.mask > -math.inf, 0.0).unsqueeze(2)
    return s.where(alive, -math.inf)


def attention(x: AttentionParams, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h (B, Hq, L, E) and lse (B, Hq, L); ``kept`` are the dropout factors (B, Hq, L, S)."""
    s = scores(x)
    s = s.max(2).values if x.is_hard else s.clamp_min(-1e300).logsumexp(2)
    alive = s > -1e299
    peak = s.where(alive, -1e300).amax(-1, keepdim=True).detach()
    weights = (s.where(alive, 0.0) - peak).exp().where(alive, 0.0)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.where(~empty, 1.0)
    lse = (peak + total.log()).where(~empty, -math.inf).squeeze(-1)
    weights = weights / total
    if kept is not None:
        weights = weights * kept
    groups = x.query.shape[1] // x.keys.shape[1]
    return weights @ x.value.repeat_interleave(groups, 1), lse


def counts(x: AttentionParams, query_mask: Tensor | None) -> Tensor:
    """N_jr (B, H, M, S)."""
    s = scores(x)
    alive = s > -math.inf
    if x.is_hard:
        shares = torch.nn.functional.one_hot(s.argmax(2), x.mixtures).movedim(-1, 2).double()
    else:
        shares = s.where(alive.any(2, keepdim=True), 0.0).softmax(2)
    shares = shares.where(alive.any(2, keepdim=True), 0.0)
    if query_mask is not None:
        shares = shares * query_mask[:, None, None, :, None]
    return shares.sum(3).unflatten(1, (x.keys.shape[1], -1)).sum(2)


def as_double(x: AttentionParams, *, requires_grad: bool = False) -> AttentionParams:
    """The same params in float64."""
    return AttentionParams._make(
        y.double().requires_grad_(requires_grad) if isinstance(y, Tensor) and y.is_floating_point() else y
        for y in x
    )
