"""The order of the data: the same for all ranks and parts, every example once an epoch, any step at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgk.data import StepBatches


@given(
    examples=st.integers(1, 40),
    share=st.integers(1, 3),
    parts=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    steps=st.integers(1, 60),
    seed=st.integers(0, 5),
    by_length=st.booleans(),
)
def test_ranks_and_parts_divide_the_steps_of_one_process(examples, share, parts, steps, seed, by_length):
    world, accumulation = parts
    batch_size = share * world * accumulation
    lengths = np.arange(examples) % 7 if by_length else None
    whole = list(StepBatches(examples, batch_size, steps, seed=seed, lengths=lengths))
    assert len(whole) == steps
    ranks = [
        StepBatches(
            examples,
            batch_size,
            steps,
            seed=seed,
            lengths=lengths,
            rank=rank,
            world_size=world,
            accumulation=accumulation,
        )
        for rank in range(world)
    ]
    assert all(len(list(one)) == len(one) == steps * accumulation for one in ranks)
    lists = [list(one) for one in ranks]
    for step, batch in enumerate(whole):
        mine = [part for one in lists for part in one[step * accumulation : (step + 1) * accumulation]]
        assert [len(part) for part in mine] == [share] * (world * accumulation)
        assert [row for part in mine for row in part] == batch


@given(examples=st.integers(1, 30), batch_size=st.integers(1, 8), epochs=st.integers(1, 3))
def test_every_example_comes_once_an_epoch(examples, batch_size, epochs):
    steps = -(-examples * epochs // batch_size)
    order = np.concatenate(list(StepBatches(examples, batch_size, steps)))[: examples * epochs]
    for epoch in order.reshape(epochs, examples):
        assert sorted(epoch) == list(range(examples))


def test_a_longer_run_begins_like_a_shorter_one():
    lengths = np.arange(1000) % 50
    short, long = (list(StepBatches(1000, 8, steps, lengths=lengths)) for steps in (10, 120))
    assert long[:10] == short


def test_rows_of_similar_length_are_together():
    lengths = np.random.default_rng(0).integers(1, 1000, 4000)
    batches = list(StepBatches(4000, 8, 400, lengths=lengths))
    assert np.mean([np.ptp(lengths[batch]) for batch in batches]) < 40
    assert np.ptp([lengths[batch].mean() for batch in batches[:20]]) > 300  # not from short to long


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match="batch_size of 6 cannot be divided over 2 ranks in 2 parts"):
        StepBatches(10, 6, 1, world_size=2, accumulation=2)
    with pytest.raises(ValueError, match="no examples"):
        StepBatches(0, 1, 1)
