"""Every number of the paper's tables, as printed: ``published.yaml``."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

import yaml

from mgk.experiments.model_spec import ModelSpec

AVERAGE = "average"
LRA = ("listops", "text", "retrieval")
# In LRA and not in the paper: columns of ours.
EXTRA_TASKS = ("image", "pathfinder")
SEEDS = 5


def _model(text: str) -> ModelSpec:
    """``smgk:1 e_step=hard``."""
    name, *options = text.split()
    given: dict[str, Any] = dict(option.split("=") for option in options)
    return replace(ModelSpec.parse(name), **given)


_FILE = resources.files("mgk.experiments.reproduce") / "published.yaml"
# The models of each table from top to bottom, with a number for each column.
TABLES: Mapping[str, Mapping[ModelSpec, Mapping[str, float]]] = {
    name: {
        _model(model): dict(zip(table["columns"], numbers, strict=True))
        for model, numbers in table["rows"].items()
    }
    for name, table in yaml.safe_load(_FILE.read_text("utf-8")).items()
}
