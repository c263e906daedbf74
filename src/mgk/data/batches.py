"""Batches: their examples, their order, their padding."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import count

import numpy as np
import torch
import torch.distributed
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from mgk.data.language import IGNORE
from mgk.data.random_bits import permutation

# Enough batches to save padding, few enough to stay random.
_BATCHES_SORTED_TOGETHER = 50
_Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Collator:
    """Pads a batch to its longest row; ``attention_mask`` (B, L) marks tokens.

    Without ``pad_id``, for images and causal running text, there is no mask. With
    ``packing`` the sequences form one row; ``seq_idx`` (1, tokens) numbers them.
    """

    pad_id: int | None = None
    packing: bool = False

    def __call__(self, examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Sequences are padded on the right, or packed; the rest is stacked."""
        if self.packing:
            rows = [example["input_ids"] for example in examples]
            lengths = torch.tensor([len(row) for row in rows])
            return {
                "input_ids": torch.cat(rows).unsqueeze(0),
                "seq_idx": torch.arange(len(rows)).repeat_interleave(lengths).unsqueeze(0),
                "labels": torch.stack([example["labels"] for example in examples]),
            }
        batch = {}
        for name in examples[0]:
            rows = [example[name] for example in examples]
            if rows[0].dim() != 1:
                batch[name] = torch.stack(rows)
                continue
            fill = IGNORE if name.endswith("labels") else self.pad_id or 0
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=fill)
            if self.pad_id is not None and name.startswith("input_ids"):
                lengths = torch.tensor([len(row) for row in rows])
                mask = torch.arange(batch[name].shape[1]) < lengths[:, None]
                batch[name.replace("input_ids", "attention_mask")] = mask.long()
        return batch


@dataclass(eq=False)
class _Batches(Sampler[list[int]]):
    """What both samplers share."""

    num_examples: int
    batch_size: int
    _: KW_ONLY
    seed: int = 0
    lengths: ArrayLike | None = None
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if is_distributed else 0
        world_size = torch.distributed.get_world_size() if is_distributed else 1
        self._rank = rank if self.rank is None else self.rank
        self._world_size = world_size if self.world_size is None else self.world_size
        self._lengths = None if self.lengths is None else np.asarray(self.lengths)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 0 <= self._rank < self._world_size:
            last = self._world_size - 1
            raise ValueError(f"rank must be from 0 to world_size - 1 = {last}, got {self._rank}")
        if self._lengths is not None and len(self._lengths) != self.num_examples:
            wanted, got = f"one for each of {self.num_examples} examples", len(self._lengths)
            raise ValueError(f"lengths must have {wanted}, got {got}")

    def _sorted_by_length(self, rows: _Indices) -> _Indices:
        if self._lengths is None:
            return rows
        return rows[np.argsort(self._lengths[rows], kind="stable")]

    def _batch_order(self, number: int, path: int) -> _Indices:
        """Shuffled where grouping by length would go from short to long."""
        if self._lengths is None:
            return np.arange(number)
        return permutation(number, self.seed, path, 1)


@dataclass(eq=False)
class EpochBatches(_Batches):
    """One rank's batches of an epoch, for ``DataLoader(batch_sampler=...)``.

    Every example comes once an epoch, and all ranks take equally many steps: the
    last step is divided evenly; too few examples for that join the one before.
    The order depends on seed and epoch alone. ``batch_size`` is that of one rank;
    ``lengths`` group the examples; ranks are by default ``torch.distributed``'s.
    """

    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epoch = self.start = 0
        if self.num_examples < self._world_size:
            raise ValueError(f"{self.num_examples} examples are too few for {self._world_size} ranks")
        if self._lengths is not None and not self.shuffle:
            raise ValueError("lengths need shuffle=True: groups by length have another order")

    @property
    def steps(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        whole, rest = divmod(self.num_examples, self.batch_size * self._world_size)
        return whole + (rest >= self._world_size)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Turn to an epoch, from its batch ``start`` on, to resume within it."""
        if not 0 <= start <= self.steps:
            wanted = f"from 0 to the {self.steps} batches of an epoch"
            raise ValueError(f"start must be {wanted}, got {start}")
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return self.steps - self.start

    def __iter__(self) -> Iterator[list[int]]:
        step_size = self.batch_size * self._world_size
        order = np.arange(self.num_examples)
        if self.shuffle:
            together = step_size * _BATCHES_SORTED_TOGETHER
            order = permutation(self.num_examples, self.seed, self.epoch)
            groups = np.split(order, range(together, len(order), together))
            order = np.concatenate([self._sorted_by_length(group) for group in groups])
        for step in self._batch_order(self.steps, self.epoch)[self.start :].tolist():
            end = self.num_examples if step == self.steps - 1 else (step + 1) * step_size
            rows = order[step * step_size : end]
            yield np.array_split(rows, self._world_size)[self._rank].tolist()


@dataclass(eq=False)
class StepBatches(_Batches):
    """One rank's batches of a run, for ``DataLoader(batch_sampler=...)``.

    A step takes the next ``batch_size`` examples of endless shuffled epochs. Which
    ones depends on seed and step alone; ranks and accumulated parts divide them.
    ``lengths`` group the examples; ranks are by default ``torch.distributed``'s.
    """

    steps: int
    _: KW_ONLY
    accumulation: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        size, ranks, parts = self.batch_size, self._world_size, self.accumulation
        if size % (ranks * parts):
            over = f"{ranks} ranks in {parts} parts"
            raise ValueError(f"a batch_size of {size} cannot be divided over {over}")
        if self.num_examples < 1:
            raise ValueError("there are no examples to train on")

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        first_part = self._rank * self.accumulation
        mine = slice(first_part, first_part + self.accumulation)
        epochs = (permutation(self.num_examples, self.seed, epoch) for epoch in count())
        rest = np.zeros(0, np.int64)
        # Always a whole group: a step must not depend on the run's length.
        together = _BATCHES_SORTED_TOGETHER
        needed = together * self.batch_size
        for first in range(0, self.steps, together):
            while len(rest) < needed:
                rest = np.concatenate([rest, next(epochs)])
            group, rest = rest[:needed], rest[needed:]
            batches = self._sorted_by_length(group).reshape(together, -1)
            for batch in batches[self._batch_order(together, first)[: self.steps - first]]:
                for part in np.split(batch, self.accumulation * self._world_size)[mine]:
                    yield part.tolist()
