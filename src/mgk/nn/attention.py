"""Multi-head attention with a mixture of keys: all six variants in one module."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mgk import variants
from mgk.functional import masks, validation
from mgk.functional.backends import backend_names
from mgk.functional.linear import api as linear
from mgk.functional.linear import feature_maps
from mgk.functional.linear.feature_maps import FeatureMap
from mgk.functional.linear.inputs import validate_inputs as validate_linear_inputs
from mgk.functional.mixture import api as attention
from mgk.functional.mixture import em_statistics
from mgk.functional.mixture.inputs import AttentionInputs, validate_inputs
from mgk.nn.caches import Cache, KeyValueCache, StateCache
from mgk.nn.em import EMModule, is_recomputing, m_step_all
from mgk.nn.feature_maps import make_feature_map
from mgk.nn.priors import EMPrior, LearnedPrior, UniformPrior, make_prior
from mgk.nn.rotary import rotate
from mgk.nn.variances import ConstantVariance, EMVariance, LearnedVariance, make_variance
from mgk.variants import CHOICES, VARIANTS, EStep, Variant


class _Options(NamedTuple):
    attn_mask: Tensor | None
    query_mask: Tensor | None  # (B, L), the queries of which statistics are taken
    is_causal: bool
    cache: Any
    need_weights: bool


class MixtureAttention(nn.Module):
    """MultiHead(x) = Concat(H_1, ..., H_H) W_O (Eq. 3).

    - "softmax": Eq. 1.
    - "mgk", "smgk": Eq. 9/10; keys W_r x_j, or W x_j + b_r.
    - "linear", "mlk", "smlk": Eq. 14.

    Args:
        embed_dim: Width of input and output.
        num_heads: H.
        variant: One of the six above.
        head_dim: D; None: embed_dim / num_heads.
        num_mixtures: M; 1 for "softmax" and "linear".
        e_step: "soft" (Eq. 9) or "hard" (Eq. 12, without a learned prior).
        prior: "learned" by SGD, "em" (:meth:`m_step`), "uniform", or a module.
        variance: "constant" (sqrt(D)), "learned", "em", or a module.
        feature_map: Linear variants: "elu", "favor", "dpfp" or a callable.
        dropout: Of attention weights; not for the linear variants.
        bias: Whether projections have biases.
        backend: "auto" or one of ``mgk.available_backends()``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        variant: Variant = variants.DEFAULT_VARIANT,
        head_dim: int | None = None,
        num_mixtures: int = variants.DEFAULT_NUM_MIXTURES,
        e_step: EStep = variants.DEFAULT_E_STEP,
        prior: str | nn.Module = variants.DEFAULT_PRIOR,
        variance: str | nn.Module = variants.DEFAULT_VARIANCE,
        feature_map: FeatureMap = variants.DEFAULT_FEATURE_MAP,
        dropout: float = 0.0,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        check_options(locals())
        super().__init__()
        spec = VARIANTS[variant]
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = head_dim or embed_dim // num_heads
        self.variant = variant
        self.num_mixtures = spec.num_components(num_mixtures)
        self.e_step = e_step
        self.dropout = dropout
        self.backend = backend
        self.is_linear = spec.is_linear
        self.keys_per_token = 1 if spec.is_shifted else self.num_mixtures

        inner = num_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, inner, bias=bias)
        # rows are (H, M, D)
        self.k_proj = nn.Linear(embed_dim, inner * self.keys_per_token, bias=bias)
        self.v_proj = nn.Linear(embed_dim, inner, bias=bias)
        self.o_proj = nn.Linear(inner, embed_dim, bias=bias)
        self.shifts: nn.Parameter | None = None
        if spec.is_shifted:
            shape = (num_heads, self.num_mixtures, self.head_dim)
            self.shifts = nn.Parameter(torch.empty(shape))
        self.prior = make_prior(prior, num_heads, self.num_mixtures)
        # neither a single key nor a hard E-step (Eq. 12) uses a prior
        is_idle = e_step == "hard" and isinstance(self.prior, LearnedPrior)
        if is_idle or not spec.is_mixture:
            self.prior = UniformPrior()
        self.variance = make_variance(variance, num_heads, self.num_mixtures, self.head_dim)
        self.feature_map: FeatureMap | None = None
        if self.is_linear:
            self.feature_map = make_feature_map(feature_map, self.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot projections, whatever M is; zero biases; standard normal shifts."""
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
        """The output (B, L, embed_dim), or (output, weights).

        Args:
            x: (B, L, embed_dim).
            context: (B, S, embed_dim), for cross-attention.
            key_mask: bool (B, S), True takes part; S includes the cache.
            attn_mask: bool or additive float, broadcastable to (B, H, L, S).
                Not for the linear variants.
            is_causal: Query i sees keys j <= i + (S - L).
            rotary: cos and sin, (L, D) or (B, L, D); shifts are added after.
            cache: From :meth:`new_cache`; x is appended to it.
            need_weights: Also return the weights (B, H, L, S) before dropout.
        """
        validation.flag("is_causal", is_causal)
        validation.flag("need_weights", need_weights)
        self._check_tokens(x, context, rotary, cache)
        if self.is_linear and attn_mask is not None:
            raise ValueError(f"attn_mask has no meaning for variant={self.variant!r}: use key_mask")
        if self.is_linear and need_weights and cache is not None and cache.length:
            raise ValueError("need_weights cannot be computed from a linear state: drop the cache")
        query, keys, value = self.project(x, context=context, rotary=rotary)
        # in self-attention a padded key is a padded query
        query_mask = key_mask if context is None and cache is None else None
        options = _Options(attn_mask, query_mask, is_causal, cache, need_weights)
        attend = self._linear if self.is_linear else self._mixture
        heads, weights = attend(query, keys, value, key_mask, options)
        out = self.o_proj(heads.transpose(1, 2).flatten(2))
        return (out, weights) if weights is not None else out

    def project(
        self, x: Tensor, *, context: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, L, D), keys (B, H, M, S, D), values (B, H, S, D).

        Shifted keys are (B, H, 1, S, D), before their shifts.
        """
        source = x if context is None else context
        heads, width = self.num_heads, self.head_dim
        query = self.q_proj(x).unflatten(2, (heads, width)).transpose(1, 2)
        value = self.v_proj(source).unflatten(2, (heads, width)).transpose(1, 2)
        keys = self.k_proj(source).unflatten(2, (heads, self.keys_per_token, width))
        keys = keys.permute(0, 2, 3, 1, 4)
        if rotary is not None:
            query, keys = rotate(query, rotary), rotate(keys, rotary)
        return query, keys, value

    def log_prior(self, num_keys: int, first_key: int = 0) -> Tensor | None:
        """Log pi_jr, minus (D/2) log sigma_r^2 (Eq. 7) unless sigma is constant."""
        log_prior: Tensor | None = self.prior(num_keys, first_key)
        if isinstance(self.variance, ConstantVariance):
            return log_prior
        normaliser = -self.head_dim / 2 * self.variance().log()
        return normaliser if log_prior is None else log_prior + normaliser

    def new_cache(self) -> Cache:
        """An empty cache of this variant's kind."""
        return StateCache() if self.is_linear else KeyValueCache()

    def m_step(self) -> None:
        """Update "em" priors and variances: once per optimizer step, on every rank.

        DistributedDataParallel copies rank 0's statistics at each synchronised
        forward: accumulate under ``no_sync()``, or set ``broadcast_buffers=False``.
        """
        m_step_all(self)

    def extra_repr(self) -> str:
        """The options."""
        names = ("variant", "head_dim", "num_mixtures", "e_step", "dropout", "backend")
        options = (f"{name}={getattr(self, name)!r}" for name in names)
        return ", ".join([str(self.embed_dim), str(self.num_heads), *options])

    def _mixture(
        self, query: Tensor, keys: Tensor, value: Tensor, key_mask: Tensor | None, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        """The heads (B, H, L, D) by Eq. 1 or 10, and the weights if they are needed."""
        cache: KeyValueCache | None = options.cache
        num_keys = keys.shape[3] + (0 if cache is None else cache.length)
        log_prior = self.log_prior(num_keys)
        mask = validation.attn_mask(options.attn_mask, query, num_keys)
        key_mask = validation.token_mask("key_mask", key_mask, query, num_keys, "BS")
        if key_mask is not None:
            mask = masks.join(mask, key_mask[:, None, None])
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
            is_causal=options.is_causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        heads = attention.attend(inputs, self.backend)
        if self._collects_statistics(cache):
            self._observe(inputs, options.query_mask)
        return heads, attention.weights(inputs) if options.need_weights else None

    def _linear(
        self, query: Tensor, keys: Tensor, value: Tensor, key_mask: Tensor | None, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        """The heads (B, H, L, D) by Eq. 14, and the weights if they are needed."""
        cache: StateCache | None = options.cache
        past, added = 0 if cache is None else cache.length, keys.shape[3]
        key_mask = validation.token_mask("key_mask", key_mask, query, past + added, "BS")
        if key_mask is not None:
            key_mask = key_mask[:, past:]  # the state is masked already
        if self.shifts is not None:
            keys = keys + self.shifts[None, :, :, None].to(keys.dtype)
        inputs = validate_linear_inputs(
            query,
            keys,
            value,
            self.log_prior(added, past),
            feature_map=self.feature_map,
            key_mask=key_mask,
            is_causal=options.is_causal,
            initial_state=None if cache is None else cache.state,
        )
        heads, state = linear.attend(inputs, self.backend)
        if cache is not None:
            cache.append(state, added)
        if self._collects_statistics(cache):
            assert isinstance(self.prior, EMPrior)
            self.prior.observe(linear.counts(inputs, options.query_mask, self.backend))
        return heads, linear.weights(inputs) if options.need_weights else None

    def _collects_statistics(self, cache: Cache | None) -> bool:
        """Whether the M-step counts this forward."""
        has_em = isinstance(self.prior, EMPrior) or isinstance(self.variance, EMVariance)
        return has_em and self.training and cache is None and not is_recomputing()

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

    def _check_tokens(self, x: Any, context: Any, rotary: Any, cache: Any) -> None:
        validation.tensor("x", x, "BLC")
        validation.size("x", x, 2, self.embed_dim, "embed_dim")
        if context is not None:
            validation.tensor("context", context, "BSC")
            validation.size("context", context, 2, self.embed_dim, "embed_dim")
            validation.size("context", context, 0, x.shape[0], "the batch of x")
            if cache is not None:
                raise ValueError("cache holds the tokens of x: it cannot be used with context")
            if rotary is not None:
                raise ValueError("rotary has the positions of x: it cannot be used with context")
        if cache is not None:
            if not isinstance(cache, type(self.new_cache())):
                raise TypeError(f"cache must be what new_cache() of this variant gives, got {type(cache).__name__}")
            if cache.batch not in (None, len(x)):
                raise ValueError(f"cache holds a batch of {cache.batch} sequences, got x with {len(x)}")
        if rotary is not None:
            self._check_rotary(x, rotary)

    def _check_rotary(self, x: Tensor, rotary: Any) -> None:
        is_pair = isinstance(rotary, tuple) and len(rotary) == 2
        if not is_pair or not all(isinstance(table, Tensor) for table in rotary):
            raise TypeError(f"rotary must be the tensors (cos, sin), got {type(rotary).__name__}")
        wanted = (x.shape[1], self.head_dim)
        for table in rotary:
            if table.shape not in (wanted, (len(x), *wanted)):
                got = tuple(table.shape)
                raise ValueError(f"rotary must have tables of shape (L, D) = {wanted} or (B, L, D), got {got}")
        if self.head_dim % 2:
            raise ValueError(f"rotary needs an even head_dim, got {self.head_dim}")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise where an option of :class:`MixtureAttention` is not valid."""
    for name in ("embed_dim", "num_heads", "num_mixtures"):
        validation.positive_int(name, options[name])
    embed_dim, num_heads = options["embed_dim"], options["num_heads"]
    if options["head_dim"] is not None:
        validation.positive_int("head_dim", options["head_dim"])
    elif embed_dim % num_heads:
        wanted = f"a multiple of num_heads={num_heads} unless head_dim is given"
        raise ValueError(f"embed_dim must be {wanted}, got {embed_dim}")
    for name in ("variant", "e_step", "prior", "variance"):
        may_be_module = name in ("prior", "variance")
        if not (may_be_module and isinstance(options[name], nn.Module)):
            validation.option(name, options[name], CHOICES[name])
    if options["feature_map"] not in CHOICES["feature_map"]:
        feature_maps.check(options["feature_map"])  # a callable
    validation.probability("dropout", options["dropout"])
    validation.flag("bias", options["bias"])
    variant = VARIANTS[options["variant"]]
    validation.option("backend", options["backend"], backend_names(variant.family))

    is_hard = options["e_step"] == "hard"
    variance = options["variance"]
    has_variance = variance != "constant" and not isinstance(variance, ConstantVariance)
    if is_hard and has_variance:
        raise ValueError("e_step='hard' compares distances alone: it needs variance='constant'")
    if variant.name == "softmax" and has_variance:
        raise ValueError("variant='softmax' has the fixed scale sqrt(D): it needs variance='constant'")
    used = {"e_step": is_hard, "variance": has_variance, "dropout": options["dropout"] > 0}
    for name, is_used in used.items():
        if variant.is_linear and is_used:
            raise ValueError(f"{name} does not exist for variant={variant.name!r}: it has no Gaussians")
