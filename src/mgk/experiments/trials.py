"""One model on one task with one seed, at a preset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from mgk.experiments.model_spec import ModelSpec
from mgk.training.recipe import Recipe, differences, load_recipe

# Fields of recipes, by preset and task.
OVERRIDES: Mapping[str, Mapping[str, Mapping[str, Any]]] = yaml.safe_load(
    (resources.files("mgk.experiments") / "overrides.yaml").read_text("utf-8")
)


@dataclass(frozen=True)
class Trial:
    """One model on one task with one seed.

    Attributes:
        overrides: further fields of the recipe, by path; results keep the whole
            recipe.
        learning_rate: None: the recipe's.
    """

    preset: str
    task: str
    model: ModelSpec
    seed: int
    overrides: Annotated[Mapping[str, Any], Field(exclude=True)] = field(default_factory=dict, compare=False)
    learning_rate: float | None = None

    def __str__(self) -> str:
        rate = "" if self.learning_rate is None else f"-lr-{self.learning_rate:g}"
        return f"{self.preset}/{self.task}/{self.model.slug}{rate}-seed-{self.seed}"

    def path(self, folder: Path, suffix: str = "") -> Path:
        """Its file or folder below a folder that holds one for each trial."""
        return folder / f"{self}{suffix}"

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of its task and preset, with this model and seed."""
        overrides = {**self.overrides, **self.model.overrides, "seed": self.seed}
        if self.learning_rate is not None:
            overrides["training.learning_rate"] = self.learning_rate
        return load_recipe(self.task, self.preset, overrides=overrides)


# Fields that the metrics do not depend on.
PLACE_FIELDS = ("data.folder", "training.threads", "training.workers")


def changes(recipe: Recipe, other: Recipe, ignored: Sequence[str] = PLACE_FIELDS) -> dict[str, tuple[Any, Any]]:
    """The fields in which two recipes differ, by path."""
    return {path: pair for path, pair in differences(recipe, other).items() if path not in ignored}
