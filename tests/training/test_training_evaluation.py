"""Metrics that do not depend on the batch size and count every example and token once."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from training_cases import tiny

from mgk.data import UsageError, sliding_window_loss
from mgk.data.language import block_losses
from mgk.training import RecipeError, TrainingError, evaluate, read_summary, train
from mgk.training.evaluation import BLOCKS, perplexity
from mgk.training.generation import generate
from mgk.training.run_dir import write_summary

TEXT = np.random.default_rng(0).integers(0, 50, 400)


def losses(inputs, targets):
    """A function of the target and all tokens before it in the window."""
    return (inputs.double().cumsum(1) * 1e-3 + targets).sin().abs().float()


@given(
    length=st.integers(2, 120),
    window=st.integers(1, 40),
    stride=st.integers(1, 40),
    batch_size=st.integers(1, 9),
)
def test_every_token_is_predicted_once(length, window, stride, batch_size):
    stride = min(stride, window)
    counted = []

    def count(inputs, targets):
        counted.extend(targets[targets != -100].tolist())
        return torch.zeros(targets.shape)

    text = np.arange(length)
    found = perplexity(count, text, window=window, stride=stride, batch_size=batch_size)
    assert sorted(counted) == list(range(1, length))
    assert found.tokens == length - 1
    assert found.is_whole


@settings(max_examples=20)
@given(
    window=st.integers(1, 40), stride=st.integers(1, 40), batch_size=st.integers(1, 50), world=st.integers(1, 3)
)
def test_a_token_sees_what_the_stride_leaves_it_and_ranks_add_up(window, stride, batch_size, world):
    stride = min(stride, window)
    places = np.arange(1, len(TEXT))  # of the predicted tokens
    end = len(TEXT) - 1
    number = np.maximum(0, -(-(places - window) // stride))  # the first window that reaches them
    starts = np.minimum(number * stride, end - window)
    truth = sum(
        float(losses(torch.tensor(TEXT[start:place])[None], torch.tensor(TEXT[place]))[0, -1])
        for start, place in zip(starts, places, strict=True)
    )
    parts = [
        sliding_window_loss(
            losses, TEXT, window=window, stride=stride, batch_size=7, rank=rank, world_size=world
        )
        for rank in range(world)
    ]
    assert sum(count for _, count in parts) == end
    assert sum(total for total, _ in parts) == pytest.approx(truth, rel=1e-6)
    found = perplexity(losses, TEXT, window=window, stride=stride, batch_size=batch_size)
    assert found.loss == pytest.approx(truth / end, rel=1e-6)


def test_wrong_windows_are_refused():
    with pytest.raises(UsageError, match="the stride must be from 1 to the window's 8 tokens, got 9"):
        perplexity(losses, TEXT, window=8, stride=9, batch_size=1)
    with pytest.raises(UsageError, match="nothing to predict"):
        perplexity(losses, TEXT[:1], window=8, stride=1, batch_size=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A classifier, a matcher and a language model, trained for a moment."""
    folder = tmp_path_factory.mktemp("runs")
    for task in ("text", "retrieval", "wikitext-2", "bytes"):
        train(tiny(task), folder / task)
    return folder


@pytest.mark.parametrize("task", ["text", "retrieval"])
def test_accuracy_does_not_depend_on_the_batch_size(runs, task):
    whole = evaluate(runs / task, batch_size=64)
    for size in (1, 4):
        found = evaluate(runs / task, batch_size=size)
        assert found.loss == pytest.approx(whole.loss, abs=1e-5)
        assert (found.correct, found.confusion, found.interval) == (
            whole.correct,
            whole.confusion,
            whole.interval,
        )
    assert (whole.examples, len(whole.correct), sum(map(sum, whole.confusion))) == (9, 9, 9)
    assert sum(whole.confusion[place][place] for place in range(2)) == sum(whole.correct)
    assert whole.interval.low < whole.value < whole.interval.high
    assert evaluate(runs / task, split="validation").examples == 8


def test_perplexity_does_not_depend_on_the_batch_size(runs):
    whole = evaluate(runs / "wikitext-2", batch_size=64, stride=16, max_tokens=0)
    small = evaluate(runs / "wikitext-2", batch_size=3, stride=16, max_tokens=0)
    assert small.loss == pytest.approx(whole.loss, abs=1e-5)
    assert small.sliding.loss == pytest.approx(whole.sliding.loss, abs=1e-5)
    assert whole.sliding.is_whole
    part = evaluate(runs / "wikitext-2", stride=1, max_tokens=200)
    assert str(part.sliding).endswith(
        f"(window 32, stride 1, the first 200 of {part.sliding.text_tokens:,} tokens only)"
    )


def test_bits_per_byte_are_the_loss_in_bits_with_an_interval_over_blocks(runs):
    found = evaluate(runs / "bytes", batch_size=5)
    assert found.metric == "bits_per_byte"
    assert found.value == found.interval.estimate == pytest.approx(found.loss / np.log(2))
    blocks = np.array(found.perplexity.block_losses) / np.log(2)
    count = len(blocks)
    assert count == 9  # as many as there are segments
    assert blocks.mean() == pytest.approx(found.value, abs=0.01)
    half_width = stats.t.ppf(0.975, count - 1) * blocks.std(ddof=1) / count**0.5
    assert found.interval.high - found.interval.low == pytest.approx(2 * half_width)
    summary = read_summary(runs / "bytes")
    assert (summary.metric, summary.metrics["test_bits_per_byte"]) == (
        "bits_per_byte",
        pytest.approx(found.value),
    )
    assert summary.block_losses == pytest.approx(found.perplexity.block_losses, abs=1e-5)


@pytest.mark.parametrize(("length", "window", "stride"), [(400, 8, 8), (400, 32, 5), (40, 8, 8)])
def test_blocks_are_successive_parts_of_the_text(length, window, stride):
    found = perplexity(losses, TEXT[:length], window=window, stride=stride, batch_size=3)
    sums = block_losses(losses, TEXT[:length], blocks=BLOCKS, window=window, stride=stride, batch_size=7)
    windows = 1 + -(-(length - 1 - window) // stride)
    assert len(found.block_losses) == min(BLOCKS, windows)
    assert sums[:, 1].sum() == length - 1
    assert found.loss == pytest.approx(float(sums[:, 0].sum()) / (length - 1))
    if stride == window:  # the first block is the first windows
        first = sum(number * BLOCKS // windows == 0 for number in range(windows)) * window
        inputs, targets = (torch.tensor(TEXT[start : start + first]).view(-1, window) for start in (0, 1))
        assert found.block_losses[0] == pytest.approx(float(losses(inputs, targets).double().mean()))


def test_impossible_requests_are_named(runs, tmp_path):
    with pytest.raises(
        RecipeError, match="window, stride and max_tokens are for language models, not for text"
    ):
        evaluate(runs / "text", stride=1)
    with pytest.raises(RecipeError, match=r"there is no run here \(recipe\.yaml is missing\)"):
        evaluate(tmp_path)


def test_a_corrupt_model_is_named(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "wikitext-2", run)
    path = run / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for use in (evaluate, generate):
        with pytest.raises(
            TrainingError, match=r"model.safetensors: this file of the run has .*; mgk train --resume"
        ):
            use(run)
    write_summary(run, read_summary(run))  # as a forger would
    with pytest.raises(TrainingError, match=r"model: the model cannot be loaded \(.+\)"):
        evaluate(run)


def test_text_is_generated_piece_by_piece(runs):
    pieces, notes = [], []
    text = generate(
        runs / "wikitext-2", "the old zeppelin", on_text=pieces.append, max_new_tokens=12, on_note=notes.append
    )
    assert len(pieces) > 5
    assert "".join(pieces) == text
    assert text.startswith("the old <unk>")
    assert notes == ["1 of 3 words of the prompt are not in the vocabulary"]
    again = {seed: generate(runs / "wikitext-2", "the", max_new_tokens=12, seed=seed) for seed in (1, 2)}
    assert again[1] == generate(runs / "wikitext-2", "the", max_new_tokens=12, seed=1)
    assert again[1] != again[2]
    greedy = {generate(runs / "wikitext-2", "", max_new_tokens=5, greedy=True, seed=seed) for seed in (1, 2)}
    assert len(greedy) == 1


def test_what_cannot_be_generated_is_told(runs, tmp_path):
    with pytest.raises(RecipeError, match="a model of text classifies"):
        generate(runs / "text", "x")
    notes = []
    generate(runs / "wikitext-2", "the", max_new_tokens=40, greedy=True, on_note=notes.append)
    assert notes == ["beyond 32 tokens the model is outside of what it was trained on"]
