"""The few words that ranks exchange; without torchrun there is one rank and nothing to say."""

import atexit
import os
import sys
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState  # type: ignore[import-untyped]

T = TypeVar("T")


def leave(code: int) -> NoReturn:
    """End this process, one of several ranks, with an exit code, but without the interpreter's own ending.

    A thread of gloo's drops the tensors of a collective some time after the collective is done, which takes the lock of
    the interpreter. Once the interpreter is ending, a thread that asks for the lock is ended where it stands, in a
    destructor of C++, and that aborts the process. Destroying the group first is no way out: whatever still holds it, a
    traceback or a wrapped model, keeps its threads alive. Other ranks are not waited for, as they may have failed.
    """
    if code == 0 and dist.is_initialized() and dist.get_backend() != "gloo":
        dist.destroy_process_group()  # a device's last words to its neighbours may be under way
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if is_several() else 1


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if is_several() else 0


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    if is_several():
        dist.all_reduce(values)
    return values


def barrier() -> None:
    """Wait for all ranks."""
    if is_several():
        dist.barrier()


def is_lost(error: Exception) -> bool:
    """Whether this error only says that another rank is gone."""
    return is_several() and (isinstance(error, dist.DistError) or "gloo/transport" in str(error))


def from_first(value: T) -> T:
    """What the first rank says."""
    if not is_several():
        return value
    words = [value]
    dist.broadcast_object_list(words)
    return words[0]
