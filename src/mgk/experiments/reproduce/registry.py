"""Every table and figure as an experiment: its models and tasks.

``experiments.yaml`` declares them. On the laptop, rows have 2 and 1 heads, and
WikiText-2 takes the place of WikiText-103.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
from typing import Any, Literal

import yaml

from mgk._util import json_codec
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.reproduce.published import LRA, SEEDS, TABLES
from mgk.experiments.trials import OVERRIDES, Trial
from mgk.training.recipe import PRESETS, TASKS, check_name

Kind = Literal["table", "curves", "maps", "cost"]

SEEDS_OF_PRESET = {"paper": SEEDS, "workstation": 5, "laptop": 3, "smoke": 1}
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure.

    Attributes:
        kind: a table; curves over training; maps, ranks and heads of trained
            models; or costs by formula.
        claim: what the paper says it shows; of ours, the question.
        models: as in the paper, from top to bottom.
        more_tasks: that can be chosen besides.
        is_language: whether the task is WikiText: 103 in the paper, 2 on the laptop.
        shrink: on the laptop, the divisor of the number of heads; None keeps the rows
            with 2 and 1 heads.
        is_ours: whether the paper has no such table.
    """

    id: str
    kind: Kind
    title: str
    claim: str
    models: tuple[ModelSpec, ...] = ()
    tasks: tuple[str, ...] = LRA
    more_tasks: tuple[str, ...] = ()
    is_language: bool = False
    shrink: int | None = None
    is_ours: bool = False

    def models_at(self, preset: str) -> tuple[ModelSpec, ...]:
        """The models at a preset."""
        if preset == "paper":
            return self.models
        if self.shrink is not None:
            return tuple(model.scaled(1 / self.shrink) for model in self.models)
        return tuple(model for model in self.models if model.heads <= (1 if model.is_mixture else 2))

    def published(self, model: ModelSpec, preset: str) -> ModelSpec:
        """The model of the paper that corresponds to one at a preset."""
        return model if preset == "paper" or self.shrink is None else model.scaled(self.shrink)

    def reference(self, model: ModelSpec, preset: str) -> ModelSpec | None:
        """The baseline with twice the heads, or with as many where that is all there is.

        In our own tables the paper's setting; of feature maps, linear attention with
        the same map; of contexts, attention to everything.
        """
        if not model.is_mixture and (self.id != "context" or model.window is None):
            return None
        if self.is_ours:
            default = ModelSpec(model.attention, model.heads)
            if self.id == "feature-maps":
                return replace(model, attention=model.baseline(model.heads).attention)
            if self.id == "context":
                return model.baseline(2)
            return default if default != model else None
        twice, equal = (model.baseline(heads) for heads in (2 * model.heads, model.heads))
        models = self.models_at(preset)
        return equal if twice not in models and equal in models else twice

    def tasks_at(self, preset: str, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
        """The tasks at a preset, or those of the chosen ones that it has."""
        if self.is_language:
            language = "wikitext-103" if preset == "paper" else "wikitext-2"
            return (language,) if chosen is None or language in chosen else ()
        if chosen is None:
            return self.tasks
        return tuple(task for task in (*self.tasks, *self.more_tasks) if task in chosen)

    def seeds_at(self, preset: str, seeds: int | None = None) -> int:
        """The number of seeds: the preset's, or one where models are analyzed."""
        return seeds or (1 if self.kind == "maps" else SEEDS_OF_PRESET[preset])

    def trials(
        self, preset: str, *, seeds: int | None = None, tasks: Sequence[str] | None = None
    ) -> list[Trial]:
        """All trials, seed by seed, so that a first whole table is there early."""
        return [
            make_trial(preset, task, model, seed)
            for seed in range(self.seeds_at(preset, seeds))
            for task in self.tasks_at(preset, tasks)
            for model in self.models_at(preset)
        ]

    def command(self, preset: str, *, seeds: int | None = None, tasks: Sequence[str] | None = None) -> str:
        """The command that makes it."""
        options = f" --preset {preset}"
        if seeds is not None:
            options += f" --seeds {seeds}"
        if tasks is not None:
            options += f" --tasks {','.join(tasks)}"
        return f"mgk reproduce {self.id}{options}"


def make_trial(preset: str, task: str, model: ModelSpec, seed: int) -> Trial:
    """A trial of the reproduction, with the fields of ``overrides.yaml``."""
    return Trial(preset, task, model, seed, OVERRIDES.get(preset, {}).get(task, {}))


def find_experiments(name: str, studies: Sequence[str] = ()) -> list[Experiment]:
    """The experiment of a name, or all of them; an error suggests studies, too."""
    if name != ALL:
        check_name("experiment", name, [*EXPERIMENTS, ALL, *studies])
    return list(EXPERIMENTS.values()) if name == ALL else [EXPERIMENTS[name]]


def check_choice(preset: str, tasks: Sequence[str] | None) -> None:
    """Raise for a preset or a task that does not exist."""
    check_name("preset", preset, PRESETS)
    for task in tasks or ():
        check_name("task", task, TASKS)


def _read_experiments() -> dict[str, Experiment]:
    file = resources.files("mgk.experiments.reproduce") / "experiments.yaml"
    text = file.read_text("utf-8")
    return {
        name: json_codec.load(
            Experiment, {**fields, "id": name, "models": _models(name, fields.get("models", []))}
        )
        for name, fields in yaml.safe_load(text).items()
    }


def _models(name: str, declared: list[str] | dict[str, list[Any]]) -> list[ModelSpec]:
    if name in TABLES:
        return list(TABLES[name])
    if isinstance(declared, dict):
        options = (zip(declared, values, strict=True) for values in product(*declared.values()))
        return [ModelSpec(**dict(chosen)) for chosen in options]
    return [ModelSpec.parse(model) for model in declared]


EXPERIMENTS = _read_experiments()
