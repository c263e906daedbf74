"""Autocast: inputs take the autocast dtype, as those of SDPA do; what is inside chooses its own precision."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the autocast dtype of their device where autocast is on; float64 stays."""
    if not _is_autocast_on(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which no operator changes the dtype of its inputs."""
    return torch.autocast(tensor.device.type, enabled=False) if _is_autocast_on(tensor) else nullcontext()


def _is_autocast_on(tensor: Tensor) -> bool:
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
