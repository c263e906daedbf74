"""``mgk reproduce``: every table and figure of the paper, measured here."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import split

if TYPE_CHECKING:
    from mgk.experiments.artifacts import Outputs
    from mgk.experiments.reproduce.registry import Experiment
    from mgk.experiments.reproduce.run import Plan
    from mgk.experiments.reproduce.runtime_estimate import Estimate
    from mgk.experiments.result_store import ResultStore, TrialResult
    from mgk.experiments.trials import Trial

# Between two plain lines: few enough for a log file, often enough to see that the job lives.
_SECONDS_BETWEEN_LINES = 30.0
# Of tables that go into a file.
_WIDTH = 140


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="ID", help="table1 ... table4, fig1 ... fig8, one of ours, or all.")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="paper: as published; laptop: minutes a trial; smoke: seconds, on made-up data.")
    ] = "laptop",
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each model.", show_default="paper 5, laptop 3, smoke 1; of maps 1"),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASK,...", help="Some of its tasks, or image and pathfinder besides.", show_default="the paper's"
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option(metavar="DIR", file_okay=False, help="Where results are kept, small files to commit.")
    ] = Path("results"),
    runs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Where models are kept.", show_default="MGK_RUNS"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cells at once; 2 suit 2 cores and small models.")] = 1,
    matrices: Annotated[
        int | None, typer.Option(min=1, help="Of each layer, whose ranks are taken.", show_default="1000, smoke 8")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Measure trials anew that were measured by another recipe.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the trials and the cost, and end.")] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="Show all experiments, what they cost and what exists.")
    ] = False,
) -> None:
    """Measure a table or figure of the paper: each trial once, continued where it was interrupted.

    A trial is one model on one task with one seed; experiments share their trials.
    """
    with cli_errors():
        from mgk.experiments.reproduce.registry import EXPERIMENTS, check_choice, find_experiments
        from mgk.training.errors import RecipeError

        chosen_tasks = None if tasks is None else split(tasks)
        check_choice(preset, chosen_tasks)
        if list_:
            shown = list(EXPERIMENTS.values()) if name is None else find_experiments(name)
            _list(shown, preset, seeds, chosen_tasks, results)
            return
        if name is None:
            raise RecipeError("name an experiment, such as table1, or all; mgk reproduce --list shows them")
        experiments = find_experiments(name)
        fitting = [item for item in experiments if item.tasks_at(preset, chosen_tasks)]
        if not fitting:
            known = (*experiments[0].tasks_at(preset), *experiments[0].more_tasks)
            raise RecipeError(f"{name} has no task {', '.join(chosen_tasks or ())}: it has {', '.join(known)}")
        _reproduce(fitting, preset, seeds, chosen_tasks, results, runs, jobs, matrices, overwrite, dry_run)


def _reproduce(
    experiments: Sequence["Experiment"],
    preset: str,
    seeds: int | None,
    tasks: Sequence[str] | None,
    folder: Path,
    runs: Path | None,
    jobs: int,
    matrices: int | None,
    overwrite: bool,
    dry_run: bool,
) -> None:
    from mgk.experiments.artifacts import gather, write_outputs
    from mgk.experiments.reproduce.run import check_data, make_plan, run_plan, runs_folder
    from mgk.experiments.reproduce.runtime_estimate import estimate, in_words
    from mgk.experiments.result_store import ResultStore

    store = ResultStore(folder)
    plan = make_plan(experiments, preset, seeds=seeds, tasks=tasks, matrices=matrices)
    if not overwrite:
        for trial in plan.trials:
            store.check_same(trial)
    missing = plan.missing(store, overwrite=overwrite)
    if missing and not dry_run:
        check_data(missing)
    estimates = estimate(missing, store)
    if plan.trials:
        done = len(plan.trials) - len(missing)
        cost = f"; {len(missing)} to run, {in_words(estimates)}" if missing else ""
        typer.echo(f"{len(plan.trials)} trials, {done} done{cost}", err=not dry_run)
    if dry_run:
        _show_trials(plan, store, estimates)
        return
    with _progress(plan, estimates, jobs) as show:
        run_plan(
            plan,
            store,
            runs or runs_folder(),
            jobs=jobs,
            overwrite=overwrite,
            on_progress=show.progress,
            on_done=show.done,
        )
    outputs = gather(store, preset)
    written = write_outputs(outputs, store, experiments)
    for experiment in experiments:
        _show(experiment, outputs)
    for path in written:
        typer.echo(f"written: {path}")
    typer.echo(f"A page of everything: mgk report --results {folder}")


def _show_trials(plan: "Plan", store: "ResultStore", estimates: dict["Trial", "Estimate"]) -> None:
    from mgk._util.progress import duration

    for trial in plan.trials:
        state = f"about {duration(estimates[trial].seconds)}" if trial in estimates else "done"
        typer.echo(f"{trial.name:60} {trial.recipe.training.max_steps:>9,} steps  {state}")


def _list(
    experiments: Sequence["Experiment"], preset: str, seeds: int | None, tasks: Sequence[str] | None, folder: Path
) -> None:
    from mgk.experiments.artifacts import presets_of
    from mgk.experiments.reproduce.runtime_estimate import estimate, in_words
    from mgk.experiments.result_store import ResultStore

    store = ResultStore(folder)
    others = [name for name in presets_of(store) if name != preset]
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
        typer.echo(f"    results: {len(trials) - len(missing)} of {len(trials)} trials at preset {preset}{cost}")
    if others:
        typer.echo(f"\nThere are results at preset {', '.join(others)} too.")
    typer.echo("\nExperiments share their trials: run one with mgk reproduce ID, everything with mgk reproduce all.")


class _Progress:
    """Over all trials, by their estimated time: a bar on a terminal, now and then a plain line elsewhere."""

    def __init__(self, plan: "Plan", estimates: dict["Trial", "Estimate"], jobs: int, bar: Any) -> None:
        self.plan, self.bar, self.jobs = plan, bar, jobs
        self.weights = {trial: max(item.seconds, 1e-3) for trial, item in estimates.items()}
        self.total = sum(self.weights.values())
        self.parts: dict[Trial, float] = {}
        # What a resumed trial had done before tells nothing of how fast this machine is.
        self.before: dict[Trial, float] = {}
        self.finished = 0
        self.start = self.last = time.monotonic()
        self.task = None if bar is None else bar.add_task("starting", total=self.total, left="")

    def progress(self, trial: "Trial", part: float) -> None:
        """A trial has come so far."""
        self.before.setdefault(trial, part)
        self.parts[trial] = part
        label = f"{self.finished} of {len(self.weights)} trials, {trial.name} {part:.0%}"
        left = self._left()
        if self.bar is not None:
            self.bar.update(self.task, description=label, completed=self._done(), left=left)
        elif time.monotonic() - self.last >= _SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.say(f"{label}, {left}")

    def done(self, trial: "Trial", record: "TrialResult") -> None:
        """A trial is finished."""
        self.finished += 1
        self.before.setdefault(trial, 0.0)
        self.parts[trial] = 1.0
        name = record.metric.replace("_", " ")
        unit = "%" if record.summary.metric == "accuracy" else ""
        self.say(
            f"{self.finished} of {len(self.weights)}: {trial.name}, {name} {record.test:.2f}{unit}, in"
            f" {record.seconds:.0f} s, {self._left()}"
        )

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, soft_wrap=True)
        else:
            print(f"reproduce: {text}", file=sys.stderr, flush=True)

    def _done(self) -> float:
        return sum(self.weights.get(trial, 0.0) * part for trial, part in self.parts.items())

    def _left(self) -> str:
        from mgk._util.progress import duration

        worked = sum(self.weights.get(trial, 0.0) * (part - self.before[trial]) for trial, part in self.parts.items())
        elapsed = time.monotonic() - self.start
        rate = worked / elapsed if worked > 0 and elapsed > 1 else float(self.jobs)
        return f"{duration((self.total - self._done()) / rate)} left"


@contextmanager
def _progress(plan: "Plan", estimates: dict["Trial", "Estimate"], jobs: int) -> Iterator[_Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal or not estimates:
        yield _Progress(plan, estimates, jobs, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%  {task.fields[left]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Progress(plan, estimates, jobs, bar)


def _show(experiment: "Experiment", outputs: "Outputs") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from mgk.experiments.render.tables import difference_caption, difference_header, difference_rows, has_paper

    table = outputs.tables.get(experiment.id)
    if table is None:
        return
    rows = []
    for row in table.rows:
        entries = [(row.entries[column], has_paper(table, column)) for column in table.columns]
        trials = [f"{entry.text}\n(paper {entry.paper_text})" if beside else entry.text for entry, beside in entries]
        rows.append([row.model, row.seeds_text, *trials])
    columns = ["model", "seeds", *(table.labels[column] for column in table.columns)]
    shown = [(f"{table.title}, preset {table.preset}", columns, rows)]
    if difference_rows(table):
        shown.append((difference_caption(table), difference_header(table), difference_rows(table)))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for title, columns, cells_of_rows in shown:
        grid = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for number, column in enumerate(columns):
            grid.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
        for trials in cells_of_rows:
            grid.add_row(*trials)
        console.print(grid)
    for note in table.notes:
        typer.echo(f"- {note}")
