"""The prior pi_jr: uniform, learned by SGD (setting A), or by EM (setting B).

A prior maps (number of keys, first position) to log pi, as (B, H, M, S).
"""

import torch
from torch import Tensor, nn

from mgk.functional import validation
from mgk.functional.mixture.inputs import compute_dtype
from mgk.nn.em import EMModule, all_reduce_sum, zero_if_recomputing


class UniformPrior(nn.Module):
    """pi_jr = 1 / M."""

    def forward(self, num_keys: int, first_key: int = 0) -> None:
        """None: uniform."""


class LearnedPrior(nn.Module):
    """pi_r = softmax(logits)_r for each head; starts uniform."""

    def __init__(self, num_heads: int, num_mixtures: int) -> None:
        super().__init__()
        validation.positive_ints(num_heads=num_heads, num_mixtures=num_mixtures)
        self.logits = nn.Parameter(torch.empty(num_heads, num_mixtures))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform."""
        nn.init.zeros_(self.logits)

    def forward(self, num_keys: int, first_key: int = 0) -> Tensor:
        """Log pi (1, H, M, 1)."""
        log_pi = self.logits.log_softmax(-1, dtype=compute_dtype(self.logits))
        return log_pi[None, :, :, None]


class EMPrior(EMModule):
    """pi_jr = N_jr / N_j, N_jr = sum_i gamma_ijr (below Eq. 11).

    Args:
        momentum: Share of the old prior that an M-step keeps.
        max_positions: Positions with a prior each; None: one for all.
    """

    pi: Tensor
    counts: Tensor

    def __init__(
        self, num_heads: int, num_mixtures: int, *, momentum: float = 0.0, max_positions: int | None = None
    ) -> None:
        super().__init__(momentum)
        positions = 1 if max_positions is None else max_positions
        validation.positive_ints(num_heads=num_heads, num_mixtures=num_mixtures, max_positions=positions)
        self.max_positions = max_positions
        for name in ("pi", "counts"):
            self.register_buffer(name, torch.empty(num_heads, num_mixtures, positions))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform; clears the statistics."""
        nn.init.constant_(self.pi, 1 / self.pi.shape[1])
        nn.init.zeros_(self.counts)

    def forward(self, num_keys: int, first_key: int = 0) -> Tensor:
        """Log pi of the last M-step, (1, H, M, 1) or (1, H, M, S)."""
        # a copy: an M-step before the backward must not change it
        return self.pi[None, :, :, self._positions(num_keys, first_key)].log()

    @torch.no_grad()
    def observe(self, counts: Tensor, first_key: int = 0) -> None:
        """Add the counts N_jr (B, H, M, S) of a training forward."""
        self._count_forward()
        positions = self._positions(counts.shape[-1], first_key)
        counts = counts.sum(0).to(self.counts.dtype)
        if self.max_positions is None:
            counts = counts.sum(-1, keepdim=True)
        self.counts[:, :, positions] += zero_if_recomputing(counts, self.counts)

    @torch.no_grad()
    def m_step(self) -> None:
        """Pi <- momentum * pi + (1 - momentum) * N_jr / N_j, where N_j > 0."""
        counts = all_reduce_sum(self.counts)
        total = counts.sum(1, keepdim=True)  # N_j: a pair's gammas sum to 1
        new = counts / total.clamp_min(torch.finfo(counts.dtype).tiny)
        self.pi.lerp_(torch.where(total > 0, new, self.pi), 1 - self.momentum)
        self.counts.zero_()
        self._forget_forwards()

    def extra_repr(self) -> str:
        """The options."""
        return f"momentum={self.momentum}, max_positions={self.max_positions}"

    def _positions(self, num_keys: int, first_key: int) -> slice:
        if self.max_positions is None:
            return slice(None)
        end = first_key + num_keys
        if end > self.max_positions:
            limit = f"max_positions={self.max_positions}"
            raise ValueError(f"the prior has {limit} positions, got {end} keys")
        return slice(first_key, end)


def make_prior(prior: str | nn.Module, num_heads: int, num_mixtures: int) -> nn.Module:
    """The prior of that name, or the given module."""
    if isinstance(prior, nn.Module):
        return prior
    if prior == "uniform":
        return UniformPrior()
    kind = LearnedPrior if prior == "learned" else EMPrior
    return kind(num_heads, num_mixtures)
