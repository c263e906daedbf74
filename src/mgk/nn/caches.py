"""Caches for decoding: keys and values that grow with the sequence, or a state of constant size."""

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.functional.linear.api import LinearState


class Cache:
    """The tokens so far of a batch of sequences, detached: :class:`KeyValueCache` or :class:`StateCache`."""

    is_croppable = True

    def __init__(self) -> None:
        self.length = 0
        self._tensors: tuple[Tensor, ...] | None = None  # each with the batch first

    @property
    def batch(self) -> int | None:
        """The number of sequences, or None while empty."""
        return None if self._tensors is None else self._tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the entries in use."""
        return sum(x.numel() * x.element_size() for x in self._entries())

    def reorder(self, index: Tensor) -> None:
        """Take the sequences ``index`` (B',) of the batch, as beam search does."""
        validation.tensor("index", index, "B", dtypes=(torch.int64, torch.int32))
        if self._tensors is not None:
            self._tensors = tuple(x.index_select(0, index.to(x.device)) for x in self._tensors)

    def crop(self, length: int) -> None:
        """Drop the tokens from position ``length`` on."""
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length must be a whole number, got {type(length).__name__}")
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be from 0 to the cache's {self.length}, got {length}")
        if not self.is_croppable and 0 < length < self.length:
            raise ValueError(
                f"a linear state of {self.length} tokens cannot be cropped to {length}: it is a sum over all of them"
            )
        self.length = length
        if length == 0:
            self._tensors = None

    def _entries(self) -> tuple[Tensor, ...]:
        return self._tensors or ()


class KeyValueCache(Cache):
    """The keys and values of the tokens so far: M keys a token for mgk, one for smgk and softmax.

    The capacity doubles when it is full, so that adding a token does not copy the past.
    """

    @property
    def keys(self) -> Tensor | None:
        """(B, H, M, length, D), or None while empty."""
        return None if self._tensors is None else self._tensors[0][:, :, :, : self.length]

    @property
    def value(self) -> Tensor | None:
        """(B, H, length, E), or None while empty."""
        return None if self._tensors is None else self._tensors[1][:, :, : self.length]

    def append(self, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, H, M, L, D) and values (B, H, L, E); return all so far, with gradients for the new ones."""
        past = self.length
        all_keys, all_values = self._reserve(keys, value)
        all_keys[:, :, :, past : self.length] = keys.detach()
        all_values[:, :, past : self.length] = value.detach()
        if torch.is_grad_enabled():  # a copy: autograd keeps the result, and the next append writes to the cache
            return torch.cat([all_keys[:, :, :, :past], keys], 3), torch.cat([all_values[:, :, :past], value], 2)
        return all_keys[:, :, :, : self.length], all_values[:, :, : self.length]

    def _entries(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.keys, self.value) if x is not None)

    def _reserve(self, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors with room for the new entries, which ``length`` then includes."""
        old_keys, old_values = self.keys, self.value
        shape, needed = keys.shape[:3], self.length + keys.shape[3]
        if old_keys is not None and (old_keys.shape[:3] != shape or old_keys.dtype != keys.dtype):
            raise ValueError(
                f"the cache holds {old_keys.dtype} keys of (B, H, M) = {tuple(old_keys.shape[:3])},"
                f" got {keys.dtype} keys of {tuple(shape)}"
            )
        if self._tensors is None or needed > self._tensors[0].shape[3]:
            capacity = max(needed, 2 * self.length, 16)
            self._tensors = (
                keys.new_empty(*shape, capacity, keys.shape[-1]),
                value.new_empty(*shape[:2], capacity, value.shape[-1]),
            )
            if old_keys is not None and old_values is not None:
                self._tensors[0][:, :, :, : self.length] = old_keys
                self._tensors[1][:, :, : self.length] = old_values
        self.length = needed
        return self._tensors[0], self._tensors[1]


class StateCache(Cache):
    """The state of linear attention: its size does not depend on the number of tokens.

    A running sum cannot be truncated: it is cropped to 0 or to the present length only.
    """

    is_croppable = False

    @property
    def state(self) -> LinearState | None:
        """The sums over the tokens so far, or None while empty."""
        return None if self._tensors is None else LinearState(*self._tensors)

    def append(self, state: LinearState, added: int) -> None:
        """Replace the state by the one after ``added`` more tokens."""
        self._tensors = tuple(x.detach() for x in state)
        self.length += added
