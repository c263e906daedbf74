"""The paper's numbers and settings, spelled out, and that its settings train."""

import pytest

from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.plan import reproduction_plan
from mgk.experiments.reproduce.published import AVERAGE, LRA, TABLES
from mgk.experiments.reproduce.registry import EXPERIMENTS, find_experiments
from mgk.experiments.trials import Trial
from mgk.training.errors import RecipeError
from mgk.training.recipe import load_recipe
from mgk.training.run import train


@pytest.mark.parametrize("name", ["table1", "table2", "table4"])
def test_the_averages_are_those_of_the_columns(name):
    for model, row in TABLES[name].items():
        *values, average = row.values()
        assert tuple(row) == (*LRA, AVERAGE)
        # as printed: two of them are cut off, not rounded
        assert average == pytest.approx(sum(values) / 3, abs=0.012), model.title


def test_the_published_tables_have_their_rows():
    rows = {name: [model.title for model in table] for name, table in TABLES.items()}
    heads = (8, 4, 2, 1)
    assert [ModelSpec(*name).title for name in (("softmax", h) for h in heads)] == [
        name for name in rows["table1"] if name.startswith("softmax")
    ]
    assert len(rows["table1"]) == len(rows["table2"]) == 10
    assert TABLES["table3"][ModelSpec("mgk", 4)]["test"] == 34.21
    assert rows["table4"] == [
        "smgk + Hard-E, 1 head",
        "smgk + Soft-E, 1 head",
        "smgk, 1 head",
        "mgk + Hard-E, 1 head",
        "mgk + Soft-E, 1 head",
        "mgk, 1 head",
    ]


# A.1.1: all models; and what its reference [71] trains by.
LRA_MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,
    "num_mixtures": 2,
    "position": "learned",
    "pooling": "mean",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
LRA_TRAINING = {"learning_rate": 1e-4, "weight_decay": 0.0, "schedule": "linear", "max_grad_norm": 0.0}
# A.1.2, and reference [54].
LANGUAGE_MODEL = {
    "num_hidden_layers": 16,
    "hidden_size": 128,
    "intermediate_size": 2048,
    "head_dim": 16,
    "num_mixtures": 2,
    "adaptive_cutoffs": [20_000, 40_000, 200_000],
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
}
SETTINGS = {
    "listops": (LRA_MODEL, {"max_steps": 5_000, "batch_size": 32, "warmup_steps": 1_000} | LRA_TRAINING, 2000),
    "text": (LRA_MODEL, {"max_steps": 20_000, "batch_size": 32, "warmup_steps": 8_000} | LRA_TRAINING, 4000),
    "retrieval": (LRA_MODEL, {"max_steps": 30_000, "batch_size": 32, "warmup_steps": 800} | LRA_TRAINING, 4000),
    "image": (LRA_MODEL, {"max_steps": 35_000, "batch_size": 256, "warmup_steps": 175} | LRA_TRAINING, 1024),
    "pathfinder": (
        LRA_MODEL,
        {"max_steps": 62_400, "batch_size": 256, "warmup_steps": 312} | LRA_TRAINING,
        1024,
    ),
    "wikitext-103": (
        LANGUAGE_MODEL,
        {
            "max_steps": 500_000,
            "batch_size": 96,
            "warmup_steps": 2_000,
            "learning_rate": 2.5e-4,
            "weight_decay": 0.0,
        },
        256,
    ),
}
FIELDS = {
    "heads": "num_attention_heads",
    "mixtures": "num_mixtures",
    "e_step": "e_step",
    "prior": "prior",
    "variance": "variance",
    "feature_map": "feature_map",
}
DEFAULTS = {"e_step": "soft", "prior": "learned", "variance": "constant", "feature_map": "elu"}
ALL_PAPER = reproduction_plan(list(EXPERIMENTS.values()), "paper", tasks=list(SETTINGS)).trials


@pytest.mark.parametrize("task", SETTINGS)
def test_every_trial_of_the_paper_has_its_settings(task):
    model, training, length = SETTINGS[task]
    trials = [trial for trial in ALL_PAPER if trial.task == task]
    assert {trial.seed for trial in trials} == {0, 1, 2, 3, 4}
    for trial in trials:
        recipe = trial.recipe
        assert recipe.preset == "paper"
        assert recipe.seed == trial.seed
        assert recipe.data.name == task
        assert recipe.data.max_length == length
        assert (recipe.data.train_examples, recipe.data.test_examples, recipe.data.options) == (None, None, {})
        given = recipe.model.given()
        assert given["attention"] == trial.model.attention
        for name, path in FIELDS.items():
            assert given.get(path, DEFAULTS.get(name)) == getattr(trial.model, name), (str(trial), name)
        own = {"num_mixtures": trial.model.mixtures}
        if trial.model.position is not None:  # ours, without positions
            own["position"] = trial.model.position
        for name, value in {**model, **own}.items():
            assert given[name] == value, (str(trial), name)
        for name, value in training.items():
            assert getattr(recipe.training, name) == value, (str(trial), name)
        assert recipe.evaluation.test
        if task == "wikitext-103":
            assert (recipe.evaluation.window, recipe.evaluation.stride) == (256, 1)
            assert recipe.evaluation.max_tokens is None
            assert recipe.training.max_grad_norm == 0.25


def test_the_trials_of_the_paper_are_its_rows_and_seeds():
    trials = EXPERIMENTS["table1"].trials("paper")
    assert len(trials) == len(set(trials)) == 10 * 3 * 5
    assert len(EXPERIMENTS["table3"].trials("paper")) == 7 * 5
    assert [trial.model.title for trial in EXPERIMENTS["fig2"].trials("paper")] == [
        "softmax, 4 heads",
        "mgk, 4 heads",
        "mgk, 2 heads",
    ]
    assert {trial.task for trial in EXPERIMENTS["fig6"].trials("paper")} == {"wikitext-103"}
    assert EXPERIMENTS["fig3"].models == EXPERIMENTS["fig7"].models == ()


def test_the_laptop_has_the_rows_with_2_and_1_heads():
    titles = [model.title for model in EXPERIMENTS["table1"].models_at("laptop")]
    assert titles == ["softmax, 2 heads", "smgk, 1 head", "mgk, 1 head", "softmax, 1 head"]
    titles = [model.title for model in EXPERIMENTS["table2"].models_at("laptop")]
    assert titles == ["linear, 2 heads", "smlk, 1 head", "mlk, 1 head", "linear, 1 head"]
    assert EXPERIMENTS["table4"].models_at("laptop") == EXPERIMENTS["table4"].models
    assert {(trial.task, trial.model.heads) for trial in EXPERIMENTS["table3"].trials("laptop")} == {
        ("wikitext-2", 2),
        ("wikitext-2", 1),
    }
    assert {trial.seed for trial in EXPERIMENTS["table1"].trials("laptop")} == {0, 1, 2}


def test_trials_that_tables_share_are_one():
    one, four = (reproduction_plan([EXPERIMENTS[name]], "laptop").trials for name in ("table1", "table4"))
    both = reproduction_plan([EXPERIMENTS["table1"], EXPERIMENTS["table4"]], "laptop").trials
    assert len(both) == len(one) + len(four) - 2 * 3 * 3  # mgk and smgk with a head, three tasks, three seeds
    all_models = {trial for experiment in EXPERIMENTS.values() for trial in experiment.trials("laptop")}
    assert len({str(trial) for trial in all_models}) == len(all_models)


def test_more_tasks_can_be_chosen():
    table = EXPERIMENTS["table1"]
    assert table.tasks_at("laptop", ["image", "text"]) == ("text", "image")
    assert table.tasks_at("laptop", ["wikitext-2"]) == ()
    assert EXPERIMENTS["mixtures"].tasks_at("laptop") == ("listops",)


@pytest.mark.parametrize(("name", "near"), [("tabel1", "table1"), ("fig 2", "fig2"), ("mixture", "mixtures")])
def test_an_unknown_experiment_suggests_the_nearest(name, near):
    with pytest.raises(RecipeError, match=f"there is no experiment '{name}'; did you mean '{near}'"):
        find_experiments(name)


def test_a_model_is_that_of_its_recipe():
    for trial in ALL_PAPER:
        assert ModelSpec.of_recipe(trial.recipe) == trial.model
    assert ModelSpec.of_recipe(
        load_recipe("text", "smoke", overrides={"model.attention": "linear"})
    ) == ModelSpec("linear", 2)


# Each with the paper's model, optimizer and batch, and the shortest that takes its steps: few examples and, but for
# ListOps, short ones; of WikiText its 16 layers and the vocabulary of the sample.
STEPS = {
    "listops": (ModelSpec("smgk", 1), {"data.options": {"train": 32, "validation": 4, "test": 4}}),
    "text": (ModelSpec("mgk", 4), {}),
    "retrieval": (ModelSpec("mlk", 4), {}),
    "image": (ModelSpec("smgk", 1, e_step="hard"), {"training.batch_size": 16}),
    "pathfinder": (ModelSpec("mgk", 1, prior="em"), {"training.batch_size": 8}),
    "wikitext-103": (ModelSpec("mgk", 4), {"training.batch_size": 8, "model.adaptive_cutoffs": None}),
}


@pytest.mark.parametrize("task", STEPS)
def test_the_settings_of_the_paper_take_optimizer_steps(task, tmp_path, monkeypatch):
    monkeypatch.setenv("MGK_DATA", str(tmp_path / "data"))
    model, changes = STEPS[task]
    assert any(trial.model == model for trial in ALL_PAPER if trial.task == task)
    sample = {} if "data.options" in changes else {"data.name": f"synthetic-{task}"}
    overrides = {
        **model.overrides,
        "training.max_steps": 2,
        "training.warmup_steps": 0,
        "training.log_every": 1,
        "evaluation.every": None,
        "evaluation.test": False,
        "data.validation_examples": 2,
        "data.test_examples": 2,
        **sample,
        **changes,
    }
    summary = train(load_recipe(task, "paper", overrides=overrides), tmp_path / "run")
    assert summary.steps == 2
    assert 0 < summary.train_loss < 20
    if task == "wikitext-103":
        assert summary.parameters > 16 * (2 * 128 * 2048)


def test_a_trial_has_a_path(tmp_path):
    trial = Trial("laptop", "text", ModelSpec("smgk", 1, e_step="hard"), 2)
    assert str(trial) == "laptop/text/smgk-1h-e_step-hard-seed-2"
    assert trial.path(tmp_path, ".json") == tmp_path / "laptop" / "text" / "smgk-1h-e_step-hard-seed-2.json"
