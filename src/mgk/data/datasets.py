"""Map-style data sets over prepared splits, with Hugging Face's names."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mgk.data.errors import UsageError
from mgk.data.language import SegmentDataset
from mgk.data.preparation import prepared
from mgk.data.splits import MappedTokens, Split
from mgk.data.task_registry import find_task

Example = dict[str, Tensor]


class _LabelledDataset(Dataset[Example]):
    def __init__(self, split: Split, max_length: int) -> None:
        self._split, self.max_length = split, max_length
        self.vocab_size: int = split.manifest.facts["vocab_size"]
        self.pad_id: int | None = split.manifest.facts["pad_id"]

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> Example:
        place = range(len(self))[index]  # counts from the end if negative
        return {**self._inputs(place), "labels": torch.tensor(int(self._split["labels"][place]))}

    def _inputs(self, place: int) -> Example:
        raise NotImplementedError


class SequenceDataset(_LabelledDataset):
    """Labelled sequences, one or two an example, truncated to ``max_length``.

    ``input_ids`` (L,), for a second one ``input_ids_2``, and ``labels`` ().
    """

    def __init__(self, split: Split, *, max_length: int, sequences: int = 1) -> None:
        super().__init__(split, max_length)
        self._sequences = sequences
        self._shift: int = split.manifest.facts["shift"]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of every example after truncation; of a pair the longer one."""
        lengths = np.diff(self._split["offsets"]).reshape(-1, self._sequences)
        return np.minimum(lengths.max(1), self.max_length)

    def _inputs(self, place: int) -> Example:
        first = place * self._sequences
        names = ("input_ids", "input_ids_2")[: self._sequences]
        return {name: self._tokens(row) for row, name in enumerate(names, first)}

    def _tokens(self, row: int) -> Tensor:
        start, end = (int(offset) for offset in self._split["offsets"][row : row + 2])
        tokens = self._split["tokens"][start : min(end, start + self.max_length)]
        return torch.from_numpy(tokens.astype(np.int64)) + self._shift


class ImageDataset(_LabelledDataset):
    """Labelled images: ``input_ids`` (pixels,), or ``pixel_values`` (3, H, W)."""

    def __init__(self, split: Split, *, max_length: int, colour: bool = False) -> None:
        super().__init__(split, max_length)
        if colour and "colour" not in split:
            raise UsageError(f"{split.manifest.task} has no colour")
        self._colour = colour

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of every example, the same for all."""
        return np.full(len(self), min(self._split["tokens"].shape[1], self.max_length))

    def _inputs(self, place: int) -> Example:
        if self._colour:
            image = torch.from_numpy(np.array(self._split["colour"][place]))  # (H, W, 3)
            return {"pixel_values": image.permute(2, 0, 1).float() / 255}
        pixels = self._split["tokens"][place, : self.max_length]
        return {"input_ids": torch.from_numpy(pixels.astype(np.int64))}


def load(
    name: str,
    split: str,
    *,
    folder: Path | str | None = None,
    max_length: int | None = None,
    colour: bool = False,
) -> SequenceDataset | ImageDataset | SegmentDataset:
    """A split of a prepared task; ``synthetic-...`` is generated if absent.

    An example or segment has ``max_length`` tokens, by default the paper's.
    """
    task = find_task(name)
    length = task.max_length if max_length is None else max_length
    if length < 1:
        raise UsageError(f"max_length must be at least 1, got {length}")
    if colour and task.kind != "image":
        raise UsageError(f"{name} has no images")
    opened = Split(*prepared(name, folder), split)
    if task.kind == "language":
        vocab_size = opened.manifest.facts["vocab_size"]
        return SegmentDataset(MappedTokens(opened), length, vocab_size=vocab_size)
    if task.kind == "image":
        return ImageDataset(opened, max_length=length, colour=colour)
    return SequenceDataset(opened, max_length=length, sequences=2 if task.kind == "pair" else 1)


def load_tokens(name: str, split: str, *, folder: Path | str | None = None) -> NDArray[np.integer]:
    """The token ids of running text, mapped into memory."""
    if find_task(name).kind != "language":
        raise UsageError(f"{name} is not running text")
    tokens: NDArray[np.integer] = Split(*prepared(name, folder), split)["tokens"]
    return tokens
