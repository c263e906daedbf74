"""What docs/training.md and docs/scaling.md say: their code runs, and their figures are the cost model's."""

import re
from pathlib import Path

import pytest

from mgk.analysis import cost_model
from mgk.training.recipe import load_recipe

DOCS = Path(__file__).parents[2] / "docs"
VOCABULARY = {"text": 257, "wikitext-103": 267_735}


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def test_the_example_of_training_runs(capsys):
    (code,) = blocks("training.md")
    exec(code, {})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_examples_of_scaling_are_accepted(tmp_path):
    names = {}
    for code in blocks("scaling.md"):
        exec(code, names)
    assert names["arguments"](str(tmp_path)).fsdp_config["transformer_layer_cls_to_wrap"] == ["MgkLayer"]
    from mgk.models.modeling import MgkLayer  # noqa: F401  the name that is wrapped


def rows():
    lines = (DOCS / "scaling.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in table if row[0].split(",")[0] in VOCABULARY]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_figures_of_scaling_are_the_cost_models(row):
    task, attention, heads = (part.strip() for part in row[0].split(","))
    recipe = load_recipe(task, "paper")
    model, is_language = recipe.model, task != "text"
    one, eight = (
        cost_model.Sizes(
            attention=attention,
            heads=int(heads),
            head_dim=model.head_dim,
            hidden=model.hidden_size,
            layers=model.num_hidden_layers,
            intermediate=model.intermediate_size,
            length=recipe.data.max_length,
            batch=recipe.training.batch_size // processes,
            vocab=VOCABULARY[task],
            labels=0 if is_language else 2,
            head="language" if is_language else "classification",
            causal=is_language,
            tied=not is_language,
            cutoffs=tuple(model.adaptive_cutoffs or ()),
            cutoff_divisor=model.adaptive_div_value or 4.0,
            position=model.position,
        )
        for processes in (1, 8)
    )
    parameters = cost_model.model_parameters(one).value
    wanted = [
        parameters,
        16 * parameters,
        cost_model.training_flops(one).value,
        cost_model.training_flops(eight).value,
        cost_model.activation_bytes(one).value,
        cost_model.activation_bytes(eight).value,
        8 * parameters * 7 / 8,
    ]
    units = {"MB": 1e6, "GB": 1e9, "T": 1e12}
    for cell, value in zip(row[1:], wanted, strict=True):
        number, _, unit = cell.replace(",", "").partition(" ")
        digits = len(number.partition(".")[2])
        assert float(number) == pytest.approx(round(value / units.get(unit, 1), digits))
