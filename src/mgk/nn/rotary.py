"""Rotary positions: (x_m, x_(m + D/2)) rotated by position * base^(-2m/D)."""

import torch
from torch import Tensor

from mgk.functional import validation


def rotary_tables(positions: Tensor, head_dim: int, *, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cos and sin of the angles of positions (..., L): float32 (..., L, D)."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor of shape (..., L), got {type(positions).__name__}")
    validation.positive_int("head_dim", head_dim)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * base ** (-steps / head_dim)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (B, H, ..., L, D) by tables (L, D), (1, L, D) or (B, L, D)."""
    over_heads = (slice(None), *(None,) * (x.ndim - 3))  # (B, 1, ..., L, D)
    tables = (t[over_heads] if t.ndim == 3 else t for t in rotary)
    cos, sin = (table.to(x.dtype) for table in tables)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
