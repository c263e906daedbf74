"""Caches for decoding, one kind a family: keys and values that grow, or a state of constant size. All detached."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.functional.linear.api import LinearState


class _Layout(NamedTuple):
    keys: Tensor  # (B, H, M, capacity, D)
    value: Tensor  # (B, H, capacity, E)


class KeyValueCache:
    """The keys and values of the tokens so far: M keys a token for mgk, one for smgk and softmax.

    The room doubles when it is full, so that adding a token does not copy the past.
    """

    def __init__(self) -> None:
        self.length = 0
        self._room: _Layout | None = None

    @property
    def batch(self) -> int | None:
        """The number of sequences, or None while empty."""
        return None if self._room is None else self._room.keys.shape[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the entries in use."""
        return sum(x.numel() * x.element_size() for x in (self.keys, self.value) if x is not None)

    @property
    def keys(self) -> Tensor | None:
        """(B, H, M, length, D), or None while empty."""
        return None if self._room is None else self._room.keys[:, :, :, : self.length]

    @property
    def value(self) -> Tensor | None:
        """(B, H, length, E), or None while empty."""
        return None if self._room is None else self._room.value[:, :, : self.length]

    def append(self, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, H, M, L, D) and values (B, H, L, E); all so far come back, with gradients for the new ones."""
        past = self.length
        room = self._reserve(keys, value)
        room.keys[:, :, :, past : self.length] = keys.detach()
        room.value[:, :, past : self.length] = value.detach()
        if torch.is_grad_enabled():  # a copy: autograd keeps what comes back, and the next append writes to the room
            all_keys = torch.cat([room.keys[:, :, :, :past], keys], 3)
            return all_keys, torch.cat([room.value[:, :, :past], value], 2)
        return room.keys[:, :, :, : self.length], room.value[:, :, : self.length]

    def reorder(self, index: Tensor) -> None:
        """Take the sequences ``index`` (B',) of the batch, as beam search does."""
        _check_index(index)
        if self._room is not None:
            self._room = _Layout(*(x.index_select(0, index.to(x.device)) for x in self._room))

    def crop(self, length: int) -> None:
        """Forget the tokens from position ``length`` on."""
        _check_crop(length, self.length)
        self.length = length
        if length == 0:
            self._room = None

    def _reserve(self, keys: Tensor, value: Tensor) -> _Layout:
        """Room for the new entries, counted into ``length``."""
        batch, heads, mixtures, added, _ = keys.shape
        needed = self.length + added
        old = self._room
        if old is not None and (old.keys.shape[:3] != (batch, heads, mixtures) or old.keys.dtype != keys.dtype):
            raise ValueError(
                f"the cache holds {old.keys.dtype} keys of (B, H, M) = {tuple(old.keys.shape[:3])},"
                f" got {keys.dtype} keys of {(batch, heads, mixtures)}"
            )
        if old is None or needed > old.keys.shape[3]:
            capacity = max(needed, 2 * self.length, 16)
            new = _Layout(
                keys.new_empty(batch, heads, mixtures, capacity, keys.shape[-1]),
                value.new_empty(batch, heads, capacity, value.shape[-1]),
            )
            if old is not None:
                new.keys[:, :, :, : self.length] = old.keys[:, :, :, : self.length]
                new.value[:, :, : self.length] = old.value[:, :, : self.length]
            self._room = old = new
        self.length = needed
        return old


class StateCache:
    """The state of linear attention: its size does not depend on the number of tokens."""

    def __init__(self) -> None:
        self.length = 0
        self.state: LinearState | None = None

    @property
    def batch(self) -> int | None:
        """The number of sequences, or None while empty."""
        return None if self.state is None else self.state.numerator.shape[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the state."""
        return 0 if self.state is None else sum(x.numel() * x.element_size() for x in self.state)

    def append(self, state: LinearState, added: int) -> None:
        """Replace the state by the one after ``added`` more tokens."""
        self.state = LinearState(*(x.detach() for x in state))
        self.length += added

    def reorder(self, index: Tensor) -> None:
        """Take the sequences ``index`` (B',) of the batch, as beam search does."""
        _check_index(index)
        if self.state is not None:
            self.state = LinearState(*(x.index_select(0, index.to(x.device)) for x in self.state))

    def crop(self, length: int) -> None:
        """Only to 0 or to the present length: a sum does not tell its terms."""
        _check_crop(length, self.length)
        if length == 0:
            self.state, self.length = None, 0
        elif length != self.length:
            raise ValueError(
                f"a linear state of {self.length} tokens cannot be cropped to {length}: it is a sum over all of them"
            )


def _check_index(index: Any) -> None:
    validation.tensor("index", index, "B", dtypes=(torch.int64, torch.int32))


def _check_crop(length: Any, held: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"length must be a whole number, got {type(length).__name__}")
    if not 0 <= length <= held:
        raise ValueError(f"length must be from 0 to the cache's {held}, got {length}")
