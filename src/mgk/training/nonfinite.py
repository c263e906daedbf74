"""Finds where numbers stop being finite."""

import torch
from torch import Tensor, nn

from mgk.training.tasks import Batch


def first_nonfinite(model: nn.Module, batch: Batch) -> str | None:
    """The first place, in the order of computation, with a value that is not finite: weights, then outputs."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not torch.isfinite(tensor).all():
            return f"the weights {name!r}"
    found: list[str] = []

    def look(name: str, module: nn.Module, output: object) -> None:
        if not found and not all(torch.isfinite(value).all() for value in _floats(output)):
            found.append(f"the output of {name!r} ({type(module).__name__})")

    hooks = [
        module.register_forward_hook(lambda module, _, output, name=name: look(name, module, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for hook in hooks:
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
