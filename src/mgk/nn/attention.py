"""Multi-head attention with a mixture of keys: all six variants."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as linear_map
from torch.nn.functional import pad

from mgk import variants
from mgk.functional import masks, validation
from mgk.functional.backends import backend_names
from mgk.functional.linear import api as linear
from mgk.functional.linear import feature_maps
from mgk.functional.linear.api import LinearState
from mgk.functional.linear.feature_maps import FeatureMap
from mgk.functional.linear.inputs import validate_inputs as validate_linear_inputs
from mgk.functional.mixture import api as attention
from mgk.functional.mixture import em_statistics
from mgk.functional.mixture.inputs import AttentionInputs, validate_inputs
from mgk.functional.validation import eager_in_old_graphs
from mgk.nn.caches import (
    Cache,
    KeyValueCache,
    StateCache,
    StaticCache,
    StaticKeyValueCache,
    StaticStateCache,
)
from mgk.nn.em import EMModule, is_recomputing, m_step_all
from mgk.nn.feature_maps import make_feature_map
from mgk.nn.priors import EMPrior, LearnedPrior, UniformPrior, make_prior
from mgk.nn.rotary import rotate
from mgk.nn.variances import (
    ConstantVariance,
    EMVariance,
    LearnedVariance,
    UnequalVariance,
    make_variance,
)
from mgk.variants import CHOICES, VARIANTS, EStep, Kernel, Variant

# Arguments of nn.MultiheadAttention, and what to do instead.
_ADAPTER = "or take mgk.nn.MultiheadMixtureAttention, which is called as nn.MultiheadAttention is"
_OPTIONS_INSTEAD = {
    "": "pass the rest by name",
    "batch_first": "x is (B, L, embed_dim) always",
    **dict.fromkeys(("device", "dtype"), "call .to() on the module"),
    **dict.fromkeys(("kdim", "vdim"), "a context has the width embed_dim"),
    **dict.fromkeys(("add_bias_kv", "add_zero_attn"), "no keys are added to the sequence"),
}
_ARGUMENTS_INSTEAD = {
    "key_padding_mask": "pass key_mask=~key_padding_mask, in which True takes part",
    "average_attn_weights": "need_weights=True returns the weights of every head; take their mean(1)",
    **dict.fromkeys(("", "key", "value"), "pass x alone, and context= for cross-attention"),
}


class _Options(NamedTuple):
    key_mask: Tensor | None
    attn_mask: Tensor | None
    query_mask: Tensor | None  # (B, L), of the statistics
    is_causal: bool
    segment_ids: Tensor | None
    cache: Any
    need_weights: bool


class MixtureAttention(nn.Module):
    """MultiHead(x) = Concat(H_1, ..., H_H) W_O (Eq. 3).

    - "softmax": Eq. 1.
    - "mgk", "smgk": Eq. 9/10; keys W_r x_j, or W x_j + b_r.
    - "linear", "mlk", "smlk": Eq. 14.

    Args:
        embed_dim: Width of input and output.
        num_heads: Hq, of queries.
        num_key_value_heads: H, of keys and values, which divides Hq; None: Hq. Query head
            h reads key head h // (Hq / H). Shifts, prior and variance belong to key heads.
        window: (left, right), each an int or None: a query sees the keys from ``left``
            positions before it to ``right`` after it. An int w is (w, w), or (w, 0) under
            causality. Not for the linear variants.
        variant: One of the six above.
        head_dim: D; None: embed_dim / num_heads.
        num_mixtures: M; 1 for "softmax" and "linear".
        kernel: "gaussian" (Eq. 9) or "dot" (Eq. 8); "softmax" is always "dot".
        e_step: "soft" (Eq. 9) or "hard" (Eq. 12, without a learned prior).
        prior: "learned" by SGD, "em" (:meth:`m_step`), "uniform", or a module.
        variance: "constant" (sqrt(D)), "learned", "em", "unequal" (sqrt(D) and a third
            of it for r > 1, without normaliser), or a module.
        feature_map: Linear variants: "elu", "favor", "dpfp" or a callable.
        dropout: Of attention weights; not for the linear variants.
        bias: Whether projections have biases.
        init: Of queries, keys and shifts: "paper", "narrow", or the standard deviation of
            the scores q.k / sqrt(D) for normalised inputs.
        backend: "auto" or one of ``mgk.available_backends()``.
    """

    @validation.explain_unexpected(_OPTIONS_INSTEAD, _ADAPTER)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        window: attention.Window = None,
        variant: Variant = variants.DEFAULT_VARIANT,
        head_dim: int | None = None,
        num_mixtures: int = variants.DEFAULT_NUM_MIXTURES,
        kernel: Kernel = variants.DEFAULT_KERNEL,
        e_step: EStep = variants.DEFAULT_E_STEP,
        prior: str | nn.Module = variants.DEFAULT_PRIOR,
        variance: str | nn.Module = variants.DEFAULT_VARIANCE,
        feature_map: FeatureMap = variants.DEFAULT_FEATURE_MAP,
        dropout: float = 0.0,
        bias: bool = True,
        init: str | float = variants.DEFAULT_INIT,
        backend: str = "auto",
    ) -> None:
        check_options(locals())
        super().__init__()
        spec = VARIANTS[variant]
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads or num_heads
        self.window = window
        self.head_dim = head_dim or embed_dim // num_heads
        self.variant = variant
        self.num_mixtures = spec.num_components(num_mixtures)
        self.kernel = "dot" if variant == "softmax" else kernel
        self.e_step = e_step
        self.dropout = dropout
        self.init = init
        self.backend = backend
        self.is_linear = spec.is_linear
        self.keys_per_token = 1 if spec.is_shifted else self.num_mixtures

        key_heads = self.num_key_value_heads
        inner, key_inner = num_heads * self.head_dim, key_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, inner, bias=bias)
        # rows are (H, M, D)
        self.k_proj = nn.Linear(embed_dim, key_inner * self.keys_per_token, bias=bias)
        self.v_proj = nn.Linear(embed_dim, key_inner, bias=bias)
        self.o_proj = nn.Linear(inner, embed_dim, bias=bias)
        self.shifts: nn.Parameter | None = None
        if spec.is_shifted:
            shape = (key_heads, self.num_mixtures, self.head_dim)
            self.shifts = nn.Parameter(torch.empty(shape))
        self.prior = make_prior(prior, key_heads, self.num_mixtures)
        # neither a single key nor a hard E-step (Eq. 12) uses a prior
        is_idle = e_step == "hard" and isinstance(self.prior, LearnedPrior)
        if is_idle or not spec.is_mixture:
            self.prior = UniformPrior()
        self.variance = make_variance(variance, key_heads, self.num_mixtures, self.head_dim)
        self.feature_map: FeatureMap | None = None
        if self.is_linear:
            self.feature_map = make_feature_map(feature_map, self.head_dim)
        self.register_state_dict_post_hook(_mark_variant)
        self.register_load_state_dict_pre_hook(_check_variant)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot projections, zero biases; queries, keys and shifts by ``init``.

        Weights of variance s / embed_dim make queries and keys of variance s, where inputs
        have variance 1, and so scores q.k / sqrt(D) of standard deviation s.
        """
        chosen = variants.NARROW_SCORE_STD if self.init == "narrow" else self.init
        score_std = None if isinstance(chosen, str) else chosen  # None: "paper"
        key_heads = self.num_key_value_heads
        heads = {self.q_proj: self.num_heads, self.k_proj: key_heads, self.v_proj: key_heads}
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            width = heads.get(projection, self.num_heads) * self.head_dim
            variance = 2 / (self.embed_dim + width)
            if score_std is not None and projection in (self.q_proj, self.k_proj):
                variance = score_std / self.embed_dim
            bound = (3 * variance) ** 0.5
            nn.init.uniform_(projection.weight, -bound, bound)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.shifts is not None:  # as keys
            nn.init.normal_(self.shifts, std=1.0 if score_std is None else score_std**0.5)
        for part in (self.prior, self.variance):
            if isinstance(part, LearnedPrior | LearnedVariance | UnequalVariance | EMModule):
                part.reset_parameters()

    @validation.explain_unexpected(_ARGUMENTS_INSTEAD, _ADAPTER)
    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: tuple[Tensor, Tensor] | None = None,
        segment_ids: Tensor | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output (B, L, embed_dim), or the pair (output, weights).

        ``out, w = attn(x)`` without ``need_weights`` splits a batch of two.

        Args:
            x: (B, L, embed_dim).
            context: (B, S, embed_dim), for cross-attention.
            key_mask: bool (B, S), True takes part; S includes the cache.
            attn_mask: bool or additive float, broadcastable to (B, Hq, L, S).
                Not for the linear variants.
            is_causal: Query i sees keys j <= i + (S - L).
            rotary: cos and sin, (L, D), (1, L, D) or (B, L, D); shifts are added after.
            segment_ids: int (B, S), S with the cache: a query sees its own segment, a
                maximal run of equal ids.
            cache: From :meth:`new_cache`; x is appended to it.
            need_weights: Also return the weights (B, Hq, L, S) before dropout.
        """
        validation.flag("is_causal", is_causal)
        validation.flag("need_weights", need_weights)
        self._check_tokens(x, context, rotary, cache)
        if context is not None and segment_ids is not None:
            raise ValueError("segment_ids are of the tokens of x: they cannot be used with context")
        if self.is_linear and need_weights and cache is not None and cache.length:
            raise ValueError("need_weights cannot be computed from a linear state: drop the cache")
        if key_mask is not None and cache is None:
            x, context = self._without_dead(x, context, key_mask)
        query, keys, value = self.project(x, context=context, rotary=rotary)
        out, weights = self.attend(
            query,
            keys,
            value,
            key_mask=key_mask,
            # in self-attention a padded key is a padded query
            query_mask=key_mask if context is None and cache is None else None,
            attn_mask=attn_mask,
            is_causal=is_causal,
            segment_ids=segment_ids,
            cache=cache,
            need_weights=need_weights,
        )
        return (out, weights) if weights is not None else out

    def project(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        values: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, Hq, L, D), keys (B, H, M, S, D), values (B, H, S, D).

        Shifted keys are (B, H, 1, S, D), before their shifts. ``values`` (B, S, C) are
        projected in place of ``context``.
        """
        heads, width = self.num_key_value_heads, self.head_dim
        if context is None and values is None and self._has_plain_projections():
            query, keys, value = self._project_at_once(x)
        else:
            source = x if context is None else context
            query, keys = self.q_proj(x), self.k_proj(source)
            value = self.v_proj(source if values is None else values)
        query = query.unflatten(2, (self.num_heads, width)).transpose(1, 2)
        value = value.unflatten(2, (heads, width)).transpose(1, 2)
        keys = keys.unflatten(2, (heads, self.keys_per_token, width)).permute(0, 2, 3, 1, 4)
        if rotary is not None:
            query, keys = rotate(query, rotary), rotate(keys, rotary)
        return query, keys, value

    def _has_plain_projections(self) -> bool:
        """Whether one product may project all: not where a projection is replaced or watched."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return self.training and all(
            type(x) is nn.Linear and not x._forward_hooks and not x._forward_pre_hooks for x in projections
        )

    def _project_at_once(self, x: Tensor) -> Sequence[Tensor]:
        """[W_Q, W_K, W_V] x in one product, which reads x once, as its gradient does."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weight = torch.cat([layer.weight for layer in projections])
        has_bias = all(layer.bias is not None for layer in projections)
        bias = torch.cat([layer.bias for layer in projections]) if has_bias else None
        return linear_map(x, weight, bias).split([layer.out_features for layer in projections], -1)

    @eager_in_old_graphs
    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        segment_ids: Tensor | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Concat(H_1, ..., H_H) W_O (B, L, embed_dim), and the weights or None.

        ``query``, ``keys`` and ``value`` are those of :meth:`project`.

        ``query_mask``, bool (B, L), has the queries of which the M-step's statistics are
        taken; the rest is as in :meth:`forward`.
        """
        if self.is_linear and attn_mask is not None:
            raise ValueError(f"attn_mask has no meaning for variant={self.variant!r}: use key_mask")
        if segment_ids is not None and isinstance(cache, StaticCache):
            raise ValueError("segment_ids need the places of tokens as numbers: use new_cache()")
        options = _Options(key_mask, attn_mask, query_mask, is_causal, segment_ids, cache, need_weights)
        attend = self._linear if self.is_linear else self._mixture
        with nullcontext() if cache is None else cache.unchanged_on_error():
            heads, weights = attend(query, keys, value, options)
        return self.o_proj(heads.transpose(1, 2).flatten(2)), weights

    def log_prior(self, num_keys: int, first_key: int = 0) -> Tensor | None:
        """Log pi_jr, minus (D/2) log sigma_r^2 (Eq. 7) unless constant."""
        log_prior: Tensor | None = self.prior(num_keys, first_key)
        if isinstance(self.variance, ConstantVariance):
            return log_prior
        normaliser = -self.head_dim / 2 * self.variance().log()
        return normaliser if log_prior is None else log_prior + normaliser

    def new_cache(self, max_length: int | None = None) -> Cache:
        """An empty cache of this variant's kind.

        With ``max_length`` it is a :class:`StaticKeyValueCache` or :class:`StaticStateCache`,
        for compiled decoding.
        """
        if max_length is not None:
            return (StaticStateCache if self.is_linear else StaticKeyValueCache)(max_length)
        if self.is_linear:
            return StateCache()
        left, _ = validation.window(self.window, is_causal=True)
        return KeyValueCache(left)

    def m_step(self) -> None:
        """Update "em" priors and variances, once per optimizer step.

        DistributedDataParallel copies rank 0's statistics at each synchronised
        forward: accumulate under ``no_sync()``, or set ``broadcast_buffers=False``.
        """
        m_step_all(self)

    def extra_repr(self) -> str:
        """The options."""
        names = ["variant", "head_dim", "num_mixtures", "kernel", "e_step", "dropout", "init", "backend"]
        if self.window is not None:
            names.insert(0, "window")
        if self.num_key_value_heads != self.num_heads:
            names.insert(0, "num_key_value_heads")
        options = (f"{name}={getattr(self, name)!r}" for name in names)
        return ", ".join([str(self.embed_dim), str(self.num_heads), *options])

    def _mixture(
        self, query: Tensor, keys: Tensor, value: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        """The heads (B, Hq, L, D) by Eq. 1 or 10, and the weights or None."""
        cache: KeyValueCache | None = options.cache
        static = cache if isinstance(cache, StaticKeyValueCache) else None
        num_keys, first = keys.shape[3], 0
        if static is not None:
            num_keys = static.max_length
        elif cache is not None:  # keys before the window may be gone
            num_keys, first = num_keys + cache.length, cache.first_seen
        mask = validation.attn_mask(options.attn_mask, query, num_keys)
        key_mask = validation.token_mask("key_mask", options.key_mask, query, num_keys, "BS")
        segment_ids = validation.segment_ids(options.segment_ids, query, num_keys)
        if key_mask is not None:
            mask = masks.join(mask, key_mask[:, None, None])
        if static is not None:
            window = validation.window(self.window, options.is_causal)
            visible = static.visible(keys.shape[3], options.is_causal, window)
            mask = masks.join(mask, visible[None, None])
        if cache is not None:
            keys, value = cache.append(keys, value)
        inputs = validate_inputs(
            query,
            keys,
            value,
            shifts=self.shifts,
            log_prior=self.log_prior(num_keys - first, first),
            variance=self.variance(),
            kernel=self.kernel,
            e_step=self.e_step,
            attn_mask=mask if mask is None or mask.shape[3] == 1 else mask[..., first:],
            is_causal=options.is_causal and static is None,
            window=self.window if static is None else None,
            segment_ids=None if segment_ids is None else segment_ids[:, first:],
            dropout_p=self.dropout if self.training else 0.0,
        )
        heads, _ = attention.attend(inputs, self.backend)
        if self._collects_statistics(cache):
            self._observe(inputs, options.query_mask)
        if not options.need_weights:
            return heads, None
        return heads, pad(attention.weights(inputs), (first, 0))

    def _linear(
        self, query: Tensor, keys: Tensor, value: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        """The heads (B, Hq, L, D) by Eq. 14, and the weights or None."""
        cache: StateCache | None = options.cache
        static = cache if isinstance(cache, StaticStateCache) else None
        past, added = 0 if cache is None or static else cache.length, keys.shape[3]
        num_keys = static.max_length if static else past + added
        is_shared = getattr(self.prior, "max_positions", None) is None
        if static and not is_shared:
            needed = "the place of a token as a number"
            raise ValueError(f"a prior with max_positions needs {needed}: use new_cache()")
        key_mask = validation.token_mask("key_mask", options.key_mask, query, num_keys, "BS")
        if key_mask is not None and static:
            key_mask = key_mask.index_select(1, static.places(added))
        elif key_mask is not None:  # the state is masked already
            key_mask = key_mask[:, past:]
        ids, state = validation.segment_ids(options.segment_ids, query, past + added), None
        if cache is not None:
            state = cache.state
        if ids is not None:
            if state is not None and added:  # it is of the last token's segment
                goes_on = (ids[:, past - 1] == ids[:, past])[:, None, None]
                numerator, normaliser = state
                numerator = numerator.where(goes_on[..., None], 0.0)
                state = LinearState(numerator, normaliser.where(goes_on, 0.0))
            ids = ids[:, past:]
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
            segment_ids=ids,
            initial_state=state,
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
        """Hand the statistics of a forward to the prior and the variance."""
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
        self.check_dtype("x", x)
        if context is not None:
            validation.tensor("context", context, "BSC")
            validation.size("context", context, 2, self.embed_dim, "embed_dim")
            validation.size("context", context, 0, x.shape[0], "the batch of x")
            self.check_dtype("context", context)
            if cache is not None:
                raise ValueError("cache holds the tokens of x: it cannot be used with context")
            if self.window is not None:
                given = f"window={self.window}"
                raise ValueError(f"{given} is of the positions of x: it cannot be used with context")
            if rotary is not None:
                raise ValueError("rotary has the positions of x: it cannot be used with context")
        if cache is not None:
            if not isinstance(cache, type(self.new_cache())):
                got = type(cache).__name__
                raise TypeError(f"cache must be what new_cache() of this variant gives, got {got}")
            left, _ = validation.window(self.window, is_causal=True)
            if type(cache) is KeyValueCache and cache.left != left:
                got = f"one with left={cache.left}"
                raise ValueError(f"cache must be of a window with left={left}, got {got}")
            if cache.batch not in (None, x.shape[0]):
                held = f"a batch of {cache.batch} sequences"
                raise ValueError(f"cache holds {held}, got x with {x.shape[0]}")
        if rotary is not None:
            self._check_rotary(x, rotary)

    def _without_dead(
        self, x: Tensor, context: Tensor | None, key_mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens without what padding holds that is not finite."""
        source = x if context is None else context
        validation.token_mask("key_mask", key_mask, source, source.shape[1], "BS")
        source = masks.without_dead(source, key_mask)
        return (source, None) if context is None else (x, source)

    def check_dtype(self, name: str, value: Tensor) -> None:
        """Raise where ``value`` has not the dtype of the weights, outside autocast."""
        # what replaces a projection (quantised, with adapters) has its own rules
        dtype = self.q_proj.weight.dtype if type(self.q_proj) is nn.Linear else value.dtype
        if value.dtype != dtype and not validation.is_autocast_on(value):
            have, wanted = (str(d).removeprefix("torch.") for d in (value.dtype, dtype))
            advice = "convert one of them, or run under torch.autocast"
            wanted = f"the dtype of the module's weights, {wanted}"
            raise TypeError(f"{name} must have {wanted}, got {have}: {advice}")

    def _check_rotary(self, x: Tensor, rotary: Any) -> None:
        is_pair = isinstance(rotary, tuple) and len(rotary) == 2
        if not is_pair or not all(isinstance(table, Tensor) for table in rotary):
            raise TypeError(f"rotary must be the tensors (cos, sin), got {type(rotary).__name__}")
        wanted = (x.shape[1], self.head_dim)
        for table in rotary:
            if table.shape not in (wanted, (1, *wanted), (x.shape[0], *wanted)):
                shapes = f"(L, D) = {wanted} or (B, L, D)"
                got = tuple(table.shape)
                raise ValueError(f"rotary must have tables of shape {shapes}, got {got}")
        if self.head_dim % 2:
            raise ValueError(f"rotary needs an even head_dim, got {self.head_dim}")


def _mark_variant(module: Any, state_dict: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """The variant beside the weights: several have weights of the same shapes."""
    metadata["variant"] = module.variant


def _check_variant(
    module: Any,
    state_dict: Any,
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """An error for weights of another variant; without a mark they pass."""
    if (found := metadata.get("variant", module.variant)) != module.variant:
        place = prefix.rstrip(".") or "the weights"
        own = f"this module has variant={module.variant!r}"
        error_msgs.append(f"{place}: they are of variant={found!r}, {own}")


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
    if (key_heads := options["num_key_value_heads"]) is not None:
        validation.positive_int("num_key_value_heads", key_heads)
        if num_heads % key_heads:
            raise ValueError(f"num_key_value_heads must divide num_heads={num_heads}, got {key_heads}")
    validation.window(options["window"], is_causal=False)
    for name in ("variant", "kernel", "e_step", "prior", "variance"):
        may_be_module = name in ("prior", "variance")
        if not (may_be_module and isinstance(options[name], nn.Module)):
            validation.option(name, options[name], CHOICES[name])
    if options["feature_map"] not in CHOICES["feature_map"]:
        feature_maps.check(options["feature_map"])  # a callable
    validation.probability("dropout", options["dropout"])
    validation.flag("bias", options["bias"])
    check_init(options["init"])
    variant = VARIANTS[options["variant"]]
    validation.option("backend", options["backend"], backend_names(variant.family))

    is_hard = options["e_step"] == "hard"
    variance = options["variance"]
    has_variance = variance != "constant" and not isinstance(variance, ConstantVariance)
    if is_hard and has_variance:
        raise ValueError("e_step='hard' compares distances alone: it needs variance='constant'")
    if variant.name == "softmax" and has_variance:
        raise ValueError("variant='softmax' has the fixed scale sqrt(D): it needs variance='constant'")
    is_dot = options["kernel"] == "dot"
    if variant.name == "smgk" and is_dot and not has_variance:
        unless = "unless its variance is learned or em"
        raise ValueError(f"kernel='dot' cancels the shifts of variant='smgk' {unless}")
    if variant.is_linear and options["window"] is not None:
        why = "whose state is a sum over all keys"
        raise ValueError(f"window must be None for variant={variant.name!r}, {why}")
    used = {
        "kernel": is_dot,
        "e_step": is_hard,
        "variance": has_variance,
        "dropout": options["dropout"] > 0,
    }
    for name, is_used in used.items():
        if variant.is_linear and is_used:
            why = f"variant={variant.name!r}: it has no Gaussians"
            raise ValueError(f"{name} does not exist for {why}")


def check_init(init: Any) -> None:
    """Raise unless ``init`` is a name or a positive standard deviation."""
    if isinstance(init, str):
        validation.option("init", init, CHOICES["init"])
    elif isinstance(init, bool) or not isinstance(init, int | float) or not 0 < init < math.inf:
        names = ", ".join(map(repr, CHOICES["init"]))
        raise ValueError(f"init must be {names} or a positive number, got {init!r}")
