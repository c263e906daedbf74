"""Trains contenders under one budget, from the same seeds and in the same order of data, and compares them.

Each run has a process of its own, so its time and memory are its own. A run that is finished is not run again, one
that was interrupted goes on from its last checkpoint, and one that was trained by another recipe is not mistaken for
this one.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from mgk._util.errors import Interrupted
from mgk.analysis.confidence_intervals import mean_accuracy, mean_difference, paired_difference
from mgk.data.preparation import prepared
from mgk.data.task_registry import find_task
from mgk.experiments.compare.result import Comparison, Curve, Look, Result
from mgk.experiments.model_spec import Contender
from mgk.experiments.subprocess_runner import ProcessError, run_isolated
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.recipe import Recipe, differences, load_recipe, read_recipe
from mgk.training.run_dir import RECIPE, SUMMARY, RunSummary, read_correct, read_metrics, read_summary

COMPARISON = "comparison.json"
PAGE = "comparison.html"
RUNS = "runs"

# Imported once, for all runs.
_PRELOAD = ("mgk.training.run", "mgk.experiments.inspect_runs", "torch.utils.tensorboard")

# ListOps at a scale that learns in under a minute on one core: short expressions, small steps. On such small tensors a
# second thread helps little, and costs much where another program wants the core.
QUICK: Mapping[str, Any] = {
    "data.options": {
        "seed": 0,
        "train": 60_000,
        "validation": 1_000,
        "test": 2_000,
        "min_length": 6,
        "max_length": 40,
        "max_depth": 4,
        "max_args": 5,
    },
    "data.max_length": 40,
    "training.max_steps": 2_000,
    "training.batch_size": 64,
    "training.learning_rate": 2e-3,
    "training.threads": 1,
    "training.log_every": 20,
    "training.save_every": 500,
    "evaluation.every": 200,
    "evaluation.batch_size": 250,
}


@dataclass(frozen=True)
class Trial:
    """One run of the comparison."""

    contender: Contender
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def is_finished(self) -> bool:
        """Whether the run has its summary."""
        return (self.folder / SUMMARY).is_file()


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, the baseline's first for every seed."""

    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]
    trials: tuple[Trial, ...]
    out: Path

    @property
    def steps(self) -> int:
        """Of all runs."""
        return sum(trial.recipe.training.max_steps for trial in self.trials)

    def trials_of(self, contender: Contender) -> list[Trial]:
        """The runs of a contender, by seed."""
        return [trial for trial in self.trials if trial.contender == contender]


# Told after each step: the run, its steps that are done, and those of all runs.
OnStep = Callable[[Trial, int, int], None]
# Told after each run, with whether it was trained now.
OnDone = Callable[[Trial, RunSummary, bool], None]


def make_plan(
    task: str,
    *,
    preset: str = "laptop",
    baseline: Contender,
    candidates: Sequence[Contender],
    seeds: int = 1,
    out: Path,
    overrides: Mapping[str, Any] | None = None,
) -> Plan:
    """The runs of a comparison.

    Args:
        task: of the recipes.
        preset: of the recipes.
        baseline: what the others are compared to.
        candidates: the others.
        seeds: how many runs of each, with the seeds 0, 1, ...
        out: the folder of the comparison.
        overrides: fields of all recipes, by path; a "seed" is the first of the seeds.

    Returns:
        The plan: recipes that differ in attention, heads and seed alone.
    """
    contenders = tuple(dict.fromkeys([baseline, *candidates]))
    if len(contenders) < 2 or len(contenders) != 1 + len(candidates):
        raise RecipeError("a comparison needs a baseline and other candidates, each once")
    if seeds < 1:
        raise RecipeError(f"seeds must be at least 1, got {seeds}")
    shared = dict(overrides or {})
    for path in ("model.attention", "model.num_attention_heads"):
        if path in shared:
            raise RecipeError(f"{path} is what is compared: name it in the baseline and the candidates")
    first = shared.pop("seed", 0)
    numbers = tuple(range(first, first + seeds))
    trials = []
    for seed in numbers:
        for contender in contenders:
            recipe = load_recipe(
                task,
                preset,
                overrides={
                    **shared,
                    "model.attention": contender.attention,
                    "model.num_attention_heads": contender.heads,
                    "seed": seed,
                },
            )
            if not recipe.evaluation.test:
                raise RecipeError("evaluation.test must be true: the test split is what is compared")
            folder = out / RUNS / f"{contender.attention}-{contender.heads}-seed-{seed}"
            trials.append(Trial(contender, seed, recipe, folder))
    return Plan(contenders, numbers, tuple(trials), out)


def check_plan(plan: Plan, *, overwrite: bool = False) -> None:
    """Raise, before anything is trained, where data are absent or a run's folder holds one of another recipe."""
    data = plan.trials[0].recipe.data
    if not data.options and not find_task(data.name).is_synthetic:
        prepared(data.name, data.folder)
    for trial in () if overwrite else plan.trials:
        if not (trial.folder / RECIPE).is_file():
            continue
        for path, (now, then) in differences(trial.recipe, read_recipe(trial.folder / RECIPE)).items():
            raise RecipeError(
                f"{trial.folder}: this run was trained with {path} = {then!r}, not {now!r}: choose another --out, or"
                " --overwrite it"
            )


def run_plan(plan: Plan, *, overwrite: bool = False, on_step: OnStep, on_done: OnDone) -> list[RunSummary]:
    """Train whatever is not trained yet.

    Args:
        plan: the runs.
        overwrite: whether to train finished runs anew, and to replace runs of other recipes.
        on_step: told of every step.
        on_done: told of every run that is finished, and whether it was trained now.

    Returns:
        The summaries, in the order of the plan.
    """
    check_plan(plan, overwrite=overwrite)
    before = 0
    summaries = []
    for trial in plan.trials:
        is_new = overwrite or not trial.is_finished
        if is_new:
            tell = partial(_tell, on_step, trial, before)
            try:
                run_isolated(_train, trial.recipe, trial.folder, overwrite, on_message=tell, preload=_PRELOAD)
            except (Interrupted, KeyboardInterrupt):
                raise Interrupted(
                    f"{trial.folder}: stopped; the same command goes on from its last checkpoint"
                ) from None
            except ProcessError as error:
                raise TrainingError(
                    f"{trial.folder}: {error}; the same command goes on from its last checkpoint"
                ) from None
        before += trial.recipe.training.max_steps
        summary = read_summary(trial.folder)
        summaries.append(summary)
        on_done(trial, summary, is_new)
    return summaries


def _tell(on_step: OnStep, trial: Trial, before: int, steps: tuple[int, int]) -> None:
    on_step(trial, steps[0], before + steps[0])


def _train(recipe: Recipe, folder: Path, overwrite: bool, send: Callable[[Any], None]) -> None:
    from mgk.training.run import train

    replaces = overwrite and folder.exists()
    train(recipe, folder, resume=not replaces, overwrite=replaces, on_step=lambda done, total: send((done, total)))


def conclude(plan: Plan, *, command: str) -> tuple[Comparison, Look]:
    """Compare the runs of a plan, which are all finished; and look into the first model of each contender."""
    look: Look = run_isolated(_look, plan, preload=_PRELOAD)
    baseline = plan.trials_of(plan.contenders[0])
    results = tuple(_result(plan.trials_of(contender), baseline, look) for contender in plan.contenders)
    summary = read_summary(baseline[0].folder)
    return (
        Comparison(
            task=summary.task,
            data=summary.data,
            preset=summary.preset,
            metric=summary.metric,
            chance=look.chance,
            test_examples=summary.examples,
            length=look.length,
            steps=summary.steps,
            seeds=plan.seeds,
            results=results,
            command=command,
            machine=look.machine,
            date=look.date,
            recipe=baseline[0].recipe.to_yaml(),
        ),
        look,
    )


def _look(plan: Plan, send: Callable[[Any], None]) -> Look:
    from mgk.experiments.inspect_runs import look_at_runs

    return look_at_runs({contender.name: plan.trials_of(contender)[0].folder for contender in plan.contenders})


def _result(trials: Sequence[Trial], baseline: Sequence[Trial], look: Look) -> Result:
    summaries = [read_summary(trial.folder) for trial in trials]
    metric = summaries[0].metric
    values = tuple(summary.metrics[f"test_{metric}"] for summary in summaries)
    lines = [read_metrics(trial.folder) for trial in trials]
    peaks = [summary.peak_memory_bytes for summary in summaries]
    contender = trials[0].contender
    is_baseline = contender == baseline[0].contender
    paired = gap = None
    if metric == "accuracy":
        correct = [read_correct(trial.folder) for trial in trials]
        score = mean_accuracy(correct)
        if not is_baseline:
            paired = paired_difference(correct, [read_correct(trial.folder) for trial in baseline])
    else:
        score = mean_difference(values, [0.0] * len(values))
        if not is_baseline:
            theirs = [read_summary(trial.folder).metrics[f"test_{metric}"] for trial in baseline]
            gap = mean_difference(values, theirs)
    flops = look.flops[contender.name]
    return Result(
        name=contender.name,
        title=contender.title,
        parameters=summaries[0].parameters,
        flops=flops.value,
        flops_formula=flops.explain(),
        seconds_per_step=median(summary.seconds_per_step for summary in summaries),
        peak_memory_bytes=None if None in peaks else max(peak for peak in peaks if peak is not None),
        values=values,
        score=score,
        losses=tuple(_curve(run, "loss") for run in lines),
        validation=tuple(_curve(run, f"eval_{metric}") for run in lines),
        paired=paired,
        gap=gap,
        runs=tuple(trial.folder.name for trial in trials),
    )


def _curve(lines: Sequence[Mapping[str, Any]], name: str) -> Curve:
    return tuple((float(line["step"]), float(line[name])) for line in lines if name in line)


def write_files(comparison: Comparison, look: Look, out: Path) -> Path:
    """Write the page and its data into the folder of the comparison, each whole or not at all; the page's path."""
    from mgk.experiments.compare.page import comparison_page

    _write(out / COMPARISON, json.dumps(comparison.to_json(), indent=1) + "\n")
    _write(out / PAGE, comparison_page(comparison, look))
    return out / PAGE


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
