"""``mgk reproduce``: every table and figure of the paper, measured here."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import split


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
        from mgk.cli import reproduction as steps
        from mgk.experiments.plan import TABLES_STUDY, find_studies, reproduction_plan
        from mgk.experiments.reproduce.registry import EXPERIMENTS, check_choice, find_experiments
        from mgk.experiments.runner import default_runs_folder
        from mgk.experiments.study import read_study
        from mgk.training.errors import RecipeError

        chosen = None if tasks is None else split(tasks)
        check_choice(preset, chosen)
        if times and name != "frontier":
            raise RecipeError("--times are those of the models of mgk reproduce frontier")
        options = steps.Options(runs or default_runs_folder(), jobs, dry_run, allow_dirty, overwrite)
        studies = find_studies(results)
        if list_:
            if name not in studies:
                experiments = list(EXPERIMENTS.values()) if name is None else find_experiments(name, studies)
                steps.list_experiments(experiments, preset, seeds, chosen, results)
            for study in studies:
                if name in (None, study):
                    steps.list_study(read_study(results, study))
            return
        if name in studies:
            if times:
                steps.measure_times(read_study(results, name))
            else:
                steps.run_study(read_study(results, name, chosen), options)
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
            plan = steps.as_declared(plan, read_study(results, TABLES_STUDY), options)
        if steps.run(plan, results, options):
            steps.write(fitting, preset, results)
