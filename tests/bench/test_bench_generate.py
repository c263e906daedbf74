import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mgk.bench import generate
from mgk.bench.registry import GENERATE_VARIANTS as VARIANTS
from mgk.bench.registry import GenerateSettings
from mgk.bench.runner import BenchError, run

MODEL = {"layers": 2, "width": 32, "head_dim": 8, "heads": 2, "vocab_size": 20}
TEXT = {"batch": 2, "prompt": 12, "tokens": 4, "positions": (5, 9), "position_tokens": 2}
SMALL = GenerateSettings(**MODEL, **TEXT, variants=VARIANTS, rounds=2)


@pytest.fixture(scope="module")
def outcome():
    seen: list[tuple[int, int]] = []
    rows = run("generate", SMALL, lambda done, total: seen.append((done, total))).outcome.rows
    speeds, positions = ([row for row in rows if row["experiment"] == name] for name in ("speed", "position"))
    return speeds, positions, seen


def test_every_model_has_a_row_and_progress_ends_at_its_total(outcome) -> None:
    speeds, positions, seen = outcome
    assert [row["model"] for row in speeds] == ["softmax", "gpt2", *VARIANTS]
    assert [row["heads"] for row in speeds] == [4, 4, *[2] * len(VARIANTS)]
    assert [(row["model"], row["position"]) for row in positions] == [("mlk", 5), ("mlk", 9)]
    assert seen == [(done, 27) for done in range(1, 28)]


def test_figures_are_coherent(outcome) -> None:
    speeds, positions, _ = outcome
    rows = {row["model"]: row for row in speeds}
    for row in speeds:
        assert row["tokens_per_second"] > 0
        assert row["times_softmax_min"] <= row["times_softmax"] <= row["times_softmax_max"]
        assert row["times_gpt2_min"] <= row["times_gpt2"] <= row["times_gpt2_max"]
    assert rows["softmax"]["times_softmax"] == rows["gpt2"]["times_gpt2"] == 1.0
    assert all(row["milliseconds"] > 0 for row in positions)


def test_cache_bytes(outcome) -> None:
    """Keys and values of 12 + 4 tokens, 4 heads of 8 in 2 layers, 2 sequences, 4 bytes: half of it for smgk."""
    found = {row["model"]: row["cache_bytes"] for row in outcome[0]}
    softmax = 2 * 16 * 4 * 8 * 2 * 2 * 4
    assert found["softmax"] == found["gpt2"] == softmax
    assert found["smgk"] * 2 == softmax
    assert found["mgk"] * 4 == softmax * 3
    assert found["linear"] == found["mlk"] == found["smlk"] == 2 * 2 * 2 * 8 * 9 * 4


@pytest.mark.parametrize("name", ["softmax", "smgk", "mlk", "gpt2"])
def test_a_run_generates_what_generate_does_and_can_be_run_again(name: str) -> None:
    torch.manual_seed(0)
    model = generate.make_model(name, SMALL)
    prompt = torch.randint(20, (2, 7))
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    generation = generate.Generation(model, prompt)
    for _ in range(2):
        assert torch.equal(generation.run(4), expected)
        assert generation.cache.get_seq_length() == 6
    generation.steps(3)
    assert generation.cache.get_seq_length() == 6


def test_the_models_have_one_shape() -> None:
    ours, theirs = (generate.make_model(name, SMALL) for name in ("softmax", "gpt2"))
    assert theirs.config._attn_implementation == "sdpa"
    assert ours.num_parameters() == theirs.num_parameters()


def test_sizes_that_do_not_fit_are_a_sentence() -> None:
    with pytest.raises(BenchError, match="the width 30 is no multiple of the head width 8"):
        run("generate", replace(SMALL, width=30))


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    sizes = (
        "--batch 1 --prompt 8 --tokens 2 --layers 1 --width 16 --head-dim 8 --heads 1 --vocab-size 9 --rounds 1"
    )
    options = [*sizes.split(), "--positions", "3,6", "--json", str(path)]
    command = [sys.executable, "-m", "mgk", "bench", "generate", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["position"] for row in rows if row["experiment"] == "position"] == [3, 6]
    for row in rows:
        if row["experiment"] == "speed":
            assert f"{row['tokens_per_second']:.2f}" in result.stdout
    assert "ms/token" in result.stdout
    assert "…" not in result.stdout


def test_bad_positions_are_bad_usage() -> None:
    command = [sys.executable, "-m", "mgk", "bench", "generate", "--positions", "3,x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "'x' is not a whole number from 1 up" in result.stderr
