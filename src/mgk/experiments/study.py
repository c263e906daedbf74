"""Studies: trials that a file declares before they are run. Does not import torch.

``results/STUDY/plan.yaml`` is the plan of a study, ``results/plan.yaml`` of the paper's tables.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
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
from mgk.experiments.result_store import TrialResult
from mgk.experiments.trials import Trial
from mgk.training.errors import RecipeError

CHOSEN: Literal["chosen"] = "chosen"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Every combination of seeds, learning rates, initialisations and models.

    Attributes:
        models: as in ``mgk:4`` or ``mgk:4 mixtures=3``.
        inits: of queries, keys and shifts; None: the recipe's.
        learning_rates: None: the recipe's; "chosen": that of the model's family in ``rates``.
        overrides: fields of the recipe, by path.
        title: what it is for.
        max_seeds: how many seeds there may be until the pairs' intervals are narrow
            enough; None: no more.
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
        use: when somebody chooses between the two.
        half_width: of the 95% interval, in per cent or points: stages with ``max_seeds`` grow
            until it is reached; None: they do not for this pair.
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
    """What is asked, the trials that answer it, stage by stage, and the rule by which they do.

    Attributes:
        pairs: that are compared, by the margins of the decision rules.
        rates: the file with the chosen learning rates.
        corpus: how the name of the text of ``bytes`` must begin.
        claims: of the paper that the trials decide.
        margins: of the decision rules, by metric.
        stopping: when no more trials are run.
    """

    id: str
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
    def trials(self) -> list[Trial]:
        """Each once, by stage; without stages that wait for learning rates."""
        ready = (stage.trials for stage in self.stages if stage.is_ready)
        return list(dict.fromkeys(trial for trials in ready for trial in trials))

    def plan(self, *, overwrite: bool = False) -> Plan:
        """The plan of all trials."""
        trials = tuple(self.trials)
        commands = dict.fromkeys(trials, f"mgk reproduce {self.id}")
        return Plan(trials, commands, overwrite="changed" if overwrite else "none", sha256=self.sha256)

    def extended(self, results: Sequence[TrialResult]) -> "Study":
        """With further seeds behind the stages whose first ones are measured.

        Stein's rule: n = (t s / d)^2 seeds, s the standard deviation of a pair's differences
        over the first n0 seeds, t = t_0.975 of n0 - 1, d the half-width.
        """
        further: list[Stage] = []
        for stage in self.stages:
            if stage.max_seeds is None or not stage.is_ready:
                continue
            needed = self.seeds_needed(stage, results)
            first = len(stage.seeds)
            for number in range(first, min(stage.max_seeds, max(needed.values(), default=0))):
                models = tuple(name for name in stage.models if needed.get(name, 0) > number)
                seed = stage.seeds[0] + number
                further.append(replace(stage, models=models, seeds=(seed,), max_seeds=None))
        return replace(self, stages=(*self.stages, *further))

    def seeds_needed(self, stage: Stage, results: Sequence[TrialResult]) -> dict[str, int]:
        """By model of the stage: the seeds that its pairs take."""
        from scipy.stats import t

        found = PresetResults(stage.preset, [one for one in results if one.trial.seed in stage.seeds])
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
            found = declared.get((trial.preset, trial.task, trial.model), [])
            for one in found:
                commands.setdefault(one, command)
                if trial in plan.analyzed and one.seed == trial.seed:
                    analyzed.add(one)
        return replace(
            plan,
            trials=tuple(commands),
            commands=commands,
            analyzed=frozenset(analyzed),
            sha256=self.sha256,
        )


def family(model: ModelSpec) -> str:
    """Of models that share a learning rate; grouped softmax is its own."""
    is_grouped = model.attention == "softmax" and model.key_value_heads is not None
    return "grouped" if is_grouped else model.attention


def study_folder(results: Path, name: str) -> Path:
    """The folder of a study's plan and results."""
    return results if name == TABLES_STUDY else results / name


def read_study(folder: Path, results: Path | None = None) -> Study:
    """The study of a folder.

    Args:
        folder: that its plan is in.
        results: where chosen learning rates are; by default the folder above.
    """
    path = folder / PLAN
    text = path.read_bytes()
    try:
        values = yaml.safe_load(text)
        name = TABLES_STUDY if folder == results else folder.name
        fields = {**values, "id": name, "sha256": hashlib.sha256(text).hexdigest()}
        study = json_codec.load(Study, fields)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise RecipeError(f"{path}: this is not the plan of a study ({error})") from None
    if study.rates is None:
        return study
    file = (results or folder.parent) / study.rates
    chosen = read_json(file)["chosen"] if file.is_file() else {}
    stages = (replace(stage, rates=chosen.get(stage.task, {})) for stage in study.stages)
    return replace(study, stages=tuple(stages))


def check_committed(folder: Path, study: Study | None = None, results: Path | None = None) -> None:
    """Raise unless the plan and its learning rates are committed.

    A plan made after its results decides nothing.
    """
    if not is_committed(folder / PLAN):
        raise RecipeError(f"{folder / PLAN}: commit this plan before its trials are run")
    if study is None or study.rates is None:
        return
    file = (results or folder.parent) / study.rates
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
