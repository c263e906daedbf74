"""``mgk compare``: train models under one budget, and compare their accuracy and cost."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import split

if TYPE_CHECKING:
    from mgk.experiments.compare.result import Comparison
    from mgk.experiments.model_analysis import Inspection
    from mgk.experiments.plan import Plan

BASELINE, CANDIDATES = "softmax:2", "smgk:1,mgk:1"


def _check_model(text: str) -> str:
    from mgk.experiments.model_spec import ModelSpec

    try:
        ModelSpec.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _check_models(text: str) -> str:
    if not split(text):
        raise typer.BadParameter("name at least one candidate, such as mgk:4")
    for part in split(text):
        _check_model(part)
    return text


def compare(
    task: Annotated[
        str | None, typer.Argument(help="The task of the recipes.", show_default="ListOps at a small scale")
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="ATTENTION:HEADS", callback=_check_model, help="What the others are compared to.")
    ] = BASELINE,
    candidates: Annotated[
        str, typer.Option(metavar="ATTENTION:HEADS,...", callback=_check_models, help="The others.")
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

    Without TASK: ListOps with short expressions, generated here, in a few minutes. Finished runs are not run again, and
    an interrupted comparison continues where it was.
    """
    with cli_errors():
        from mgk.experiments.model_spec import ModelSpec
        from mgk.experiments.plan import QUICK, comparison_plan
        from mgk.training.recipe import parse_overrides

        overrides: dict[str, Any] = dict(QUICK) if task is None and preset is None else {}
        if steps is not None:
            overrides["training.max_steps"] = steps
        name = task or "listops"
        plan = comparison_plan(
            name,
            baseline=ModelSpec.parse(baseline),
            candidates=[ModelSpec.parse(part) for part in split(candidates)],
            preset=preset or "laptop",
            seeds=seeds,
            overrides=overrides | parse_overrides(set_ or []),
            command=shlex.join(["mgk", *sys.argv[1:]]),
            overwrite=overwrite,
        )
        folder = out or Path(f"comparison-{name}")
        comparison, inspection = _run(plan, folder)
        page = _write(comparison, inspection, folder)
        _show(comparison)
        typer.echo(f"The page with curves and attention maps: {page.resolve().as_uri()}")


def _run(plan: "Plan", folder: Path) -> tuple["Comparison", "Inspection"]:
    """Run what is missing, and compare."""
    from mgk._util.progress import Progress
    from mgk.cli.trial_progress import TrialProgress, describe
    from mgk.experiments.compare.result import compare_results
    from mgk.experiments.model_analysis import inspect_models
    from mgk.experiments.plan import check_data
    from mgk.experiments.result_store import ResultStore
    from mgk.experiments.runner import run_isolated, run_plan

    store, runs = ResultStore(folder), folder / "runs"
    missing = plan.missing(store, runs)
    check_data(missing)
    folder.mkdir(parents=True, exist_ok=True)
    with Progress("compare") as progress:
        for trial in plan.trials:
            if trial not in missing and (result := store.read(trial)) is not None:
                progress.note(f"{describe(result)}, already trained")
        show = TrialProgress(progress, {trial: trial.recipe.training.max_steps for trial in missing})
        run_plan(plan, store, runs, on_progress=show.update, on_done=show.done)
        progress.note("computing FLOPs and attention maps")
        first_seed = plan.trials[0].seed
        models = {trial.model.name: trial.path(runs) for trial in plan.trials if trial.seed == first_seed}
        inspection: Inspection = run_isolated(inspect_models, {"inspection": (models,)})["inspection"]
    results = {trial: result for trial in plan.trials if (result := store.read(trial)) is not None}
    return compare_results(plan, results, inspection), inspection


def _write(comparison: "Comparison", inspection: "Inspection", folder: Path) -> Path:
    from mgk._util import json_codec
    from mgk._util.files import write_file
    from mgk.experiments.compare.page import comparison_page

    write_file(folder / "comparison.json", json_codec.compact_json(json_codec.dump(comparison)))
    page = folder / "comparison.html"
    write_file(page, comparison_page(comparison, inspection))
    return page


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
