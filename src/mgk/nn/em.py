"""What the M-step's priors and variances have in common: sums in float32, over all ranks, counted once."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, distributed, nn

from mgk.functional import validation


class EMModule(nn.Module):
    """Buffers that training forwards add statistics to and :meth:`m_step` turns into parameters (identity 5).

    The buffers stay in float32 when the model moves to half precision: counts pass float16's 65,504 in one forward.
    """

    def reset_parameters(self) -> None:
        """Back to the start, without statistics."""
        raise NotImplementedError

    def m_step(self) -> None:
        """Sum the statistics over all ranks, update from them, and start anew."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_half = moved.is_floating_point() and moved.element_size() < 4
            return tensor.to(moved.device) if is_half else moved

        return super()._apply(keep_float32, recurse)


def over_ranks(statistic: Tensor) -> Tensor:
    """The sum of a statistic over all ranks, when there are several."""
    total = statistic.clone()
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(total)
    return total


def is_first_pass() -> bool:
    """False while a backward pass recomputes a forward (gradient checkpointing): its statistics have been counted."""
    return torch.compiler.is_compiling() or not _is_in_backward()


def counted_once(statistic: Tensor) -> Tensor:
    """The statistic, or zeros in a recomputation. Compiled code cannot branch on that: an operator looks as it runs."""
    return torch.ops.mgk.counted_once(statistic) if torch.compiler.is_compiling() else statistic


def checked_momentum(momentum: float) -> float:
    """A momentum, with 0 <= momentum < 1."""
    validation.probability("momentum", momentum)
    return momentum


def m_step_all(model: nn.Module) -> None:
    """Run the M-step of every module in ``model`` that has one: once per optimizer step, on every rank."""
    for module in model.modules():
        if isinstance(module, EMModule):
            module.m_step()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _counted_once(statistic: Tensor) -> Tensor:
    return torch.zeros_like(statistic) if _is_in_backward() else statistic.clone()


_library = torch.library.Library("mgk", "FRAGMENT")
_library.define("counted_once(Tensor statistic) -> Tensor")
_library.impl("counted_once", _counted_once, "CompositeExplicitAutograd")
torch.library.register_fake("mgk::counted_once", torch.empty_like, lib=_library)
