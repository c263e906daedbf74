"""Recipes: what each preset says, overrides, files, errors; all without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgk.training.recipe import (
    FORMAT,
    PRESETS,
    TASKS,
    ModelSection,
    RecipeError,
    differences,
    load_recipe,
    parse_overrides,
    read_recipe,
    write_recipe,
)
from mgk.variants import ModelOptions

# Steps, batch and warm-up of the paper's settings; length of an example.
PAPER = {
    "listops": (5_000, 32, 1_000, 2_000),
    "text": (20_000, 32, 8_000, 4_000),
    "retrieval": (30_000, 32, 800, 4_000),
    "image": (35_000, 256, 175, 1_024),
    "pathfinder": (62_400, 256, 312, 1_024),
    "wikitext-103": (500_000, 96, 2_000, 256),
}


@pytest.mark.parametrize("task", PAPER)
def test_paper_is_what_the_paper_says(task):
    recipe = load_recipe(task, "paper")
    training, model = recipe.training, recipe.model
    assert (training.max_steps, training.batch_size, training.warmup, recipe.data.max_length) == PAPER[task]
    assert (training.weight_decay, model.hidden_dropout_prob, model.num_mixtures) == (0.0, 0.1, 2)
    assert recipe.data.name == task
    sizes = (model.num_hidden_layers, model.hidden_size, model.intermediate_size, model.head_dim)
    if task == "wikitext-103":
        assert sizes == (16, 128, 2_048, 16)
        assert (training.learning_rate, model.attention_probs_dropout_prob) == (2.5e-4, 0.0)
        assert (recipe.evaluation.window, recipe.evaluation.stride, recipe.evaluation.max_tokens) == (
            256,
            1,
            None,
        )
        assert model.adaptive_cutoffs == [20_000, 40_000, 200_000]
    else:
        assert sizes == (2, 64, 128, 32)
        assert (training.learning_rate, model.attention_probs_dropout_prob) == (1e-4, 0.1)
        assert (model.position, model.pooling, training.schedule) == ("learned", "mean", "linear")


def test_wikitext_2_has_the_model_of_wikitext_103():
    small, large = load_recipe("wikitext-2", "paper"), load_recipe("wikitext-103", "paper")
    assert [path for path in differences(small, large) if path.startswith("model")] == [
        "model.adaptive_cutoffs"
    ]


@pytest.mark.parametrize("task", TASKS)
def test_other_presets_are_smaller_and_smoke_needs_no_data(task):
    paper, workstation, laptop, smoke = (load_recipe(task, preset) for preset in PRESETS)
    steps = [recipe.training.max_steps for recipe in (smoke, laptop, workstation, paper)]
    assert steps == sorted(steps)
    assert smoke.data.name == f"synthetic-{task}"
    assert paper.model.head_dim == workstation.model.head_dim == laptop.model.head_dim


@pytest.mark.parametrize("task", [task for task in TASKS if task != "bytes"])
@pytest.mark.parametrize("preset", ["paper", "laptop", "smoke"])
def test_presets_with_committed_results_name_the_start_that_they_were_measured_from(task, preset):
    assert load_recipe(task, preset).model.init == "paper"


def test_a_recipe_of_format_1_had_the_start_of_the_paper(tmp_path):
    recipe = load_recipe("listops", "smoke")
    text = recipe.to_yaml().replace(f"format: {FORMAT}", "format: 1").replace("  init: paper\n", "")
    assert "init" not in text
    (tmp_path / "recipe.yaml").write_text(text)
    assert read_recipe(tmp_path / "recipe.yaml") == recipe
    (tmp_path / "recipe.yaml").write_text(text.replace("format: 1", f"format: {FORMAT}"))
    assert read_recipe(tmp_path / "recipe.yaml").model.init is None


def test_recipe_and_configuration_have_the_same_options():
    from mgk.models import MgkConfig

    options = set(ModelSection.model_fields)
    assert options == set(ModelOptions.__annotations__) | {"num_labels"}
    assert options == {name for name in options if hasattr(MgkConfig(), name)}


def test_overrides_reach_any_field():
    recipe = load_recipe(
        "listops",
        "laptop",
        overrides={"model.attention": "smgk", "training.learning_rate": "1e-3", "data.options": {}, "seed": 3},
    )
    assert (recipe.model.attention, recipe.training.learning_rate, recipe.data.options, recipe.seed) == (
        "smgk",
        1e-3,
        {},
        3,
    )
    assert recipe.model["attention"] == "smgk"


def test_values_of_assignments_are_yaml():
    assert parse_overrides(["a.b=1", "c=[1, 2]", "d=x=y", "e=null"]) == {
        "a.b": 1,
        "c": [1, 2],
        "d": "x=y",
        "e": None,
    }


@pytest.mark.parametrize("text", ["abc", "=1", "a=[1"])
def test_wrong_assignments_are_named(text):
    with pytest.raises(RecipeError, match=r"is not"):
        parse_overrides([text])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.atention": "mgk"}, "there is no field 'model.atention'; did you mean 'model.attention'?"),
        ({"max_steps": 2}, "there is no field 'max_steps'; did you mean 'training.max_steps'?"),
        ({"training.model.x": 2}, "there is no field 'training.model'"),
        ({"model.attention": "mgkk"}, "model.attention: .* got 'mgkk'; did you mean 'mgk'?"),
        ({"training.max_steps": "many"}, "training.max_steps: .* got 'many'"),
        ({"training.max_steps": 0}, "training.max_steps: .* greater than or equal to 1, got 0"),
        ({"training.max_steps": 10}, "warmup_steps of 1000 exceed max_steps of 10: set both"),
        (
            {"training.batch_size": 7, "training.accumulation": 2},
            "batch_size of 7 does not divide by accumulation of 2",
        ),
        ({"model.hidden_dropout_prob": 2.0}, "model.hidden_dropout_prob: .* got 2.0"),
        ({"evaluation.split": "test"}, "select must be 'last'"),
        ({"task": "text"}, "task is not a field to set"),
        ({"seed": -1}, "seed: .* got -1"),
        ({"model": 3}, "model: .* got 3"),
    ],
)
def test_wrong_fields_and_values_are_named(overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("listops", "paper", overrides=overrides)


@pytest.mark.parametrize(
    ("task", "preset", "message"),
    [
        ("lstops", "paper", "there is no task 'lstops'; did you mean 'listops'?"),
        ("cooking", "paper", "choose one of listops, text"),
        ("text", "papers", "there is no preset 'papers'; did you mean 'paper'?"),
    ],
)
def test_unknown_names_suggest_the_nearest(task, preset, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(task, preset)


@given(
    task=st.sampled_from(TASKS),
    preset=st.sampled_from(PRESETS),
    heads=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
    rate=st.floats(1e-9, 1.0),
)
def test_a_recipe_reads_back_as_it_was_written(tmp_path_factory, task, preset, heads, seed, rate):
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    changes = {"model.num_attention_heads": heads, "seed": seed, "training.learning_rate": rate}
    recipe = load_recipe(task, preset, overrides=changes)
    write_recipe(recipe, path)
    assert read_recipe(path) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: 9\n", f"a recipe of format 9, from a newer mgk; this one reads format {FORMAT}"),
        ("task: text\n", "this is not a recipe: it has no 'format'"),
        ("- 1\n", "this is not a recipe"),
        ("a: [1\nb: 2\n", "line 2: this is not YAML"),
        ("format: 1\ntask: text\n", "the field 'model' is missing"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_recipe(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.yaml: cannot be read"):
        read_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match=r"zero: this is not a recipe: it has more than 67,108,864 bytes"):
        read_recipe(Path("/dev/zero"))


def test_recipes_need_no_torch():
    code = (
        "import sys, mgk.training.run_dir, mgk.training.recipe;"
        "mgk.training.recipe.load_recipe('text'); print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ("{a: " * 100_000, "it is nested too deeply"),
        ("format: 1\ntask: listops\ntask: text\n", "line 3: this is not YAML (the key 'task' occurs twice)"),
        ("format: 1\ntraining: {max_steps: 1, max_steps: 2}\n", "the key 'max_steps' occurs twice"),
    ],
    ids=["list", "mapping", "twice", "twice inside"],
)
def test_hostile_yaml_is_one_sentence(tmp_path, text, reason):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError) as error:
        read_recipe(tmp_path / "recipe.yaml")
    assert reason in str(error.value)
    with pytest.raises(RecipeError, match="is not YAML"):
        parse_overrides([f"model={text}"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training.learning_rate", float("inf")),
        ("training.learning_rate", float("nan")),
        ("training.weight_decay", float("inf")),
        ("training.threads", 99_999_999),
        ("training.workers", 99_999_999),
        ("training.batch_size", 10**12),
    ],
)
def test_absurd_numbers_are_named(path, value):
    with pytest.raises(RecipeError, match=rf"{path}.*: input should be .*, got "):
        load_recipe("listops", "smoke", overrides={path: value})
