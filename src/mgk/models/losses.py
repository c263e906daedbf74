"""Losses divided by the number of targets of an optimizer step, so that micro-batches add up to one larger batch."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from mgk.functional.mixture.inputs import compute_dtype

IGNORE = -100

NumItems = Tensor | int | None


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None, num_items: NumItems) -> Tensor:
    """Cross entropy of classes (B,), of independent labels (B, num_labels), or the squared error of a regression.

    Without a ``problem_type`` one output is a regression, whole numbers are classes and other numbers are independent
    labels, as everywhere in transformers.
    """
    if problem_type is None:
        is_class = not labels.is_floating_point()
        many = "single_label_classification" if is_class else "multi_label_classification"
        problem_type = "regression" if logits.shape[-1] == 1 else many
    logits = logits.to(compute_dtype(logits))
    if problem_type == "single_label_classification":
        return class_loss(logits, labels.view(-1), num_items, "num_labels")
    reduction = "mean" if num_items is None else "sum"
    if problem_type == "multi_label_classification":
        loss = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction=reduction)
    else:
        loss = mse_loss(logits.view(labels.shape), labels.to(logits.dtype), reduction=reduction)
    return loss if num_items is None else loss / num_items


def class_loss(logits: Tensor, targets: Tensor, num_items: NumItems, limit_name: str) -> Tensor:
    """Cross entropy of logits (N, classes) and targets (N,): the mean, or the sum over ``num_items``."""
    check_targets(targets, logits.shape[-1], limit_name)
    reduction = "mean" if num_items is None else "sum"
    loss = cross_entropy(logits.to(compute_dtype(logits)), targets, ignore_index=IGNORE, reduction=reduction)
    return loss if num_items is None else loss / num_items


def check_targets(targets: Tensor, limit: int, limit_name: str) -> None:
    """Targets are from 0 to ``limit - 1``, or -100. Checked on the CPU only: elsewhere it would wait for the device."""
    if torch.compiler.is_compiling() or targets.device.type != "cpu" or targets.numel() == 0:
        return
    real = targets[targets != IGNORE]
    if real.numel() and (int(real.min()) < 0 or int(real.max()) >= limit):
        raise ValueError(
            f"labels must be from 0 to {limit - 1} ({limit_name} - 1) or {IGNORE},"
            f" got {int(real.min())} to {int(real.max())}"
        )
