"""The mixture's prior pi_jr: learned by SGD (setting A), updated by the M-step (setting B), or uniform.

A prior maps the number of keys and the position of the first to log pi, broadcastable to (B, H, M, S).
"""

import torch
from torch import Tensor, nn

from mgk.functional.mixture.inputs import compute_dtype
from mgk.nn.em import EMModule, all_reduce_sum, check_sizes, zero_if_recomputing


class UniformPrior(nn.Module):
    """pi_jr = 1 / M."""

    def forward(self, num_keys: int, first_key: int = 0) -> None:
        """None, which every function takes as uniform."""


class LearnedPrior(nn.Module):
    """pi_r = softmax(logits)_r for each head, shared over positions; starts uniform, the paper's 0.5 for M = 2."""

    def __init__(self, num_heads: int, num_mixtures: int) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, num_mixtures=num_mixtures)
        self.logits = nn.Parameter(torch.empty(num_heads, num_mixtures))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the uniform prior."""
        nn.init.zeros_(self.logits)

    def forward(self, num_keys: int, first_key: int = 0) -> Tensor:
        """Log pi (1, H, M, 1)."""
        return self.logits.log_softmax(-1, dtype=compute_dtype(self.logits)).view(1, *self.logits.shape, 1)


class EMPrior(EMModule):
    """pi_jr = N_jr / N_j, N_jr = sum_i gamma_ijr (Eq. 11 and below), from the training forwards since the last M-step.

    Args:
        num_heads: H.
        num_mixtures: M.
        momentum: The share of the old prior that an M-step keeps.
        max_positions: None shares the prior over positions; a number gives each of that many positions its own.
    """

    pi: Tensor
    counts: Tensor

    def __init__(
        self, num_heads: int, num_mixtures: int, *, momentum: float = 0.0, max_positions: int | None = None
    ) -> None:
        super().__init__(momentum)
        positions = 1 if max_positions is None else max_positions
        check_sizes(num_heads=num_heads, num_mixtures=num_mixtures, max_positions=positions)
        self.max_positions = max_positions
        for name in ("pi", "counts"):
            self.register_buffer(name, torch.empty(num_heads, num_mixtures, positions))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the uniform prior and clear the statistics."""
        nn.init.constant_(self.pi, 1 / self.pi.shape[1])
        nn.init.zeros_(self.counts)

    def forward(self, num_keys: int, first_key: int = 0) -> Tensor:
        """Log pi of the last M-step: (1, H, M, 1), or (1, H, M, S) with a prior for each position."""
        # a copy: an M-step between forward and backward must not change what autograd has saved
        return self.pi[None, :, :, self._positions(num_keys, first_key)].log()

    @torch.no_grad()
    def observe(self, counts: Tensor, first_key: int = 0) -> None:
        """Add the counts N_jr (B, H, M, S) of a training forward."""
        counts = counts.sum(0).to(self.counts.dtype)
        if self.max_positions is None:
            self.counts += zero_if_recomputing(counts.sum(-1, keepdim=True))
        else:
            self.counts[:, :, self._positions(counts.shape[-1], first_key)] += zero_if_recomputing(counts)

    @torch.no_grad()
    def m_step(self) -> None:
        """Pi <- momentum * pi + (1 - momentum) * N_jr / N_j; positions without evidence keep theirs."""
        counts = all_reduce_sum(self.counts)
        per_position = counts.sum(1, keepdim=True)  # N_j, as the responsibilities of a pair sum to 1
        new = torch.where(per_position > 0, counts / per_position.clamp_min(torch.finfo(counts.dtype).tiny), self.pi)
        self.pi.lerp_(new, 1 - self.momentum)
        self.counts.zero_()

    def extra_repr(self) -> str:
        """The options."""
        return f"momentum={self.momentum}, max_positions={self.max_positions}"

    def _positions(self, num_keys: int, first_key: int) -> slice:
        if self.max_positions is None:
            return slice(None)
        if first_key + num_keys > self.max_positions:
            raise ValueError(
                f"the prior's table holds max_positions={self.max_positions} positions, got {first_key + num_keys} keys"
            )
        return slice(first_key, first_key + num_keys)


def make_prior(prior: str | nn.Module, num_heads: int, num_mixtures: int) -> nn.Module:
    """The prior of that name, or the module as it is."""
    if isinstance(prior, nn.Module):
        return prior
    if prior == "uniform":
        return UniformPrior()
    return LearnedPrior(num_heads, num_mixtures) if prior == "learned" else EMPrior(num_heads, num_mixtures)
