"""The caches of mgk.nn as layers of a transformers cache.

A :class:`CoreCacheLayer` replaces an empty layer on first use.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from mgk.nn import KeyValueCache, MixtureAttention, caches


class CoreCacheLayer(CacheLayerMixin):
    """A cache of mgk.nn as one layer of a transformers cache."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, core: caches.Cache) -> None:
        self.core = core  # the base class's attributes are properties of it

    @property
    def keys(self) -> Tensor | None:
        """(B, H, M, S, D), before shifts; None for a state."""
        return self.core.keys if isinstance(self.core, KeyValueCache) else None

    @property
    def values(self) -> Tensor | None:
        """(B, H, S, D); None for a state."""
        return self.core.value if isinstance(self.core, KeyValueCache) else None

    @property
    def is_initialized(self) -> bool:
        """Whether it holds tokens."""
        return self.core.batch is not None

    @property
    def is_croppable(self) -> bool:
        """False for a state."""
        return self.core.is_croppable

    @property
    def is_compileable(self) -> bool:
        """Whether one compiled step serves every length."""
        return isinstance(self.core, caches.StaticCache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: ``core`` allocates itself."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys (B, H, M, L, D) and values (B, H, L, D); all so far."""
        if not isinstance(self.core, KeyValueCache):
            raise TypeError("a cache of linear attention holds a state, not keys and values")
        return self.core.append(key_states, value_states)

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.core.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The keys of ``query_length`` new queries, and the first position."""
        limit = self.get_max_length()
        return limit if limit > 0 else self.core.length + query_length, 0

    def get_max_length(self) -> int:
        """Places of a static cache; -1: no limit."""
        return getattr(self.core, "max_length", -1)

    get_max_cache_shape = get_max_length  # its earlier name

    def reset(self) -> None:
        """Drop all tokens."""
        self.core.crop(0)

    def crop(self, tokens: int) -> None:
        """Keep ``tokens`` tokens, or drop the last ``-tokens``."""
        if tokens < 0 or tokens < self.core.length:
            self.core.crop(self.core.length + tokens if tokens <= 0 else tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these sequences."""
        self.core.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take every sequence ``repeats`` times."""
        if self.core.batch is not None:
            rows = torch.arange(self.core.batch)
            self.core.reorder(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take these sequences."""
        if self.core.batch is not None:
            rows = torch.arange(self.core.batch, device=indices.device)
            self.core.reorder(rows[indices])


def core_cache(cache: Cache, index: int, attention: MixtureAttention) -> caches.Cache:
    """The cache of layer ``index``, made on first use."""
    layers = cache.layers
    if index < len(layers) and type(layers[index]) is CoreCacheLayer:
        return layers[index].core
    if getattr(cache, "offloading", False):
        way = "use cache_implementation='dynamic' or 'static'"
        raise ValueError(f"past_key_values must not be offloaded: {way}")
    while len(layers) <= index:
        layers.append(DynamicLayer())
    layer = layers[index]
    is_filled = layer.is_initialized and bool(layer.get_seq_length() > 0)
    if is_filled and (prefix := _prefix(layer, attention)) is not None:
        layers[index] = CoreCacheLayer(prefix)
        return prefix
    kinds: list[type] = [DynamicLayer, StaticLayer]
    if attention.window is not None:  # a DynamicCache made for the configuration
        kinds.append(DynamicSlidingWindowLayer)
    if type(layer) not in kinds or is_filled:
        got = "the cache of another model" if is_filled else type(layer).__name__
        wanted = "a DynamicCache or StaticCache that is empty or was filled by this model"
        raise ValueError(f"past_key_values must be {wanted}, got {got} in layer {index}")
    layers[index] = CoreCacheLayer(attention.new_cache(getattr(layer, "max_cache_len", None)))
    return layers[index].core


def _prefix(layer: CacheLayerMixin, attention: MixtureAttention) -> KeyValueCache | None:
    """The keys and values (B, H, S, D) of prefix tuning, if they fit.

    Each key stands for all M components: one Gaussian.
    """
    keys, values = layer.keys, layer.values
    wanted = (attention.num_key_value_heads, attention.head_dim)
    fits = keys.ndim == 4 and keys.shape == values.shape
    fits = fits and (keys.shape[1], keys.shape[3]) == wanted
    cache = attention.new_cache()
    if type(layer) is not DynamicLayer or not isinstance(cache, KeyValueCache) or not fits:
        return None
    cache.prefill(keys.unsqueeze(2).expand(-1, -1, attention.keys_per_token, -1, -1), values)
    return cache


def cache_bytes(cache: Cache) -> int:
    """Bytes of the entries in use, over all layers."""
    layers = (layer for layer in cache.layers if isinstance(layer, CoreCacheLayer))
    return sum(layer.core.nbytes for layer in layers)
