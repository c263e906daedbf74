"""Studies: trials that a file declares before they are run. Does not import torch.

``results/STUDY/plan.yaml`` is the plan of a study, ``results/plan.yaml`` of the paper's tables.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from pathlib import Path
from statistics import stdev
from typing import Any, Literal

import yaml

from mgk._util import json_codec
from mgk._util.files import is_committed, read_json
from mgk.data.errors import DataError
from mgk.experiments.evidence.effects import PresetResults
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.plan import PLAN, TABLES_STUDY, Plan
from mgk.experiments.result_store import ResultStore, TrialResult
from mgk.experiments.trials import Trial
from mgk.training.errors import RecipeError

CHOSEN: Literal["chosen"] = "chosen"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Every combination of seeds, learning rates, initialisations and models.

    Attributes:
        models: names such as ``mgk:4`` or ``mgk:4 mixtures=3``.
        inits: initialisations of queries, keys and shifts; None: the recipe's.
        learning_rates: None: the recipe's; "chosen": that of the model's family in ``rates``.
        overrides: fields of the recipe, by path.
        title: the purpose of the stage.
        max_seeds: the most seeds until the pairs' intervals are narrow enough; None: no
            more than ``seeds``.
    """

    task: str
    models: tuple[str, ...]
    seeds: tuple[int, ...]
    preset: str = "laptop"
    inits: tuple[str | float | None, ...] = (None,)
    learning_rates: tuple[float | Literal["chosen"] | None, ...] = (None,)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    max_seeds: int | None = None
    rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def specs(self) -> list[ModelSpec]:
        """The models."""
        return [ModelSpec.parse(model) for model in self.models]

    @property
    def is_ready(self) -> bool:
        """Whether all learning rates are known."""
        return CHOSEN not in self.learning_rates or all(family(model) in self.rates for model in self.specs)

    @property
    def trials(self) -> list[Trial]:
        """All of them, in order."""
        combinations = product(self.seeds, self.learning_rates, self.inits, self.specs)
        return [
            Trial(
                self.preset,
                self.task,
                model if init is None else replace(model, init=init),
                seed,
                self.overrides,
                self.rates[family(model)] if rate == CHOSEN else rate,
            )
            for seed, rate, init, model in combinations
        ]


@dataclass(frozen=True)
class Pair:
    """Two models that are compared: is the candidate better, or comparable or better?

    Attributes:
        use: the situation in which one chooses between the two.
        half_width: half the 95% interval, in per cent or points; stages with ``max_seeds``
            grow until it is reached; None: they do not for this pair.
    """

    candidate: str
    baseline: str
    asks: Literal["better", "comparable"] = "better"
    use: str = ""
    half_width: float | None = None

    @property
    def specs(self) -> tuple[ModelSpec, ModelSpec]:
        """Candidate and baseline."""
        return ModelSpec.parse(self.candidate), ModelSpec.parse(self.baseline)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, the trials that answer it, stage by stage, and the decision rule.

    Attributes:
        id: the name of the study.
        results: the folder of all results.
        pairs: models that are compared, by the margins of the decision rules.
        rates: the file with the chosen learning rates, below ``results``.
        corpus: how the name of the text of ``bytes`` must begin.
        claims: the paper's claims that the trials decide.
        margins: the margins of the decision rules, by metric.
        stopping: when no more trials are run.
    """

    id: str
    results: Path
    question: str
    criterion: str
    stages: tuple[Stage, ...]
    sha256: str
    pairs: tuple[Pair, ...] = ()
    rates: str | None = None
    corpus: str | None = None
    claims: tuple[str, ...] = ()
    margins: Mapping[str, float] = field(default_factory=dict)
    stopping: str = ""

    @property
    def folder(self) -> Path:
        """The folder of the plan and of the study's results."""
        return self.results if self.id == TABLES_STUDY else self.results / self.id

    @property
    def store(self) -> ResultStore:
        """The store of the study's results."""
        return ResultStore(self.folder)

    @property
    def measured(self) -> tuple[TrialResult, ...]:
        """The results so far."""
        return self.store.found(self.trials)

    @property
    def trials(self) -> list[Trial]:
        """Each once, by stage; without stages that wait for learning rates."""
        ready = (stage.trials for stage in self.stages if stage.is_ready)
        return list(dict.fromkeys(trial for trials in ready for trial in trials))

    def plan(self, *, overwrite: bool = False) -> Plan:
        """The plan of all trials."""
        commands = dict.fromkeys(self.trials, f"mgk reproduce {self.id}")
        return Plan(commands, overwrite="changed" if overwrite else "none", sha256=self.sha256)

    def extended(self) -> "Study":
        """The study with further seeds of the stages whose first ones are measured.

        Stein's rule: n = (t s / d)^2 seeds, s the standard deviation of a pair's differences
        over the first n0 seeds, t = t_0.975 of n0 - 1, d the half-width.
        """
        further: list[Stage] = []
        for stage in self.stages:
            if stage.max_seeds is None or not stage.is_ready:
                continue
            needed = self._seeds_needed(stage)
            first = len(stage.seeds)
            for number in range(first, min(stage.max_seeds, max(needed.values(), default=0))):
                models = tuple(name for name in stage.models if needed.get(name, 0) > number)
                seed = stage.seeds[0] + number
                further.append(replace(stage, models=models, seeds=(seed,), max_seeds=None))
        return replace(self, stages=(*self.stages, *further))

    def _seeds_needed(self, stage: Stage) -> dict[str, int]:
        """The number of seeds that the pairs of a stage take, by model."""
        from scipy.stats import t

        found = PresetResults(stage.preset, self.store.found(stage.trials))
        needed: dict[str, int] = {}
        for pair in self.pairs:
            if pair.half_width is None:
                continue
            names = (pair.candidate, pair.baseline)
            values = found.differences(stage.task, *pair.specs)
            if not set(names) <= set(stage.models) or len(values) < len(stage.seeds):
                continue
            quantile = t.ppf(0.975, len(values) - 1)
            count = ceil((quantile * stdev(values) / pair.half_width) ** 2)
            needed |= {name: max(count, needed.get(name, 0)) for name in names}
        return needed

    def adopted(self, plan: Plan) -> Plan:
        """The trials of a plan as declared here; others at these presets are left out."""
        declared: dict[tuple[str, str, ModelSpec], list[Trial]] = {}
        for trial in self.trials:
            declared.setdefault((trial.preset, trial.task, trial.model), []).append(trial)
        presets = {stage.preset for stage in self.stages}
        if not presets & {trial.preset for trial in plan.trials}:
            return plan
        commands: dict[Trial, str] = {}
        analyzed = set()
        for trial, command in plan.commands.items():
            for one in declared.get((trial.preset, trial.task, trial.model), []):
                commands.setdefault(one, command)
                if trial in plan.analyzed and one.seed == trial.seed:
                    analyzed.add(one)
        return replace(plan, commands=commands, analyzed=frozenset(analyzed), sha256=self.sha256)


def family(model: ModelSpec) -> str:
    """The family of models that share a learning rate; grouped softmax is its own."""
    is_grouped = model.attention == "softmax" and model.key_value_heads is not None
    return "grouped" if is_grouped else model.attention


def read_study(results: Path, name: str, tasks: Collection[str] | None = None) -> Study:
    """The study of that name in a folder of results, with the stages of some tasks."""
    path = (results if name == TABLES_STUDY else results / name) / PLAN
    text = path.read_bytes()
    try:
        fields = {**yaml.safe_load(text), "id": name, "results": results}
        study = json_codec.load(Study, {**fields, "sha256": hashlib.sha256(text).hexdigest()})
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise RecipeError(f"{path}: this is not the plan of a study ({error})") from None
    stages = tuple(stage for stage in study.stages if tasks is None or stage.task in tasks)
    if not stages:
        known = ", ".join(dict.fromkeys(stage.task for stage in study.stages))
        raise RecipeError(f"{name} has no task {', '.join(tasks or ())}: it has {known}")
    if study.rates is not None:
        file = results / study.rates
        chosen = read_json(file)["chosen"] if file.is_file() else {}
        stages = tuple(replace(stage, rates=chosen.get(stage.task, {})) for stage in stages)
    return replace(study, stages=stages)


def check_committed(study: Study) -> None:
    """Raise unless the plan and its learning rates are committed.

    A plan made after its results decides nothing.
    """
    if not is_committed(study.folder / PLAN):
        raise RecipeError(f"{study.folder / PLAN}: commit this plan before its trials are run")
    if study.rates is None:
        return
    file = study.results / study.rates
    if not study.trials:
        command = f"mgk reproduce {Path(study.rates).parent}"
        raise RecipeError(f"{file}: no learning rate is chosen yet: {command}")
    if not is_committed(file):
        raise RecipeError(f"{file}: commit these learning rates before the trials are run")


def check_corpus(study: Study) -> None:
    """Raise where the text of ``bytes`` is another one than the plan's."""
    from mgk.data.preparation import prepared

    trials = [trial for trial in study.trials if trial.task == "bytes" and trial.preset != "smoke"]
    if study.corpus is None or not trials:
        return
    folder = trials[0].recipe.data.folder
    _, manifest = prepared("bytes", folder)
    corpus = str(manifest.facts["corpus"])
    if not corpus.startswith(study.corpus):
        raise DataError(
            f"the text of bytes is {corpus!r}, and the plan wants {study.corpus!r}: prepare that one, or set"
            " MGK_DATA to the folder that has it"
        )


def waiting(study: Study) -> Iterator[str]:
    """Why some stages have no trials yet."""
    for task in dict.fromkeys(stage.task for stage in study.stages if not stage.is_ready):
        command = f"mgk reproduce {Path(study.rates or '').parent} --tasks {task}"
        yield f"no learning rate is chosen for {task} yet: {command}"
