"""Batches: which examples form them, in which order and on which rank; padding."""

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

# Batches that are sorted together by length: enough to save padding, few enough to stay random.
_BATCHES_SORTED_TOGETHER = 50
_Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Collator:
    """Pads every batch to its own longest row and adds ``attention_mask`` (B, L), 1 for real tokens.

    Attributes:
        pad_id: the id that pads. None adds no mask: images have one length, and running text is causal, so that the
            padding of its last segment is not seen.
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


@dataclass(eq=False)
class _Batches(Sampler[list[int]]):
    """The arguments that both samplers share, and the order by seed and length."""

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
            raise ValueError(f"rank must be from 0 to world_size - 1 = {self._world_size - 1}, got {self._rank}")
        count, given = self.num_examples, self._lengths
        if given is not None and len(given) != count:
            raise ValueError(f"lengths must have one for each of {count} examples, got {len(given)}")

    def _sorted_by_length(self, rows: _Indices) -> _Indices:
        return rows if self._lengths is None else rows[np.argsort(self._lengths[rows], kind="stable")]

    def _batch_order(self, number: int, path: int) -> _Indices:
        """Batches grouped by length would run from short to long: shuffle them too."""
        return np.arange(number) if self._lengths is None else permutation(number, self.seed, path, 1)


@dataclass(eq=False)
class EpochBatches(_Batches):
    """The batches of one rank in one epoch, as the ``batch_sampler`` of a ``DataLoader``.

    Over all ranks every example comes once an epoch, and all ranks take equally many steps: the last step is divided
    evenly, and examples too few for every rank join the step before it. The order depends on seed and epoch alone. To
    resume within an epoch, give the number of batches done to ``set_epoch``: the workers of a ``DataLoader`` draw
    batches ahead of their use, so the sampler cannot count them.

    Args:
        num_examples: of the data set.
        batch_size: examples of one rank in one step.
        seed: of the order.
        lengths: of all examples, to put rows of similar length together; needs ``shuffle``.
        rank: this process's; torch.distributed's, or 0 without it, if not given.
        world_size: the number of processes; likewise.
        shuffle: whether to shuffle; otherwise the order is that of the data set.
    """

    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epoch = self.start = 0
        if self.num_examples < self._world_size:
            raise ValueError(f"{self.num_examples} examples are too few for {self._world_size} ranks")
        if self._lengths is not None and not self.shuffle:
            raise ValueError("lengths need shuffle=True: grouping by length gives up the order of the data set")

    @property
    def steps(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        whole, rest = divmod(self.num_examples, self.batch_size * self._world_size)
        return whole + (rest >= self._world_size)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Turn to an epoch, from its batch ``start`` on."""
        if not 0 <= start <= self.steps:
            raise ValueError(f"start must be from 0 to the {self.steps} batches of an epoch, got {start}")
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
            yield np.array_split(order[step * step_size : end], self._world_size)[self._rank].tolist()


@dataclass(eq=False)
class StepBatches(_Batches):
    """The batches of one rank for all steps of a run, as the ``batch_sampler`` of a ``DataLoader``.

    A step takes the next ``batch_size`` examples of an endless sequence of shuffled epochs, so every step is whole and
    every example comes once an epoch. Which examples form a step depends on seed and step alone; ranks and accumulated
    parts divide them equally. For loops over epochs, where no batch reaches into the next one, see
    :class:`EpochBatches`.

    Args:
        num_examples: of the data set.
        batch_size: examples of a step over all ranks.
        steps: of the run.
        seed: of the order.
        lengths: of all examples, to put rows of similar length together.
        rank: this process's; torch.distributed's, or 0 without it, if not given.
        world_size: the number of processes; likewise.
        accumulation: batches of a rank in a step.
    """

    steps: int
    _: KW_ONLY
    accumulation: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        size, ranks, parts = self.batch_size, self._world_size, self.accumulation
        if size % (ranks * parts):
            raise ValueError(f"a batch_size of {size} cannot be divided over {ranks} ranks in {parts} parts")
        if self.num_examples < 1:
            raise ValueError("there are no examples to train on")

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        mine = slice(self._rank * self.accumulation, (self._rank + 1) * self.accumulation)
        epochs = (permutation(self.num_examples, self.seed, epoch) for epoch in count())
        rest = np.zeros(0, np.int64)
        # Always a whole group: what a step holds must not depend on how many steps the run has.
        needed = _BATCHES_SORTED_TOGETHER * self.batch_size
        for first in range(0, self.steps, _BATCHES_SORTED_TOGETHER):
            while len(rest) < needed:
                rest = np.concatenate([rest, next(epochs)])
            group, rest = rest[:needed], rest[needed:]
            batches = self._sorted_by_length(group).reshape(_BATCHES_SORTED_TOGETHER, self.batch_size)
            for batch in batches[self._batch_order(_BATCHES_SORTED_TOGETHER, first)][: self.steps - first]:
                for part in np.split(batch, self.accumulation * self._world_size)[mine]:
                    yield part.tolist()
