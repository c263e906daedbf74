"""One checked call of mixture attention, as every backend receives it."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kernel = Literal["gaussian", "dot"]
EStep = Literal["soft", "hard"]

# Stands for log 0 where -inf would make inf - inf or 0 * inf.
LOG_ZERO = -1e30
# Scores of this size are rounded by a millionth: a centre that saves no more is not worth having.
SMALL_SCORE = 16.0


class Call(NamedTuple):
    """The arguments of Eq. 9/10 after checking: shapes agree, and masks, priors and variances are 4-D.

    With ``shifts`` the key of component r is ``keys + shifts[:, r]`` (sMGK) and ``keys`` has one component.
    """

    query: Tensor  # (B, H, L, D)
    keys: Tensor  # (B, H, M, S, D), or (B, H, 1, S, D) with shifts
    shifts: Tensor | None  # (H, M, D)
    value: Tensor  # (B, H, S, E)
    log_prior: Tensor | None  # broadcastable to (B, H, M, S); None: uniform, or a hard E-step, which ignores it
    variance: float | Tensor  # broadcastable to (B, H, M, S)
    kernel: Kernel
    e_step: EStep
    attn_mask: Tensor | None  # bool or additive float, broadcastable to (B, H, L, S)
    is_causal: bool
    dropout_p: float

    @property
    def num_mixtures(self) -> int:
        """M, the number of Gaussians a key position is made of."""
        return self.keys.shape[2] if self.shifts is None else self.shifts.shape[1]

    @property
    def num_queries(self) -> int:
        """L."""
        return self.query.shape[2]

    @property
    def num_keys(self) -> int:
        """S."""
        return self.keys.shape[3]

    @property
    def is_hard(self) -> bool:
        """Whether a max over components takes the place of their sum (Eq. 12); one component has no choice."""
        return self.e_step == "hard" and self.num_mixtures > 1

    @property
    def has_common_variance(self) -> bool:
        """Whether sigma^2 is one number for all components and positions of a head."""
        return not isinstance(self.variance, Tensor) or self.variance.shape[2:] == (1, 1)

    @property
    def learns_variance(self) -> bool:
        """Whether sigma^2 has a gradient."""
        return isinstance(self.variance, Tensor) and self.variance.requires_grad and torch.is_grad_enabled()

    @property
    def learns_prior(self) -> bool:
        """Whether pi has a gradient."""
        return self.log_prior is not None and self.log_prior.requires_grad and torch.is_grad_enabled()

    @property
    def has_key_mask(self) -> bool:
        """Whether the mask is the same for every query."""
        return self.attn_mask is not None and self.attn_mask.shape[2] == 1

    def with_key_mask_in_prior(self) -> "Call":
        """The same call with a key mask as a factor of pi_jr, exp(mask_j) for every r: no mask is left to read."""
        if self.attn_mask is None or not self.has_key_mask:
            return self
        mask = self.attn_mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
        return self._replace(attn_mask=None, log_prior=mask if self.log_prior is None else self.log_prior + mask)

    def with_normalised_prior(self) -> "Call":
        """The same call with sum_r pi_r = 1 where the prior is shared by all positions: no output depends on its sum.

        Its gradient over r must therefore add up to 0. Taken through the normalisation it does, whatever is left of
        the rounding errors of the L S terms that each component's gradient is a sum of.
        """
        prior = self.log_prior
        if prior is None or prior.shape[3] != 1 or not self.learns_prior:
            return self
        prior = prior.to(compute_dtype(self.query))
        # clamped, so that a head whose components are all removed has a finite sum
        return self._replace(log_prior=prior - prior.clamp_min(LOG_ZERO).logsumexp(2, keepdim=True))

    def at_full_precision(self) -> "Call":
        """The same call with half-precision tensors in float32, so that every sum is in float32 or better."""
        return self.in_dtype(compute_dtype(self.query))

    def in_dtype(self, dtype: torch.dtype) -> "Call":
        """The same call with every tensor of numbers in a dtype."""

        def convert(tensor: Tensor | None) -> Tensor | None:
            return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor

        return self._replace(
            query=self.query.to(dtype),
            keys=self.keys.to(dtype),
            shifts=convert(self.shifts),
            value=self.value.to(dtype),
            log_prior=convert(self.log_prior),
            variance=self.variance.to(dtype) if isinstance(self.variance, Tensor) else self.variance,
            attn_mask=convert(self.attn_mask),
        )

    def centre(self) -> Tensor:
        """The point c (B, H, 1, D) that distances are expanded about: the mean of the keys that take part.

        Any c gives the same scores, so no gradient needs to flow through it; one amid the keys keeps them precise.
        Under causality it is the first key that takes part: no later one, however large, touches an earlier output.
        Near 0 that key is no better a centre than 0 itself, and a worse one than the mean: 0 it is.
        """
        keys = self.keys.detach()
        if self.log_prior is None or self.log_prior.shape[3] == 1:
            keys = keys[:, :, :, :1] if self.is_causal else keys
            return self._unless_near_zero(keys.mean((2, 3)).unsqueeze(2))
        alive = (self.log_prior > -torch.inf).any(2).expand(*keys.shape[:2], -1)  # (B, H, S)
        if self.is_causal:
            alive = alive & (alive.cumsum(-1) == 1)
        count = alive.sum(-1).clamp_min(1)[:, :, None, None]
        return self._unless_near_zero(keys.mean(2).masked_fill(~alive.unsqueeze(-1), 0.0).sum(2, keepdim=True) / count)

    def _unless_near_zero(self, centre: Tensor) -> Tensor:
        """A first key as it is, or 0 where the scores |k|^2 / (2 sigma^2) that it would take away are a few."""
        if not self.is_causal:
            return centre
        sigma2 = self.variance
        if isinstance(sigma2, Tensor):
            sigma2 = sigma2.detach().mean((2, 3), keepdim=True)
        is_far = centre.square().sum(-1, keepdim=True) > 2 * SMALL_SCORE * sigma2
        return centre.where(is_far, 0.0)

    def with_expanded_keys(self) -> "Call":
        """The same call with the shifts added to the keys: k_jr = k_j + b_r."""
        if self.shifts is None:
            return self
        return self._replace(keys=self.keys + self.shifts[None, :, :, None], shifts=None)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that sums are made in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def finest_dtype(tensor: Tensor) -> torch.dtype:
    """float64 where the device has it, else float32: for gradients that add up the rounding of every pair."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
