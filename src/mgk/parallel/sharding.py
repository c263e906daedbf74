"""Parts of a sequence, one for each rank.

A zigzag cuts the sequence into 2 P chunks and gives rank r the chunks r and 2 P - 1 - r:
under causality every rank then has the same number of pairs.
"""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


def place(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group, and the number of ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(group), distributed.get_world_size(group)


def shard_sequence(
    x: Tensor, dim: int = 2, *, zigzag: bool = True, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's chunks r and 2 P - 1 - r of 2 P, or without ``zigzag`` chunk r of P.

    Args:
        x: The same on every rank.
        dim: Of the positions: 2 of queries and values, 3 of keys, 1 of tokens and masks.
        zigzag: As :func:`ring_attention` with ``is_causal=True`` expects.
        group: None: all processes.
    """
    rank, ranks = place(group)
    chunks = 2 * ranks if zigzag else ranks
    length = x.shape[dim]
    if length % chunks:
        wanted = f"a multiple of {chunks} for {ranks} ranks"
        raise ValueError(f"dimension {dim} of x must be {wanted}, got {length}")
    parts = x.chunk(chunks, dim) if length else [x] * chunks
    return torch.cat([parts[rank], parts[-1 - rank]], dim) if zigzag else parts[rank]


def gather_sequence(
    x: Tensor, dim: int = 2, *, zigzag: bool = True, group: ProcessGroup | None = None
) -> Tensor:
    """The whole sequence, from its parts; gradients are summed."""
    rank, ranks = place(group)
    parts = list(_AllGather.apply(x, rank, ranks, group)) if ranks > 1 else [x]
    if zigzag:
        halves = [part.chunk(2, dim) for part in parts]
        parts = [first for first, _ in halves] + [second for _, second in reversed(halves)]
    return torch.cat(parts, dim)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, ranks: int, group: ProcessGroup | None) -> tuple[Tensor, ...]:
        ctx.rank, ctx.group = rank, group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        total = torch.stack(grads)
        distributed.all_reduce(total, group=ctx.group)
        return total[ctx.rank], None, None, None
