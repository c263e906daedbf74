"""Rotary positions (RoPE): features (x_m, x_(m + D/2)) rotated by the angle position * base^(-2m/D)."""

import torch
from torch import Tensor

from mgk.functional import validation


def rotary_tables(positions: Tensor, head_dim: int, *, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cos and sin of the angles of ``positions`` (..., L), each (..., L, D), float32, for the argument ``rotary``."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor of shape (..., L), got {type(positions).__name__}")
    validation.positive_int("head_dim", head_dim)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
    rates = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[..., None].float() * rates
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the features of x (B, H, ..., L, D) by tables (L, D) or (B, L, D)."""
    over_heads = (slice(None), *(None,) * (x.ndim - 3))  # (B, L, D) as (B, 1, ..., L, D)
    cos, sin = ((table if table.ndim == 2 else table[over_heads]).to(x.dtype) for table in rotary)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
