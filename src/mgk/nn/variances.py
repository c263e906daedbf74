"""The variance sigma^2: constant, learned by SGD, by EM (Eq. 13), or unequal constants.

A variance takes no arguments and returns a number or a tensor (1, H, M, 1).
"""

import math

import torch
from torch import Tensor, nn

from mgk.functional import validation
from mgk.functional.mixture.em_statistics import VARIANCE_FLOOR
from mgk.functional.mixture.inputs import compute_dtype
from mgk.nn.em import EMModule, all_reduce_sum, zero_if_recomputing


class ConstantVariance(nn.Module):
    """sigma^2 = sqrt(D)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        validation.positive_ints(head_dim=head_dim)
        self.value = math.sqrt(head_dim)

    def forward(self) -> float:
        """sigma^2."""
        return self.value

    def extra_repr(self) -> str:
        """The value."""
        return f"{self.value:.4g}"


class UnequalVariance(ConstantVariance):
    """sigma_1^2 = sqrt(D), sigma_r^2 = sqrt(D) / 3 for r > 1, as in the authors' code.

    Constants, so that Eq. 9 drops their normaliser, too.
    """

    sigma2: Tensor

    def __init__(self, num_heads: int, num_mixtures: int, head_dim: int) -> None:
        super().__init__(head_dim)
        validation.positive_ints(num_heads=num_heads, num_mixtures=num_mixtures)
        self.register_buffer("sigma2", torch.empty(num_heads, num_mixtures))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """sqrt(D), and a third of it."""
        nn.init.constant_(self.sigma2, self.value / 3)
        nn.init.constant_(self.sigma2[:, 0], self.value)

    def forward(self) -> Tensor:  # type: ignore[override]
        """sigma^2 (1, H, M, 1)."""
        return self.sigma2[None, :, :, None]


class LearnedVariance(nn.Module):
    """sigma_r^2 = exp(log_variance_r) for each head; starts at sqrt(D)."""

    def __init__(self, num_heads: int, num_mixtures: int, head_dim: int) -> None:
        super().__init__()
        validation.positive_ints(num_heads=num_heads, num_mixtures=num_mixtures, head_dim=head_dim)
        self.initial = math.log(head_dim) / 2
        self.log_variance = nn.Parameter(torch.empty(num_heads, num_mixtures))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """sqrt(D)."""
        nn.init.constant_(self.log_variance, self.initial)

    def forward(self) -> Tensor:
        """sigma^2 (1, H, M, 1)."""
        exact = self.log_variance.to(compute_dtype(self.log_variance))
        return exact.exp()[None, :, :, None]


class EMVariance(EMModule):
    """sigma_r^2 = sum_ij gamma_ijr |q_i - k_jr|^2 / (D sum_ij gamma_ijr) (Eq. 13).

    For each head, at least 1e-6.
    """

    sigma2: Tensor
    counts: Tensor
    distances: Tensor

    def __init__(self, num_heads: int, num_mixtures: int, head_dim: int, *, momentum: float = 0.0) -> None:
        super().__init__(momentum)
        validation.positive_ints(num_heads=num_heads, num_mixtures=num_mixtures, head_dim=head_dim)
        self.head_dim = head_dim
        for name in ("sigma2", "counts", "distances"):
            self.register_buffer(name, torch.empty(num_heads, num_mixtures))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """sqrt(D); clears the statistics."""
        nn.init.constant_(self.sigma2, math.sqrt(self.head_dim))
        nn.init.zeros_(self.counts)
        nn.init.zeros_(self.distances)

    def forward(self) -> Tensor:
        """sigma^2 of the last M-step, (1, H, M, 1)."""
        # a copy: an M-step before the backward must not change it
        return self.sigma2.clone()[None, :, :, None]

    @torch.no_grad()
    def observe(self, counts: Tensor, distances: Tensor) -> None:
        """Add the sums of gamma and of gamma |q - k|^2, both (B, H, M, S)."""
        self._count_forward()
        counts, distances = (x.sum((0, 3)).to(self.counts.dtype) for x in (counts, distances))
        self.counts += zero_if_recomputing(counts, self.counts)
        self.distances += zero_if_recomputing(distances)

    @torch.no_grad()
    def m_step(self) -> None:
        """Move sigma^2 to distances / (D counts), where counts > 0."""
        counts, distances = all_reduce_sum(self.counts), all_reduce_sum(self.distances)
        total = (self.head_dim * counts).clamp_min(torch.finfo(counts.dtype).tiny)
        new = (distances / total).clamp_min(VARIANCE_FLOOR)
        self.sigma2.lerp_(torch.where(counts > 0, new, self.sigma2), 1 - self.momentum)
        self.counts.zero_()
        self.distances.zero_()
        self._forget_forwards()

    def extra_repr(self) -> str:
        """The options."""
        return f"momentum={self.momentum}"


def make_variance(variance: str | nn.Module, num_heads: int, num_mixtures: int, head_dim: int) -> nn.Module:
    """The variance of that name, or the given module."""
    if isinstance(variance, nn.Module):
        return variance
    if variance == "constant":
        return ConstantVariance(head_dim)
    kinds = {"learned": LearnedVariance, "em": EMVariance, "unequal": UnequalVariance}
    return kinds[variance](num_heads, num_mixtures, head_dim)
