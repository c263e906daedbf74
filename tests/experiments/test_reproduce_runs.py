"""Trials are run once, stored, continued after an interruption, and analyzed."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from mgk._util.errors import Interrupted
from mgk.analysis.cost_model import model_parameters
from mgk.data.errors import DataError
from mgk.experiments.artifacts import gather
from mgk.experiments.model_analysis import rank_examples
from mgk.experiments.model_spec import ModelSpec, sizes_of
from mgk.experiments.plan import Plan, check_data, reproduction_plan
from mgk.experiments.reproduce.collect import collect_results
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.result_store import ResultStore
from mgk.experiments.runner import default_runs_folder, run_plan
from mgk.experiments.trials import Trial
from mgk.training.errors import TrainingError
from mgk.training.recipe import load_recipe
from mgk.training.tasks import open_data

pytestmark = pytest.mark.usefixtures("own_data_folder")

SMALL = {
    "model.num_hidden_layers": 1,
    "model.hidden_size": 8,
    "model.head_dim": 4,
    "model.intermediate_size": 8,
    "training.batch_size": 4,
    "data.max_length": 32,
    "data.validation_examples": 4,
    "data.test_examples": 16,
}


def small(task: str, model: ModelSpec, seed: int = 0, **changes: object) -> Trial:
    """A trial that takes a moment."""
    return Trial("smoke", task, model, seed, {**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}})


def plan_of(*trials: Trial, analyzed: tuple[Trial, ...] = (), **options: object) -> Plan:
    commands = dict.fromkeys(trials, "mgk reproduce table1 --preset smoke")
    return Plan(commands, frozenset(analyzed), rank_samples=6, **options)


def test_trials_are_run_once_and_analyzed(tmp_path):
    results, runs = ResultStore(tmp_path / "results"), tmp_path / "runs"
    mgk, linear = small("retrieval", ModelSpec("mgk", 2)), small("listops", ModelSpec("linear", 1))
    plan = plan_of(mgk, linear, analyzed=(mgk,))
    done, parts = [], []
    calls = {
        "on_progress": lambda trial, part: parts.append(part),
        "on_done": lambda item: done.append(item.trial),
    }
    run_plan(plan, results, runs, jobs=2, **calls)
    assert set(done) == {mgk, linear}
    assert all(0 <= part <= 1 for part in parts)
    assert len(parts) > 10
    record = results.read(mgk)
    assert record is not None
    assert record.data.label == "Retrieval (synthetic sample)"
    assert 0.5 <= record.data.chance < 0.8  # of 16 examples, drawn at random
    assert record.data.is_synthetic
    assert record.machine["threads"] == max(1, (os.cpu_count() or 1) // 2)
    assert record.jobs == 2
    assert len(record.correct or ()) == record.summary.examples == 16
    assert record.summary.parameters == model_parameters(sizes_of(mgk.recipe)).value
    assert record.losses
    assert record.validation
    text = results.path(mgk).read_text()
    assert str(tmp_path) not in text
    assert os.path.expanduser("~") not in text
    analysis = {item.trial: item for item in results.analyses("smoke")}[mgk]
    assert analysis is not None
    assert analysis.maps.weights.shape[:2] == (1, 2)
    assert len(analysis.ranks[0].ranks) == 6
    assert len(analysis.head_similarity) == 16
    assert len(analysis.usage[0].prior) == 2
    assert not (mgk.path(runs) / "checkpoints").exists()
    assert (mgk.path(runs) / "model").is_dir()

    done.clear()
    run_plan(plan, results, runs, **calls)
    assert done == []

    results.analysis_path(mgk).unlink()
    trained = (mgk.path(runs) / "summary.json").stat().st_mtime_ns
    run_plan(plan, results, runs, **calls)  # the analysis alone is made anew
    assert done == [mgk]
    assert results.analysis_path(mgk).is_file()
    assert (mgk.path(runs) / "summary.json").stat().st_mtime_ns == trained

    done.clear()
    run_plan(plan_of(linear, overwrite="all"), results, runs, **calls)
    assert done == [linear]

    records = collect_results(runs)
    sizes = {"head_dim": 4, "feed_forward": 8}  # not the preset's: a folder of runs tells them by the model
    assert {item.trial for item in records} == {
        replace(trial, model=replace(trial.model, **sizes)) for trial in (mgk, linear)
    }
    assert (
        len(gather(ResultStore(runs), "smoke", trials=records).others) == 2
    )  # none has the recipe of its table


def test_ranks_are_taken_of_whole_segments_of_both_splits():
    data = open_data(load_recipe("wikitext-2", "smoke", overrides={"data.max_length": 48}).data)
    sampled = rank_examples(data, "validation")
    sizes = [sampled[number]["input_ids"].shape[-1] for number in range(len(sampled))]
    assert set(sizes) == {48}
    every = [
        example["input_ids"].shape[-1] for split in ("test", "validation") for example in whole(data, split)
    ]
    assert len(sizes) == every.count(48) < len(every)
    assert len(rank_examples(data, "test")) < len(sizes)


def whole(data, split):
    examples = data.split(split)
    return [examples[number] for number in range(len(examples))]


def test_an_interrupted_trial_continues(tmp_path):
    results, runs = ResultStore(tmp_path / "results"), tmp_path / "runs"
    trial = small(
        "listops", ModelSpec("mgk", 1), training__max_steps=200, training__save_every=10, evaluation__every=200
    )

    def stop_when_saved() -> None:
        end = time.monotonic() + 100
        while not list(trial.path(runs).glob("checkpoints/step-*")) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_saved, daemon=True).start()
    with pytest.raises(Interrupted, match="the same command continues from the last checkpoint"):
        run_plan(plan_of(trial), results, runs)
    assert not results.has(trial)
    parts: list[float] = []
    run_plan(plan_of(trial), results, runs, on_progress=lambda _, part: parts.append(part))
    assert parts[0] > 0
    record = results.read(trial)
    assert record is not None
    assert record.machine["sessions"] == 2


def test_a_trial_that_fails_leaves_the_others(tmp_path):
    results = ResultStore(tmp_path / "results")
    good = small("listops", ModelSpec("softmax", 1))
    bad = small("listops", ModelSpec("mgk", 1), training__learning_rate=1e30, training__max_grad_norm=0.0)
    with pytest.raises(TrainingError, match="not finite"):
        run_plan(plan_of(good, bad), results, tmp_path / "runs")
    assert results.has(good)
    assert not results.has(bad)


def test_absent_data_are_an_error_before_anything_is_trained():
    trials = reproduction_plan([EXPERIMENTS["table1"], EXPERIMENTS["table3"]], "laptop").trials
    with pytest.raises(DataError) as error:
        check_data(trials)
    for task in ("text", "retrieval", "wikitext-2"):
        assert f"then run: mgk data prepare {task} --source PATH" in str(error.value)
    check_data([replace(trial, preset="smoke", overrides={}) for trial in trials])


def test_runs_are_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("MGK_RUNS", str(tmp_path))
    assert default_runs_folder() == tmp_path
    monkeypatch.delenv("MGK_RUNS")
    assert default_runs_folder().parts[-2:] == ("runs", "reproduce")
