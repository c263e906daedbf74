"""The order of the training examples: the same for any number of ranks and accumulated parts, from any step on."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from mgk.data.random_bits import permutation

# Steps whose examples are sorted together when rows are grouped by length: enough to save padding, few enough to stay
# random.
_STEPS_SORTED_TOGETHER = 50


class StepBatches(Sampler[list[int]]):
    """The batches of one rank for all steps of a run, as the ``batch_sampler`` of a ``DataLoader``.

    Epochs follow each other without a gap: a step takes the next ``batch_size`` examples of an endless row of shuffled
    epochs, so every step is whole and every example comes once an epoch. Which examples form a step depends on the
    seed and the step alone; ranks and accumulated parts share them out in equal parts, ``accumulation`` batches a step.
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
        for first in range(0, self.steps, _STEPS_SORTED_TOGETHER):
            # Always a whole group: what a step holds must not depend on how many steps the run has.
            needed = _STEPS_SORTED_TOGETHER * self.batch_size
            while len(rest) < needed:
                rest = np.concatenate([rest, next(epochs)])
            group, rest = rest[:needed], rest[needed:]
            if self.lengths is not None:
                group = group[np.argsort(self.lengths[group], kind="stable")]
            batches = group.reshape(_STEPS_SORTED_TOGETHER, self.batch_size)
            if self.lengths is not None:  # from short to long otherwise
                batches = batches[permutation(_STEPS_SORTED_TOGETHER, self.seed, first, 1)]
            yield from batches[: self.steps - first]

    def _epochs(self) -> Iterator[NDArray[np.int64]]:
        epoch = 0
        while True:
            yield permutation(self.num_examples, self.seed, epoch)
            epoch += 1
