"""Caches for decoding: growing keys and values, or a constant state."""

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.functional.linear.api import LinearState


class Cache:
    """The tokens so far, detached: a :class:`KeyValueCache` or :class:`StateCache`."""

    is_croppable = True

    def __init__(self) -> None:
        self.length = 0
        self._tensors: tuple[Tensor, ...] | None = None  # each with the batch first

    @property
    def batch(self) -> int | None:
        """Sequences; None while empty."""
        return None if self._tensors is None else self._tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the entries in use."""
        return sum(x.numel() * x.element_size() for x in self._entries())

    def reorder(self, index: Tensor) -> None:
        """Take the sequences ``index`` (B',) of the batch, as beam search does."""
        validation.tensor("index", index, "B", dtypes=(torch.int64, torch.int32))
        if self._tensors is not None:
            index = index.to(self._tensors[0].device)
            self._tensors = tuple(x.index_select(0, index) for x in self._tensors)

    def crop(self, length: int) -> None:
        """Drop the tokens from position ``length`` on."""
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length must be a whole number, got {type(length).__name__}")
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be from 0 to the cache's {self.length}, got {length}")
        if not self.is_croppable and 0 < length < self.length:
            raise ValueError(f"a linear state of {self.length} tokens cannot be cropped to {length}: it is a sum")
        self.length = length
        if length == 0:
            self._tensors = None

    def _entries(self) -> tuple[Tensor, ...]:
        return self._tensors or ()


class KeyValueCache(Cache):
    """Keys, M a token for mgk and one for smgk and softmax, and values.

    The capacity doubles when full, so that few appends copy the past.
    """

    @property
    def keys(self) -> Tensor | None:
        """(B, H, M, length, D); None while empty."""
        return self._entries()[0] if self._tensors else None

    @property
    def value(self) -> Tensor | None:
        """(B, H, length, E); None while empty."""
        return self._entries()[1] if self._tensors else None

    def append(self, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, H, M, L, D) and values (B, H, L, E); return all so far."""
        past, added = self.length, keys.shape[3]
        all_keys, all_values = self._reserve(keys, value, past + added)
        all_keys.narrow(-2, past, added).copy_(keys.detach())
        all_values.narrow(-2, past, added).copy_(value.detach())
        self.length = past + added
        if torch.is_grad_enabled():  # a copy: the next append must not change it
            keys = torch.cat([all_keys.narrow(-2, 0, past), keys], -2)
            return keys, torch.cat([all_values.narrow(-2, 0, past), value], -2)
        all_keys, all_values = self._entries()
        return all_keys, all_values

    def _entries(self) -> tuple[Tensor, ...]:
        return tuple(x.narrow(-2, 0, self.length) for x in self._tensors or ())

    def _reserve(self, keys: Tensor, value: Tensor, length: int) -> tuple[Tensor, ...]:
        """Tensors with room for ``length`` tokens."""
        old, shape = self._tensors, keys.shape[:3]
        if old and (old[0].shape[:3] != shape or old[0].dtype != keys.dtype):
            held = f"{old[0].dtype} keys of (B, H, M) = {tuple(old[0].shape[:3])}"
            raise ValueError(f"the cache holds {held}, got {keys.dtype} keys of {tuple(shape)}")
        if old is None or length > old[0].shape[3]:
            capacity = max(length, 2 * self.length, 16)
            new = tuple(x.new_empty(*x.shape[:-2], capacity, x.shape[-1]) for x in (keys, value))
            for larger, entries in zip(new, self._entries(), strict=False):
                larger.narrow(-2, 0, self.length).copy_(entries)
            self._tensors = new
            return new
        return old


class StateCache(Cache):
    """The state of linear attention, of constant size.

    A running sum cannot be truncated: it is cropped to 0 or not at all.
    """

    is_croppable = False

    @property
    def state(self) -> LinearState | None:
        """The sums over the tokens so far; None while empty."""
        return None if self._tensors is None else LinearState(*self._tensors)

    def append(self, state: LinearState, added: int) -> None:
        """Take the state after ``added`` more tokens."""
        self._tensors = tuple(x.detach() for x in state)
        self.length += added
