"""Caches for decoding: keys and values, or a constant state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mgk.functional import validation
from mgk.functional.linear.api import LinearState

MAX_CROP = 64  # tokens to drop from a window, in assisted decoding


class Cache:
    """The tokens so far: a :class:`KeyValueCache` or :class:`StateCache`."""

    is_croppable = True

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] | None = None  # batch first
        self.length = 0

    @property
    def batch(self) -> int | None:
        """Sequences; None while empty."""
        return None if self._tensors is None else self._tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the entries in use."""
        return sum(x.numel() * x.element_size() for x in self._entries())

    def reorder(self, index: Tensor) -> None:
        """Take the sequences ``index`` (B',), as beam search does."""
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
            state = f"a linear state of {self.length} tokens"
            raise ValueError(f"{state} cannot be cropped to {length}: it is a sum")
        self.length = length
        if length == 0:
            self._tensors = None

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """An error leaves the cache as it was."""
        if torch.compiler.is_compiling():
            yield
            return
        length, held = self._copy_of_length(), dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).update(held)
            self.length = length
            raise

    def _copy_of_length(self) -> Any:
        return self.length

    def _entries(self) -> tuple[Tensor, ...]:
        return self._tensors or ()

    def _leave_inference_mode(self) -> None:
        """Copy tensors of ``inference_mode`` once they are used outside."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        if self._tensors and self._tensors[0].is_inference():
            self._tensors = tuple(x.clone() for x in self._tensors)


class KeyValueCache(Cache):
    """Keys, M a token for mgk and one for smgk and softmax, and values.

    The capacity doubles when full, so that few appends copy the past. With a window it
    holds the last ``left`` + 64 tokens: what the next query sees, also after
    :meth:`crop` has dropped up to 64 tokens.

    Args:
        left: The keys before its own that a query sees; None: all.
    """

    def __init__(self, left: int | None = None) -> None:
        super().__init__()
        self.left = left
        self.start = 0  # the first position held
        self._stored_from = 0  # the position of the first entry of the tensors

    @property
    def keys(self) -> Tensor | None:
        """(B, H, M, held, D), from position ``start`` on; None while empty."""
        return self._entries()[0] if self._tensors else None

    @property
    def value(self) -> Tensor | None:
        """(B, H, held, E), from position ``start`` on; None while empty."""
        return self._entries()[1] if self._tensors else None

    @property
    def first_seen(self) -> int:
        """The first position that the next query sees."""
        return 0 if self.left is None else max(0, self.length - self.left)

    def prefill(self, keys: Tensor, value: Tensor) -> None:
        """Start with keys (B, H, M, S, D) and values (B, H, S, E)."""
        self._tensors, self.length = (keys, value), keys.shape[3]

    def append(self, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, H, M, L, D) and values; all from ``first_seen`` on."""
        self._leave_inference_mode()
        past, added, first = self.length, keys.shape[3], self.first_seen
        stored = self._reserve(keys, value, past + added)
        for tensor, new in zip(stored, (keys, value), strict=True):
            tensor.narrow(-2, past - self._stored_from, added).copy_(new.detach())
        self.length = past + added
        has_derivatives = torch.is_grad_enabled() or any(map(validation.has_tangent, (keys, value)))
        seen = self._between(first, past if has_derivatives else self.length)
        if self.left is not None:
            self.start = max(self.start, self.length - self.left - MAX_CROP)
        if has_derivatives:  # a copy: the next append must not change it
            seen = tuple(torch.cat([old, new], -2) for old, new in zip(seen, (keys, value), strict=True))
        all_keys, all_values = seen
        return all_keys, all_values

    def crop(self, length: int) -> None:
        """Drop the tokens from ``length`` on: with a window 64, or all."""
        if self.start and isinstance(length, int) and 0 < length < self.length:
            least = self.start + (self.left or 0)
            if length < least:
                wanted = f"0 or from {least} to {self.length}"
                why = f"with a window the cache forgets what {MAX_CROP} tokens back is out of sight"
                raise ValueError(f"length must be {wanted}, got {length}: {why}")
        super().crop(length)
        if length == 0:
            self.start = self._stored_from = 0

    def _entries(self) -> tuple[Tensor, ...]:
        return self._between(self.start, self.length)

    def _between(self, start: int, stop: int) -> tuple[Tensor, ...]:
        first = start - self._stored_from
        return tuple(x.narrow(-2, first, stop - start) for x in self._tensors or ())

    def _check_like(self, keys: Tensor) -> None:
        old, shape = self._tensors, keys.shape[:3]
        if old and (old[0].shape[:3] != shape or old[0].dtype != keys.dtype):
            held = f"{old[0].dtype} keys of (B, H, M) = {tuple(old[0].shape[:3])}"
            raise ValueError(f"the cache holds {held}, got {keys.dtype} keys of {tuple(shape)}")

    def _reserve(self, keys: Tensor, value: Tensor, length: int) -> tuple[Tensor, ...]:
        """Tensors with room for the tokens up to position ``length``."""
        self._check_like(keys)
        old = self._tensors
        if old is None or length - self._stored_from > old[0].shape[3]:
            held = self.length - self.start
            capacity = max(length - self.start, 2 * held, 16)
            new = tuple(x.new_empty(*x.shape[:-2], capacity, x.shape[-1]) for x in (keys, value))
            for larger, entries in zip(new, self._entries(), strict=False):
                larger.narrow(-2, 0, held).copy_(entries)
            self._tensors, self._stored_from = new, self.start
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
        self._leave_inference_mode()
        return None if self._tensors is None else LinearState(*self._tensors)

    def append(self, state: LinearState, added: int) -> None:
        """Take the state after ``added`` more tokens."""
        self._tensors = tuple(x.detach() for x in state)
        self.length += added


class StaticCache(Cache):
    """The length is a tensor, so that one compiled step serves every length.

    Under ``no_grad`` only: a step writes over tensors that stay where they are.
    """

    max_length: int

    def __init__(self, max_length: int) -> None:
        validation.positive_int("max_length", max_length)
        self.max_length = max_length
        self.position = torch.zeros((), dtype=torch.int64)
        super().__init__()

    @property
    def length(self) -> int:
        """Tokens so far; reading it waits for the device."""
        return int(self.position)

    @length.setter
    def length(self, value: int | Tensor) -> None:
        self._leave_inference_mode()
        self.position.fill_(value)

    def _copy_of_length(self) -> Tensor:
        return self.position.clone()

    def places(self, added: int) -> Tensor:
        """The positions (L,) of the next ``added`` tokens."""
        return self.position + torch.arange(added, device=self.position.device)

    def visible(self, num_queries: int, is_causal: bool, window: tuple[int | None, int | None]) -> Tensor:
        """Bool (L, max_length): the places that the next tokens see."""
        own = self.places(num_queries)[:, None]  # (L, 1)
        left, right = window
        places = torch.arange(self.max_length, device=own.device)
        seen = places <= (own if is_causal else own[-1:])
        if left is not None:
            seen = seen & (places >= own - left)
        return seen if right is None else seen & (places <= own + right)

    def _leave_inference_mode(self) -> None:
        super()._leave_inference_mode()
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        if self.position.is_inference():
            self.position = self.position.clone()

    def _check_step(self, like: Tensor, added: int) -> None:
        self._leave_inference_mode()
        if validation.needs_grad(like):
            advice = "use torch.no_grad(), or new_cache()"
            raise ValueError(f"a cache of fixed length has no derivatives: {advice}")
        if self.position.device != like.device:
            self.position = self.position.to(like.device)
        # elsewhere reading the length would wait for the device at every token
        if not torch.compiler.is_compiling() and like.device.type == "cpu":
            needed = self.length + added
            if needed > self.max_length:
                have = f"max_length={self.max_length} places"
                raise ValueError(f"the cache has {have}, got {needed} tokens")


class StaticKeyValueCache(StaticCache, KeyValueCache):
    """Keys and values in ``max_length`` places, for compiled decoding.

    ``key_mask``, ``attn_mask`` and weights have ``max_length`` columns.
    """

    def append(self, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, H, M, L, D) and values; all ``max_length`` places."""
        added = keys.shape[3]
        self._check_like(keys)
        self._check_step(keys, added)
        if self._tensors is None:
            sizes = ((*x.shape[:-2], self.max_length, x.shape[-1]) for x in (keys, value))
            self._tensors = tuple(keys.new_zeros(size) for size in sizes)
        all_keys, all_values = self._tensors
        places = self.places(added)
        all_keys.index_copy_(-2, places, keys.detach())
        all_values.index_copy_(-2, places, value.detach())
        self.position.add_(added)
        return all_keys, all_values


class StaticStateCache(StaticCache, StateCache):
    """The state of linear attention; ``key_mask`` has ``max_length`` columns."""

    def append(self, state: LinearState, added: int) -> None:
        """Take the state after ``added`` more tokens."""
        self._check_step(state[0], added)
        if self._tensors is None:
            self._tensors = tuple(x.detach().clone() for x in state)
        else:
            for held, new in zip(self._tensors, state, strict=True):
                held.copy_(new.detach())
        self.position.add_(added)
