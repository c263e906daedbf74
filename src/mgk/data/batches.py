"""Batches: which examples form them, on which rank and in which order, and how rows of different lengths fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from mgk.data.language import IGNORE
from mgk.data.random_bits import permutation

# Batches, or steps, that are sorted together when rows are grouped by length: enough to save padding, few enough to
# stay random.
_BATCHES_SORTED_TOGETHER = 50


@dataclass(frozen=True)
class Collator:
    """Pads every batch to its own longest row and adds ``attention_mask`` (B, L), 1 for real tokens.

    Attributes:
        pad_id: the id that pads. None for images, of one length, and for running text, whose last segment is padded
            with 0 and targets that do not count: neither needs a mask, as no real token looks at a later one.
    """

    pad_id: int | None = None

    def __call__(self, examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The batch of the examples; sequences are padded on the right, the rest is stacked."""
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


class EpochBatches(Sampler[list[int]]):
    """The batches of one rank in one epoch, as the ``batch_sampler`` of a ``DataLoader``.

    Over all ranks every example comes once an epoch, and all ranks take equally many steps: the last step is shared
    out evenly, and examples too few for every rank to get one join the step before it. The order depends on the seed
    and the epoch alone. To go on in the middle of an epoch, give the number of batches done to ``set_epoch``; the
    sampler counts nothing itself, because the workers of a ``DataLoader`` draw batches ahead of their use.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        lengths: ArrayLike | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Set up epoch 0.

        Args:
            num_examples: of the data set.
            batch_size: examples of one rank in one step.
            seed: of the order.
            shuffle: whether to shuffle; otherwise the order is that of the data set.
            lengths: of all examples, to put rows of similar length together; needs ``shuffle``.
            rank: this process's; torch.distributed's, or 0 without it, if not given.
            world_size: the number of processes; likewise.
        """
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        default_rank, default_size = (
            (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_distributed else (0, 1)
        )
        self.rank = default_rank if rank is None else rank
        self.world_size = default_size if world_size is None else world_size
        self.num_examples, self.batch_size, self.seed, self.shuffle = num_examples, batch_size, seed, shuffle
        self.lengths = None if lengths is None else np.asarray(lengths)
        self.epoch = self.start = 0
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {self.world_size - 1}, got {self.rank}")
        if num_examples < self.world_size:
            raise ValueError(f"{num_examples} examples are too few for {self.world_size} ranks")
        if self.lengths is not None and not shuffle:
            raise ValueError("lengths need shuffle=True: grouping by length gives up the order of the data set")
        if self.lengths is not None and len(self.lengths) != num_examples:
            raise ValueError(f"lengths must have one for each of {num_examples} examples, got {len(self.lengths)}")

    @property
    def steps(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        whole, rest = divmod(self.num_examples, self.batch_size * self.world_size)
        return whole + (rest >= self.world_size)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Turn to an epoch, from its batch ``start`` on."""
        if not 0 <= start <= self.steps:
            raise ValueError(f"start must be from 0 to the {self.steps} batches of an epoch, got {start}")
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return self.steps - self.start

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        step_size = self.batch_size * self.world_size
        for step in self._step_order()[self.start :]:
            end = self.num_examples if step == self.steps - 1 else (step + 1) * step_size
            yield np.array_split(order[step * step_size : end], self.world_size)[self.rank].tolist()

    def _order(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(self.num_examples)
        order = permutation(self.num_examples, self.seed, self.epoch)
        if self.lengths is None:
            return order
        together = self.batch_size * self.world_size * _BATCHES_SORTED_TOGETHER
        parts = [order[start : start + together] for start in range(0, len(order), together)]
        return np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in parts])

    def _step_order(self) -> list[int]:
        """Batches grouped by length would run from short to long: shuffle them too."""
        if self.lengths is None:
            return list(range(self.steps))
        return permutation(self.steps, self.seed, self.epoch, 1).tolist()


class StepBatches(Sampler[list[int]]):
    """The batches of one rank for all steps of a run, as the ``batch_sampler`` of a ``DataLoader``.

    Epochs follow each other without a gap: a step takes the next ``batch_size`` examples of an endless row of shuffled
    epochs, so every step is whole and every example comes once an epoch. Which examples form a step depends on the
    seed and the step alone; ranks and accumulated parts share them out in equal parts, ``accumulation`` batches a step.
    For loops over epochs there is :class:`EpochBatches`, whose last batch of an epoch ends with it instead of reaching
    into the next one: that is another order, so neither can stand for the other.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        steps: int,
        *,
        seed: int = 0,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        lengths: ArrayLike | None = None,
    ) -> None:
        """Set up all steps.

        Args:
            num_examples: of the data set.
            batch_size: examples of a step over all ranks.
            steps: of the run.
            seed: of the order.
            accumulation: batches of a rank in a step.
            rank: this process's.
            world_size: the number of processes.
            lengths: of all examples, to put rows of similar length together.
        """
        if batch_size % (accumulation * world_size):
            raise ValueError(
                f"a batch_size of {batch_size} cannot be shared out over {world_size} ranks in {accumulation} parts"
            )
        if num_examples < 1:
            raise ValueError("there are no examples to train on")
        self.num_examples, self.batch_size, self.steps, self.seed = num_examples, batch_size, steps, seed
        self.accumulation, self.rank, self.world_size = accumulation, rank, world_size
        self.lengths = None if lengths is None else np.asarray(lengths)

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        parts = self.accumulation * self.world_size
        mine = slice(self.rank * self.accumulation, (self.rank + 1) * self.accumulation)
        for batch in self._batches():
            for part in np.split(batch, parts)[mine]:
                yield part.tolist()

    def _batches(self) -> Iterator[NDArray[np.int64]]:
        epochs = self._epochs()
        rest = np.zeros(0, np.int64)
        for first in range(0, self.steps, _BATCHES_SORTED_TOGETHER):
            # Always a whole group: what a step holds must not depend on how many steps the run has.
            needed = _BATCHES_SORTED_TOGETHER * self.batch_size
            while len(rest) < needed:
                rest = np.concatenate([rest, next(epochs)])
            group, rest = rest[:needed], rest[needed:]
            if self.lengths is not None:
                group = group[np.argsort(self.lengths[group], kind="stable")]
            batches = group.reshape(_BATCHES_SORTED_TOGETHER, self.batch_size)
            if self.lengths is not None:  # from short to long otherwise
                batches = batches[permutation(_BATCHES_SORTED_TOGETHER, self.seed, first, 1)]
            yield from batches[: self.steps - first]

    def _epochs(self) -> Iterator[NDArray[np.int64]]:
        epoch = 0
        while True:
            yield permutation(self.num_examples, self.seed, epoch)
            epoch += 1
