"""Dropout of hidden vectors plus their residual, on the CPU in one pass."""

from typing import Any

import torch
from torch import Tensor

from mgk.functional.mixture.backends import cpu_kernels
from mgk.functional.validation import has_tangent, is_plain, is_unobserved


def add_dropout(x: Tensor, residual: Tensor | None, p: float) -> Tensor:
    """``residual + x m / (1 - p)``, each m 0 with probability p, else 1.

    On the CPU the mask is a hash of a seed, made again in the backward.
    """
    if p == 0:
        return x if residual is None else residual + x
    if not _is_fused(x, residual):
        dropped = torch.dropout(x, p, True)
        return dropped if residual is None else residual + dropped
    seed = int(torch.randint(2**62, (1,), device="cpu"))
    out: Tensor = _Dropout.apply(x, residual, p, seed)
    return out


def _is_fused(x: Tensor, residual: Tensor | None) -> bool:
    if cpu_kernels.STATUS != "ready" or not is_unobserved():
        return False
    for tensor in (x,) if residual is None else (x, residual):
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or tensor.shape != x.shape:
            return False
        if not is_plain(tensor) or has_tangent(tensor):
            return False
    return True


class _Dropout(torch.autograd.Function):
    """A linear map of x, so that it is its own derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed, ctx.adds = p, seed, residual is not None
        added = None if residual is None else residual.contiguous()
        return cpu_kernels.dropout(x.contiguous(), added, seed, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_x = _Dropout.apply(grad, None, ctx.p, ctx.seed) if ctx.needs_input_grad[0] else None
        return d_x, grad if ctx.adds else None, None, None
