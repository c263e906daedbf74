"""Cells are run once, stored, continued in the middle, and looked into."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from mgk._util.errors import Interrupted
from mgk.analysis.cost_model import model_parameters
from mgk.data.errors import DataError
from mgk.experiments.artifacts import find_runs, gather, read_analysis
from mgk.experiments.reproduce.collect import collect_results, rank_examples
from mgk.experiments.reproduce.paper_costs import sizes_of
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.reproduce.run import Plan, check_data, make_plan, run_plan, runs_folder
from mgk.experiments.result_store import ResultStore
from mgk.experiments.trials import ModelSpec, Trial
from mgk.training.errors import TrainingError
from mgk.training.recipe import load_recipe
from mgk.training.tasks import open_data

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


@pytest.fixture(autouse=True, scope="module")
def _data_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGK_DATA", str(tmp_path_factory.mktemp("data")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def small(task: str, model: ModelSpec, seed: int = 0, **changes: object) -> Trial:
    """A trial that takes a moment: one with a recipe of its own."""
    trial = Trial("smoke", task, model, seed)
    overrides = {**SMALL, **model.overrides, "seed": seed, **{k.replace("__", "."): v for k, v in changes.items()}}
    trial.__dict__["recipe"] = load_recipe(task, "smoke", overrides=overrides)
    return trial


def plan_of(*trials: Trial, looks: tuple[Trial, ...] = ()) -> Plan:
    return Plan(trials, frozenset(looks), dict.fromkeys(trials, "mgk reproduce table1 --preset smoke"), 6)


def test_cells_are_run_once_and_looked_into(tmp_path):
    results, runs = ResultStore(tmp_path / "results"), tmp_path / "runs"
    mgk, linear = small("retrieval", ModelSpec("mgk", 2)), small("listops", ModelSpec("linear", 1))
    plan = plan_of(mgk, linear, looks=(mgk,))
    done, parts = [], []
    tell = {"on_progress": lambda trial, part: parts.append(part), "on_done": lambda trial, _: done.append(trial)}
    run_plan(plan, results, runs, jobs=2, **tell)
    assert set(done) == {mgk, linear}
    assert all(0 <= part <= 1 for part in parts)
    assert len(parts) > 10
    record = results.read(mgk)
    assert record is not None
    assert record.data.label == "Retrieval (made-up sample)"
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
    seen = read_analysis(results, mgk)
    assert seen is not None
    assert seen.maps.weights.shape[:2] == (1, 2)
    assert len(seen.ranks[0].ranks) == 6
    assert len(seen.head_similarity) == 16
    assert len(seen.usage[0].prior) == 2
    assert not (mgk.place(runs) / "checkpoints").exists()
    assert (mgk.place(runs) / "model").is_dir()

    done.clear()
    run_plan(plan, results, runs, **tell)
    assert done == []

    records = collect_results(find_runs(runs))
    assert {item.trial for item in records} == {mgk, linear}
    assert len(gather(ResultStore(runs), "smoke", records=records).others) == 2  # none has the recipe of its table


def test_ranks_are_taken_of_whole_segments_of_both_splits():
    data = open_data(load_recipe("wikitext-2", "smoke", overrides={"data.max_length": 48}).data)
    sampled = rank_examples(data, ("test", "validation"))
    sizes = [sampled[number]["input_ids"].shape[-1] for number in range(len(sampled))]
    assert set(sizes) == {48}
    every = [example["input_ids"].shape[-1] for split in ("test", "validation") for example in whole(data, split)]
    assert len(sizes) == every.count(48) < len(every)
    assert len(rank_examples(data, ("test", "test"))) < len(sizes)


def whole(data, split):
    examples = data.split(split)
    return [examples[number] for number in range(len(examples))]


def test_an_interrupted_cell_goes_on_where_it_was(tmp_path):
    results, runs = ResultStore(tmp_path / "results"), tmp_path / "runs"
    trial = small(
        "listops", ModelSpec("mgk", 1), training__max_steps=200, training__save_every=10, evaluation__every=200
    )

    def stop_when_saved() -> None:
        end = time.monotonic() + 100
        while not list(trial.place(runs).glob("checkpoints/step-*")) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_saved, daemon=True).start()
    with pytest.raises(Interrupted, match="the same command goes on where it was"):
        run_plan(plan_of(trial), results, runs)
    assert not results.has(trial)
    parts: list[float] = []
    run_plan(plan_of(trial), results, runs, on_progress=lambda _, part: parts.append(part))
    assert parts[0] > 0
    record = results.read(trial)
    assert record is not None
    assert record.machine["sessions"] == 2


def test_a_cell_that_fails_leaves_the_others(tmp_path):
    results = ResultStore(tmp_path / "results")
    good = small("listops", ModelSpec("softmax", 1))
    bad = small("listops", ModelSpec("mgk", 1), training__learning_rate=1e30, training__max_grad_norm=0.0)
    with pytest.raises(TrainingError, match="not finite"):
        run_plan(plan_of(good, bad), results, tmp_path / "runs")
    assert results.has(good)
    assert not results.has(bad)


def test_absent_data_are_told_before_anything_is_trained():
    trials = make_plan([EXPERIMENTS["table1"], EXPERIMENTS["table3"]], "laptop").trials
    with pytest.raises(DataError) as error:
        check_data(trials)
    for task in ("text", "retrieval", "wikitext-2"):
        assert f"then run: mgk data prepare {task} --source PATH" in str(error.value)
    check_data([replace(trial, preset="smoke") for trial in trials])


def test_runs_live_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("MGK_RUNS", str(tmp_path))
    assert runs_folder() == tmp_path
    monkeypatch.delenv("MGK_RUNS")
    assert runs_folder().parts[-2:] == ("runs", "reproduce")
