import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from mgk.data import SegmentDataset, UsageError, sliding_window_loss
from mgk.data.language import IGNORE, windows

VOCABULARY = 11


def text(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, count).astype(np.uint16)


class Model(torch.nn.Module):
    """Causal, and sensitive to positions: a token's logits depend on all before it and on where it stands."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.place = torch.nn.Embedding(window, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.out = torch.nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
        return self.out(self.layer(self.embed(tokens) + self.place.weight[:length], mask))


@settings(max_examples=100, deadline=None)
@given(count=st.integers(2, 80), length=st.integers(1, 30))
def test_segments_are_contiguous_and_predict_every_token_once(count: int, length: int) -> None:
    tokens = text(count)
    data = SegmentDataset(tokens, length)
    pieces = [data[i] for i in range(len(data))]
    assert torch.cat([piece["input_ids"] for piece in pieces]).tolist() == tokens[:-1].tolist()
    assert torch.cat([piece["shift_labels"] for piece in pieces]).tolist() == tokens[1:].tolist()
    assert all(len(piece["input_ids"]) == length for piece in pieces[:-1])
    assert all(torch.equal(piece["input_ids"], piece["labels"]) for piece in pieces)
    with pytest.raises(IndexError):
        data[len(data)]


@settings(max_examples=100, deadline=None)
@given(count=st.integers(3, 60), window=st.integers(1, 20), first=st.integers(0, 5), size=st.integers(1, 9))
def test_windows(count: int, window: int, first: int, size: int) -> None:
    tokens = text(count)
    size = min(size, count - window - first)
    if size < 1:
        return
    inputs, targets = windows(tokens, window, first, size)
    for row in range(size):
        start = first + row
        assert inputs[row].tolist() == tokens[start : start + window].tolist()
        following = tokens[start + 1 : start + window + 1].tolist()
        assert targets[row].tolist() == (following if start == 0 else [IGNORE] * (window - 1) + following[-1:])


def by_definition(model: Model, tokens: np.ndarray, window: int) -> float:
    """Token by token: each is predicted from the at most ``window`` tokens before it."""
    total = 0.0
    for place in range(1, len(tokens)):
        context = torch.tensor(tokens[max(0, place - window) : place].astype(np.int64))[None]
        total -= float(model(context)[0, -1].log_softmax(-1)[int(tokens[place])])
    return total


@pytest.mark.parametrize(("count", "window"), [(60, 16), (17, 16), (16, 16), (5, 16), (2, 16), (30, 1)])
@torch.no_grad()
def test_the_sliding_window_by_its_definition_for_any_batch_size(count: int, window: int) -> None:
    model, tokens = Model(16).eval(), text(count)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")

    results = [sliding_window_loss(loss, tokens, window=window, batch_size=size) for size in (1, 2, 7, 64)]
    assert {counted for _, counted in results} == {count - 1}
    for total, _ in results:
        assert math.isclose(total, results[0][0], rel_tol=1e-5)
        assert math.isclose(total, by_definition(model, tokens, window), rel_tol=1e-5)


def test_progress_and_errors() -> None:
    steps = []
    sliding_window_loss(
        lambda inputs, targets: torch.zeros(inputs.shape),
        text(50),
        window=8,
        batch_size=16,
        on_step=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(16, 42), (32, 42), (42, 42)]
    with pytest.raises(UsageError, match="nothing to predict"):
        sliding_window_loss(lambda inputs, targets: inputs, text(1))
    with pytest.raises(UsageError, match="nothing to predict"):
        SegmentDataset(text(1), 4)
    with pytest.raises(ValueError, match="at least 1, got 0 and 64"):
        sliding_window_loss(lambda inputs, targets: inputs, text(9), window=0)
