"""Multi-head attention with a mixture of keys: all six variants in one module."""

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
from mgk.nn.em import EMModule, check_sizes, is_recomputing
from mgk.nn.feature_maps import make_feature_map
from mgk.nn.priors import EMPrior, LearnedPrior, UniformPrior, make_prior
from mgk.nn.rotary import rotate
from mgk.nn.variances import ConstantVariance, EMVariance, LearnedVariance, make_variance
from mgk.variants import CHOICES, VARIANTS, EStep, Variant


class _Options(NamedTuple):
    """The options of one forward beside its key mask."""

    attn_mask: Tensor | None
    query_mask: Tensor | None  # (B, L): the real tokens among the queries, which statistics are taken of
    is_causal: bool
    cache: Any
    need_weights: bool


class MixtureAttention(nn.Module):
    r"""MultiHead(x) = Concat(H_1, ..., H_H) W_O (Eq. 3), each head attending by the variant's equation.

    ``softmax``: Eq. 1. ``mgk``, ``smgk``: Eq. 9/10 with keys k_jr = W_r x_j, or k_jr = W x_j + b_r. ``linear``,
    ``mlk``, ``smlk``: Eq. 14.

    Args:
        embed_dim: Width of the input and the output.
        num_heads: H.
        variant: "softmax", "linear", "mgk", "smgk", "mlk" or "smlk".
        head_dim: D, the width of a head; None: embed_dim / num_heads.
        num_mixtures: M, the Gaussians of a key; always 1 for "softmax" and "linear".
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
        super().__init__()
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "head_dim": head_dim, "num_mixtures": num_mixtures}
        names = {"variant": variant, "e_step": e_step, "prior": prior, "variance": variance, "feature_map": feature_map}
        check_options(**sizes, **names, dropout=dropout, bias=bias, backend=backend)
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
        self.k_proj = nn.Linear(embed_dim, inner * self.keys_per_token, bias=bias)  # rows are (H, M, D)
        self.v_proj = nn.Linear(embed_dim, inner, bias=bias)
        self.o_proj = nn.Linear(inner, embed_dim, bias=bias)
        self.shifts: nn.Parameter | None = None
        if spec.is_shifted:
            self.shifts = nn.Parameter(torch.empty(num_heads, self.num_mixtures, self.head_dim))
        self.prior = make_prior(prior, num_heads, self.num_mixtures)
        # a single key needs no prior; a hard E-step (Eq. 12) does not use it, so none is trained
        if not spec.is_mixture or (e_step == "hard" and isinstance(self.prior, LearnedPrior)):
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
            rotary: cos and sin, (L, D) or (B, L, D), that rotate queries and keys (before a shift is added).
            cache: From :meth:`new_cache`; x is appended and attends to all so far.
            need_weights: Whether to return (output, weights), weights (B, H, L, S) before dropout; the output is the
                same.

        Returns:
            (B, L, embed_dim), or (output, weights).
        """
        validation.flag("is_causal", is_causal)
        validation.flag("need_weights", need_weights)
        self._check_tokens(x, context, rotary, cache)
        if self.is_linear and attn_mask is not None:
            raise ValueError(f"attn_mask has no meaning for variant={self.variant!r}: use key_mask and is_causal")
        if self.is_linear and need_weights and cache is not None and cache.length:
            raise ValueError("need_weights cannot be computed from a linear state: call without the cache")
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
        """Queries (B, H, L, D), keys (B, H, M, S, D), or one (B, H, 1, S, D) before its shifts, values (B, H, S, D)."""
        source = x if context is None else context
        heads, width = self.num_heads, self.head_dim
        query = self.q_proj(x).view(*x.shape[:2], heads, width).transpose(1, 2)
        value = self.v_proj(source).view(*source.shape[:2], heads, width).transpose(1, 2)
        keys = self.k_proj(source).view(*source.shape[:2], heads, self.keys_per_token, width).permute(0, 2, 3, 1, 4)
        if rotary is not None:
            query, keys = rotate(query, rotary), rotate(keys, rotary)
        return query, keys, value

    def log_prior(self, num_keys: int, first_key: int = 0) -> Tensor | None:
        """Log pi_jr, with -(D/2) log sigma_r^2 (Eq. 7's normaliser, which Eq. 9 drops) unless sigma is constant."""
        log_prior: Tensor | None = self.prior(num_keys, first_key)
        if isinstance(self.variance, ConstantVariance):
            return log_prior
        normaliser = -self.head_dim / 2 * self.variance().log()
        return normaliser if log_prior is None else log_prior + normaliser

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
        for name, tensor, dims in (("x", x, "BLC"), ("context", context, "BSC")):
            if name == "context" and tensor is None:
                continue
            validation.tensor(name, tensor, dims)
            validation.size(name, tensor, 2, self.embed_dim, "embed_dim")
        if context is not None:
            validation.size("context", context, 0, x.shape[0], "the batch of x")
            if cache is not None:
                raise ValueError("cache holds the tokens of x: it cannot be used with context")
            if rotary is not None:
                raise ValueError("rotary has the positions of x: it cannot be used with context")
        if cache is not None and not isinstance(cache, StateCache if self.is_linear else KeyValueCache):
            raise TypeError(f"cache must be what new_cache() of this variant gives, got {type(cache).__name__}")
        if cache is not None and cache.batch not in (None, x.shape[0]):
            raise ValueError(f"cache holds a batch of {cache.batch} sequences, got x with {x.shape[0]}")
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


def check_options(**options: Any) -> None:
    """Raise where an option of :class:`MixtureAttention` has no valid value or two exclude each other."""
    embed_dim, num_heads, head_dim = (options[name] for name in ("embed_dim", "num_heads", "head_dim"))
    check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_mixtures=options["num_mixtures"])
    if head_dim is not None:
        check_sizes(head_dim=head_dim)
    elif embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be a multiple of num_heads={num_heads} unless head_dim is given, got {embed_dim}"
        )
    for name in ("variant", "e_step", "prior", "variance"):
        is_module = name in ("prior", "variance") and isinstance(options[name], nn.Module)
        if not is_module:
            validation.option(name, options[name], CHOICES[name])
    feature_maps.check(options["feature_map"])
    validation.probability("dropout", options["dropout"])
    validation.flag("bias", options["bias"])
    variant = VARIANTS[options["variant"]]
    validation.option("backend", options["backend"], backend_names(variant.family))

    is_hard = options["e_step"] == "hard"
    is_constant = options["variance"] == "constant" or isinstance(options["variance"], ConstantVariance)
    if is_hard and not is_constant:
        raise ValueError("e_step='hard' compares distances alone: it needs variance='constant'")
    if variant.name == "softmax" and not is_constant:
        raise ValueError("variant='softmax' has the fixed scale sqrt(D): it needs variance='constant'")
    for name, is_used in (("e_step", is_hard), ("variance", not is_constant), ("dropout", options["dropout"] > 0)):
        if variant.is_linear and is_used:
            raise ValueError(
                f"{name} does not exist for variant={variant.name!r}: linear attention has no Gaussians to weigh"
            )
