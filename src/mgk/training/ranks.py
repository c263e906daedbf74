"""The few words that ranks exchange; without torchrun there is one rank and nothing to say."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from torch import distributed

T = TypeVar("T")

# For a thread that waits for a lock which nobody holds: ample.
_SECONDS_TO_LET_GO = 0.1


@contextmanager
def parting() -> Iterator[None]:
    """Leave the process group, if the job within has joined one, so that the interpreter can exit.

    A thread of gloo's drops the tensors of a collective some time after the collective is done, which takes the lock of
    the interpreter. Once the interpreter is exiting, a thread that asks for the lock is ended where it stands, in a
    destructor of C++, and that aborts the process. So those threads have to end first: they do with the last holder of
    the group. Nothing here waits for other ranks, as they may have failed.
    """
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        if distributed.is_available() and distributed.is_initialized():
            gc.collect()  # the trainer and its model, which hold the group, too
            if distributed.get_backend() == "gloo" or not has_failed:  # others wait for what is under way
                distributed.destroy_process_group()
            time.sleep(_SECONDS_TO_LET_GO)  # where something still holds it: a traceback, a cache of sharded tensors


def expected() -> int:
    """How many processes torchrun has started, whether they have met or not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def meet(device: torch.device) -> None:
    """Join the other processes that torchrun has started, if it has."""
    if expected() > 1:
        on_cpu = device.type == "cpu"
        PartialState(cpu=on_cpu, backend="gloo" if on_cpu else None)


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


def is_lost(error: Exception) -> bool:
    """Whether this error only says that another rank is gone."""
    return is_several() and (isinstance(error, distributed.DistError) or "gloo/transport" in str(error))


def from_first(value: T) -> T:
    """What the first rank says."""
    if not is_several():
        return value
    words = [value]
    distributed.broadcast_object_list(words)
    return words[0]
