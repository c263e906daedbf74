"""Comparisons as a user runs them, on the smallest recipe."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mgk._util.json_codec import load
from mgk.experiments.compare.result import Comparison
from mgk.experiments.model_spec import ModelSpec, sizes_of
from mgk.experiments.plan import QUICK, comparison_plan
from mgk.training.errors import RecipeError
from mgk.training.recipe import load_recipe

# One layer and few steps: what is tested is what happens around them.
RUNS = "runs/smoke/listops"
SMALL = ("--preset", "smoke", "--set", "model.num_hidden_layers=1", "--set", "training.threads=1")


def command(data, *arguments):
    return [sys.executable, "-m", "mgk", "compare", *arguments], {
        **os.environ,
        "MGK_DATA": str(data),
        "COLUMNS": "120",
    }


def run(data, *arguments):
    line, environment = command(data, *arguments)
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def compared(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison")
    result = run(
        data, "listops", *SMALL, "--steps", "4", "--seeds", "2", "--candidates", "mgk:1", "--out", str(out)
    )
    assert result.returncode == 0, result.stderr
    return out, result


def test_a_comparison_ends_with_a_table_and_a_page(compared):
    out, result = compared
    page = out / "comparison.html"
    assert f"attention maps: {page.as_uri()}" in result.stdout
    assert "softmax:2" in result.stdout
    assert "mgk:1" in result.stdout
    assert "The data are synthetic" in page.read_text()
    comparison = load(Comparison, json.loads((out / "comparison.json").read_text()))
    assert (comparison.seeds, comparison.steps, comparison.data) == ((0, 1), 4, "synthetic-listops")
    baseline, candidate = comparison.results
    assert candidate.parameters < baseline.parameters
    assert candidate.flops < baseline.flops
    assert candidate.paired.seeds == 2
    assert candidate.paired.examples == 64
    assert len(baseline.losses) == len(baseline.validation) == 2
    assert baseline.peak_memory_bytes is None or baseline.peak_memory_bytes > 0


def test_models_of_one_seed_see_the_same_data(compared):
    out, _ = compared
    recipes = [(out / RUNS / f"{name}-seed-1" / "recipe.yaml").read_text() for name in ("softmax-2h", "mgk-1h")]
    different = [
        pair for pair in zip(*(text.splitlines() for text in recipes), strict=True) if pair[0] != pair[1]
    ]
    assert different == [
        ("  attention: softmax", "  attention: mgk"),
        ("  num_attention_heads: 2", "  num_attention_heads: 1"),
    ]


def test_what_is_finished_is_not_run_again_and_other_recipes_are_noticed(compared, data):
    out, _ = compared
    summary = out / RUNS / "mgk-1h-seed-0" / "summary.json"
    before = summary.stat().st_mtime_ns
    options = (*SMALL, "--candidates", "mgk:1", "--out", str(out))
    again = run(data, "listops", *options, "--steps", "4")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("already trained") == 2
    assert summary.stat().st_mtime_ns == before
    changed = run(data, "listops", *options, "--steps", "6")
    assert changed.returncode == 2
    assert (
        "was trained with training.max_steps = 4, not 6: choose another folder, or --overwrite it"
        in changed.stderr
    )
    assert summary.stat().st_mtime_ns == before


def test_a_run_that_was_deleted_is_trained_again(compared, data):
    out, _ = compared
    shutil.rmtree(out / RUNS / "mgk-1h-seed-0")
    shutil.rmtree(out / RUNS / "softmax-2h-seed-0" / "model")
    again = run(data, "listops", *SMALL, "--candidates", "mgk:1", "--out", str(out), "--steps", "4")
    assert again.returncode == 0, again.stderr
    assert "already trained" not in again.stderr
    assert (out / RUNS / "softmax-2h-seed-0" / "model").is_dir()


def test_an_interrupted_comparison_goes_on(data, tmp_path):
    options = (
        "listops",
        *SMALL,
        "--baseline",
        "linear:2",
        "--candidates",
        "mlk:1",
        "--out",
        str(tmp_path / "out"),
    )
    slow = (*options, "--steps", "200", "--set", "training.save_every=20", "--set", "evaluation.every=100")
    line, environment = command(data, *slow)
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    checkpoints = tmp_path / "out" / RUNS / "linear-2h-seed-0" / "checkpoints"
    end = time.monotonic() + 120
    while not list(checkpoints.glob("step-*")) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert "interrupted; the same command continues from the last checkpoint" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out" / "comparison.html").exists()
    result = run(data, *slow)
    assert result.returncode == 0, result.stderr
    sessions = json.loads((checkpoints.parent / "environment.json").read_text())["sessions"]
    assert [session["from_step"] > 0 for session in sessions] == [False, True]
    assert (tmp_path / "out" / "comparison.html").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--baseline", "sofmax:2"), "there is no attention 'sofmax'; did you mean 'softmax'?"),
        (("--candidates", "mgk"), "'mgk' must name the attention and its heads, as in mgk:4"),
        (("--candidates", "mgk:0"), "'mgk:0' must name the attention"),
        (("--candidates", ","), "name at least one candidate"),
        (("--candidates", "softmax:4"), "a comparison needs a baseline and other candidates"),
        (("listop",), "there is no task 'listop'; did you mean 'listops'?"),
        (("listops", "--preset", "lap"), "there is no preset 'lap'; did you mean 'laptop'?"),
        (("--set", "training.max_step=3"), "did you mean 'training.max_steps'?"),
        (("--set", "model.attention=mgk"), "model.attention is what is compared"),
        (("--set", "evaluation.test=false"), "evaluation.test must be true"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_bad_usage(arguments, reason, tmp_path):
    result = run(tmp_path, *arguments, "--out", str(tmp_path / "out"))
    assert (result.returncode, result.stdout) == (2, "")
    assert reason in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_language_models_are_compared_by_bits_per_byte_cache_and_what_they_write(data, tmp_path):
    out = tmp_path / "out"
    result = run(data, *SMALL, "--steps", "2", "--out", str(out))  # bytes, without a task
    assert result.returncode == 0, result.stderr
    comparison = load(Comparison, json.loads((out / "comparison.json").read_text()))
    assert (comparison.metric, [r.name for r in comparison.results]) == (
        "bits_per_byte",
        ["softmax:4", "softmax:4/2", "smgk:2"],
    )
    softmax, grouped, smgk = comparison.results
    assert 0 < softmax.score.high - softmax.score.low < 1
    assert smgk.gap.low < smgk.gap.estimate < smgk.gap.high
    assert smgk.writing.cache_bytes == softmax.writing.cache_bytes / 2
    assert grouped.writing.cache_bytes == softmax.writing.cache_bytes / 2
    assert smgk.parameters < grouped.parameters < softmax.parameters
    assert softmax.writing.tokens_per_second > 0
    assert softmax.writing.text[:10] == smgk.writing.text[:10]
    page = (out / "comparison.html").read_text()
    assert "What the models write" in page
    assert "smgk with 2 heads writes:" in result.stdout
    again = run(data, *SMALL, "--steps", "2", "--out", str(out), "--beside", str(out / "comparison.json"))
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("  1 seed") == 3  # below each model
    assert "Rows of 1 seed were measured before" in " ".join(again.stdout.split())
    wrong = run(data, *SMALL, "--steps", "2", "--out", str(out), "--beside", str(out / "comparison.html"))
    assert wrong.returncode == 2
    assert "this is not a comparison" in wrong.stderr


def test_absent_data_lead_to_mgk_data(tmp_path):
    result = run(tmp_path, "text", "--out", str(tmp_path / "out"))
    assert result.returncode == 1
    assert "mgk data prepare text --source PATH" in result.stderr


def test_the_plan_of_the_demo():
    models = [ModelSpec.parse(name) for name in ("softmax:4", "softmax:4/2", "smgk:2")]
    plan = comparison_plan("bytes", baseline=models[0], candidates=models[1:], overrides=QUICK)
    assert [trial.model.name for trial in plan.trials] == ["softmax:4", "softmax:4/2", "smgk:2"]
    assert plan.models == models
    recipe = plan.trials[0].recipe
    assert recipe.training.max_steps == QUICK["training.max_steps"]
    assert recipe.model.head_dim == load_recipe("bytes", "paper").model.head_dim
    with pytest.raises(RecipeError, match="seeds must be at least 1"):
        comparison_plan("listops", baseline=models[0], candidates=models[1:], seeds=0)
    with pytest.raises(RecipeError, match="each once"):
        comparison_plan("listops", baseline=models[0], candidates=[models[1], models[1]])


def test_models_are_named_with_their_options():
    model = ModelSpec.parse("mgk:2 mixtures=4 variance=em")
    assert model == ModelSpec("mgk", 2, mixtures=4, variance="em")
    assert (model.name, model.title) == (
        "mgk:2 mixtures=4 variance=em",
        "mgk, M = 4 + M-step variance, 2 heads",
    )
    wide = ModelSpec.parse("softmax:2 feed_forward=448 window=8")
    assert wide.overrides["model.intermediate_size"] == 448
    assert ModelSpec.of_recipe(load_recipe("text", "laptop", overrides=wide.overrides)) == wide
    with pytest.raises(ValueError, match="there is no option 'mixture'; did you mean 'mixtures'"):
        ModelSpec.parse("mgk:2 mixture=4")


def test_models_with_groups_are_named_and_trained_with_them():
    model = ModelSpec.parse("smgk:8/4")
    assert (model.heads, model.key_value_heads) == (8, 4)
    assert (model.name, model.slug, model.title) == ("smgk:8/4", "smgk-8h-4kv", "smgk, 8/4 heads")
    assert model.overrides == {
        "model.attention": "smgk",
        "model.num_attention_heads": 8,
        "model.num_key_value_heads": 4,
    }
    recipe = load_recipe("listops", "smoke", overrides=model.overrides)
    assert ModelSpec.of_recipe(recipe) == model
    assert sizes_of(recipe).key_heads == 4
    assert model.scaled(0.5).name == "smgk:4/2"
    for text in ("smgk:8/3", "smgk:8/", "smgk:8/0", "smgk:/4"):
        with pytest.raises(ValueError, match="heads"):
            ModelSpec.parse(text)
