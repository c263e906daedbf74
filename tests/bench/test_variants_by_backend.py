import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import mgk
from mgk.bench import calls
from mgk.bench.registry import ATTENTION_VARIANTS, BACKENDS, PASSES, AttentionSettings
from mgk.bench.runner import BenchError, Report, run

SMALL = AttentionSettings(batch=1, heads=2, length=33, head_dim=8, mixtures=3, rounds=2)
LINEAR = {"linear", "mlk", "smlk"}


@pytest.fixture(scope="module")
def report() -> Report:
    return run("attention", SMALL)


def is_baseline(row: dict[str, Any]) -> bool:
    return row["backend"] == "torch"


def test_the_names_are_those_of_the_library() -> None:
    assert set(mgk.available_backends()) <= set(BACKENDS)
    assert set(ATTENTION_VARIANTS) == {"softmax", "mgk", "mgk-hard", "smgk", "smgk-hard", *LINEAR}


def test_every_pair_that_can_be_served_has_a_row(report: Report) -> None:
    rows, notes = report.outcome.rows, report.outcome.notes
    found = {(row["variant"], row["backend"], row["passes"]) for row in rows if not is_baseline(row)}
    for passes in PASSES:
        for name in ATTENTION_VARIANTS:
            backends = {"reference", "blockwise"} if name in LINEAR else set(mgk.available_backends())
            for backend in backends:
                is_noted = any(note.startswith(f"{name} by {backend} ") for note in notes)
                assert ((name, backend, passes) in found) != is_noted
    assert len(rows) == len(found) + len(PASSES)


def test_figures_are_coherent(report: Report) -> None:
    for passes in PASSES:
        rows = [row for row in report.outcome.rows if row["passes"] == passes]
        assert [is_baseline(row) for row in rows] == [True] + [False] * (len(rows) - 1)
        assert rows[0]["heads"] == 2 * SMALL.heads
        assert rows[0]["ratio"] == rows[0]["ratio_min"] == rows[0]["ratio_max"] == 1.0
        for name in ATTENTION_VARIANTS:
            assert sum(row["is_auto"] for row in rows if row["variant"] == name) == 1
        for row in rows:
            assert row["milliseconds"] > 0
            assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
            assert row["heads"] == SMALL.heads or is_baseline(row)


def test_the_json_form(report: Report) -> None:
    data = report.to_json()
    assert list(data) == ["benchmark", "settings", "machine", "rows", "notes"]
    assert json.loads(json.dumps(data)) == data
    assert data["benchmark"] == "attention"
    assert data["settings"]["variants"] == list(ATTENTION_VARIANTS)


@pytest.mark.parametrize("name", ATTENTION_VARIANTS)
def test_backends_compute_the_same_and_every_leaf_has_a_gradient(name: str) -> None:
    inputs = calls.make_inputs(SMALL, dtype=torch.float64)
    expected = calls.attend(name, inputs, backend="reference", is_causal=True)
    for backend in calls.backends_of(name):
        if calls.unsupported_reason(name, backend, inputs, True) is None:
            out = calls.attend(name, inputs, backend=backend, is_causal=True)
            torch.testing.assert_close(out, expected)
            assert all(grad is not None for grad in torch.autograd.grad(out.sum(), inputs.leaves(name)))


def test_unfused_attention_is_the_same_function() -> None:
    inputs = calls.make_inputs(SMALL, dtype=torch.float64)
    found = calls.unfused_attention(inputs.query, inputs.keys, inputs.value, inputs.log_prior[None, :, :, None])
    torch.testing.assert_close(found, calls.attend("mgk", inputs, backend="reference"))


def test_blockwise_needs_less_memory_than_reference() -> None:
    settings = AttentionSettings(
        batch=1, heads=2, length=1024, rounds=1, variants=("mgk",), backends=("reference", "blockwise")
    )
    rows = run("attention", settings).outcome.rows
    for passes in PASSES:
        peak = {row["backend"]: row["peak_extra_mb"] for row in rows if row["passes"] == passes}
        if peak["reference"] is None or peak["blockwise"] is None:
            pytest.skip("peak memory cannot be measured on this system")
        assert peak["blockwise"] < peak["reference"]


def test_reference_is_left_out_above_the_memory_limit() -> None:
    settings = replace(SMALL, memory_limit_gb=1e-9, variants=("mgk",), passes=("forward",), memory=False)
    outcome = run("attention", settings).outcome
    assert "reference" not in {row["backend"] for row in outcome.rows}
    assert any(note.startswith("mgk by reference was not measured: it needs about") for note in outcome.notes)
    assert all(row["peak_extra_mb"] is None for row in outcome.rows)


def test_progress_ends_at_its_total_and_threads_are_restored() -> None:
    seen: list[tuple[int, int]] = []
    before = torch.get_num_threads()
    settings = replace(SMALL, variants=("softmax", "smlk"), causal=True, threads=1, dtype="bfloat16")
    result = run("attention", settings, lambda done, total: seen.append((done, total)))
    total = len(result.outcome.rows) * (settings.rounds + 2)
    assert seen == [(done, total) for done in range(1, total + 1)]
    assert result.machine.threads == 1
    assert torch.get_num_threads() == before


def test_nothing_left_to_measure_says_why() -> None:
    with pytest.raises(BenchError, match="linear by sdpa was not measured: it has no such backend"):
        run("attention", replace(SMALL, variants=("linear",), backends=("sdpa",)))


def test_too_little_memory_is_a_sentence() -> None:
    with pytest.raises(BenchError, match="not enough memory"):
        run("attention", replace(SMALL, length=10**13))


def test_a_missing_device_is_a_sentence() -> None:
    with pytest.raises(BenchError, match="device 'cuda:99' cannot be used here"):
        run("attention", replace(SMALL, device="cuda:99"))
