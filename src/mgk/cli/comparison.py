"""What ``mgk compare`` does: trains the models, compares them, writes the page."""

from pathlib import Path

import typer

from mgk._util import json_codec
from mgk._util.files import write_file
from mgk._util.progress import Progress
from mgk.cli.tables import print_table
from mgk.cli.trial_progress import TrialProgress, describe
from mgk.data.manifest import read_manifest
from mgk.data.preparation import prepare, set_folder
from mgk.experiments.compare import page
from mgk.experiments.compare.result import Comparison, compare_results
from mgk.experiments.model_analysis import Inspection, inspect_models
from mgk.experiments.plan import Plan, check_data
from mgk.experiments.result_store import ResultStore
from mgk.experiments.runner import run_isolated, run_plan


def prepare_bytes() -> None:
    """Prepare Python's standard library as the text of ``bytes``, unless one is prepared."""
    if read_manifest(set_folder("bytes", None)) is None:
        ready = prepare("bytes")
        typer.echo(f"data: the {ready.manifest.facts['corpus']}, in {ready.folder}", err=True)


def run(plan: Plan, folder: Path) -> tuple[Comparison, Inspection]:
    """Run what is missing, and compare."""
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
    results = {result.trial: result for result in store.found(plan.trials)}
    return compare_results(plan, results, inspection), inspection


def write(comparison: Comparison, inspection: Inspection, folder: Path, before: Comparison | None) -> None:
    """Write JSON and page; show the table and what the models write."""
    json_codec.write(folder / "comparison.json", comparison)
    path = folder / "comparison.html"
    write_file(path, page.comparison_page(comparison, inspection, before))
    names = {result.title: result.name for result in comparison.results}
    caption, columns, rows = page.result_table(comparison, before)
    short_rows = [[names.get(row[0], row[0]), *row[1:]] for row in rows]
    print_table(None, columns, short_rows, caption=caption, whole=2)
    for sentence in page.summary(comparison)[1:]:
        typer.echo(sentence)
    for title, sample in page.writings(comparison):
        typer.echo(f"\n{title} writes:\n{sample}\n")
    typer.echo(f"The page with curves and attention maps: {path.resolve().as_uri()}")
