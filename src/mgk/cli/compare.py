"""``mgk compare``: models under one budget, their accuracy and cost."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import split
from mgk.cli.tables import print_table

if TYPE_CHECKING:
    from mgk.experiments.compare.result import Comparison
    from mgk.experiments.model_analysis import Inspection
    from mgk.experiments.plan import Plan

BASELINE, CANDIDATES = "softmax:2", "smgk:1,mgk:1"
# On bytes, whose heads have a sixth of the width.
BYTES_BASELINE, BYTES_CANDIDATES = "softmax:4", "softmax:4/2,smgk:2"


def _check_model(text: str | None) -> str | None:
    if text is None:
        return None
    from mgk.experiments.model_spec import ModelSpec

    try:
        ModelSpec.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _check_models(text: str | None) -> str | None:
    if text is None:
        return None
    if not split(text):
        raise typer.BadParameter("name at least one candidate, such as mgk:4")
    for part in split(text):
        _check_model(part)
    return text


def compare(
    task: Annotated[
        str | None, Argument(help="The task of the recipes.", show_default="bytes, in a few minutes")
    ] = None,
    baseline: Annotated[
        str | None,
        Option(
            metavar="ATTENTION:HEADS",
            callback=_check_model,
            help="What the others are compared to.",
            show_default=f"{BASELINE}; of bytes {BYTES_BASELINE}",
        ),
    ] = None,
    candidates: Annotated[
        str | None,
        Option(
            metavar="ATTENTION:HEADS,...",
            callback=_check_models,
            help="The others.",
            show_default=f"{CANDIDATES}; of bytes {BYTES_CANDIDATES}",
        ),
    ] = None,
    seeds: Annotated[int, Option(min=1, help="Runs of each.")] = 1,
    preset: Annotated[
        str | None,
        Option(help="paper, workstation, laptop or smoke.", show_default="laptop, if a task is given"),
    ] = None,
    steps: Annotated[int | None, Option(min=1, help="Of every run.", show_default="the preset's")] = None,
    out: Annotated[
        Path | None,
        Option(metavar="DIR", file_okay=False, help="For runs and page.", show_default="comparison-TASK"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Option(
            "--set", metavar="FIELD=VALUE", help="Any field of all recipes, such as training.batch_size=16."
        ),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Train finished runs anew.")] = False,
    beside: Annotated[
        Path | None,
        Option(
            metavar="FILE", dir_okay=False, help="The comparison.json of more seeds, to show below each row."
        ),
    ] = None,
) -> None:
    """Train a baseline and candidates with equal budget, data and seeds; a table and a page.

    Without TASK: a language model of bytes, of Python's standard library unless another
    text was prepared, in a few minutes. Finished runs are not run again, and an
    interrupted comparison continues.
    """
    with cli_errors():
        from mgk.experiments.compare.result import read_comparison
        from mgk.experiments.model_spec import ModelSpec
        from mgk.experiments.plan import QUICK, comparison_plan
        from mgk.training.recipe import parse_overrides

        name = task or "bytes"
        overrides: dict[str, Any] = dict(QUICK) if task is None and preset is None else {}
        if steps is not None:
            overrides["training.max_steps"] = steps
        defaults = (BYTES_BASELINE, BYTES_CANDIDATES) if name == "bytes" else (BASELINE, CANDIDATES)
        plan = comparison_plan(
            name,
            baseline=ModelSpec.parse(baseline or defaults[0]),
            candidates=[ModelSpec.parse(part) for part in split(candidates or defaults[1])],
            preset=preset or "laptop",
            seeds=seeds,
            overrides=overrides | parse_overrides(set_ or []),
            command=shlex.join(["mgk", *sys.argv[1:]]),
            overwrite=overwrite,
        )
        if task is None and preset != "smoke":
            _prepare_bytes()
        before = None if beside is None else read_comparison(beside)
        folder = out or Path(f"comparison-{name}")
        comparison, inspection = _run(plan, folder)
        if before is not None and not comparison.is_of(before):
            typer.echo(f"{beside} is of another task, preset or number of steps, and is not shown", err=True)
            before = None
        page = _write(comparison, inspection, folder, before)
        _show(comparison, before)
        typer.echo(f"The page with curves and attention maps: {page.resolve().as_uri()}")


def _prepare_bytes() -> None:
    """Python's standard library, unless a text was prepared."""
    from mgk.data.manifest import read_manifest
    from mgk.data.preparation import prepare, set_folder

    if read_manifest(set_folder("bytes", None)) is None:
        ready = prepare("bytes")
        typer.echo(f"data: the {ready.manifest.facts['corpus']}, in {ready.folder}", err=True)


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
        models = {trial.model.name: trial.path(runs) for trial in plan.inspected}
        inspection: Inspection = run_isolated(inspect_models, {"inspection": (models,)})["inspection"]
    results = {trial: result for trial in plan.trials if (result := store.read(trial)) is not None}
    return compare_results(plan, results, inspection), inspection


def _write(
    comparison: "Comparison", inspection: "Inspection", folder: Path, before: "Comparison | None"
) -> Path:
    from mgk._util.files import write_file
    from mgk.experiments.compare.page import comparison_page
    from mgk.experiments.compare.result import write_comparison

    write_comparison(folder / "comparison.json", comparison)
    page = folder / "comparison.html"
    write_file(page, comparison_page(comparison, inspection, before))
    return page


def _show(comparison: "Comparison", before: "Comparison | None") -> None:
    from mgk.experiments.compare import page

    names = {result.title: result.name for result in comparison.results}
    rows, caption = page.result_rows(comparison), page.table_caption(comparison)
    if before is not None:
        rows, caption = page.rows_beside(comparison, before), page.caption_beside(comparison, before)
    short_rows = [[names.get(row[0], row[0]), *row[1:]] for row in rows]
    print_table(None, page.result_columns(comparison), short_rows, caption=caption, whole=2)
    for sentence in page.summary(comparison)[1:]:
        typer.echo(sentence)
    for title, sample in page.writings(comparison):
        typer.echo(f"\n{title} writes:\n{sample}\n")
