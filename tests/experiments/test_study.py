"""Studies: trials that a committed plan declares, run from a clean checkout, and the choice that they give."""

import subprocess
from dataclasses import replace

import pytest
from synthetic_results import record
from typer.testing import CliRunner

from mgk._util.files import commit_of, is_committed
from mgk.cli.app import app
from mgk.experiments.evidence.decision_rules import least_regret, regrets
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.render.initialisation import read_initialisation, write_initialisation
from mgk.experiments.result_store import ResultStore
from mgk.experiments.study import check_committed, read_study
from mgk.training.errors import RecipeError

PLAN = """
question: which start?
criterion: the least regret
stages:
  - {task: bytes, preset: smoke, seeds: [0, 1], learning_rates: [0.002], inits: [0.1, paper],
     models: ["softmax:2", "mgk:1"],
     overrides: {training.max_steps: 2, evaluation.every: 2, model.hidden_size: 8, model.head_dim: 4}}
  - {task: bytes, preset: smoke, seeds: [0], learning_rates: [0.001, 0.002], inits: [0.1], models: ["softmax:2"]}
"""


@pytest.fixture
def results(tmp_path):
    (tmp_path / "results" / "initialisation").mkdir(parents=True)
    (tmp_path / "results" / "initialisation" / "plan.yaml").write_text(PLAN)
    return tmp_path / "results"


def git(folder, *arguments):
    name = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


def test_a_plan_lists_each_trial_once_models_within_starts_within_seeds(results):
    study = read_study(results / "initialisation")
    assert [str(trial) for trial in study.trials] == [
        *(
            f"smoke/bytes/{model}-init-{start}-lr-0.002-seed-{seed}"
            for seed in (0, 1)
            for start in ("0.1", "paper")
            for model in ("softmax-2h", "mgk-1h")
        ),
        "smoke/bytes/softmax-2h-init-0.1-lr-0.001-seed-0",
    ]
    recipe = study.trials[1].recipe
    assert (recipe.model.init, recipe.training.learning_rate, recipe.training.max_steps) == (0.1, 0.002, 2)
    assert len(study.sha256) == 64
    assert set(study.plan().commands.values()) == {"mgk reproduce initialisation"}


@pytest.mark.parametrize(
    "text", ["stages: []\n", "a: [1\n", PLAN.replace("task: bytes", "tusk: bytes"), "[]\n"]
)
def test_what_is_no_plan_is_an_error(results, text):
    (results / "initialisation" / "plan.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"plan\.yaml: this is not the plan of a study"):
        read_study(results / "initialisation")


def test_a_plan_must_be_committed_and_unchanged(results):
    folder = results / "initialisation"
    with pytest.raises(RecipeError, match=r"plan\.yaml: commit this plan before its trials are run"):
        check_committed(folder)
    git(results, "init", "--quiet")
    git(results, "add", "-A")
    with pytest.raises(RecipeError, match="commit this plan"):  # added is not committed
        check_committed(folder)
    git(results, "commit", "--quiet", "--message", "plan")
    check_committed(folder)
    (folder / "plan.yaml").write_text(PLAN + "# changed\n")
    assert not is_committed(folder / "plan.yaml")


def test_results_do_not_make_a_checkout_dirty_and_sources_do(tmp_path):
    (tmp_path / "results").mkdir()
    source, result = tmp_path / "code.py", tmp_path / "results" / "one.json"
    source.touch()
    result.touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    result.write_text("{}")
    assert not commit_of(source).endswith("-dirty")
    source.write_text("changed")
    assert commit_of(source).endswith("-dirty")


def test_recording_from_a_dirty_checkout_is_refused(results, monkeypatch):
    monkeypatch.setattr("mgk._util.files.commit_of", lambda file: "0123-dirty")
    done = CliRunner().invoke(app, ["reproduce", "table1", "--tasks", "listops", "--results", str(results)])
    assert done.exit_code == 2
    assert "the checkout has uncommitted changes: commit them, or --allow-dirty" in done.output
    assert not (results / "trials").exists()


@pytest.mark.usefixtures("own_data_folder")
def test_a_study_runs_from_its_plan_and_stores_its_hash(results, tmp_path):
    git(results, "init", "--quiet")
    git(results, "add", "-A")
    git(results, "commit", "--quiet", "--message", "plan")
    arguments = ["--results", str(results), "--runs", str(tmp_path / "runs"), "--allow-dirty", "--jobs", "2"]
    done = CliRunner().invoke(app, ["reproduce", "initialisation", *arguments])
    assert done.exit_code == 0, done.output
    study, store = read_study(results / "initialisation"), ResultStore(results / "initialisation")
    for trial in study.trials:
        found = store.read(trial)
        assert (found.trial, found.plan, found.metric) == (trial, study.sha256, "test_bits_per_byte")
        assert 1 < found.test < 10
        assert len(found.summary.block_losses) == 32
    assert (results / "initialisation" / "summary.json").is_file()
    again = CliRunner().invoke(app, ["reproduce", "initialisation", *arguments])
    assert "9 trials, 9 done\n" in again.output


def test_the_least_regret_is_that_of_the_column_which_no_row_suffers_from():
    values = {
        "a": {"wide": 1.00, "middle": 1.02, "narrow": 1.10},
        "b": {"wide": 2.20, "middle": 2.02, "narrow": 2.00},
    }
    assert regrets(values)["middle"] == pytest.approx({"a": 0.02, "b": 0.01})
    assert least_regret(values, tolerance=0.0) == "middle"
    assert least_regret(values, tolerance=0.09) == "wide"  # the first within the tolerance
    values["b"].pop("middle")
    assert least_regret(values, tolerance=0.0) == "wide"  # only columns that all rows have: 0.1 and 0.1


def test_the_choice_follows_the_criterion(results):
    """Mgk is better from the narrow start by 5%, softmax hardly differs."""
    values = {
        ("softmax", "paper"): 2.00,
        ("softmax", "0.1"): 2.01,
        ("mgk", "paper"): 2.10,
        ("mgk", "0.1"): 2.00,
    }
    store = ResultStore(results / "initialisation")
    study = read_study(results / "initialisation")
    assert read_initialisation(results).sentences() == ["0 of 9 trials are done; no start is chosen yet."]
    base = record("wikitext-2", ModelSpec("mgk", 1), 0, perplexity=4.0)
    for trial in study.trials:
        value = values[trial.model.attention, str(trial.model.init)] + 0.01 * trial.seed
        summary = replace(base.summary, metric="bits_per_byte", metrics={"validation_bits_per_byte": value})
        store.write(replace(base, trial=trial, recipe=trial.recipe, summary=summary))
    found = read_initialisation(results)
    assert found.choice(["softmax"]) == ("0.1", pytest.approx(0.005, rel=0.02))
    assert "| softmax:2 | 2.000, 2.010 | 2.010, 2.020 |" in found.markdown()
    names = {path.name for path in write_initialisation(results)}
    assert names == {"summary.json", "initialisation.png"}


def test_starts_are_compared_over_the_seeds_that_all_of_them_have(results):
    """The second seed is worse by 10%, and only one start has it: that is no regret of the start."""
    store = ResultStore(results / "initialisation")
    base = record("wikitext-2", ModelSpec("mgk", 1), 0, perplexity=4.0)
    for trial in read_study(results / "initialisation").stages[0].trials:
        if trial.seed == 0 or str(trial.model.init) == "0.1":
            metrics = {"validation_bits_per_byte": 2.0 * (1 + 0.1 * trial.seed)}
            summary = replace(base.summary, metric="bits_per_byte", metrics=metrics)
            store.write(replace(base, trial=trial, recipe=trial.recipe, summary=summary))
    assert read_initialisation(results).choice()[1] == 0
