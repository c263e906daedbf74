"""Thin wrappers over torch.distributed; they do nothing without torchrun."""

import logging
import multiprocessing
import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist


def choose_device(wanted: str) -> torch.device:
    """The accelerator of the local rank for "auto", else the CPU."""
    if wanted == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    if num_launched() > 1:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def init(device: torch.device) -> None:
    """Join torchrun's process group: gloo on the CPU, else the device's."""
    if num_launched() > 1 and not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else None)


def num_launched() -> int:
    """The number of processes that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_distributed() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """The rank of this process."""
    return dist.get_rank() if is_distributed() else 0


def all_reduce_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in place."""
    if is_distributed():
        dist.all_reduce(values)
    return values


def all_gather(values: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, (world_size, ...)."""
    if not is_distributed():
        return values.unsqueeze(0)
    found = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(found, values)
    return torch.stack(found)


def broadcast(value: int) -> int:
    """The value of the first rank."""
    values = torch.tensor(value)
    if is_distributed():
        dist.broadcast(values, 0)
    return int(values)


def barrier() -> None:
    """Wait for all ranks."""
    if is_distributed():
        dist.barrier()


def is_lost(error: Exception) -> bool:
    """Whether the error only says that another rank is gone."""
    return is_distributed() and (isinstance(error, dist.DistError) or "gloo/transport" in str(error))


def hard_exit(code: int) -> NoReturn:
    """End this process, one of several ranks, without finalizing the interpreter.

    A gloo thread that releases a tensor meanwhile would abort the process, also after the
    group is destroyed. Other ranks are not waited for.
    """
    if code == 0 and dist.is_initialized() and dist.get_backend() != "gloo":
        dist.destroy_process_group()  # collectives of a device may be in flight
    for child in multiprocessing.active_children():  # the workers of a DataLoader
        child.terminate()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
