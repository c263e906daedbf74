"""Studies: trials that a file declares before they are run, ``RESULTS/STUDY/plan.yaml``. Does not import torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from mgk._util import json_codec
from mgk._util.files import is_committed
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.plan import Plan
from mgk.experiments.trials import Trial
from mgk.training.errors import RecipeError

PLAN = "plan.yaml"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Some trials: every combination of seeds, learning rates, starts and models, the models within the rest.

    Attributes:
        models: as in ``mgk:4``.
        inits: of queries, keys and shifts; None: the recipe's.
        learning_rates: None: the recipe's.
        overrides: fields of the recipe, by path.
    """

    task: str
    models: tuple[str, ...]
    seeds: tuple[int, ...]
    preset: str = "laptop"
    inits: tuple[str | float | None, ...] = (None,)
    learning_rates: tuple[float | None, ...] = (None,)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trials(self) -> list[Trial]:
        """All of them, in order."""
        return [
            Trial(
                self.preset, self.task, replace(ModelSpec.parse(model), init=init), seed, self.overrides, rate
            )
            for seed, rate, init, model in product(self.seeds, self.learning_rates, self.inits, self.models)
        ]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is asked, the trials that answer it, stage by stage, and the rule by which they do."""

    id: str
    question: str
    criterion: str
    stages: tuple[Stage, ...]
    sha256: str

    @property
    def trials(self) -> list[Trial]:
        """Each once, in the order of the stages."""
        return list(dict.fromkeys(trial for stage in self.stages for trial in stage.trials))

    def plan(self, *, overwrite: bool = False) -> Plan:
        """The plan of all trials."""
        trials = tuple(self.trials)
        commands = dict.fromkeys(trials, f"mgk reproduce {self.id}")
        return Plan(trials, commands, overwrite="changed" if overwrite else "none", sha256=self.sha256)


def find_studies(results: Path) -> list[str]:
    """The names of the studies in a folder of results."""
    return sorted(path.parent.name for path in results.glob(f"*/{PLAN}"))


def read_study(folder: Path) -> Study:
    """The study of a folder."""
    path = folder / PLAN
    text = path.read_bytes()
    try:
        values = yaml.safe_load(text)
        fields = {**values, "id": folder.name, "sha256": hashlib.sha256(text).hexdigest()}
        return json_codec.load(Study, fields)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise RecipeError(f"{path}: this is not the plan of a study ({error})") from None


def check_committed(folder: Path) -> None:
    """Raise unless the plan was committed as it is: a plan made after its results decides nothing."""
    if not is_committed(folder / PLAN):
        raise RecipeError(f"{folder / PLAN}: commit this plan before its trials are run")
