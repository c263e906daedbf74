"""The caches of mgk.nn inside those of transformers. Nothing else here knows transformers' cache classes.

transformers keeps a list with one object a layer. On first use each of ours takes the place of the empty one that
``generate``, or a user's ``DynamicCache()``, has put there; everything that transformers does with a cache (beams,
cropping, continuing) then reaches the core's cache.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from mgk.nn import KeyValueCache, MixtureAttention, StateCache


class CoreCacheLayer(CacheLayerMixin):
    """One layer of a transformers cache that is a cache of mgk.nn: growing keys and values, or a constant state."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, core: KeyValueCache | StateCache) -> None:
        self.core = core  # what the base class would set is read from it, see below

    @property
    def keys(self) -> Tensor | None:
        """(B, H, M, S, D): M keys a token for mgk, one for smgk, whose shifts are not stored; None for a state."""
        return self.core.keys if isinstance(self.core, KeyValueCache) else None

    @property
    def values(self) -> Tensor | None:
        """(B, H, S, D); None for a state."""
        return self.core.value if isinstance(self.core, KeyValueCache) else None

    @property
    def is_initialized(self) -> bool:
        """Whether it holds anything."""
        return self.core.batch is not None

    @property
    def is_croppable(self) -> bool:
        """A state is a sum over tokens, which cannot be taken apart again."""
        return isinstance(self.core, KeyValueCache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the core's cache makes its own room."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys (B, H, M, L, D) and values (B, H, L, D); all so far come back."""
        if not isinstance(self.core, KeyValueCache):
            raise TypeError("a cache of linear attention holds a state, not keys and values")
        return self.core.append(key_states, value_states)

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.core.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length and the offset of the keys that so many queries see."""
        return self.core.length + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier releases of transformers

    def reset(self) -> None:
        """Forget everything."""
        self.core.crop(0)

    def crop(self, tokens: int) -> None:
        """Forget the last ``-tokens`` tokens; a positive number is how many to keep."""
        if tokens < 0 or tokens < self.core.length:
            self.core.crop(self.core.length + tokens if tokens <= 0 else tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences ``beam_idx`` of the batch."""
        self.core.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take every sequence of the batch ``repeats`` times."""
        if self.core.batch is not None:
            self.core.reorder(torch.arange(self.core.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the sequences ``indices`` of the batch."""
        if self.core.batch is not None:
            self.core.reorder(torch.arange(self.core.batch, device=indices.device)[indices])


def new_cache() -> Cache:
    """An empty cache for a model of any variant."""
    return DynamicCache()


def core_cache(cache: Cache, index: int, attention: MixtureAttention) -> KeyValueCache | StateCache:
    """The core's cache of layer ``index``, put into ``cache`` on first use."""
    layers = cache.layers
    if index < len(layers) and type(layers[index]) is CoreCacheLayer:
        return layers[index].core
    if getattr(cache, "offloading", False):
        raise ValueError("past_key_values must not be an offloaded cache: use cache_implementation='dynamic'")
    while len(layers) <= index:
        layers.append(DynamicLayer())
    layer = layers[index]
    if type(layer) is not DynamicLayer or layer.is_initialized:
        kind = "the cache of another model" if layer.is_initialized else type(layer).__name__
        raise ValueError(
            f"past_key_values must be a DynamicCache that is empty or was filled by this model, got {kind} in layer"
            f" {index}"
        )
    layers[index] = CoreCacheLayer(attention.new_cache())
    return layers[index].core


def cache_bytes(cache: Cache) -> int:
    """The bytes of the entries in use, over all layers."""
    return sum(layer.core.nbytes for layer in cache.layers if isinstance(layer, CoreCacheLayer))
