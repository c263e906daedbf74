"""Running text for language models: segments to train on, and the sliding window of the paper's evaluation."""

from collections.abc import Callable
from typing import Any, Protocol

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
    """The text cut into contiguous segments of ``length`` tokens; the last one may be shorter.

    ``shift_labels[t]`` is the token after ``input_ids[t]``, the first of the next segment included, so every token but
    the text's first is predicted once and every position learns to predict: the sliding window asks for the last.
    ``labels`` repeats ``input_ids`` for models that shift by themselves and do not know ``shift_labels``.
    """

    pad_id: None = None  # no segment but the last is padded, and no real token looks at what comes after it

    def __init__(self, tokens: Tokens, length: int, *, vocab_size: int = 0) -> None:
        """Cut the text.

        Args:
            tokens: of the text.
            length: of a segment.
            vocab_size: for those who build a model from the data set; 0 where nobody asks.
        """
        if len(tokens) < 2:
            raise UsageError(f"a text of {len(tokens)} tokens has nothing to predict")
        if length < 1:
            raise UsageError(f"length must be at least 1, got {length}")
        self.tokens, self.length, self.vocab_size = tokens, length, vocab_size

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(len(self))[index] * self.length
        piece = torch.from_numpy(np.asarray(self.tokens[start : start + self.length + 1]).astype(np.int64))
        return {"input_ids": piece[:-1], "labels": piece[:-1].clone(), "shift_labels": piece[1:]}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of every segment."""
        lengths = np.full(len(self), self.length)
        lengths[-1] = len(self.tokens) - 1 - (len(self) - 1) * self.length
        return lengths


def windows(tokens: Tokens, window: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Windows ``first`` to ``first + count - 1`` and what they predict, (count, window) each.

    Window i holds the tokens from i on and predicts the one after it with its last position; window 0 predicts with
    all. Targets that do not count are -100.
    """
    piece = torch.from_numpy(np.asarray(tokens[first : first + count + window]).astype(np.int64))
    inputs, targets = piece[:-1].unfold(0, window, 1), piece[1:].unfold(0, window, 1).clone()
    targets[1 if first == 0 else 0 :, :-1] = IGNORE
    return inputs, targets


def sliding_window_loss(
    loss: Callable[[Tensor, Tensor], Tensor],
    tokens: Tokens,
    *,
    window: int = 256,
    batch_size: int = 64,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[float, int]:
    """The summed negative log-likelihood of all tokens but the first, and their number.

    Args:
        loss: takes inputs and targets (B, W), the device being its own affair, and returns the loss of every position
            (B, W), anything where the target is -100: ``cross_entropy(..., reduction="none")`` of a model's logits.
        tokens: of the text.
        window: W, tokens that a prediction sees at most.
        batch_size: windows at a time; the result does not depend on it beyond rounding, as sums are in float64.
        on_step: called with how many windows of how many are done.

    Returns:
        The sum, and the count; the perplexity is exp(sum / count).
    """
    if len(tokens) < 2:
        raise UsageError(f"a text of {len(tokens)} tokens has nothing to predict")
    if window < 1 or batch_size < 1:
        raise ValueError(f"window and batch_size must be at least 1, got {window} and {batch_size}")
    window = min(window, len(tokens) - 1)
    total = len(tokens) - window
    sum_, count = 0.0, 0
    for first in range(0, total, batch_size):
        inputs, targets = windows(tokens, window, first, min(batch_size, total - first))
        losses = loss(inputs, targets).detach().to("cpu", torch.float64)
        counts = targets != IGNORE
        sum_ += float(losses[counts].sum())
        count += int(counts.sum())
        on_step(min(first + batch_size, total), total)
    return sum_, count
