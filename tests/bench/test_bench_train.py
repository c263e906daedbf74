import json

import numpy as np
import pytest
import torch

from mgk.bench.registry import StepsSettings, TrainSettings
from mgk.bench.runner import run
from mgk.bench.train import UNFUSED, UnfusedAttention, draw_lengths, make_batches
from mgk.nn import MixtureAttention

TINY = TrainSettings(heads=(1,), batch=2, max_length=24, loop_steps=2, threads=1, rounds=1)


def test_every_model_is_timed_against_its_baseline():
    seen = []
    report = run("train", TINY, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    steps, loop = (
        [row for row in report.outcome.rows if row["experiment"] == name] for name in ("step", "loop")
    )
    for shape in ("listops", "text"):
        rows = {(row["model"], row["heads"], row["attention"]): row for row in steps if row["shape"] == shape}
        softmax, linear = ("softmax", 2, "sdpa"), ("linear", 2, "auto")
        mixtures = [("mgk", 1, "auto"), ("smgk", 1, "auto"), ("mgk", 1, UNFUSED)]
        assert list(rows) == [softmax, *mixtures, linear, ("mlk", 1, "auto")]
        assert rows[softmax]["ratio"] == rows[linear]["ratio"] == 1
        assert rows[mixtures[0]]["baseline"] == "softmax:2 sdpa"
        assert all(row["milliseconds"] > 0 and 0 < row["mean_length"] <= 24 for row in rows.values())
    assert [(row["model"], row["heads"]) for row in loop] == [("softmax", 2), ("mgk", 1)]
    assert all(row["ratio"] == row["milliseconds"] / row["bare_milliseconds"] > 0 for row in loop)
    assert json.loads(json.dumps(report.to_json())) == report.to_json()


def test_what_would_not_fit_is_left_out_with_a_note():
    small = TrainSettings(
        shapes=("text",), heads=(1,), batch=1, max_length=8, loop_steps=0, rounds=1, memory_limit_gb=0
    )
    outcome = run("train", small).outcome
    assert UNFUSED not in [row["attention"] for row in outcome.rows]
    assert "mgk:1 unfused was not measured" in outcome.notes[0]
    assert {row["experiment"] for row in outcome.rows} == {"step"}


def test_lengths_are_those_of_the_tasks():
    listops, text = draw_lengths("listops", 400), draw_lengths("text", 4000)
    assert 500 < listops.min() <= listops.max() < 2000
    assert np.median(text) == pytest.approx(971, rel=0.05)
    assert (text > 4000).mean() == pytest.approx(0.05, abs=0.02)


def test_batches_are_padded_to_their_longest_example():
    for batch in make_batches("listops", TrainSettings(batch=3), 2):
        lengths = batch["attention_mask"].sum(1)
        assert batch["input_ids"].shape == (3, int(lengths.max()))
        assert (batch["input_ids"].ne(0).sum(1) == lengths).all()


def test_unfused_attention_gives_the_same_output():
    fused = MixtureAttention(16, 2, variant="mgk", head_dim=8, backend="reference")
    x, mask = torch.randn(2, 7, 16), torch.arange(7) < torch.tensor([[7], [4]])
    torch.testing.assert_close(UnfusedAttention(fused)(x, key_mask=mask), fused(x, key_mask=mask))


def test_steps_have_their_parts_and_packed_rows_the_tokens_of_padded_ones() -> None:
    settings = StepsSettings(rounds=1, tasks=("listops", "retrieval"), threads=1)
    rows = run("steps", settings).outcome.rows
    assert [row["experiment"] for row in rows] == ["parts"] * 2 + ["packing"] * 3
    for row in rows[:2]:
        shares = [value for name, value in row.items() if name.endswith("_share")]
        assert sum(shares) == pytest.approx(1)
        assert row["attention_share"] > 0 < row["products_share"]
    padded, grouped, packed = rows[2:]
    assert padded["token_share"] < grouped["token_share"] <= packed["token_share"] == 1
    assert grouped["times_grouped"] == 1
    assert packed["times_grouped"] == packed["tokens_per_second"] / grouped["tokens_per_second"]
