"""The validated inputs of mixture attention, as every backend receives them."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.functional import masks, validation
from mgk.functional.masks import KeyRange
from mgk.functional.validation import is_static, needs_grad
from mgk.variants import CHOICES, EStep, Kernel

# Stands for log 0 where -inf would make inf - inf or 0 * inf.
LOG_ZERO = -1e30
# Scores of this size are rounded by a millionth: removing no more gains nothing.
SMALL_SCORE = 16.0
# Keys that a median is taken of: enough for a centre, which need not be exact.
MEDIAN_SAMPLE = 64


class AttentionInputs(NamedTuple):
    """The arguments of Eq. 9 and 10 after validation, all 4-D or 5-D.

    With ``shifts`` (sMGK), ``keys`` has one component and k_jr is ``keys + shifts[:, r]``.
    """

    query: Tensor  # (B, Hq, L, D)
    keys: Tensor  # (B, H, M, S, D), or (B, H, 1, S, D) with shifts
    value: Tensor  # (B, H, S, E)
    shifts: Tensor | None  # (H, M, D)
    log_prior: Tensor | None  # broadcastable to (B, H, M, S); None: uniform or hard
    variance: float | Tensor  # broadcastable to (B, H, M, S)
    kernel: Kernel
    e_step: EStep
    attn_mask: Tensor | None  # bool or additive float, broadcastable to (B, Hq, L, S)
    key_range: KeyRange  # causality, window and segments
    dropout_p: float
    return_lse: bool

    @property
    def num_mixtures(self) -> int:
        """M, the number of Gaussians a key position is made of."""
        return self.keys.shape[2] if self.shifts is None else self.shifts.shape[1]

    @property
    def group(self) -> int:
        """Hq / H, the query heads that read one key head."""
        return self.query.shape[1] // max(1, self.keys.shape[1])

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.key_range.is_causal

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
        """B Hq M L S, the number of scores s_ijr."""
        batch, heads, num_queries, _ = self.query.shape
        return batch * heads * self.num_mixtures * num_queries * self.num_keys

    @property
    def is_hard(self) -> bool:
        """Whether a max over components takes the place of their sum (Eq. 12)."""
        return self.e_step == "hard" and self.num_mixtures > 1

    @property
    def is_softmax(self) -> bool:
        """Eq. 1: one key, the dot product, a scale, and SDPA's own masks."""
        return (
            self.num_mixtures == 1
            and self.kernel == "dot"
            and self.log_prior is None
            and self.shifts is None
            and not isinstance(self.variance, Tensor)
            and not (self.is_causal and self.has_key_mask)
        )

    @property
    def has_common_variance(self) -> bool:
        """Whether sigma^2 is one number for a head."""
        return not isinstance(self.variance, Tensor) or self.variance.shape[2:] == (1, 1)

    @property
    def has_key_mask(self) -> bool:
        """Whether the mask is the same for every query of a key head."""
        mask = self.attn_mask
        return mask is not None and mask.shape[2] == 1 and (mask.shape[1] == 1 or self.group == 1)

    @property
    def log_uniform_prior(self) -> float:
        """-log M, which a prior of None adds to a log-sum-exp."""
        return -math.log(self.num_mixtures) if self.log_prior is None and not self.is_hard else 0.0

    def with_key_mask_in_prior(self) -> "AttentionInputs":
        """The same inputs with a key mask as a factor exp(mask_j) of pi_jr."""
        if self.attn_mask is None or not self.has_key_mask:
            return self
        mask, dtype = self.attn_mask, compute_dtype(self.query)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
        prior = masks.to_dtype(mask, dtype)
        if self.log_prior is not None:
            prior = masks.add(masks.to_dtype(self.log_prior, dtype), prior)
        return self._replace(attn_mask=None, log_prior=prior)

    def with_normalised_prior(self) -> "AttentionInputs":
        """The same inputs with sum_r pi_r = 1 where all positions share the prior.

        No output depends on the sum, so the gradient over r sums to 0: through the
        normalisation exactly, in spite of rounding. A log-sum-exp does depend on it.
        """
        prior = self.log_prior
        if prior is None or prior.shape[3] != 1 or not needs_grad(prior) or self.return_lse:
            return self
        prior = prior.to(compute_dtype(self.query))
        # clamped: a head without components has a finite sum
        return self._replace(log_prior=prior - prior.clamp_min(LOG_ZERO).logsumexp(2, keepdim=True))

    def at_full_precision(self) -> "AttentionInputs":
        """The same inputs with half-precision tensors in float32."""
        return self.in_dtype(compute_dtype(self.query))

    def in_dtype(self, dtype: torch.dtype) -> "AttentionInputs":
        """The same inputs in a dtype; what is finite stays finite."""
        names = ["shifts", "log_prior", "variance", "attn_mask"]
        if self.query.dtype != dtype:
            names += ["query", "keys", "value"]
        others: dict[str, Any] = {}
        for name in names:
            x = getattr(self, name)
            if isinstance(x, Tensor) and x.dtype != dtype and x.is_floating_point():
                others[name] = masks.to_dtype(x, dtype)
        return self._replace(**others) if others else self

    def cleaned(self) -> tuple["AttentionInputs", Tensor | None]:
        """The same inputs with finite keys and values, and an addend."""
        keys, value, addend, overflows = masks.clean(
            self.keys, self.value, self.attn_mask, self.key_range, self.query.shape[1:3]
        )
        inputs = self._replace(keys=keys, value=value)
        return inputs.in_dtype(torch.float64) if overflows else inputs, addend

    def for_responsibilities(self) -> "AttentionInputs":
        """The same inputs for gamma_ijr, with a bool mask.

        Keys that it excludes for every query are 0, whatever they hold.
        """
        if self.attn_mask is None:
            return self
        mask = masks.admitted(self.attn_mask)
        alive = mask.any(2)  # (B, Hq or 1, S or 1)
        if alive.shape[1] > 1 and self.group > 1:
            alive = alive.unflatten(1, (-1, self.group)).any(2)
        return self._replace(attn_mask=mask, keys=self.keys.masked_fill(~alive[:, :, None, :, None], 0.0))

    def centre(self) -> Tensor:
        """The point c (B, H, 1, D) that distances are expanded about: the mean live key.

        Any c gives the same scores, so no gradient flows through it. Under causality it is
        the first live key, so that no later key affects an earlier output, or 0 where that
        key is near 0. In a window or in segments it is the median of live keys: no key is
        seen by every query, and what the others do not see must not cost them precision.
        """
        keys = self.keys.detach()
        if self.key_range.is_local:
            return self._median_key(keys)
        if self.log_prior is None or self.log_prior.shape[3] == 1:
            keys = keys[:, :, :, :1] if self.is_causal else keys
            return self._unless_near_zero(keys.mean((2, 3)).unsqueeze(2))
        alive = (self.log_prior > -torch.inf).any(2).expand(*keys.shape[:2], -1)  # (B, H, S)
        if self.is_causal:
            alive = alive & (alive.cumsum(-1) == 1)
        count = alive.sum(-1).clamp_min(1)[:, :, None, None]
        return self._unless_near_zero(
            keys.mean(2).masked_fill(~alive.unsqueeze(-1), 0.0).sum(2, keepdim=True) / count
        )

    def _median_key(self, keys: Tensor) -> Tensor:
        """The median of at most MEDIAN_SAMPLE live keys (B, H, 1, D)."""
        step = max(1, keys.shape[3] // MEDIAN_SAMPLE)
        sample = keys[:, :, 0, ::step]
        if self.log_prior is not None and self.log_prior.shape[3] > 1:
            alive = (self.log_prior > -torch.inf).any(2)[..., ::step, None]
            sample = sample.masked_fill(~alive, torch.nan)
        return sample.nanmedian(2, keepdim=True).values.nan_to_num(0.0, 0.0, 0.0)

    def _unless_near_zero(self, centre: Tensor) -> Tensor:
        """A causal centre, or 0 where |c|^2 / (2 sigma^2) is small."""
        if not self.is_causal:
            return centre
        sigma2 = self.variance
        if isinstance(sigma2, Tensor):
            sigma2 = sigma2.detach().mean((2, 3), keepdim=True)
        is_far = centre.square().sum(-1, keepdim=True) > 2 * SMALL_SCORE * sigma2
        return centre.where(is_far, 0.0)

    def with_repeated_heads(self) -> "AttentionInputs":
        """The same inputs with a key head for each query head."""
        if self.group == 1:
            return self
        prior, variance = self.log_prior, self.variance
        return self._replace(
            keys=self.keys.repeat_interleave(self.group, 1),
            value=self.value.repeat_interleave(self.group, 1),
            shifts=None if self.shifts is None else self.shifts.repeat_interleave(self.group, 0),
            log_prior=None if prior is None else self._per_query_head(prior),
            variance=self._per_query_head(variance) if isinstance(variance, Tensor) else variance,
        )

    def with_folded_groups(self) -> "AttentionInputs":
        """The same inputs with the queries of a group in a row, without mask."""
        if self.group == 1:
            return self
        batch, _, num_queries, width = self.query.shape
        shape = (batch, self.keys.shape[1], self.group * num_queries, width)
        return self._replace(query=self.query.reshape(shape))

    def with_seen_keys(self) -> "AttentionInputs":
        """The same inputs without the keys before every query's window."""
        if self.key_range.left is None or not (is_static(self.num_queries) and is_static(self.num_keys)):
            return self
        first = self.key_range.first_seen(self.num_queries, self.num_keys)
        if first == 0:
            return self

        def cut(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[3] == 1 else x[..., first:]

        variance = cut(self.variance) if isinstance(self.variance, Tensor) else self.variance
        assert variance is not None
        key_range = self.key_range.from_key(first).for_sizes(self.num_queries, self.num_keys - first)
        return self._replace(
            keys=self.keys[:, :, :, first:],
            value=self.value[:, :, first:],
            log_prior=cut(self.log_prior),
            variance=variance,
            attn_mask=cut(self.attn_mask),
            key_range=key_range,
        )

    def _per_query_head(self, x: Tensor) -> Tensor:
        """(B, H, ...) as (B, Hq, ...); a head dimension of 1 is shared by all."""
        return x if x.shape[1] == 1 else x.repeat_interleave(self.group, 1)

    def with_expanded_keys(self) -> "AttentionInputs":
        """The same inputs with keys k_jr = k_j + b_r."""
        if self.shifts is None:
            return self
        shifts = self.shifts[None, :, :, None]
        if self.kernel == "dot":
            return self._replace(keys=self.keys + shifts, shifts=None)
        # about the centre no digits of a shift are lost
        centre = self.centre()
        keys = self.keys - centre.unsqueeze(2) + shifts
        query = self.query - self._per_query_head(centre)
        return self._replace(query=query, keys=keys, shifts=None)


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
    window: Any = None,
    segment_ids: Any = None,
    dropout_p: Any = 0.0,
    return_lse: Any = False,
) -> AttentionInputs:
    """The arguments of ``mixture_attention``, checked; ``value`` may be missing.

    With ``shifts`` (H, M, D) the keys are (B, H, 1, S, D).
    """
    validation.tensor("query", query, "BHLD")
    if shifts is None:  # else its caller has looked at the key
        validation.tensor("keys", keys, "BHMSD")
    value = query.new_empty(*keys.shape[:2], keys.shape[3], 0) if value is None else value
    validation.tensor("value", value, "BHSE")
    query, keys, value = validation.autocast_inputs(query, keys, value)
    validation.matching_sizes(query, keys, value, "keys" if shifts is None else "key")
    batch, width, heads, num_keys = query.shape[0], query.shape[3], keys.shape[1], keys.shape[3]
    if width == 0:
        raise ValueError(
            f"query must have at least one feature in its last dimension, got shape {tuple(query.shape)}"
        )
    if shifts is not None:
        validation.size("shifts", shifts, 0, heads, "the heads of key")
        validation.size("shifts", shifts, 2, width, "the features of query")
        validation.on_device("shifts", shifts, query)
    shape = (batch, heads, keys.shape[2] if shifts is None else shifts.shape[1], num_keys)
    if shape[2] == 0:
        raise ValueError(f"{'keys' if shifts is None else 'shifts'} must have at least one component, got none")
    validation.option("kernel", kernel, CHOICES["kernel"])
    validation.option("e_step", e_step, CHOICES["e_step"])
    validation.flag("is_causal", is_causal)
    validation.flag("return_lse", return_lse)
    validation.probability("dropout_p", dropout_p)
    prior = validation.log_prior(log_prior, query, shape)
    key_range = validated_key_range(window, is_causal, segment_ids, query, num_keys)
    return AttentionInputs(
        query=query,
        keys=keys,
        value=value,
        shifts=shifts,
        log_prior=prior if e_step == "soft" else None,
        variance=validation.variance(variance, query, shape),
        kernel=kernel,
        e_step=e_step,
        attn_mask=validation.attn_mask(attn_mask, query, num_keys),
        key_range=key_range,
        dropout_p=float(dropout_p),
        return_lse=return_lse,
    )


def validated_key_range(
    window: Any, is_causal: bool, segment_ids: Any, query: Tensor, num_keys: int
) -> KeyRange:
    """Causality, window and segments, checked."""
    if window is None and segment_ids is None and not is_causal:
        return masks.WHOLE
    ids = validation.segment_ids(segment_ids, query, num_keys)
    segments = None if ids is None else masks.segment_bounds(ids)
    return KeyRange(*validation.window(window, is_causal), segments).for_sizes(query.shape[2], num_keys)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that sums are made in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def finest_dtype(tensor: Tensor) -> torch.dtype:
    """float64 where the device has it, else float32."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
