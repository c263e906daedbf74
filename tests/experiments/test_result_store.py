"""The store of results: what goes in comes out, small, and is not mistaken for something else."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_results import MGK, SOFTMAX, analysis, record, stored

from mgk._util.json_codec import dump, load, write_compact
from mgk._util.machine import describe
from mgk._util.progress import duration
from mgk.experiments.artifacts import gather, write_artifacts, write_verdicts
from mgk.experiments.plan import reproduction_plan
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.reproduce.runtime_estimate import BY_FORMULA, BY_RATE, EARLIER, estimate, in_words
from mgk.experiments.result_store import ResultStore, TrialResult, thinned
from mgk.experiments.trials import Trial
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.recipe import write_recipe


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("results"))


def plan_of(name, **options):
    return reproduction_plan([EXPERIMENTS[name]], "laptop", **options)


@given(st.lists(st.booleans()))
def test_answers_are_packed_and_unpacked(flags):
    item = replace(record("text", MGK, 0), correct=tuple(flags))
    assert load(TrialResult, json.loads(json.dumps(dump(item)))).correct == tuple(flags)


@given(st.lists(st.floats(0.1, 100.0), max_size=40), st.integers(1, 10))
def test_a_thinned_curve_keeps_its_mean(values, most):
    curve = [(float(step), value) for step, value in enumerate(values)]
    found = thinned(curve, most)
    assert len(found) <= most
    if len(values) and len(values) % len(found) == 0 and len(values) // len(found) == -(-len(values) // most):
        assert np.mean([y for _, y in found]) == pytest.approx(np.mean(values), rel=1e-4)


@pytest.mark.parametrize("task", ["text", "wikitext-2"])
def test_a_result_comes_back_as_it_was(tmp_path, task):
    store, item = ResultStore(tmp_path), record(task, MGK, 1, perplexity=120.0)
    store.write(item)
    assert store.read(item.trial) == item
    assert store.results("laptop") == [item]
    assert store.presets == ["laptop"]
    assert store.results("paper") == []


def test_a_result_of_a_long_run_is_small(tmp_path):
    store, item = ResultStore(tmp_path), record("text", MGK, 0)
    curve = [(50.0 * step, 1 / (step + 3)) for step in range(10_000)]
    store.write(
        replace(item, losses=thinned(curve), validation=thinned(curve[:600]), correct=(True, False) * 12_500)
    )
    assert store.path(item.trial).stat().st_size < 60_000


def test_lists_of_numbers_are_on_one_line(tmp_path):
    data = {"a": [1, 2, 3], "b": [[1, 2.5], [3, 4]], "c": {"d": [], "e": ["x y", "z"]}, "f": [{"g": 1}]}
    write_compact(tmp_path / "data.json", data)
    text = (tmp_path / "data.json").read_text()
    assert json.loads(text) == data
    assert '"a": [1, 2, 3]' in text
    assert '"b": [[ 1, 2.5' in text or '"b": [[1, 2.5], [3, 4]]' in text


def test_the_analysis_of_a_model_comes_back(tmp_path):
    store, item = ResultStore(tmp_path), analysis("retrieval", replace(MGK, heads=2))
    store.write(item)
    (found,) = store.analyses("laptop")
    np.testing.assert_allclose(found.maps.weights, item.maps.weights, atol=item.maps.weights.max() / 500)
    assert replace(found, maps=item.maps) == item
    assert store.analysis_path(item.trial).stat().st_size < 60_000
    store.remove(item.trial)
    assert store.analyses("laptop") == []


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[1]"])
def test_a_damaged_result_is_named(tmp_path, text):
    store, trial = ResultStore(tmp_path), Trial("laptop", "text", MGK, 0)
    store.path(trial).parent.mkdir(parents=True)
    store.path(trial).write_text(text)
    with pytest.raises(TrainingError, match=r"mgk-1h-seed-0.json: this is not the result of a trial"):
        store.read(trial)
    store.analysis_path(trial).parent.mkdir(parents=True)
    store.analysis_path(trial).write_text(text)
    with pytest.raises(TrainingError, match=r"mgk-1h-seed-0.json: this is not the analysis of a model"):
        store.analyses("laptop")


def test_a_result_of_another_recipe_is_not_taken_for_this_one(tmp_path):
    store, item = ResultStore(tmp_path), record("text", MGK, 0)
    other = item.recipe.model_copy(
        update={"training": item.recipe.training.model_copy(update={"max_steps": 7})}
    )
    store.write(replace(item, recipe=other))
    with pytest.raises(RecipeError, match=r"trained with training.max_steps = 7, not \d+: .* --overwrite"):
        plan_of("table1", seeds=1, tasks=["text"]).missing(store, tmp_path / "runs")
    assert item.trial in plan_of("table1", seeds=1, tasks=["text"], overwrite=True).missing(
        store, tmp_path / "runs"
    )


def test_a_run_of_another_recipe_is_not_replaced_unasked(tmp_path):
    store, trial = ResultStore(tmp_path), record("text", MGK, 0).trial
    training = trial.recipe.training.model_copy(update={"max_steps": 7})
    run = trial.path(tmp_path / "runs")
    run.mkdir(parents=True)
    write_recipe(trial.recipe.model_copy(update={"training": training}), run / "recipe.yaml")
    with pytest.raises(
        RecipeError, match=r"mgk-1h-seed-0: this was trained with training.max_steps = 7, not \d+"
    ):
        plan_of("table1", seeds=1, tasks=["text"]).missing(store, tmp_path / "runs")
    assert trial in plan_of("table1", seeds=1, tasks=["text"], overwrite=True).missing(store, tmp_path / "runs")


def test_threads_and_folders_do_not_make_another_trial(tmp_path):
    store, item = ResultStore(tmp_path), record("text", MGK, 0)
    other = item.recipe.model_copy(update={"training": item.recipe.training.model_copy(update={"threads": 1})})
    store.write(replace(item, recipe=other))
    assert item.trial not in plan_of("table1", seeds=1, tasks=["text"]).missing(store, tmp_path / "runs")


def test_finished_trials_are_not_missing(results, tmp_path):
    for name in ("table1", "table3", "fig2"):
        plan = plan_of(name)
        assert plan.missing(results, tmp_path) == []
        seeds = EXPERIMENTS[name].seeds_at("laptop")
        assert len(plan_of(name, seeds=seeds + 1).missing(results, tmp_path)) == len(plan.trials) // seeds


def test_a_trial_that_is_not_analyzed_is_missing_for_a_figure_only(tmp_path):
    store = ResultStore(tmp_path)
    for trial in EXPERIMENTS["fig2"].trials("laptop"):
        store.write(record(trial.task, trial.model, trial.seed))
    assert len(plan_of("fig2").missing(store, tmp_path)) == 3
    in_both = set(plan_of("fig1", seeds=1, tasks=["retrieval"]).trials) & set(plan_of("fig2").trials)
    assert in_both
    assert in_both.isdisjoint(plan_of("fig1", seeds=1, tasks=["retrieval"]).missing(store, tmp_path))


def test_estimates_say_where_they_come_from(results, tmp_path, monkeypatch):
    elsewhere = estimate([Trial("laptop", "text", MGK, 7)], results)
    assert next(iter(elsewhere.values())).basis == BY_FORMULA
    here = replace(describe(), processor="a processor", cores=2, accelerator=None)
    monkeypatch.setattr("mgk._util.machine.describe", lambda: here)
    known = Trial("laptop", "text", MGK, 7)
    assert estimate([known], results)[known].seconds == pytest.approx(180.0)
    assert estimate([known], results)[known].basis == EARLIER
    for new in (Trial("laptop", "text", replace(MGK, heads=2), 0), Trial("laptop", "image", MGK, 0)):
        assert estimate([new], results)[new].basis == BY_RATE
    nothing = estimate([Trial("smoke", "listops", SOFTMAX, 0)], ResultStore(tmp_path))
    assert next(iter(nothing.values())).basis == BY_FORMULA
    assert all(item.seconds > 0 for item in nothing.values())
    assert in_words({known: estimate([known], results)[known]}) == f"about 3 min ({EARLIER})"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (600, "10 min"), (9000, "2.5 h"), (86400 * 3, "3.0 days"), (1e9, "11,574.1 days")],
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text


def test_tables_figures_and_verdicts_are_written(results):
    artifacts = gather(results, "laptop")
    assert set(artifacts.tables) == {name for name, item in EXPERIMENTS.items() if item.kind == "table"}
    assert set(artifacts.figures) == {name for name, item in EXPERIMENTS.items() if item.kind != "table"}
    written = write_artifacts(artifacts, results, [EXPERIMENTS[name] for name in ("table1", "fig2", "fig3")])
    assert [path.name for path in written] == ["table1.md", "fig2.png", "fig3.png"]
    assert all(path.is_file() for path in written)
    assert written[1].read_bytes().startswith(b"\x89PNG")
    table = json.loads(written[0].with_suffix(".json").read_bytes())
    row = table["rows"][0]
    assert (row["model"], row["entries"]["listops"]["paper"]) == ("softmax, 2 heads", 36.76)
    write_verdicts(artifacts, results)
    claims = json.loads((results.folder / "tables" / "laptop" / "claims.json").read_bytes())["claims"]
    assert claims["half-the-heads"]["verdict"] == "confirmed"
    figure = json.loads(written[2].with_suffix(".json").read_bytes())
    assert "model parameters = " in figure["panels"][1]["formulas"][0]


def test_results_of_no_table_are_others(tmp_path):
    item = record("text", replace(MGK, heads=3), 0)
    artifacts = gather(ResultStore(tmp_path), "laptop", trials=[item, record("text", MGK, 0)])
    assert [other.trial.model.heads for other in artifacts.others] == [3]
    assert isinstance(artifacts.trials[0], TrialResult)
