import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgk.analysis.confidence_intervals import (
    mcnemar,
    mean_accuracy,
    mean_difference,
    mean_over_blocks,
    paired_difference,
    student_interval,
    wilson_interval,
)


def test_wilson_by_hand():
    # 8 of 10 at 95%: the textbook's 0.490 to 0.943.
    interval = wilson_interval(8, 10)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)


@given(total=st.integers(1, 5000), share=st.floats(0, 1))
def test_wilson_stays_within_bounds_and_around_its_estimate(total, share):
    correct = round(share * total)
    interval = wilson_interval(correct, total)
    assert 0 <= interval.low <= interval.estimate + 1e-12
    assert interval.estimate - 1e-12 <= interval.high <= 1
    assert wilson_interval(0, total).low == pytest.approx(0)
    assert wilson_interval(total, total).high == pytest.approx(1)


def test_mcnemar_by_hand():
    assert mcnemar(0, 0) == 1
    assert mcnemar(5, 0) == pytest.approx(2 / 32)
    assert mcnemar(1, 7) == mcnemar(7, 1) == pytest.approx(2 * 9 / 256)
    assert mcnemar(480, 520) == pytest.approx(mcnemar(481, 520), abs=0.02)


def test_paired_difference_counts_who_alone_is_right():
    candidate = [True, True, True, False, False]
    baseline = [True, False, False, True, False]
    found = paired_difference(candidate, baseline)
    assert (found.gained, found.lost, found.examples, found.seeds) == (2, 1, 5, 1)
    assert found.difference.estimate == pytest.approx(0.2)
    assert found.difference.low < 0.2 < found.difference.high


def test_paired_interval_agrees_with_the_normal_approximation():
    generator = np.random.default_rng(0)
    baseline = generator.random(4000) < 0.6
    candidate = np.where(generator.random(4000) < 0.1, ~baseline, baseline)
    change = candidate.astype(float) - baseline
    reach = 1.96 * change.std() / np.sqrt(4000)
    found = paired_difference(candidate, baseline).difference
    assert (found.low, found.high) == pytest.approx((change.mean() - reach, change.mean() + reach), abs=0.0015)


def test_several_seeds_widen_the_interval_where_they_disagree():
    generator = np.random.default_rng(0)
    easy = generator.random((1, 500))
    equal = np.repeat(easy < 0.5, 3, axis=0)
    unequal = np.concatenate([easy < 0.3, easy < 0.5, easy < 0.7])
    assert equal.mean() == pytest.approx(unequal.mean(), abs=0.03)
    narrow, wide = mean_accuracy(equal), mean_accuracy(unequal)
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_one_seed_has_an_unbounded_interval():
    assert mean_difference([5.0], [7.0]).low == -np.inf
    several = mean_difference([5.0, 5.5, 6.0], [7.0, 7.5, 8.5])
    assert several.low < several.estimate == pytest.approx(-2.1667, abs=1e-3)
    assert several.high < 0


def test_three_seeds_that_agree_are_as_uncertain_as_their_examples_and_no_more():
    generator = np.random.default_rng(0)
    one = generator.random(400) < 0.7
    alone, thrice = paired_difference(one, ~one), paired_difference([one] * 3, [~one] * 3)
    assert thrice.difference == alone.difference


def test_seeds_that_disagree_are_trusted_no_more_than_three_numbers_are():
    by_seed = np.repeat([[0.5], [0.6], [0.7]], 1000, axis=1) > np.linspace(0, 1, 1000)
    found = paired_difference(
        by_seed, np.repeat([[0.5]] * 3, 1000, axis=1) > np.linspace(0, 1, 1000)
    ).difference
    assert found.high - found.estimate > 4.303 * 0.1 / 3**0.5  # Student's t of two degrees of freedom


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: wilson_interval(3, 2), "got 3 of 2"),
        (lambda: wilson_interval(0, 0), "total above 0"),
        (lambda: paired_difference([True], [True, False]), r"one shape, got \(1, 1\) and \(1, 2\)"),
        (lambda: mean_difference([1.0], [1.0, 2.0]), "one length"),
        (lambda: mean_accuracy([]), "seeds, examples"),
    ],
)
def test_bad_arguments(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()


def test_an_interval_over_blocks_covers_seeds_too():
    generator = np.random.default_rng(0)
    blocks = generator.normal(size=32)
    one = mean_over_blocks(blocks)
    assert one == student_interval(blocks.tolist())
    same, apart = mean_over_blocks([blocks, blocks]), mean_over_blocks([blocks, blocks + 1])
    assert (same.low, same.high) == pytest.approx((one.low, one.high))
    assert apart.high - apart.low > 5 * (one.high - one.low)  # t of one degree of freedom is 12.7
