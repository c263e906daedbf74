"""The M-step: statistics in float32, summed over ranks, each forward once."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

from mgk.functional import validation

# Training forwards without an M-step before a warning.
PATIENCE = 100

# Compiled forwards since the last M-step, by the address of a module's counts:
# an operator in a graph knows the module by nothing else.
_compiled_forwards: Counter[int] = Counter()

# Tells whether a backward pass is running (``is_bw``); tracks no module.
_tracker = ModuleTracker()


class EMModule(nn.Module):
    """Parameters that :meth:`m_step` computes from training forwards.

    Its buffers stay in float32: counts pass float16's 65,504 in one forward. A module
    adds to ``counts`` in every forward.

    Args:
        momentum: Share of the old parameters that an M-step keeps.
    """

    counts: Tensor

    def __init__(self, momentum: float) -> None:
        super().__init__()
        validation.probability("momentum", momentum)
        self.momentum = momentum
        self.pending_forwards = 0  # since the last M-step, in eager mode

    def reset_parameters(self) -> None:
        """Initialise; clear the statistics."""
        raise NotImplementedError

    def m_step(self) -> None:
        """Update from the statistics of all ranks, and clear them."""
        raise NotImplementedError

    def _count_forward(self) -> None:
        """Warn once where training forwards pile up without an M-step.

        While compiling :func:`zero_if_recomputing` counts, at run time.
        """
        if not torch.compiler.is_compiling():
            self.pending_forwards += 1
            _warn_at_patience(self.pending_forwards)

    def _forget_forwards(self) -> None:
        self.pending_forwards = 0
        _compiled_forwards.pop(self.counts.data_ptr(), None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_half = moved.is_floating_point() and moved.element_size() < 4
            return tensor.to(moved.device) if is_half else moved

        return super()._apply(keep_float32, recurse)


def all_reduce_sum(statistic: Tensor) -> Tensor:
    """The sum over all ranks, as a new tensor."""
    total = statistic.clone()
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(total)
    return total


def is_recomputing() -> bool:
    """Whether gradient checkpointing reruns a forward, which is counted already.

    False while compiling: there :func:`zero_if_recomputing` decides at run time.
    """
    return not torch.compiler.is_compiling() and _tracker.is_bw


def zero_if_recomputing(statistic: Tensor, counts: Tensor | None = None) -> Tensor:
    """The statistic, or zeros where a compiled forward is rerun.

    ``counts`` are those of the module whose forward this is: given once a forward.
    """
    if not torch.compiler.is_compiling():
        return statistic
    return torch.ops.mgk.zero_if_recomputing(statistic, counts)


def _warn_at_patience(forwards: int) -> None:
    if forwards == PATIENCE:
        warnings.warn(
            f"{PATIENCE} training forwards without m_step(): prior='em' and variance='em'"
            " do not learn by SGD; call model.m_step() after every optimizer step, or"
            " mgk.nn.m_step_after(optimizer, model) once, or give"
            " mgk.models.MStepCallback() to Trainer",
            stacklevel=3,
        )


def m_step_after(optimizer: torch.optim.Optimizer, model: nn.Module) -> RemovableHandle:
    """Run :func:`m_step_all` after every ``optimizer.step()``."""
    return optimizer.register_step_post_hook(lambda *_: m_step_all(model))


def m_step_all(model: nn.Module) -> None:
    """Every M-step in ``model``: once per optimizer step, on every rank."""
    for module in model.modules():
        if isinstance(module, EMModule):
            module.m_step()


def _zero_if_recomputing(statistic: Tensor, counts: Tensor | None) -> Tensor:
    if _tracker.is_bw:
        return torch.zeros_like(statistic)
    if counts is not None:
        _compiled_forwards[counts.data_ptr()] += 1
        _warn_at_patience(_compiled_forwards[counts.data_ptr()])
    return statistic.clone()


_library = torch.library.Library("mgk", "FRAGMENT")
_library.define("zero_if_recomputing(Tensor statistic, Tensor? counts) -> Tensor")
_library.impl("zero_if_recomputing", _zero_if_recomputing, "CompositeExplicitAutograd")
torch.library.register_fake(
    "mgk::zero_if_recomputing", lambda statistic, counts: torch.empty_like(statistic), lib=_library
)
