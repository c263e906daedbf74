import json
from dataclasses import replace

import pytest
import torch

import mgk
from mgk.bench import attention, variants
from mgk.bench.errors import BenchError
from mgk.bench.report import Report
from mgk.bench.settings import BACKENDS, PASSES, VARIANTS, Settings

SMALL = Settings(batch=1, heads=2, length=33, head_dim=8, mixtures=3, rounds=2)
LINEAR = {"linear", "mlk", "smlk"}


@pytest.fixture(scope="module")
def report() -> Report:
    return attention.run(SMALL)


def test_the_names_are_those_of_the_library() -> None:
    assert set(mgk.available_backends()) <= set(BACKENDS)
    assert tuple(variants.BY_NAME) == VARIANTS


def test_every_pair_that_can_be_served_has_a_row(report: Report) -> None:
    found = {(row.variant, row.backend, row.passes) for row in report.rows if not row.is_yardstick}
    for passes in PASSES:
        for name in VARIANTS:
            backends = {"reference", "blockwise"} if name in LINEAR else set(mgk.available_backends())
            for backend in backends:
                is_noted = any(note.startswith(f"{name} by {backend} ") for note in report.notes)
                assert ((name, backend, passes) in found) != is_noted
    assert len(report.rows) == len(found) + len(PASSES)


def test_figures_are_coherent(report: Report) -> None:
    for passes in PASSES:
        (yardstick,) = (row for row in report.rows if row.passes == passes and row.is_yardstick)
        assert yardstick.heads == 2 * SMALL.heads
        assert yardstick.ratio == yardstick.ratio_min == yardstick.ratio_max == 1.0
        for name in VARIANTS:
            assert sum(row.is_auto for row in report.rows if (row.variant, row.passes) == (name, passes)) == 1
    for row in report.rows:
        assert row.milliseconds > 0
        assert row.ratio_min <= row.ratio <= row.ratio_max
        assert row.heads == SMALL.heads or row.is_yardstick


def test_json_round_trip(report: Report) -> None:
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.parametrize("name", VARIANTS)
def test_backends_compute_the_same_and_every_leaf_has_a_gradient(name: str) -> None:
    inputs = variants.make_inputs(replace(SMALL, dtype="float64"), torch.device("cpu"))
    variant = variants.BY_NAME[name]
    leaves = [getattr(inputs, leaf) for leaf in variant.leaves]
    expected = variant.attend(inputs, backend="reference", is_causal=True)
    for backend in variants.backends_of(name):
        if variants.unsupported_reason(name, backend, inputs, True) is None:
            out = variant.attend(inputs, backend=backend, is_causal=True)
            torch.testing.assert_close(out, expected)
            assert all(grad is not None for grad in torch.autograd.grad(out.sum(), leaves))


def test_blockwise_needs_less_memory_than_reference() -> None:
    settings = Settings(batch=1, heads=2, length=1024, rounds=1, variants=("mgk",), backends=("reference", "blockwise"))
    rows = attention.run(settings).rows
    for passes in PASSES:
        peak = {row.backend: row.peak_extra_mb for row in rows if row.passes == passes}
        if peak["reference"] is None or peak["blockwise"] is None:
            pytest.skip("this system does not tell the peak of memory")
        assert peak["blockwise"] < peak["reference"]


def test_reference_is_left_out_above_the_memory_limit() -> None:
    settings = replace(SMALL, memory_limit_gb=1e-9, variants=("mgk",), passes=("forward",), memory=False)
    result = attention.run(settings)
    assert "reference" not in {row.backend for row in result.rows}
    assert any(note.startswith("mgk by reference was not measured: it needs about") for note in result.notes)
    assert all(row.peak_extra_mb is None for row in result.rows)


def test_progress_ends_at_its_total_and_threads_are_restored() -> None:
    seen: list[tuple[int, int]] = []
    before = torch.get_num_threads()
    settings = replace(SMALL, variants=("softmax", "smlk"), causal=True, threads=1, dtype="bfloat16")
    result = attention.run(settings, lambda done, total: seen.append((done, total)))
    total = len(result.rows) * (settings.rounds + 2)
    assert seen == [(done, total) for done in range(1, total + 1)]
    assert result.machine.threads == 1
    assert torch.get_num_threads() == before


def test_nothing_left_to_measure_says_why() -> None:
    with pytest.raises(BenchError, match="linear by sdpa was not measured: it has no such backend"):
        attention.run(replace(SMALL, variants=("linear",), backends=("sdpa",)))


def test_too_little_memory_is_a_sentence() -> None:
    with pytest.raises(BenchError, match="not enough memory"):
        attention.run(replace(SMALL, length=10**13))
