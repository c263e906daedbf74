"""Every number of the paper's tables, as printed: ``published.yaml``."""

from collections.abc import Mapping
from importlib import resources

import yaml

from mgk.experiments.model_spec import ModelSpec

AVERAGE = "average"
LRA = ("listops", "text", "retrieval")
# Tasks of LRA that the paper leaves out.
EXTRA_TASKS = ("image", "pathfinder")
SEEDS = 5
TITLES = {
    "listops": "ListOps",
    "text": "Text",
    "retrieval": "Retrieval",
    "image": "Image",
    "pathfinder": "Pathfinder",
    "bytes": "Bytes",
    "wikitext-2": "WikiText-2",
    "wikitext-103": "WikiText-103",
}

_FILE = resources.files("mgk.experiments.reproduce") / "published.yaml"
# The models of each table from top to bottom, with a number for each column.
TABLES: Mapping[str, Mapping[ModelSpec, Mapping[str, float]]] = {
    name: {
        ModelSpec.parse(model): dict(zip(table["columns"], numbers, strict=True))
        for model, numbers in table["rows"].items()
    }
    for name, table in yaml.safe_load(_FILE.read_text("utf-8")).items()
}
