"""The benchmarks that are one module each, at small sizes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mgk._util.machine import cpu_threads
from mgk.bench import data, kernels
from mgk.bench.kernels import BASELINE, UNFUSED, Case
from mgk.bench.registry import (
    BENCHMARKS,
    KERNEL_EXPERIMENTS,
    ImagesSettings,
    KernelsSettings,
    MemorySettings,
    PrecisionSettings,
    RooflineSettings,
    WikiTextSettings,
)
from mgk.bench.runner import BenchError, run
from mgk.functional import available_backends
from mgk.functional.mixture.backends import cpu_kernels

needs_kernels = pytest.mark.skipif(available_backends()["cpu"] != "ready", reason="the kernels are not built")


SMALL_CASES = [replace(case, batch=1, length=40, head_dim=8, rounds=1) for case in kernels.cases()]


@pytest.fixture
def small_cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    monkeypatch.setattr(kernels, "cases", lambda: SMALL_CASES)
    return SMALL_CASES


def test_every_benchmark_has_an_entry_point_and_a_description() -> None:
    for name, benchmark in BENCHMARKS.items():
        module, _, function = benchmark.entry.partition(":")
        source = Path(data.__file__).with_name(f"{module}.py").read_text()
        assert (
            f"def {function}(settings: {benchmark.settings.__name__}, on_step: OnStep) -> Outcome:" in source
        ), name
        assert benchmark.description.endswith(".")


@needs_kernels
def test_kernels_have_a_row_per_case_and_alternative(small_cases: list[Case], tmp_path: Path) -> None:
    assert list(dict.fromkeys(case.experiment for case in small_cases)) == list(KERNEL_EXPERIMENTS)
    seen: list[tuple[int, int]] = []
    report = run("kernels", KernelsSettings(), lambda done, total: seen.append((done, total)))
    rows = report.outcome.rows
    assert [(row["experiment"], row["passes"], row["alternative"]) for row in rows] == [
        (case.experiment, case.passes, name) for case in small_cases for name in case.alternatives
    ]
    assert all(row["ratio"] == 1 for row in rows if row["alternative"] in (BASELINE, "linear, 4 heads"))
    assert all(("peak_extra_mb" in row) == (row["experiment"] == "length") for row in rows)
    assert {row["alternative"] for row in rows if row["experiment"] == "unfused"} == {
        BASELINE,
        "mgk soft, 4 heads",
        UNFUSED,
    }
    assert seen[-1] == (len(small_cases), len(small_cases))
    path = tmp_path / "kernels.json"
    report.write(path)
    run("kernels", KernelsSettings(experiments=("decoding",))).write(path)
    merged = json.loads(path.read_text())["rows"]
    assert len(merged) == len(rows)
    assert [row["experiment"] for row in merged[-3:]] == ["decoding"] * 3


@needs_kernels
def test_the_plot_is_of_the_lengths(small_cases: list[Case], tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    run("kernels", KernelsSettings(experiments=("length",), plot=path))
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BenchError, match="the plot shows the experiment 'length'"):
        run("kernels", KernelsSettings(experiments=("table",), plot=path))


@needs_kernels
def test_the_parts_of_the_roofline_add_up() -> None:
    settings = RooflineSettings(batch=1, heads=2, length=130, head_dim=16, rounds=2, matrix=64)
    seen: list[tuple[int, int]] = []
    rows = run("roofline", settings, lambda done, total: seen.append((done, total))).outcome.rows
    assert seen[-1] == (21, 21)
    rates = {row["operation"]: row for row in rows if row["experiment"] == "rate"}
    assert set(rates) == {"sgemm", *cpu_kernels.PARTS}
    assert rates["sgemm"]["giga_per_second"] == pytest.approx(2 * 64**3 / rates["sgemm"]["milliseconds"] / 1e6)
    peak = rates["multiply-add"]["giga_per_second"]
    for row, products in zip((row for row in rows if row["experiment"] == "forward"), (2, 3), strict=True):
        parts = ("score_products", "softmax", "value_product", "rest")
        assert sum(row[f"{part}_milliseconds"] for part in parts) == pytest.approx(row["milliseconds"])
        assert row["products_gflop"] == pytest.approx(products * 2 * 2 * 130**2 * 16 / 1e9)
        assert row["share_of_peak"] == pytest.approx(row["products_gflop"] / row["milliseconds"] * 1e3 / peak)


@needs_kernels
@pytest.mark.parametrize("part", cpu_kernels.PARTS)
def test_a_part_runs_on_every_thread(part: str) -> None:
    with cpu_threads(1):
        one = cpu_kernels.run_part(part, 3, 20)
    with cpu_threads(2):
        assert cpu_kernels.run_part(part, 3, 20) == 2 * one > 0
    if part == "score product":
        assert one == 3 * 2 * 64 * 64 * 20


def test_memory_above_the_limit_is_a_failure() -> None:
    outcome = run("memory_at_length", MemorySettings(length=1024, limit_gb=0.5)).outcome
    (row,) = outcome.rows
    assert row["reference_score_bytes"] == 2 * 1024**2 * 4 < row["reference_bytes"]
    if row["peak_extra_bytes"] is None:
        pytest.skip("peak memory cannot be measured on this system")
    assert outcome.failures == []
    (failure,) = run("memory_at_length", MemorySettings(length=1024, limit_gb=0)).outcome.failures
    assert "above the limit" in failure


def test_errors_above_the_bound_are_a_failure() -> None:
    settings = PrecisionSettings(seeds=1, length=64, threads=1)
    outcome = run("precision", settings).outcome
    assert outcome.failures == []
    cases = {(row["variant"], row["e_step"], row["causal"], row["learned_variance"]) for row in outcome.rows}
    assert len(cases) == 2 * 2 * (3 + 1)
    for row in outcome.rows:
        assert row["largest"] == max(error["largest"] for error in row["errors"].values())
        assert ("log_prior" in row["errors"]) == (row["e_step"] == "soft")
        assert 0 <= row["errors"]["output"]["root_mean_square"] <= row["errors"]["output"]["largest"]
    (failure,) = run("precision", replace(settings, bound=0.0)).outcome.failures
    assert "errors are above 0" in failure


def test_the_best_threshold_of_one_half_is_tested_on_the_other() -> None:
    labels = np.tile(np.array([1, 0], np.uint8), 50)
    informative = np.where(labels == 1, 1.0, 2.0)
    assert data.threshold_accuracy(informative, labels) == 1
    assert data.threshold_accuracy(-informative, labels) == 1
    image = np.zeros((8, 8), np.uint8)
    image[1, 1] = image[4, 5] = 255
    assert data.dot_distance(image) == 5


def test_images_are_drawn(tmp_path: Path) -> None:
    rows = run("data_images", ImagesSettings(out=tmp_path)).outcome.rows
    assert [row["difficulty"] for row in rows] == ["easy", "intermediate", "hard"]
    assert all(Path(row["file"]).read_bytes().startswith(b"\x89PNG") for row in rows)


def test_the_training_text_is_repeated(tmp_path: Path) -> None:
    for split, words in (("train", 30), ("valid", 6), ("test", 4)):
        (tmp_path / f"wiki.{split}.tokens").write_text(" = A = \n " + "a b " * (words // 2 - 2) + "\n")
    settings = WikiTextSettings(source=tmp_path, times=3, min_words_per_second=1e12)
    outcome = run("data_wikitext", settings).outcome
    (row,) = outcome.rows
    assert row["words"] == 3 * len((tmp_path / "wiki.train.tokens").read_text().split()) + 5 + 3
    assert len(outcome.failures) == 1
    assert "words per second are below the limit" in outcome.failures[0]
