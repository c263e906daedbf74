"""Map-style data sets of PyTorch over prepared splits: an example is a dictionary with the names of Hugging Face."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mgk.data.errors import UsageError
from mgk.data.language import SegmentDataset
from mgk.data.splits import MappedTokens, Split, open_split
from mgk.data.task_registry import find_task

Example = dict[str, Tensor]


class SequenceDataset(Dataset[Example]):
    """Labelled token sequences of different lengths, one or two an example; each keeps its first ``max_length`` tokens.

    An example has ``input_ids`` (L,) and ``labels`` (); of two sequences the second is ``input_ids_2``.
    """

    def __init__(self, split: Split, *, max_length: int, sequences: int = 1) -> None:
        self._split, self._sequences, self.max_length = split, sequences, max_length
        facts = split.manifest.facts
        self.vocab_size: int = facts["vocab_size"]
        self.pad_id: int = facts["pad_id"]
        self._shift: int = facts["shift"]

    def __len__(self) -> int:
        return self._split.manifest.examples(self._split.name)

    def __getitem__(self, index: int) -> Example:
        place = range(len(self))[index]  # a negative index counts from the end, one beyond it raises
        example = {
            f"input_ids{'' if number == 0 else f'_{number + 1}'}": self._tokens(place * self._sequences + number)
            for number in range(self._sequences)
        }
        return {**example, "labels": torch.tensor(int(self._split["labels"][place]))}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of every example, that of the longer sequence of two, after truncation."""
        lengths: NDArray[np.int64] = np.diff(self._split["offsets"]).reshape(-1, self._sequences).max(1)
        return np.minimum(lengths, self.max_length)

    def _tokens(self, row: int) -> Tensor:
        start, end = (int(offset) for offset in self._split["offsets"][row : row + 2])
        tokens = self._split["tokens"][start : min(end, start + self.max_length)]
        return torch.from_numpy(tokens.astype(np.int64)) + self._shift


class ImageDataset(Dataset[Example]):
    """Labelled images: ``input_ids`` (pixels,) of grey values, or ``pixel_values`` (3, H, W) from 0 to 1."""

    def __init__(self, split: Split, *, max_length: int, colour: bool = False) -> None:
        if colour and "colour" not in split:
            raise UsageError(f"{split.manifest.task} has no colour")
        self._split, self._colour, self.max_length = split, colour, max_length
        self.vocab_size: int = split.manifest.facts["vocab_size"]
        self.pad_id: int | None = split.manifest.facts["pad_id"]

    def __len__(self) -> int:
        return self._split.manifest.examples(self._split.name)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of every example: the same for all."""
        return np.full(len(self), min(self._split["tokens"].shape[1], self.max_length))

    def __getitem__(self, index: int) -> Example:
        place = range(len(self))[index]
        label = torch.tensor(int(self._split["labels"][place]))
        if self._colour:
            image = torch.from_numpy(np.array(self._split["colour"][place]))  # (H, W, 3)
            return {"pixel_values": image.permute(2, 0, 1).float() / 255, "labels": label}
        pixels = self._split["tokens"][place, : self.max_length]
        return {"input_ids": torch.from_numpy(pixels.astype(np.int64)), "labels": label}


def load(
    name: str, split: str, *, folder: Path | str | None = None, max_length: int | None = None, colour: bool = False
) -> SequenceDataset | ImageDataset | SegmentDataset:
    """A split of a prepared task.

    Args:
        name: the task's; a made-up sample, ``synthetic-...``, is made when it is not there yet.
        split: "train", "validation" or "test".
        folder: the folder of all sets; the data folder if not given.
        max_length: tokens that an example keeps, for running text the length of a segment; the paper's if not given.
        colour: of images, the pixels in colour instead of grey ones.

    Returns:
        The data set, by the task's kind. All have ``vocab_size``, ``pad_id`` for the collator, and ``lengths``.
    """
    task = find_task(name)
    length = task.max_length if max_length is None else max_length
    if length < 1:
        raise UsageError(f"max_length must be at least 1, got {length}")
    if colour and task.kind != "image":
        raise UsageError(f"{name} has no images")
    opened = open_split(name, split, folder)
    if task.kind == "language":
        return SegmentDataset(MappedTokens(opened), length, vocab_size=opened.manifest.facts["vocab_size"])
    if task.kind == "image":
        return ImageDataset(opened, max_length=length, colour=colour)
    return SequenceDataset(opened, max_length=length, sequences=2 if task.kind == "pair" else 1)


def load_tokens(name: str, split: str, *, folder: Path | str | None = None) -> NDArray[np.integer]:
    """The token ids of running text, mapped into memory."""
    if find_task(name).kind != "language":
        raise UsageError(f"{name} is not running text")
    tokens: NDArray[np.integer] = open_split(name, split, folder)["tokens"]
    return tokens
