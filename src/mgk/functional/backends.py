"""The contract of a backend, the registry, and the function that selects one.

The families "softmax" (Eq. 9, 10) and "linear" (Eq. 14) have their own inputs and
backends. Outputs and the M-step's statistics are selected alike.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.variants import Family

Inputs = TypeVar("Inputs")
Task = Literal["attention", "counts", "moments"]


class Backend(Generic[Inputs]):
    """One way to compute attention, and the M-step's statistics.

    Attributes:
        name: the value of ``backend=`` that selects it.
        priority: "auto" tries the highest first; 0: by name only.
        is_transformable: whether it is made of torch's own operators, which every
            transform of torch.func passes through, compiled too.
    """

    name: str
    priority: int = 0
    is_transformable: bool = True

    def status(self) -> str:
        """Ready, or why it cannot run on this machine."""
        return "ready"

    def unsupported_reason(self, inputs: Inputs, task: Task = "attention") -> str | None:
        """Why it cannot do the task for these inputs; None if it can."""
        return None

    def is_efficient(self, inputs: Inputs) -> bool:
        """Whether "auto" should take it for these inputs, which it supports."""
        return True

    def skips_dead_keys(self, inputs: Inputs) -> bool:
        """Whether it never reads masked keys; else they are made finite."""
        return False

    def missing(self, inputs: Inputs) -> str | None:
        """What to install to make this call faster; None if nothing."""
        return None

    def attention(self, inputs: Inputs) -> Any:
        """The output of attention."""
        raise NotImplementedError

    def statistics(self, inputs: Inputs, query_mask: Tensor | None, points: Tensor | None) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr (B, H, M, S), over the queries of ``query_mask`` (B, L).

        That is the task "counts". With points x_i (B, H, L, D), the task "moments", also
        sum_i gamma_ijr x_i and sum_i gamma_ijr |x_i|^2.
        """
        raise NotImplementedError


BACKENDS: dict[Family, dict[str, Backend[Any]]] = {}
_BY_PRIORITY: dict[Family, list[Backend[Any]]] = {}


def register(family: Family, *backends: Backend[Any]) -> None:
    """Set the backends of a family."""
    BACKENDS[family] = {backend.name: backend for backend in backends}
    automatic = [backend for backend in backends if backend.priority > 0]
    _BY_PRIORITY[family] = sorted(automatic, key=lambda backend: -backend.priority)


def backend_names(family: Family) -> tuple[str, ...]:
    """The values that ``backend=`` takes."""
    return "auto", *BACKENDS[family]


def available_backends() -> dict[str, str]:
    """The backends by name, each "ready" or why it is not."""
    return {name: backend.status() for family in BACKENDS.values() for name, backend in family.items()}


def select(family: Family, inputs: Any, name: str = "auto", task: Task = "attention") -> Backend[Any]:
    """The named backend; "auto": the first that is efficient for the inputs.

    A named backend that cannot do the task raises.
    """
    if name != "auto":
        validation.option("backend", name, backend_names(family))
        reason = _unsupported_reason(BACKENDS[family][name], inputs, task)
        if reason is None:
            return BACKENDS[family][name]
        what = "serve this call" if task == "attention" else "compute the statistics of the M-step"
        raise ValueError(f"backend {name!r} cannot {what}: {reason}; use backend='auto'")
    for backend in _BY_PRIORITY[family]:
        if not backend.is_efficient(inputs):
            continue
        if _unsupported_reason(backend, inputs, task) is None:
            return backend
        missing = backend.missing(inputs)
        if missing is not None and not torch.compiler.is_compiling():
            _warn_once(missing)
    raise ValueError(f"no backend can serve this call; there are {', '.join(BACKENDS[family])}")


def _unsupported_reason(backend: Backend[Any], inputs: Any, task: Task) -> str | None:
    reason = None
    if task == "attention" and not backend.is_transformable:
        reason = validation.why_untransformable()
    return reason or backend.unsupported_reason(inputs, task)


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)


# torch.library.custom_op would import torch._dynamo, which takes two seconds.
library = torch.library.Library("mgk", "FRAGMENT")


def define_operator(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Add ``torch.ops.mgk.{name}``; ``fake`` gives its shapes."""
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mgk::{name}", fake, lib=library)
