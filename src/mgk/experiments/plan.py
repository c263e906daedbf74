"""The trials of a comparison or of experiments, and what is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mgk.data.errors import DataError
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.result_store import ResultStore
from mgk.experiments.trials import OVERRIDES, PLACE_FIELDS, Trial, changes
from mgk.training.errors import RecipeError
from mgk.training.recipe import differences
from mgk.training.run_dir import MODEL, RECIPE, read_run_recipe

if TYPE_CHECKING:
    from mgk.experiments.reproduce.registry import Experiment

# Attention matrices of each layer whose ranks are taken.
RANK_SAMPLES = {"paper": 1000, "workstation": 1000, "laptop": 1000, "smoke": 8}

# Declares the trials of its folder of results (mgk.experiments.study).
PLAN = "plan.yaml"
# The study of the paper's tables, whose folder is that of all results.
TABLES_STUDY = "plan"

# Bytes at a scale that learns in about a minute on one core.
QUICK: Mapping[str, Any] = OVERRIDES["quick"]["bytes"]


@dataclass(frozen=True)
class Plan:
    """Trials to be run.

    Attributes:
        commands: each trial, in the order in which they run, with the command for it.
        analyzed: the trials whose model a figure shows.
        inspected: the trials whose model a page shows.
        rank_samples: attention matrices of each layer in the analysis.
        overwrite: which results to replace: none, those measured with another
            recipe, or all.
        ignored_fields: of the recipe, in which a result may differ.
        sha256: of the committed file that declares the trials, if one does.
    """

    commands: Mapping[Trial, str]
    analyzed: frozenset[Trial] = frozenset()
    rank_samples: int = 0
    overwrite: Literal["none", "changed", "all"] = "none"
    ignored_fields: tuple[str, ...] = PLACE_FIELDS
    inspected: tuple[Trial, ...] = ()
    sha256: str | None = None

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All of them, in order."""
        return tuple(self.commands)

    @property
    def models(self) -> list[ModelSpec]:
        """Each once, in the order of the trials."""
        return list(dict.fromkeys(trial.model for trial in self.trials))

    def missing(self, store: ResultStore, runs: Path) -> list[Trial]:
        """The trials that are to be run or analyzed.

        Raises:
            RecipeError: where a result or a run has another recipe and is not
                overwritten.
        """
        found = []
        for trial in self.trials:
            result = store.read(trial)
            if result is None:
                if ((run := trial.path(runs)) / RECIPE).is_file():
                    self._check_same(run, differences(trial.recipe, read_run_recipe(run)))
            elif changed := changes(trial.recipe, result.recipe, self.ignored_fields):
                self._check_same(store.path(trial), changed)
                result = None
            is_analyzed = trial not in self.analyzed or store.analysis_path(trial).is_file()
            has_model = trial not in self.inspected or (trial.path(runs) / MODEL).is_dir()
            if result is None or not is_analyzed or not has_model or self.overwrite == "all":
                found.append(trial)
        return found

    def _check_same(self, path: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
        for name, (now, then) in changed.items() if self.overwrite == "none" else ():
            how = f"this was trained with {name} = {then!r}, not {now!r}"
            raise RecipeError(f"{path}: {how}: choose another folder, or --overwrite it")


def find_studies(results: Path) -> list[str]:
    """The names of the studies in a folder of results."""
    names = sorted(path.parent.name for path in results.glob(f"*/{PLAN}"))
    return [*names, *([TABLES_STUDY] if (results / PLAN).is_file() else [])]


def comparison_plan(
    task: str,
    *,
    baseline: ModelSpec,
    candidates: Sequence[ModelSpec],
    preset: str = "laptop",
    seeds: int = 1,
    overrides: Mapping[str, Any] | None = None,
    command: str = "mgk compare",
    overwrite: bool = False,
) -> Plan:
    """The trials of a comparison: they differ in model and seed alone.

    Args:
        seeds: trials of each model, with the seeds 0, 1, ...
        overrides: fields of all recipes; a "seed" is the first one.
    """
    models = list(dict.fromkeys([baseline, *candidates]))
    if len(models) < 2 or len(models) != 1 + len(candidates):
        raise RecipeError("a comparison needs a baseline and other candidates, each once")
    if seeds < 1:
        raise RecipeError(f"seeds must be at least 1, got {seeds}")
    shared = dict(overrides or {})
    for path in ("model.attention", "model.num_attention_heads", "model.num_key_value_heads"):
        if path in shared:
            advice = "name it in the baseline and the candidates"
            raise RecipeError(f"{path} is what is compared: {advice}")
    first = shared.pop("seed", 0)
    trials = tuple(
        Trial(preset, task, model, seed, shared) for seed in range(first, first + seeds) for model in models
    )
    if not all(trial.recipe.evaluation.test for trial in trials):
        raise RecipeError("evaluation.test must be true: the test split is what is compared")
    return Plan(
        dict.fromkeys(trials, command),
        overwrite="all" if overwrite else "none",
        ignored_fields=("data.folder",),  # threads change the compared times
        inspected=trials[: len(models)],  # of the first seed
    )


def reproduction_plan(
    experiments: Sequence["Experiment"],
    preset: str,
    *,
    seeds: int | None = None,
    tasks: Sequence[str] | None = None,
    rank_samples: int | None = None,
    overwrite: bool = False,
) -> Plan:
    """The trials of some experiments at a preset, each once."""
    commands: dict[Trial, str] = {}
    analyzed = set()
    for experiment in experiments:
        for trial in experiment.trials(preset, seeds=seeds, tasks=tasks):
            commands.setdefault(trial, experiment.command(preset, seeds=seeds, tasks=tasks))
            if experiment.kind == "maps":
                analyzed.add(trial)
    samples = rank_samples or RANK_SAMPLES[preset]
    return Plan(commands, frozenset(analyzed), samples, "changed" if overwrite else "none")


def check_data(trials: Sequence[Trial]) -> None:
    """Raise ``DataError`` for data that are absent."""
    wrong = []
    for data in {trial.task: trial.recipe.data for trial in trials}.values():
        try:
            data.check()
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        raise DataError("; ".join(wrong))
