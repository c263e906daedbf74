"""The few words that ranks exchange; without torchrun there is one rank and nothing to say."""

from typing import TypeVar

import torch
from torch import distributed

T = TypeVar("T")


def is_several() -> bool:
    """Whether several processes train together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def world_size() -> int:
    """How many processes there are."""
    return distributed.get_world_size() if is_several() else 1


def rank() -> int:
    """This process's number."""
    return distributed.get_rank() if is_several() else 0


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    if is_several():
        distributed.all_reduce(values)
    return values


def barrier() -> None:
    """Wait for all ranks."""
    if is_several():
        distributed.barrier()


def from_first(value: T) -> T:
    """What the first rank says."""
    if not is_several():
        return value
    words = [value]
    distributed.broadcast_object_list(words)
    return words[0]
