"""Studies: trials that a committed plan declares, run from a clean checkout, and the choice that they give."""

import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
from scipy.stats import t
from synthetic_results import record
from typer.testing import CliRunner

from mgk._util.files import commit_of, is_committed, read_json
from mgk._util.json_codec import load
from mgk.analysis import cost_model
from mgk.analysis.confidence_intervals import student_interval
from mgk.cli.app import app
from mgk.data.errors import DataError
from mgk.experiments.compare.result import Comparison
from mgk.experiments.evidence.claims import CLAIMS
from mgk.experiments.evidence.decision_rules import MARGINS, least_regret, regrets
from mgk.experiments.evidence.effects import late_change, seeds_for
from mgk.experiments.model_spec import ModelSpec, sizes_of
from mgk.experiments.plan import QUICK, find_studies, reproduction_plan
from mgk.experiments.render.frontier import Frontier
from mgk.experiments.render.initialisation import Initialisation
from mgk.experiments.render.learning_rates import LearningRates
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.result_store import ResultStore
from mgk.experiments.step_times import measure_times
from mgk.experiments.study import (
    check_committed,
    check_corpus,
    read_study,
    waiting,
)
from mgk.training.errors import RecipeError

COMMITTED = Path(__file__).parents[2] / "results"

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
    study = read_study(results, "initialisation")
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
        read_study(results, "initialisation")


def test_a_plan_must_be_committed_and_unchanged(results):
    study = read_study(results, "initialisation")
    with pytest.raises(RecipeError, match=r"plan\.yaml: commit this plan before its trials are run"):
        check_committed(study)
    git(results, "init", "--quiet")
    git(results, "add", "-A")
    with pytest.raises(RecipeError, match="commit this plan"):  # added is not committed
        check_committed(study)
    git(results, "commit", "--quiet", "--message", "plan")
    check_committed(study)
    (study.folder / "plan.yaml").write_text(PLAN + "# changed\n")
    assert not is_committed(study.folder / "plan.yaml")


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
    study, store = read_study(results, "initialisation"), ResultStore(results / "initialisation")
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
    """Mgk is better with 0.1 by 5%, softmax hardly differs."""
    values = {
        ("softmax", "paper"): 2.00,
        ("softmax", "0.1"): 2.01,
        ("mgk", "paper"): 2.10,
        ("mgk", "0.1"): 2.00,
    }
    store = ResultStore(results / "initialisation")
    study = read_study(results, "initialisation")
    assert Initialisation.read(results).sentences() == [
        "0 of 9 trials are done; no initialisation is chosen yet."
    ]
    base = record("wikitext-2", ModelSpec("mgk", 1), 0, perplexity=4.0)
    for trial in study.trials:
        value = values[trial.model.attention, str(trial.model.init)] + 0.01 * trial.seed
        summary = replace(base.summary, metric="bits_per_byte", metrics={"validation_bits_per_byte": value})
        store.write(replace(base, trial=trial, recipe=trial.recipe, summary=summary))
    found = Initialisation.read(results)
    assert found.choice(["softmax"]) == ("0.1", pytest.approx(0.005, rel=0.02))
    assert "| softmax:2 | 2.000, 2.010 | 2.010, 2.020 |" in found.markdown()
    names = {path.name for path in Initialisation.write(results)}
    assert names == {"summary.json", "initialisation.png"}


@pytest.mark.parametrize(
    ("loss", "verdict"), [(0.005, "the choice stands"), (0.02, "the choice does not stand")]
)
def test_the_choice_is_checked_at_other_rates_and_on_other_tasks(results, loss, verdict):
    plan = results / "initialisation" / "plan.yaml"
    checks = """
  - {task: bytes, preset: smoke, seeds: [0], learning_rates: [0.001], inits: [0.1, paper],
     models: ["softmax:2", "mgk:1"]}
  - {task: listops, preset: smoke, seeds: [0], inits: [0.1, paper], models: ["softmax:2", "mgk:1"]}
"""
    plan.write_text(PLAN.rpartition("  - {")[0].rstrip() + checks)
    store = ResultStore(results / "initialisation")
    bits = record("wikitext-2", ModelSpec("mgk", 1), 0, perplexity=4.0)
    answers = record("listops", ModelSpec("mgk", 1), 0)
    for trial in read_study(results, "initialisation").trials:
        is_paper = trial.model.init == "paper"
        if trial.task == "listops":
            metrics = {"test_accuracy": 0.5 + loss * is_paper}
            store.write(replace(answers, trial=trial, summary=replace(answers.summary, metrics=metrics)))
            continue
        value = 2.0 + 0.1 * is_paper * (trial.model.attention == "mgk") - 0.01 * (trial.learning_rate == 0.001)
        summary = replace(bits.summary, metric="bits_per_byte", metrics={"validation_bits_per_byte": value})
        store.write(replace(bits, trial=trial, recipe=trial.recipe, summary=summary))
    _, rates, task = Initialisation.read(results).sentences()
    assert rates.endswith("0.00% with 0.1 and 5.03% with the paper's; the choice stands.")
    assert f"0.1 has −{100 * loss:.2f} points" in task
    assert task.endswith(f"{verdict}.")


def test_initialisations_are_compared_over_the_seeds_that_all_of_them_have(results):
    """The second seed is worse by 10%, and only one initialisation has it: that is no regret of it."""
    store = ResultStore(results / "initialisation")
    base = record("wikitext-2", ModelSpec("mgk", 1), 0, perplexity=4.0)
    for trial in read_study(results, "initialisation").stages[0].trials:
        if trial.seed == 0 or str(trial.model.init) == "0.1":
            metrics = {"validation_bits_per_byte": 2.0 * (1 + 0.1 * trial.seed)}
            summary = replace(base.summary, metric="bits_per_byte", metrics=metrics)
            store.write(replace(base, trial=trial, recipe=trial.recipe, summary=summary))
    assert Initialisation.read(results).choice()[1] == 0


RATES = """
question: which learning rate?
criterion: the best on validation
stages:
  - {task: bytes, seeds: [100, 101], learning_rates: [0.001, 0.004], models: ["softmax:4", "softmax:4/2", "smgk:2"]}
"""
FRONTIER = """
question: which attention?
criterion: bits per byte
rates: learning-rates/summary.json
pairs:
  - {candidate: "smgk:2", baseline: "softmax:4", half_width: 0.6, use: With half the cache}
  - {candidate: "smgk:2 mixtures=4", baseline: "smgk:2"}
stages:
  - {title: pairs, task: bytes, seeds: [10, 11, 12, 13], max_seeds: 9, learning_rates: [chosen],
     models: ["softmax:4", "smgk:2", "softmax:4/2"]}
  - {title: rest, task: bytes, seeds: [10, 11], learning_rates: [chosen], models: ["smgk:2 mixtures=4"]}
"""
# Of the pairs: smgk is better by 2% on average, with a standard deviation that takes more seeds than 4.
GAINS = {10: 0.015, 11: 0.025, 12: 0.018, 13: 0.022}


def bits(trial, value):
    """A result with these bits per byte, of validation and of test."""
    base = record("wikitext-2", ModelSpec("mgk", 1), 0, perplexity=4.0)
    metrics = {"validation_bits_per_byte": value, "test_bits_per_byte": value}
    summary = replace(base.summary, metric="bits_per_byte", metrics=metrics)
    return replace(base, trial=trial, recipe=trial.recipe, summary=summary)


@pytest.fixture
def frontier(tmp_path):
    """Learning rates that are chosen, and a frontier whose pairs are measured."""
    results = tmp_path / "results"
    for name, text in (("learning-rates", RATES), ("frontier", FRONTIER)):
        (results / name).mkdir(parents=True)
        (results / name / "plan.yaml").write_text(text)
    assert read_study(results, "frontier").trials == []
    store = ResultStore(results / "learning-rates")
    for trial in read_study(results, "learning-rates").trials:
        is_better = trial.learning_rate == (0.001 if trial.model.attention == "smgk" else 0.004)
        if trial.model.key_value_heads is None or trial.seed == 100:
            store.write(bits(trial, (2.0 if is_better else 2.1) + 0.2 * (trial.seed - 100)))
    LearningRates.write(results)
    return results


def test_a_learning_rate_is_chosen_once_its_family_is_complete(frontier):
    summary = read_json(frontier / "learning-rates" / "summary.json")
    assert summary["chosen"] == {"bytes": {"softmax": 0.004, "smgk": 0.001}}  # grouped softmax lacks a seed
    study = read_study(frontier, "frontier")
    (reason,) = waiting(study)
    assert reason == "no learning rate is chosen for bytes yet: mgk reproduce learning-rates --tasks bytes"
    assert {trial.learning_rate for trial in study.trials} == {0.001}  # of the stage without grouped softmax


def complete(results):
    """With the missing learning rate, and results of the first seeds of the pairs."""
    store = ResultStore(results / "learning-rates")
    for trial in read_study(results, "learning-rates").trials:
        if not store.has(trial):
            store.write(bits(trial, 2.0))
    LearningRates.write(results)
    study = read_study(results, "frontier")
    assert study.extended() == study  # not before they are measured
    for trial in study.stages[0].trials:
        gain = GAINS[trial.seed] if trial.model.attention == "smgk" else 0.0
        study.store.write(bits(trial, 2.0 * (1 + 0.1 * (trial.seed - 10)) * (1 - gain)))
    return study


def test_seeds_follow_from_the_variance_of_the_first_ones(frontier):
    """N = (t s / d)^2 with t_0.975 of 3, at most max_seeds; grouped softmax is in no pair."""
    study = complete(frontier)
    assert list(waiting(study)) == []
    count = (3.18245 * stdev(100 * gain for gain in GAINS.values()) / 0.6) ** 2
    assert 5 < count < 6
    extended = study.extended()
    more = [trial for trial in extended.trials if trial not in study.trials]
    assert [(trial.model.name, trial.seed, trial.learning_rate) for trial in more] == [
        ("softmax:4", 14, 0.004),
        ("smgk:2", 14, 0.001),
        ("softmax:4", 15, 0.004),
        ("smgk:2", 15, 0.001),
    ]
    wide = replace(study, pairs=(replace(study.pairs[0], half_width=0.1),))
    assert max(trial.seed for trial in wide.extended().trials) == 10 + 9 - 1


def test_the_frontier_has_paired_gains_costs_and_advice(frontier):
    complete(frontier)
    found = Frontier.read(frontier)
    softmax, smgk, grouped = found.points
    assert (softmax.gain.estimate, softmax.gain.high) == (0, 0)
    assert smgk.gain.estimate == pytest.approx(2.0)
    assert (smgk.seeds, grouped.seeds) == (4, 4)
    # 3 layers, 4 bytes a number, a key and a value of width 16 in each head
    assert softmax.costs["cache"] == 3 * 4 * 2 * 4 * 16
    assert smgk.costs["cache"] == grouped.costs["cache"] == softmax.costs["cache"] / 2
    assert smgk.costs["flops"] < grouped.costs["flops"] == softmax.costs["flops"]
    assert [point.model for point in found.front("cache")] == ["smgk:2"]  # as cheap as any, and the best
    assert found.sentences()[0] == "With half the cache: take smgk with 2 heads."
    assert found.comparisons() == [
        "**Better**: smgk with 2 heads vs softmax with 4 heads (with half the cache)."
    ]
    assert "| smgk, 2 heads | 4 |" in found.markdown()
    assert {path.name for path in Frontier.write(frontier)} == {"summary.json", "frontier.png"}


def test_an_open_question_says_how_many_seeds_would_close_it():
    """The least n with t_0.975 s / sqrt(n) <= 1."""
    four = student_interval([1.0, -1.0, 3.0, 3.0])
    deviation = stdev([1.0, -1.0, 3.0, 3.0])
    count = seeds_for(four, 4, 1.0)
    assert t.ppf(0.975, count - 1) * deviation / count**0.5 <= 1.0
    assert t.ppf(0.975, count - 2) * deviation / (count - 1) ** 0.5 > 1.0
    assert seeds_for(student_interval([1.0]), 1, 1.0) is None


def test_what_is_still_learned_at_the_end_is_said():
    result = record("listops", ModelSpec("mgk", 1), 0)
    steps = result.recipe.training.max_steps
    curve = tuple((steps * part, 0.5 + 0.1 * part) for part in (0.25, 0.5, 0.75, 1.0))
    assert late_change([replace(result, validation=curve)]) == pytest.approx(0.025)
    assert late_change([replace(result, validation=curve[:2])]) is None


def test_a_plan_refers_to_learning_rates_that_must_be_committed(frontier):
    git(frontier, "init", "--quiet")
    git(frontier, "add", "*/plan.yaml")
    git(frontier, "commit", "--quiet", "--message", "plans")
    with pytest.raises(RecipeError, match="commit these learning rates before the trials are run"):
        check_committed(read_study(frontier, "frontier"))
    git(frontier, "add", "-A")
    git(frontier, "commit", "--quiet", "--message", "rates")
    check_committed(read_study(frontier, "frontier"))
    (frontier / "learning-rates" / "summary.json").unlink()
    with pytest.raises(RecipeError, match="no learning rate is chosen yet: mgk reproduce learning-rates"):
        check_committed(read_study(frontier, "frontier"))


@pytest.mark.usefixtures("own_data_folder")
def test_a_study_wants_its_own_text():
    study = read_study(COMMITTED, "demo")
    with pytest.raises(DataError, match="bytes is not prepared"):
        check_corpus(study)


def test_tables_run_the_trials_that_the_plan_declares(tmp_path):
    (tmp_path / "plan.yaml").write_text(
        """
question: do mixtures replace heads?
criterion: the rules
stages:
  - {task: listops, preset: workstation, seeds: [0, 1, 2, 3, 4, 5], learning_rates: [0.003],
     models: ["softmax:2", "smgk:1"]}
"""
    )
    study = read_study(tmp_path, "plan")
    plan = study.adopted(reproduction_plan([EXPERIMENTS["table1"]], "workstation"))
    assert [str(trial) for trial in plan.trials[:2]] == [
        "workstation/listops/softmax-2h-lr-0.003-seed-0",
        "workstation/listops/softmax-2h-lr-0.003-seed-1",
    ]
    assert len(plan.trials) == 12
    assert plan.sha256 == study.sha256
    assert plan.commands[plan.trials[0]] == "mgk reproduce table1 --preset workstation"
    laptop = reproduction_plan([EXPERIMENTS["table1"]], "laptop")
    assert study.adopted(laptop) is laptop


@pytest.mark.parametrize("name", find_studies(COMMITTED))
def test_committed_plans_are_consistent(name):
    study = read_study(COMMITTED, name)
    models = {model for stage in study.stages for model in stage.specs}
    assert all(spec in models for pair in study.pairs for spec in pair.specs)
    assert set(study.claims) <= {claim.id for claim in CLAIMS}
    assert study.margins.items() <= MARGINS.items()
    for stage in study.stages:
        last = stage.seeds[0] + (stage.max_seeds or len(stage.seeds)) - 1
        if name in ("learning-rates", "pilot"):
            assert stage.seeds[0] >= 100  # not used again
        else:
            assert last < 100
        for trial in replace(stage, learning_rates=(None,), inits=(None,)).trials:
            assert ModelSpec.of_recipe(trial.recipe) == trial.model
            assert ModelSpec.parse(trial.model.name) == trial.model


def test_some_tasks_of_a_study_can_be_chosen():
    arguments = ["reproduce", "learning-rates", "--dry-run", "--results", str(COMMITTED), "--tasks"]
    done = CliRunner().invoke(app, [*arguments, "bytes"])
    assert done.exit_code == 0, done.output
    assert "70 trials, " in done.output
    assert "listops" not in done.output
    wrong = CliRunner().invoke(app, [*arguments, "image"])
    assert "learning-rates has no task image: it has bytes, listops, text, retrieval" in wrong.output


def test_the_committed_demo_is_that_of_compare():
    (stage,) = read_study(COMMITTED, "demo").stages
    assert stage.overrides == QUICK
    assert len(stage.seeds) == 5


def test_softmax_with_a_wider_feed_forward_part_has_the_parameters_of_the_others():
    (stage,) = (one for one in read_study(COMMITTED, "frontier").stages if one.title == "matched parameters")
    wider = [trial.recipe for trial in replace(stage, learning_rates=(None,), seeds=(0,)).trials]
    others = [
        replace(stage, learning_rates=(None,), seeds=(0,), models=(name,)).trials[0].recipe
        for name in ("mgk:2", "softmax:4")
    ]
    for one, other in zip(wider, others, strict=True):
        counts = [cost_model.model_parameters(sizes_of(recipe)).value for recipe in (one, other)]
        assert counts[0] == pytest.approx(counts[1], rel=1e-3)


@pytest.mark.usefixtures("own_data_folder")
def test_times_are_of_steps_and_tokens(results):
    (trial, *_) = read_study(results, "initialisation").trials
    calls = []

    def measure(works, *, rounds, on_run):
        calls.extend(work() for work in works.values())
        return {name: [0.5, 0.1, 0.2] for name in works}

    found = measure_times([trial], measure, rounds=3)
    assert len(calls) == 2
    assert found["models"] == {trial.model.name: {"step": 200.0, "token": 200.0 / 16}}  # of a context of 32


@pytest.mark.usefixtures("own_data_folder")
def test_the_demo_is_recorded_over_seeds(tmp_path):
    folder = tmp_path / "results" / "demo"
    folder.mkdir(parents=True)
    (folder / "plan.yaml").write_text(
        """
question: what does the demo show?
criterion: none
stages:
  - {task: bytes, preset: smoke, seeds: [0, 1], models: ["softmax:2", "smgk:1"],
     overrides: {training.max_steps: 2, evaluation.every: 2, model.hidden_size: 8, model.head_dim: 4}}
"""
    )
    git(folder, "init", "--quiet")
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "--message", "plan")
    arguments = ["--results", str(folder.parent), "--runs", str(tmp_path / "runs"), "--jobs", "2"]
    done = CliRunner().invoke(app, ["reproduce", "demo", *arguments])
    assert done.exit_code == 0, done.output
    comparison = load(Comparison, read_json(folder / "comparison.json"))
    assert (comparison.seeds, [one.name for one in comparison.results]) == ((0, 1), ["softmax:2", "smgk:1"])
    for result in comparison.results:
        assert len(result.step_seconds) == len(result.tokens_per_second) == 2
