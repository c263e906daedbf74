"""Losses over the targets of a whole optimizer step, so that micro-batches add up."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from mgk.functional.mixture.inputs import compute_dtype

IGNORE = -100  # as in cross_entropy

NumItems = Tensor | int | None


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None, num_items: NumItems) -> Tensor:
    """Cross entropy of classes (B,) or labels (B, num_labels), or squared error.

    Without ``problem_type`` one output is a regression, whole numbers are classes
    and other numbers independent labels, as in transformers.
    """
    if problem_type is None:
        if logits.shape[-1] == 1:
            problem_type = "regression"
        elif labels.is_floating_point():
            problem_type = "multi_label_classification"
        else:
            problem_type = "single_label_classification"
    logits = logits.to(compute_dtype(logits))
    if problem_type == "single_label_classification":
        return class_loss(logits, labels.view(-1), num_items, "num_labels")
    labels = labels.to(logits.dtype)
    if problem_type == "multi_label_classification":
        return _over(num_items, binary_cross_entropy_with_logits, logits, labels)
    return _over(num_items, mse_loss, logits.view(labels.shape), labels)


def class_loss(logits: Tensor, targets: Tensor, num_items: NumItems, limit_name: str) -> Tensor:
    """Cross entropy of logits (N, classes): the mean, or the sum / ``num_items``."""
    check_targets(targets, logits.shape[-1], limit_name)
    logits = logits.to(compute_dtype(logits))
    return _over(num_items, cross_entropy, logits, targets)


def check_targets(targets: Tensor, limit: int, limit_name: str) -> None:
    """Targets are from 0 to ``limit - 1``, or -100.

    Checked on the CPU only: elsewhere it would wait for the device.
    """
    if torch.compiler.is_compiling() or targets.device.type != "cpu":
        return
    real = targets[targets != IGNORE]
    if real.numel() == 0:
        return
    least, largest = int(real.min()), int(real.max())
    if least < 0 or largest >= limit:
        wanted = f"from 0 to {limit - 1} ({limit_name} - 1) or {IGNORE}"
        raise ValueError(f"labels must be {wanted}, got {least} to {largest}")


def _over(num_items: NumItems, loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    if num_items is None:
        return loss(*inputs)
    return loss(*inputs, reduction="sum") / num_items
