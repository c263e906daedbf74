"""The validated inputs of mixture attention, as every backend receives them."""

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.variants import EStep, Kernel

# Stands for log 0 where -inf would make inf - inf or 0 * inf.
LOG_ZERO = -1e30
# Scores of this size are rounded by a millionth: a centre that removes no more from them gains nothing.
SMALL_SCORE = 16.0


class AttentionInputs(NamedTuple):
    """The arguments of Eq. 9 and 10 after validation: shapes agree, and masks, priors and variances are 4-D.

    With ``shifts`` the key of component r is ``keys + shifts[:, r]`` (sMGK) and ``keys`` has one component.
    """

    query: Tensor  # (B, H, L, D)
    keys: Tensor  # (B, H, M, S, D), or (B, H, 1, S, D) with shifts
    value: Tensor  # (B, H, S, E)
    shifts: Tensor | None  # (H, M, D)
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
    def num_scores(self) -> int:
        """B H M L S, the number of scores s_ijr."""
        batch, heads, num_queries, _ = self.query.shape
        return batch * heads * self.num_mixtures * num_queries * self.num_keys

    @property
    def is_hard(self) -> bool:
        """Whether a max over components takes the place of their sum (Eq. 12); one component has no choice."""
        return self.e_step == "hard" and self.num_mixtures > 1

    @property
    def has_common_variance(self) -> bool:
        """Whether sigma^2 is one number for all components and positions of a head."""
        return not isinstance(self.variance, Tensor) or self.variance.shape[2:] == (1, 1)

    @property
    def has_key_mask(self) -> bool:
        """Whether the mask is the same for every query."""
        return self.attn_mask is not None and self.attn_mask.shape[2] == 1

    def with_key_mask_in_prior(self) -> "AttentionInputs":
        """The same inputs with a key mask as a factor of pi_jr, exp(mask_j) for every r: no mask is left to read."""
        if self.attn_mask is None or not self.has_key_mask:
            return self
        mask = self.attn_mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
        return self._replace(attn_mask=None, log_prior=mask if self.log_prior is None else self.log_prior + mask)

    def with_normalised_prior(self) -> "AttentionInputs":
        """The same inputs with sum_r pi_r = 1 where all positions share the prior.

        No output depends on the sum, so the gradient over r sums to 0: through the
        normalisation exactly, in spite of rounding.
        """
        prior = self.log_prior
        if prior is None or prior.shape[3] != 1 or not needs_grad(prior):
            return self
        prior = prior.to(compute_dtype(self.query))
        # clamped, so that a head whose components are all removed has a finite sum
        return self._replace(log_prior=prior - prior.clamp_min(LOG_ZERO).logsumexp(2, keepdim=True))

    def at_full_precision(self) -> "AttentionInputs":
        """The same inputs with half-precision tensors in float32, so that every sum is in float32 or better."""
        return self.in_dtype(compute_dtype(self.query))

    def in_dtype(self, dtype: torch.dtype) -> "AttentionInputs":
        """The same inputs with every tensor of numbers in a dtype."""
        return AttentionInputs._make(
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in self
        )

    def centre(self) -> Tensor:
        """The point c (B, H, 1, D) that distances are expanded about: the mean live key.

        Any c gives the same scores, so no gradient flows through it. Under causality it is
        the first live key, so that no later key affects an earlier output, or 0 where that
        key is near 0.
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
        """A causal centre, or 0 where |c|^2 / (2 sigma^2), the size that it removes from the scores, is small."""
        if not self.is_causal:
            return centre
        sigma2 = self.variance
        if isinstance(sigma2, Tensor):
            sigma2 = sigma2.detach().mean((2, 3), keepdim=True)
        is_far = centre.square().sum(-1, keepdim=True) > 2 * SMALL_SCORE * sigma2
        return centre.where(is_far, 0.0)

    def with_expanded_keys(self) -> "AttentionInputs":
        """The same inputs with the shifts added to the keys: k_jr = k_j + b_r."""
        if self.shifts is None:
            return self
        return self._replace(keys=self.keys + self.shifts[None, :, :, None], shifts=None)


def validate_inputs(
    query: Any,
    keys: Any,
    value: Any = None,
    *,
    shifts: Tensor | None = None,
    log_prior: Any = None,
    variance: Any = None,
    kernel: Any = "gaussian",
    e_step: Any = "soft",
    attn_mask: Any = None,
    is_causal: Any = False,
    dropout_p: Any = 0.0,
) -> AttentionInputs:
    """The arguments of ``mixture_attention``, checked; with ``shifts`` (H, M, D) the keys are (B, H, 1, S, D).

    Without ``value`` the inputs serve weights, responsibilities and statistics.
    """
    validation.tensor("query", query, "BHLD")
    validation.tensor("keys", keys, "BHMSD")
    value = query.new_empty(*query.shape[:2], keys.shape[3], 0) if value is None else value
    validation.tensor("value", value, "BHSE")
    query, keys, value = validation.autocast_inputs(query, keys, value)
    validation.matching_sizes(query, keys, value, "keys" if shifts is None else "key")
    batch, heads, num_queries, width = query.shape
    if width == 0:
        raise ValueError(f"query must have at least one feature in its last dimension, got shape {tuple(query.shape)}")
    if shifts is not None:
        validation.size("shifts", shifts, 0, heads, "the heads of query")
        validation.size("shifts", shifts, 2, width, "the features of query")
        validation.on_device("shifts", shifts, query)
    shape = (batch, heads, keys.shape[2] if shifts is None else shifts.shape[1], keys.shape[3])
    if shape[2] == 0:
        raise ValueError(f"{'keys' if shifts is None else 'shifts'} must have at least one component, got none")
    validation.option("kernel", kernel, get_args(Kernel))
    validation.option("e_step", e_step, get_args(EStep))
    validation.flag("is_causal", is_causal)
    validation.probability("dropout_p", dropout_p)
    prior = validation.log_prior(log_prior, query, shape)
    return AttentionInputs(
        query=query,
        keys=keys,
        value=value,
        shifts=shifts,
        log_prior=prior if e_step == "soft" else None,
        variance=validation.variance(variance, query, shape),
        kernel=kernel,
        e_step=e_step,
        attn_mask=validation.attn_mask(attn_mask, query, keys.shape[3]),
        is_causal=is_causal and num_queries > 1,  # one query sees every key
        dropout_p=float(dropout_p),
    )


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that sums are made in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def finest_dtype(tensor: Tensor) -> torch.dtype:
    """float64 where the device has it, else float32: for gradients that add up the rounding of every pair."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def needs_grad(x: object) -> bool:
    """Whether x is a tensor whose gradient is computed."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
