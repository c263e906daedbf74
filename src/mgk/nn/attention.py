"""Multi-head attention with a mixture of keys: all six variants in one module."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mgk.functional import masks, validation
from mgk.functional.backends import backend_names
from mgk.functional.linear import api as linear
from mgk.functional.linear import feature_maps
from mgk.functional.linear.feature_maps import FeatureMap
from mgk.functional.linear.inputs import validate_inputs as validate_linear_inputs
from mgk.functional.mixture import api as attention
from mgk.functional.mixture import em_statistics
from mgk.functional.mixture.inputs import AttentionInputs, validate_inputs
from mgk.nn.caches import KeyValueCache, StateCache
from mgk.nn.em import EMModule, is_first_pass
from mgk.nn.feature_maps import make_feature_map
from mgk.nn.priors import EMPrior, LearnedPrior, UniformPrior, make_prior
from mgk.nn.rotary import rotate
from mgk.nn.variances import ConstantVariance, EMVariance, LearnedVariance, make_variance
from mgk.variants import EStep

Variant = Literal["softmax", "linear", "mgk", "smgk", "mlk", "smlk"]
Cache = KeyValueCache | StateCache

_LINEAR = ("linear", "mlk", "smlk")
_SHIFTED = ("smgk", "smlk")
_SINGLE = ("softmax", "linear")


class MixtureAttention(nn.Module):
    r"""MultiHead(x) = Concat(H_1, ..., H_H) W_O (Eq. 3), each head attending by the variant's equation.

    ``softmax``: Eq. 1. ``mgk``, ``smgk``: Eq. 9/10 with keys k_jr = W_r x_j, or k_jr = W x_j + b_r. ``linear``,
    ``mlk``, ``smlk``: Eq. 14.

    Args:
        embed_dim: Width of the input and the output.
        num_heads: H. A mixture of two keys does with half the heads of softmax attention.
        variant: "softmax", "linear", "mgk", "smgk", "mlk" or "smlk".
        head_dim: D, the width of a head; None: embed_dim / num_heads.
        num_mixtures: M, the Gaussians of a key; the variants "softmax" and "linear" have one whatever is said here.
        e_step: "soft" (Eq. 9) or "hard" (Eq. 12), which has no trainable prior.
        prior: "learned" by SGD, "em" (updated by :meth:`m_step`), "uniform", or a module such as ``EMPrior(...,
            momentum=0.9)``.
        variance: "constant" (sqrt(D)), "learned", "em", or a module. Unless it is constant, Eq. 7's normaliser joins
            the prior.
        feature_map: phi of the linear variants: "elu", "favor", "dpfp", or a callable.
        dropout: Probability of dropping a position weight in training; the linear variants have none.
        bias: Whether the projections have biases.
        backend: Of the attention function: "auto" or a name from ``mgk.available_backends()``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        variant: Variant = "mgk",
        head_dim: int | None = None,
        num_mixtures: int = 2,
        e_step: EStep = "soft",
        prior: str | nn.Module = "learned",
        variance: str | nn.Module = "constant",
        feature_map: FeatureMap = "elu",
        dropout: float = 0.0,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_options(
            embed_dim, num_heads, variant, head_dim, num_mixtures, e_step, variance, feature_map, dropout, bias, backend
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = head_dim or embed_dim // num_heads
        self.variant = variant
        self.num_mixtures = 1 if variant in _SINGLE else num_mixtures
        self.e_step = e_step
        self.dropout = dropout
        self.backend = backend
        self.is_linear = variant in _LINEAR
        self.is_shifted = variant in _SHIFTED
        self.keys_per_token = 1 if self.is_shifted else self.num_mixtures

        inner = num_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, inner, bias=bias)
        self.k_proj = nn.Linear(embed_dim, inner * self.keys_per_token, bias=bias)  # rows are (H, M, D)
        self.v_proj = nn.Linear(embed_dim, inner, bias=bias)
        self.o_proj = nn.Linear(inner, embed_dim, bias=bias)
        self.shifts: nn.Parameter | None = None
        if self.is_shifted:
            self.shifts = nn.Parameter(torch.empty(num_heads, self.num_mixtures, self.head_dim))
        self.prior = make_prior(prior, num_heads, self.num_mixtures)
        # one key has no prior to choose; a hard E-step (Eq. 12) does not use it, so none is trained
        if variant in _SINGLE or (e_step == "hard" and isinstance(self.prior, LearnedPrior)):
            self.prior = UniformPrior()
        self.variance = make_variance(variance, num_heads, self.num_mixtures, self.head_dim)
        self.feature_map: FeatureMap | None = make_feature_map(feature_map, self.head_dim) if self.is_linear else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot projections, the same spread for any number of mixtures; zero biases; standard normal shifts."""
        bound = (6 / (self.embed_dim + self.num_heads * self.head_dim)) ** 0.5
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.uniform_(projection.weight, -bound, bound)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.shifts is not None:
            nn.init.normal_(self.shifts)
        for part in (self.prior, self.variance):
            if isinstance(part, LearnedPrior | LearnedVariance | EMModule):
                part.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x to itself, or to ``context``.

        Args:
            x: (B, L, embed_dim).
            context: (B, S, embed_dim), for cross-attention.
            key_mask: bool (B, S), True takes part; with a cache (B, cache.length + L).
            attn_mask: bool or additive float, broadcastable to (B, H, L, S); not for the linear variants.
            is_causal: Query i sees keys j <= i + (S - L).
            rotary: cos and sin, (L, D) or (B, L, D), that turn queries and keys (before a shift is added).
            cache: From :meth:`new_cache`; x is appended and attends to all so far.
            need_weights: Whether to return (output, weights), weights (B, H, L, S) before dropout; the output is the
                same.

        Returns:
            (B, L, embed_dim), or (output, weights).
        """
        self._check_inputs(x, context, attn_mask, is_causal, rotary, cache, need_weights)
        query, keys, value = self.project(x, context=context, rotary=rotary)
        is_padded = key_mask if context is None and cache is None else None
        if self.is_linear:
            assert not isinstance(cache, KeyValueCache)
            heads, weights = self._linear(query, keys, value, key_mask, is_padded, is_causal, cache, need_weights)
        else:
            assert not isinstance(cache, StateCache)
            heads, weights = self._mixture(
                query, keys, value, key_mask, attn_mask, is_padded, is_causal, cache, need_weights
            )
        out = self.o_proj(heads.transpose(1, 2).flatten(2))
        return (out, weights) if weights is not None else out

    def project(
        self, x: Tensor, *, context: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, L, D), keys (B, H, M, S, D), or one (B, H, 1, S, D) before its shifts, values (B, H, S, D)."""
        source = x if context is None else context
        heads, width = self.num_heads, self.head_dim
        query = self.q_proj(x).view(*x.shape[:2], heads, width).transpose(1, 2)
        value = self.v_proj(source).view(*source.shape[:2], heads, width).transpose(1, 2)
        keys = self.k_proj(source).view(*source.shape[:2], heads, self.keys_per_token, width).permute(0, 2, 3, 1, 4)
        if rotary is not None:
            query, keys = rotate(query, rotary), rotate(keys, rotary)
        return query, keys, value

    def new_cache(self) -> Cache:
        """An empty cache of this variant's kind."""
        return StateCache() if self.is_linear else KeyValueCache()

    def m_step(self) -> None:
        """Update the "em" priors and variances from the training forwards since the last call (identity 5).

        Sums over all ranks. To be called once per optimizer step, on every rank; without "em" it does nothing.
        DistributedDataParallel copies rank 0's buffers over the others' at each synchronised forward: accumulate
        gradients under its ``no_sync()``, or give it ``broadcast_buffers=False``.
        """
        for part in (self.prior, self.variance):
            if isinstance(part, EMModule):
                part.m_step()

    def extra_repr(self) -> str:
        """The options."""
        return (
            f"{self.embed_dim}, {self.num_heads}, variant={self.variant!r}, head_dim={self.head_dim},"
            f" num_mixtures={self.num_mixtures}, e_step={self.e_step!r}, dropout={self.dropout},"
            f" backend={self.backend!r}"
        )

    def _mixture(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
        cache: KeyValueCache | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The heads (B, H, L, D) by Eq. 1 or 10, and the weights when they are asked for."""
        num_keys = keys.shape[3] + (0 if cache is None else cache.length)
        log_prior, mask = self.log_prior(num_keys), _join_masks(attn_mask, key_mask, query, num_keys)
        if cache is not None:
            keys, value = cache.append(keys, value)
        inputs = validate_inputs(
            query,
            keys,
            value,
            shifts=self.shifts,
            log_prior=log_prior,
            variance=self.variance(),
            kernel="dot" if self.variant == "softmax" else "gaussian",
            e_step=self.e_step,
            attn_mask=mask,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        heads = attention.attend(inputs, self.backend)
        if self._counts(cache):
            self._observe(inputs, query_mask)
        return heads, attention.weights(inputs) if need_weights else None

    def _linear(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
        cache: StateCache | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The heads (B, H, L, D) by Eq. 14, and the weights when they are asked for."""
        assert self.feature_map is not None
        past = 0 if cache is None else cache.length
        key_mask = validation.token_mask("key_mask", key_mask, query, past + keys.shape[3], "BS")
        if key_mask is not None:
            key_mask = key_mask[:, past:]  # the state has obeyed the rest
        if self.shifts is not None:
            keys = keys + self.shifts[None, :, :, None].to(keys.dtype)
        log_prior = self.log_prior(keys.shape[3], past)
        inputs = validate_linear_inputs(
            query,
            keys,
            value,
            log_prior,
            feature_map=self.feature_map,
            key_mask=key_mask,
            is_causal=is_causal,
            initial_state=None if cache is None else cache.state,
        )
        heads, state = linear.attend(inputs, self.backend)
        if cache is not None:
            cache.append(state, keys.shape[3])
        if self._counts(cache):
            assert isinstance(self.prior, EMPrior)
            self.prior.observe(linear.counts(inputs, query_mask, self.backend))
        return heads, linear.weights(inputs) if need_weights else None

    def log_prior(self, num_keys: int, first_key: int = 0) -> Tensor | None:
        """Log pi_jr, with -(D/2) log sigma_r^2 (Eq. 7's normaliser, which Eq. 9 drops) unless sigma is constant."""
        log_prior: Tensor | None = self.prior(num_keys, first_key)
        if isinstance(self.variance, ConstantVariance):
            return log_prior
        normaliser = -self.head_dim / 2 * self.variance().log()
        return normaliser if log_prior is None else log_prior + normaliser

    def _counts(self, cache: Cache | None) -> bool:
        """Whether this forward's statistics count for the M-step."""
        has_em = isinstance(self.prior, EMPrior) or isinstance(self.variance, EMVariance)
        return has_em and self.training and cache is None and is_first_pass()

    @torch.no_grad()
    def _observe(self, inputs: AttentionInputs, query_mask: Tensor | None) -> None:
        """Hand the statistics of a training forward to the prior and the variance."""
        if isinstance(self.variance, EMVariance):
            sums = em_statistics.moments(inputs, query_mask, self.backend)
            counts = sums.counts
            self.variance.observe(counts, em_statistics.squared_distances(inputs, sums))
        else:
            counts = em_statistics.counts(inputs, query_mask, self.backend)
        if isinstance(self.prior, EMPrior):
            self.prior.observe(counts)

    def _check_inputs(
        self, x: Any, context: Any, attn_mask: Any, is_causal: Any, rotary: Any, cache: Any, need_weights: Any
    ) -> None:
        for name, tensor, dims in (("x", x, "BLC"), ("context", context, "BSC")):
            if name == "context" and tensor is None:
                continue
            validation.tensor(name, tensor, dims)
            validation.size(name, tensor, 2, self.embed_dim, "embed_dim")
        validation.flag("is_causal", is_causal)
        validation.flag("need_weights", need_weights)
        if context is not None:
            validation.size("context", context, 0, x.shape[0], "the batch of x")
            if cache is not None:
                raise ValueError("cache holds the tokens of x: it cannot be used with context")
            if rotary is not None:
                raise ValueError("rotary turns queries and keys by the positions of x: it cannot be used with context")
        if cache is not None and not isinstance(cache, StateCache if self.is_linear else KeyValueCache):
            raise TypeError(f"cache must be what new_cache() of this variant gives, got {type(cache).__name__}")
        if cache is not None and cache.batch not in (None, x.shape[0]):
            raise ValueError(f"cache holds a batch of {cache.batch} sequences, got x with {x.shape[0]}")
        if self.is_linear and attn_mask is not None:
            raise ValueError(f"attn_mask has no meaning for variant={self.variant!r}: use key_mask and is_causal")
        if self.is_linear and need_weights and cache is not None and cache.length:
            raise ValueError("need_weights cannot look into a linear state: call without the cache")
        if rotary is not None:
            self._check_rotary(x, rotary)

    def _check_rotary(self, x: Tensor, rotary: Any) -> None:
        if not isinstance(rotary, tuple) or len(rotary) != 2 or not all(isinstance(t, Tensor) for t in rotary):
            raise TypeError(f"rotary must be the tensors (cos, sin), got {type(rotary).__name__}")
        wanted = (x.shape[1], self.head_dim)
        for table in rotary:
            if table.shape not in (wanted, (x.shape[0], *wanted)):
                raise ValueError(
                    f"rotary must have tables of shape (L, D) = {wanted} or (B, L, D), got {tuple(table.shape)}"
                )
        if self.head_dim % 2:
            raise ValueError(f"rotary needs an even head_dim, got {self.head_dim}")


def _join_masks(attn_mask: Any, key_mask: Any, query: Tensor, num_keys: int) -> Tensor | None:
    """Both masks as one that broadcasts to (B, H, L, S)."""
    keys = validation.token_mask("key_mask", key_mask, query, num_keys, "BS")
    pairs = validation.attn_mask(attn_mask, query, num_keys)
    return pairs if keys is None else masks.join(pairs, keys[:, None, None])


def check_options(
    embed_dim: Any,
    num_heads: Any,
    variant: Any,
    head_dim: Any,
    num_mixtures: Any,
    e_step: Any,
    variance: Any,
    feature_map: Any,
    dropout: Any,
    bias: Any,
    backend: Any,
) -> None:
    """Each option of :class:`MixtureAttention` is known, and they go together; ``prior`` is checked as it is made."""
    for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_mixtures", num_mixtures)):
        validation.positive_int(name, value)
    if head_dim is not None:
        validation.positive_int("head_dim", head_dim)
    elif embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be a multiple of num_heads={num_heads} unless head_dim is given, got {embed_dim}"
        )
    validation.option("variant", variant, get_args(Variant))
    validation.option("e_step", e_step, get_args(EStep))
    feature_maps.check(feature_map)
    validation.probability("dropout", dropout)
    validation.flag("bias", bias)
    validation.option("backend", backend, backend_names("linear" if variant in _LINEAR else "softmax"))
    is_constant = variance == "constant" or isinstance(variance, ConstantVariance)
    if e_step == "hard" and not is_constant:
        raise ValueError("e_step='hard' compares distances alone: it needs variance='constant'")
    if variant == "softmax" and not is_constant:
        raise ValueError("variant='softmax' has the fixed scale sqrt(D): it needs variance='constant'")
    if variant in _LINEAR:
        for name, is_default in (("e_step", e_step == "soft"), ("variance", is_constant), ("dropout", dropout == 0)):
            if not is_default:
                raise ValueError(
                    f"{name} does not exist for variant={variant!r}: linear attention has no Gaussians to weigh"
                )
