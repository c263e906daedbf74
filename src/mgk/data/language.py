"""Running text: segments to train on, sliding windows to evaluate on."""

import math
from collections.abc import Callable
from typing import Any, Protocol, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mgk.data.errors import UsageError

IGNORE = -100


class Tokens(Protocol):
    """An array of token ids, or what can be sliced like one."""

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> NDArray[Any]: ...


class SegmentDataset(Dataset[dict[str, Tensor]]):
    """The text cut into segments of ``length`` tokens; the last may be shorter.

    ``shift_labels[t]`` is the token after ``input_ids[t]``, also across segments;
    ``labels`` repeats ``input_ids`` for models that shift by themselves.
    """

    pad_id: None = None  # causal attention needs no mask

    def __init__(self, tokens: Tokens, length: int, *, vocab_size: int = 0) -> None:
        """``vocab_size`` is there to build a model from the data set."""
        if len(tokens) < 2:
            raise UsageError(f"a text of {len(tokens)} tokens has nothing to predict")
        if length < 1:
            raise UsageError(f"length must be at least 1, got {length}")
        self.tokens, self.length, self.vocab_size = tokens, length, vocab_size

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(len(self))[index] * self.length
        tokens = np.asarray(self.tokens[start : start + self.length + 1])
        piece = torch.from_numpy(tokens.astype(np.int64))
        inputs, targets = piece[:-1], piece[1:]
        return {"input_ids": inputs, "labels": inputs.clone(), "shift_labels": targets}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of every segment."""
        lengths = np.full(len(self), self.length)
        lengths[-1] = len(self.tokens) - 1 - (len(self) - 1) * self.length
        return lengths


def windows(tokens: Tokens, window: int, first: int, count: int, *, stride: int = 1) -> tuple[Tensor, Tensor]:
    """``count`` windows from ``first`` on and their targets, (count, window).

    Window i begins at i * stride, the last one ``window`` tokens before the end.
    It predicts what no window before it has; other targets are -100.
    """
    numbers = np.arange(first, first + count)
    starts = np.minimum(numbers * stride, len(tokens) - 1 - window)
    piece = np.asarray(tokens[starts[0] : starts[-1] + window + 1]).astype(np.int64)
    places = (starts - starts[0])[:, None] + np.arange(window)
    inputs, targets = piece[places], piece[places + 1]
    done = np.where(numbers == 0, 0, (numbers - 1) * stride + window - starts)
    targets[np.arange(window) < done[:, None]] = IGNORE
    return torch.from_numpy(inputs), torch.from_numpy(targets)


class WindowOptions(TypedDict, total=False):
    """Options of :func:`block_losses`."""

    window: int
    stride: int
    batch_size: int
    rank: int
    world_size: int
    on_step: Callable[[int, int], None]


def sliding_window_loss(
    loss: Callable[[Tensor, Tensor], Tensor],
    tokens: Tokens,
    **options: Unpack[WindowOptions],
) -> tuple[float, int]:
    """-sum log p, and the number of tokens; see :func:`block_losses`."""
    ((sum_, count),) = block_losses(loss, tokens, blocks=1, **options).tolist()
    return sum_, int(count)


def block_losses(
    loss: Callable[[Tensor, Tensor], Tensor],
    tokens: Tokens,
    *,
    blocks: int,
    window: int = 256,
    stride: int = 1,
    batch_size: int = 64,
    rank: int = 0,
    world_size: int = 1,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """-sum log p and tokens of each part of a text, float64 (blocks, 2).

    A block is a run of windows. Windows begin every ``stride`` tokens; each predicts what
    no window before it has. A stride of 1 is the paper's: every token after the first
    window sees exactly ``window`` tokens.

    ``loss`` takes inputs and targets (B, W) on the CPU and returns -log p (B, W), ignored
    where the target is -100. The results of all ranks add up.
    """
    if len(tokens) < 2:
        raise UsageError(f"a text of {len(tokens)} tokens has nothing to predict")
    if window < 1 or batch_size < 1:
        given = f"{window} and {batch_size}"
        raise ValueError(f"window and batch_size must be at least 1, got {given}")
    if not 1 <= stride <= window:
        limit = f"the window's {window} tokens"
        raise UsageError(f"the stride must be from 1 to {limit}, got {stride}")
    window = min(window, len(tokens) - 1)
    total = 1 + math.ceil((len(tokens) - 1 - window) / stride)
    found = torch.zeros(blocks, 2, dtype=torch.float64)
    for first in range(rank * batch_size, total, world_size * batch_size):
        number = min(batch_size, total - first)
        inputs, targets = windows(tokens, window, first, number, stride=stride)
        losses = loss(inputs, targets).detach().to("cpu", torch.float64)
        counts = targets != IGNORE
        sums = losses.masked_fill(~counts, 0.0).sum(1)
        by_window = torch.stack([sums, counts.sum(1).double()], 1)
        found.index_add_(0, torch.arange(first, first + number) * blocks // total, by_window)
        on_step(min(first + world_size * batch_size, total), total)
    return found
