"""``mgk compare``: train models under one budget, and see what half the heads cost and give."""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import split
from mgk.experiments.model_spec import parse_contender

if TYPE_CHECKING:
    from mgk.experiments.compare.result import Comparison
    from mgk.experiments.compare.run import Plan, Trial
    from mgk.training.run_dir import RunSummary

BASELINE, CANDIDATES = "softmax:2", "smgk:1,mgk:1"
DEFAULT_OUT = Path("comparison")
# Between two plain lines: few enough for a log file, often enough to see that the job lives.
_SECONDS_BETWEEN_LINES = 15.0


def _contender(text: str) -> str:
    try:
        parse_contender(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _contenders(text: str) -> str:
    if not split(text):
        raise typer.BadParameter("name at least one candidate, such as mgk:4")
    for part in split(text):
        _contender(part)
    return text


def compare(
    task: Annotated[
        str | None, typer.Argument(help="The task of the recipes.", show_default="ListOps at a small scale")
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="ATTENTION:HEADS", callback=_contender, help="What the others are compared to.")
    ] = BASELINE,
    candidates: Annotated[
        str, typer.Option(metavar="ATTENTION:HEADS,...", callback=_contenders, help="The others.")
    ] = CANDIDATES,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 1,
    preset: Annotated[
        str | None, typer.Option(help="paper, laptop or smoke.", show_default="laptop, if a task is given")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of every run.", show_default="the preset's")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="For runs and page.", show_default="comparison-TASK"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any field of all recipes, such as training.batch_size=16."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train finished runs anew.")] = False,
) -> None:
    """Train a baseline and candidates with the same budget, data and seeds; end with a table and a page.

    Without TASK: ListOps with short expressions, generated here, in a few minutes. Runs that are finished are not run
    again, and an interrupted comparison goes on where it was.
    """
    with cli_errors():
        from mgk.experiments.compare.run import check_plan

        plan = _plan(task, preset, baseline, candidates, seeds, steps, out, set_ or [])
        check_plan(plan, overwrite=overwrite)
        _run(plan, overwrite)


def _plan(
    task: str | None,
    preset: str | None,
    baseline: str,
    candidates: str,
    seeds: int,
    steps: int | None,
    out: Path | None,
    assignments: list[str],
) -> "Plan":
    from mgk.experiments.compare.run import QUICK, make_plan
    from mgk.training.recipe import parse_overrides

    overrides: dict[str, Any] = dict(QUICK) if task is None and preset is None else {}
    if steps is not None:
        overrides["training.max_steps"] = steps
    overrides |= parse_overrides(assignments)
    name = task or "listops"
    return make_plan(
        name,
        preset=preset or "laptop",
        baseline=parse_contender(baseline),
        candidates=[parse_contender(part) for part in split(candidates)],
        seeds=seeds,
        out=out or Path(f"{DEFAULT_OUT}-{name}"),
        overrides=overrides,
    )


def _run(plan: "Plan", overwrite: bool) -> None:
    from mgk.experiments.compare.run import conclude, run_plan, write_files

    plan.out.mkdir(parents=True, exist_ok=True)
    with _progress(plan) as show:
        run_plan(plan, overwrite=overwrite, on_step=show.step, on_done=show.done)
        show.say("looking into the models")
        comparison, look = conclude(plan, command=shlex.join(["mgk", *sys.argv[1:]]))
    page = write_files(comparison, look, plan.out)
    _show(comparison)
    typer.echo(f"The page with curves and attention maps: {page.resolve().as_uri()}")


class _Progress:
    """Over all runs: a bar on a terminal, now and then a plain line elsewhere; a line for every finished run."""

    def __init__(self, plan: "Plan", bar: Any) -> None:
        self.plan, self.bar = plan, bar
        self.task = None if bar is None else bar.add_task("starting", total=plan.steps)
        self.numbers = {trial.folder: number for number, trial in enumerate(plan.trials, 1)}
        self.start = self.last = time.monotonic()
        self.skipped = 0

    def step(self, trial: "Trial", done: int, all_done: int) -> None:
        """A step is done."""
        label = f"run {self.numbers[trial.folder]} of {len(self.plan.trials)}: {_name(trial)}"
        if self.bar is not None:
            self.bar.update(self.task, description=label, completed=all_done)
            return
        now = time.monotonic()
        if now - self.last >= _SECONDS_BETWEEN_LINES:
            self.last = now
            trained = max(all_done - self.skipped, 1)
            left = (now - self.start) / trained * (self.plan.steps - all_done)
            self.say(f"{label}: step {done:,} of {trial.recipe.training.max_steps:,}, {left:.0f} s left for all runs")

    def done(self, trial: "Trial", summary: "RunSummary", is_new: bool) -> None:
        """A run is finished."""
        if not is_new:
            self.skipped += trial.recipe.training.max_steps
            if self.bar is not None:
                self.bar.advance(self.task, trial.recipe.training.max_steps)
        value = summary.metrics[f"test_{summary.metric}"]
        how = f"in {summary.seconds:.0f} s" if is_new else "already trained"
        self.say(f"{_name(trial)}: {how}, test {summary.metric} {value:.4g}")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        else:
            print(f"compare: {text}", file=sys.stderr, flush=True)


def _name(trial: "Trial") -> str:
    return f"{trial.contender.name}, seed {trial.seed}"


@contextmanager
def _progress(plan: "Plan") -> Iterator[_Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Progress(plan, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Progress(plan, bar)


def _show(comparison: "Comparison") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from mgk.experiments.compare.page import result_columns, result_rows, summary, table_caption

    table = Table(box=box.SIMPLE_HEAD, caption=table_caption(comparison), caption_justify="left")
    for number, column in enumerate(result_columns(comparison)):
        table.add_column(column, justify="right" if number else "left", no_wrap=number < 2, min_width=len(column))
    for result, row in zip(comparison.results, result_rows(comparison), strict=True):
        table.add_row(result.name, *row[1:])
    Console().print(table)
    for sentence in summary(comparison)[1:]:
        typer.echo(sentence)
