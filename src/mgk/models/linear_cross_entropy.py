"""Cross entropy of a linear map, a few rows of logits at a time."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Logits at a time: 8 MB in float32, about what a core has in its cache.
CHUNK = 2**21


def sum_of_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """-sum_i log softmax(W h_i)_(t_i), for hidden (N, C), weight (V, C) and targets (N,).

    No logits are kept for the backward, and none are computed twice: the gradient of a row,
    softmax(W h_i) - e_(t_i), goes through W as soon as it is there.
    """
    loss: Tensor = _SumOfLosses.apply(hidden, weight, targets)
    return loss


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float64)
        rows = max(1, CHUNK // weight.shape[0])
        parts = zip(hidden.split(rows), targets.split(rows), d_hidden.split(rows), strict=True)
        for x, t, d_x in parts:
            scores = torch.log_softmax(x @ weight.T, 1)
            at = t.unsqueeze(1)
            total -= scores.gather(1, at).sum(dtype=torch.float64)
            scores.exp_().scatter_add_(1, at, scores.new_full(at.shape, -1.0))
            torch.mm(scores, weight, out=d_x)
            d_weight.addmm_(scores.T, x)
        ctx.save_for_backward(d_hidden, d_weight)
        return total.to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad, d_weight * grad, None


def sum_of_adaptive_losses(hidden: Tensor, softmax: nn.AdaptiveLogSoftmaxWithLoss, targets: Tensor) -> Tensor:
    """The same for an adaptive softmax: the head, then each cluster with a target."""
    bounds = [0, *softmax.cutoffs]
    of_head, total = targets.clone(), hidden.new_zeros(())
    clusters: list[Any] = list(softmax.tail)
    for number, (down, up) in enumerate(clusters):
        first, last = bounds[number + 1 : number + 3]
        rows = ((targets >= first) & (targets < last)).nonzero().squeeze(1)
        if rows.numel():
            of_head[rows] = bounds[1] + number
            total = total + sum_of_losses(down(hidden[rows]), up.weight, targets[rows] - first)
    return total + sum_of_losses(hidden, softmax.head.weight, of_head)
