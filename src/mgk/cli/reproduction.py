"""What ``mgk reproduce`` does: runs plans and studies, lists them, shows tables."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import typer

from mgk._util import files
from mgk._util.progress import Progress, duration
from mgk.cli.tables import print_table
from mgk.cli.trial_progress import TrialProgress
from mgk.experiments.artifacts import gather, write_artifacts
from mgk.experiments.compare import demo
from mgk.experiments.evidence.claims import CLAIMS, compare_pair, power
from mgk.experiments.evidence.effects import PresetResults
from mgk.experiments.plan import TABLES_STUDY, Plan, check_data
from mgk.experiments.render.frontier import TIMES
from mgk.experiments.render.studies import STUDIES
from mgk.experiments.render.tables import Table
from mgk.experiments.reproduce.registry import EXPERIMENTS, Experiment
from mgk.experiments.reproduce.runtime_estimate import Estimate, estimate, in_words
from mgk.experiments.result_store import ResultStore
from mgk.experiments.runner import run_plan
from mgk.experiments.study import Study, check_committed, check_corpus, waiting
from mgk.experiments.trials import Trial
from mgk.training.errors import RecipeError

# Characters of a line of a table that is not for a terminal.
_WIDTH = 140
# Rounds of the timing.
_ROUNDS = 7


@dataclass(frozen=True)
class Options:
    """How trials are run."""

    runs: Path
    jobs: int
    dry_run: bool
    allow_dirty: bool
    overwrite: bool


def _check_clean() -> None:
    """Raise where the checkout has uncommitted changes."""
    if (files.commit_of(Path(__file__)) or "").endswith(files.DIRTY):
        raise RecipeError("the checkout has uncommitted changes: commit them, or --allow-dirty")


def _check_study(study: Study, options: Options) -> None:
    """Raise where its trials must not run yet; show which stages wait."""
    if not options.dry_run:
        check_committed(study)
        check_corpus(study)
    for reason in waiting(study):
        typer.echo(f"waits: {reason}", err=True)


def run_study(study: Study, options: Options) -> None:
    """Run the stages of a study one after the other."""
    _check_study(study, options)
    if study.id != TABLES_STUDY:
        options = replace(options, runs=options.runs / study.id)
    try:
        for title in dict.fromkeys(stage.title for stage in study.stages):
            stages = tuple(stage for stage in study.stages if stage.title == title)
            _run_stage(title, replace(study, stages=stages), options)
        # Further seeds come last: a new point tells more than a narrower interval.
        further = study.extended().stages[len(study.stages) :]
        _run_stage("further seeds", replace(study, stages=further), options)
    finally:  # also where it was interrupted
        if not options.dry_run:
            _write_study(study, options.runs)


def _run_stage(title: str, study: Study, options: Options) -> None:
    """Run the trials of a study that has the stages of one title alone."""
    plan = study.plan(overwrite=options.overwrite)
    if title and plan.trials:
        typer.echo(f"{title}:", err=not options.dry_run)
    run(plan, study.folder, options)


def _write_study(study: Study, runs: Path) -> None:
    """Write what follows from the trials of a study."""
    paths = []
    if study.id == TABLES_STUDY:
        for preset in dict.fromkeys(stage.preset for stage in study.stages):
            write(list(EXPERIMENTS.values()), preset, study.results)
    elif study.id == demo.ID:
        paths = demo.write_demo(study, runs=runs)
    elif study.id in STUDIES:
        paths = STUDIES[study.id].write(study.results)
    for path in paths:
        typer.echo(f"written: {path}")


def measure_times(study: Study) -> None:
    """Time the models of the frontier, which takes a quiet machine."""
    from mgk.bench.timing import Steps, measure
    from mgk.experiments.step_times import measure_times

    first = study.stages[0]
    models = dict.fromkeys(model for stage in study.stages for model in stage.specs)
    trials = [Trial(first.preset, first.task, model, 0, first.overrides) for model in models]
    with Progress("times") as progress:
        steps = Steps(progress, 2 * len(trials) * (_ROUNDS + 1))
        found = measure_times(trials, measure, rounds=_ROUNDS, on_run=steps)
    path = study.folder / TIMES
    files.write_json(path, found)
    typer.echo(f"written: {path}")
    _write_study(study, study.folder)


def as_declared(plan: Plan, study: Study, options: Options) -> Plan:
    """The trials as the plan of the tables declares them, at the presets that it is for."""
    declared = study.extended().adopted(plan)
    if declared is not plan:
        _check_study(study, options)
    return declared


def run(plan: Plan, folder: Path, options: Options) -> bool:
    """Run what is missing, or show it only; whether it was run."""
    store = ResultStore(folder)
    missing = plan.missing(store, options.runs)
    if not options.dry_run:
        check_data(missing)
        if any(trial.preset != "smoke" for trial in missing) and not options.allow_dirty:
            _check_clean()
    estimates = estimate(missing, store)
    if plan.trials:
        cost = f"; {len(missing)} to run, {in_words(estimates)}" if missing else ""
        done = len(plan.trials) - len(missing)
        typer.echo(f"{len(plan.trials)} trials, {done} done{cost}", err=not options.dry_run)
    if options.dry_run:
        _show_trials(plan, estimates)
    elif missing:
        with Progress("reproduce") as progress:
            show = TrialProgress(
                progress, {trial: max(item.seconds, 1e-3) for trial, item in estimates.items()}
            )
            run_plan(plan, store, options.runs, jobs=options.jobs, on_progress=show.update, on_done=show.done)
    return not options.dry_run


def write(experiments: Sequence[Experiment], preset: str, folder: Path) -> None:
    """Write and show the tables and figures."""
    store = ResultStore(folder)
    artifacts = gather(store, preset)
    written = write_artifacts(artifacts, store, experiments)
    for experiment in experiments:
        if experiment.kind == "table" and experiment.id in artifacts.tables:
            _show(artifacts.tables[experiment.id])
    for path in written:
        typer.echo(f"written: {path}")
    typer.echo(f"A page of everything, with verdicts on the claims: mgk report --results {folder}")


def _show_trials(plan: Plan, estimates: dict[Trial, Estimate]) -> None:
    for trial in plan.trials:
        state = f"about {duration(estimates[trial].seconds)}" if trial in estimates else "done"
        typer.echo(f"{trial!s:60} {trial.recipe.training.max_steps:>9,} steps  {state}")


def list_experiments(
    experiments: Sequence[Experiment],
    preset: str,
    seeds: int | None,
    tasks: Sequence[str] | None,
    folder: Path,
) -> None:
    """Show claims, models, costs and results of experiments, and what seeds can detect."""
    store = ResultStore(folder)
    results = PresetResults(preset, store.results(preset))
    others = [name for name in store.presets if name != preset]
    for experiment in experiments:
        if tasks is not None and not experiment.tasks_at(preset, tasks):
            continue
        trials = experiment.trials(preset, seeds=seeds, tasks=tasks)
        missing = [trial for trial in trials if not store.has(trial)]
        typer.echo(f"{experiment.id:14}{experiment.title}")
        typer.echo(f"    {'asks' if experiment.is_ours else 'the paper'}: {experiment.claim}")
        if not trials:
            typer.echo("    by formula: nothing is run")
            continue
        models = "; ".join(model.title for model in experiment.models_at(preset))
        typer.echo(f"    models: {models}")
        names = ", ".join(experiment.tasks_at(preset, tasks))
        if experiment.more_tasks and tasks is None:
            names += f" (more with --tasks: {', '.join(experiment.more_tasks)})"
        typer.echo(f"    tasks: {names}; seeds: {experiment.seeds_at(preset, seeds)}")
        cost = f"; the rest takes {in_words(estimate(missing, store))}" if missing else ""
        done = f"{len(trials) - len(missing)} of {len(trials)}"
        typer.echo(f"    results: {done} trials at preset {preset}{cost}")
        if experiment.kind == "table":
            planned = experiment.seeds_at(preset, seeds)
            for claim in CLAIMS:
                if experiment.id in claim.experiments:
                    evidence = claim.verdict(results).evidence
                    typer.echo(f"    claim {claim.id}: {power(evidence, planned)}")
    if others:
        typer.echo(f"\nThere are results at preset {', '.join(others)} too.")
    typer.echo("\nExperiments share their trials: run one with mgk reproduce ID, all with mgk reproduce all.")


def list_study(study: Study) -> None:
    """Its question, and the difference that each pair of models can detect."""
    study = study.extended()
    found = study.measured
    typer.echo(f"{study.id:15} {study.question}")
    typer.echo(f"    results: {len(found)} of {len(study.trials)} trials")
    for reason in waiting(study):
        typer.echo(f"    waits: {reason}")
    seeds: dict[tuple[str, Any], set[int]] = {}
    for trial in study.trials:
        seeds.setdefault((trial.task, trial.model), set()).add(trial.seed)
    known = PresetResults(study.stages[0].preset, found)
    for pair, task in product(study.pairs, dict.fromkeys(task for task, _ in seeds)):
        common = set.intersection(*(seeds.get((task, model), set()) for model in pair.specs))
        if common:
            item = compare_pair(known, [task], *pair.specs, is_comparable=pair.asks == "comparable")
            what = f"{pair.candidate} {pair.asks} vs {pair.baseline} on {task}"
            aim = f"; seeds follow up to a half-width of {pair.half_width:g}" if pair.half_width else ""
            typer.echo(f"    {what}: {power([item], len(common))}{aim}")


def _show(table: Table) -> None:
    rows = []
    for row in table.rows:
        entries = [(row.entries[column], table.has_paper(column)) for column in table.columns]
        texts = [
            f"{entry.text}\n(paper {entry.paper_text})" if beside else entry.text for entry, beside in entries
        ]
        rows.append([row.model, row.seeds_text, *texts])
    columns = ["model", "seeds", *(table.labels[column] for column in table.columns)]
    shown = [(f"{table.title}, preset {table.preset}", columns, rows)]
    if (differences := table.differences) is not None:
        shown.append(differences)
    for title, names, lines in shown:
        print_table(title, names, lines, width=None if sys.stdout.isatty() else _WIDTH)
    for note in table.notes:
        typer.echo(f"- {note}")
