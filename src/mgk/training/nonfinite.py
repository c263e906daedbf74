"""Finds the first value of a model that is not finite."""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from mgk.training.tasks import Batch


def first_nonfinite(model: nn.Module, batch: Batch) -> str | None:
    """The first value that is not finite: weights, then outputs."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not torch.isfinite(tensor).all():
            return f"the weights {name!r}"
    names = {module: name for name, module in model.named_modules() if name}
    found: list[str] = []

    def check(module: nn.Module, inputs: object, output: object) -> None:
        if not found and module in names and not all(torch.isfinite(value).all() for value in _floats(output)):
            found.append(f"the output of {names[module]!r} ({type(module).__name__})")

    hook = register_module_forward_hook(check)
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        hook.remove()
    return found[0] if found else None


def _floats(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _floats(part)]
    return []
