"""``mgk reproduce``: every table and figure of the paper, measured here."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import split
from mgk.cli.tables import print_table

if TYPE_CHECKING:
    from mgk.experiments.model_spec import ModelSpec
    from mgk.experiments.plan import Plan
    from mgk.experiments.render.tables import Table
    from mgk.experiments.reproduce.registry import Experiment
    from mgk.experiments.reproduce.runtime_estimate import Estimate
    from mgk.experiments.study import Study
    from mgk.experiments.trials import Trial

# Characters of a line of a table that is not for a terminal.
_WIDTH = 140
# Rounds of the timing.
_ROUNDS = 7


def reproduce(
    name: Annotated[
        str | None,
        Argument(metavar="ID", help="table1 ... table4, fig1 ... fig8, one of ours, a study, plan or all."),
    ] = None,
    preset: Annotated[
        str,
        Option(
            help="paper: as published; workstation: up to an hour a trial; laptop: a quick look; smoke: seconds."
        ),
    ] = "laptop",
    seeds: Annotated[
        int | None,
        Option(
            min=1,
            help="Runs of each model.",
            show_default="paper and workstation 5, laptop 3, smoke 1; of maps 1",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        Option(
            metavar="TASK,...",
            help="Some of its tasks, or image and pathfinder besides.",
            show_default="the paper's",
        ),
    ] = None,
    results: Annotated[
        Path,
        Option(metavar="DIR", file_okay=False, help="Where results are kept, small files to commit."),
    ] = Path("results"),
    runs: Annotated[
        Path | None,
        Option(metavar="DIR", file_okay=False, help="Where models are kept.", show_default="MGK_RUNS"),
    ] = None,
    jobs: Annotated[int, Option(min=1, help="Trials at once; 2 suit 2 cores and small models.")] = 1,
    rank_samples: Annotated[
        int | None,
        Option(
            min=1, help="Attention matrices of each layer whose ranks are taken.", show_default="1000, smoke 8"
        ),
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Measure trials anew that were measured with another recipe.")
    ] = False,
    allow_dirty: Annotated[
        bool, Option("--allow-dirty", help="Measure with uncommitted changes; the results say so.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the trials and the cost, and end.")] = False,
    times: Annotated[
        bool,
        Option("--times", help="Of frontier: time a step and a token of each model now, and end."),
    ] = False,
    list_: Annotated[
        bool, Option("--list", help="Show all experiments, what they cost and what exists.")
    ] = False,
) -> None:
    """Measure a table or figure of the paper: each trial once; interrupted ones continue.

    A trial is one model on one task with one seed; experiments share their trials.
    """
    with cli_errors():
        from mgk.experiments.plan import TABLES_STUDY, find_studies, reproduction_plan
        from mgk.experiments.reproduce.registry import EXPERIMENTS, check_choice, find_experiments
        from mgk.experiments.runner import default_runs_folder
        from mgk.experiments.study import read_study
        from mgk.training.errors import RecipeError

        chosen = None if tasks is None else split(tasks)
        check_choice(preset, chosen)
        if times and name != "frontier":
            raise RecipeError("--times are those of the models of mgk reproduce frontier")
        options = _Options(runs or default_runs_folder(), jobs, dry_run, allow_dirty, overwrite)
        studies = find_studies(results)
        if list_:
            if name not in studies:
                experiments = list(EXPERIMENTS.values()) if name is None else find_experiments(name, studies)
                _list(experiments, preset, seeds, chosen, results)
            for study in studies:
                if name in (None, study):
                    _list_study(read_study(results, study))
            return
        if name in studies:
            if times:
                _measure_times(read_study(results, name))
            else:
                _run_study(read_study(results, name, chosen), options)
            return
        if name is None:
            raise RecipeError("name an experiment, such as table1, or all; mgk reproduce --list shows them")
        experiments = find_experiments(name, studies)
        fitting = [item for item in experiments if item.tasks_at(preset, chosen)]
        if not fitting:
            known = (*experiments[0].tasks_at(preset), *experiments[0].more_tasks)
            raise RecipeError(f"{name} has no task {', '.join(chosen or ())}: it has {', '.join(known)}")
        plan = reproduction_plan(
            fitting, preset, seeds=seeds, tasks=chosen, rank_samples=rank_samples, overwrite=overwrite
        )
        if TABLES_STUDY in studies:
            plan = _as_declared(plan, read_study(results, TABLES_STUDY), options)
        if _run(plan, results, options):
            _write(fitting, preset, results)


def _check_clean() -> None:
    """Raise where the checkout has uncommitted changes."""
    from mgk._util.files import DIRTY, commit_of
    from mgk.training.errors import RecipeError

    if (commit_of(Path(__file__)) or "").endswith(DIRTY):
        raise RecipeError("the checkout has uncommitted changes: commit them, or --allow-dirty")


@dataclass(frozen=True)
class _Options:
    runs: Path
    jobs: int
    dry_run: bool
    allow_dirty: bool
    overwrite: bool


def _check_study(study: "Study", options: _Options) -> None:
    """Raise where its trials must not run yet; show which stages wait."""
    from mgk.experiments.study import check_committed, check_corpus, waiting

    if not options.dry_run:
        check_committed(study)
        check_corpus(study)
    for reason in waiting(study):
        typer.echo(f"waits: {reason}", err=True)


def _run_study(study: "Study", options: _Options) -> None:
    """Run the stages of a study one after the other."""
    from mgk.experiments.plan import TABLES_STUDY

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


def _run_stage(title: str, study: "Study", options: _Options) -> None:
    """Run the trials of a study that has the stages of one title alone."""
    plan = study.plan(overwrite=options.overwrite)
    if title and plan.trials:
        typer.echo(f"{title}:", err=not options.dry_run)
    _run(plan, study.folder, options)


def _write_study(study: "Study", runs: Path) -> None:
    """Write what follows from the trials of a study."""
    from mgk.experiments.compare import demo
    from mgk.experiments.plan import TABLES_STUDY
    from mgk.experiments.render.studies import STUDIES
    from mgk.experiments.reproduce.registry import EXPERIMENTS

    paths = []
    if study.id == TABLES_STUDY:
        for preset in dict.fromkeys(stage.preset for stage in study.stages):
            _write(list(EXPERIMENTS.values()), preset, study.results)
    elif study.id == demo.ID:
        paths = demo.write_demo(study, runs=runs)
    elif study.id in STUDIES:
        paths = STUDIES[study.id].write(study.results)
    for path in paths:
        typer.echo(f"written: {path}")


def _measure_times(study: "Study") -> None:
    """Time the models of the frontier, which takes a quiet machine."""
    from mgk._util.files import write_json
    from mgk._util.progress import Progress
    from mgk.bench.timing import Steps, measure
    from mgk.experiments.render.frontier import TIMES
    from mgk.experiments.step_times import measure_times
    from mgk.experiments.trials import Trial

    first = study.stages[0]
    models = dict.fromkeys(model for stage in study.stages for model in stage.specs)
    trials = [Trial(first.preset, first.task, model, 0, first.overrides) for model in models]
    with Progress("times") as progress:
        steps = Steps(progress, 2 * len(trials) * (_ROUNDS + 1))
        found = measure_times(trials, measure, rounds=_ROUNDS, on_run=steps)
    path = study.folder / TIMES
    write_json(path, found)
    typer.echo(f"written: {path}")
    _write_study(study, study.folder)


def _as_declared(plan: "Plan", study: "Study", options: _Options) -> "Plan":
    """The trials as the plan of the tables declares them, at the presets that it is for."""
    declared = study.extended().adopted(plan)
    if declared is not plan:
        _check_study(study, options)
    return declared


def _run(plan: "Plan", folder: Path, options: _Options) -> bool:
    """Run what is missing, or show it only; whether it was run."""
    from mgk._util.progress import Progress
    from mgk.cli.trial_progress import TrialProgress
    from mgk.experiments.plan import check_data
    from mgk.experiments.reproduce.runtime_estimate import estimate, in_words
    from mgk.experiments.result_store import ResultStore
    from mgk.experiments.runner import run_plan

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


def _write(experiments: Sequence["Experiment"], preset: str, folder: Path) -> None:
    """Write and show the tables and figures."""
    from mgk.experiments.artifacts import gather, write_artifacts
    from mgk.experiments.result_store import ResultStore

    store = ResultStore(folder)
    artifacts = gather(store, preset)
    written = write_artifacts(artifacts, store, experiments)
    for experiment in experiments:
        if experiment.kind == "table" and experiment.id in artifacts.tables:
            _show(artifacts.tables[experiment.id])
    for path in written:
        typer.echo(f"written: {path}")
    typer.echo(f"A page of everything, with verdicts on the claims: mgk report --results {folder}")


def _show_trials(plan: "Plan", estimates: dict["Trial", "Estimate"]) -> None:
    from mgk._util.progress import duration

    for trial in plan.trials:
        state = f"about {duration(estimates[trial].seconds)}" if trial in estimates else "done"
        typer.echo(f"{trial!s:60} {trial.recipe.training.max_steps:>9,} steps  {state}")


def _list(
    experiments: Sequence["Experiment"],
    preset: str,
    seeds: int | None,
    tasks: Sequence[str] | None,
    folder: Path,
) -> None:
    from mgk.experiments.evidence.claims import CLAIMS, power
    from mgk.experiments.evidence.effects import PresetResults
    from mgk.experiments.reproduce.runtime_estimate import estimate, in_words
    from mgk.experiments.result_store import ResultStore

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
            typer.echo("    by formula: a moment")
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


def _list_study(study: "Study") -> None:
    """Its question, and the difference that each pair of models can detect."""
    from mgk.experiments.evidence.claims import compare_pair, power
    from mgk.experiments.evidence.effects import PresetResults
    from mgk.experiments.study import waiting

    study = study.extended()
    found = study.measured
    typer.echo(f"{study.id:15} {study.question}")
    typer.echo(f"    results: {len(found)} of {len(study.trials)} trials")
    for reason in waiting(study):
        typer.echo(f"    waits: {reason}")
    seeds: dict[tuple[str, ModelSpec], set[int]] = {}
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


def _show(table: "Table") -> None:
    from mgk.experiments.render.tables import difference_caption, difference_header, difference_rows, has_paper

    rows = []
    for row in table.rows:
        entries = [(row.entries[column], has_paper(table, column)) for column in table.columns]
        texts = [
            f"{entry.text}\n(paper {entry.paper_text})" if beside else entry.text for entry, beside in entries
        ]
        rows.append([row.model, row.seeds_text, *texts])
    columns = ["model", "seeds", *(table.labels[column] for column in table.columns)]
    shown = [(f"{table.title}, preset {table.preset}", columns, rows)]
    if differences := difference_rows(table):
        shown.append((difference_caption(table), difference_header(table), differences))
    for title, names, lines in shown:
        print_table(title, names, lines, width=None if sys.stdout.isatty() else _WIDTH)
    for note in table.notes:
        typer.echo(f"- {note}")
