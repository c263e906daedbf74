"""``mgk report``: one page of everything that was measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import writable_file

if TYPE_CHECKING:
    from mgk.experiments.artifacts import Artifacts
    from mgk.experiments.result_store import ResultStore


def report(
    results: Annotated[
        Path, Option(metavar="DIR", help="What mgk reproduce has written, or any folder of runs.")
    ] = Path("results"),
    out: Annotated[
        Path | None,
        Option(metavar="FILE", callback=writable_file, help="The page.", show_default="reproduction.html"),
    ] = None,
    preset: Annotated[
        str | None,
        Option(
            help="paper, workstation, laptop or smoke.",
            show_default="the largest with results",
        ),
    ] = None,
    update_docs: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE",
            help="Fill the generated parts of this document instead; may be given several times.",
        ),
    ] = None,
) -> None:
    """Make one page of all results: claims with verdicts, tables, figures. Works offline."""
    with cli_errors():
        from mgk._util.files import write_file
        from mgk.experiments.artifacts import write_artifacts, write_verdicts
        from mgk.experiments.render.markdown_sections import fill_document
        from mgk.experiments.reproduce.page import reproduction_page
        from mgk.experiments.reproduce.registry import EXPERIMENTS
        from mgk.experiments.result_store import ResultStore
        from mgk.training.errors import RecipeError
        from mgk.training.recipe import PRESETS, check_name

        if preset is not None:
            check_name("preset", preset, PRESETS)
        if update_docs and out is not None:
            raise RecipeError("give --out for a page or --update-docs for documents, not both")
        if not results.is_dir():
            raise RecipeError(f"{results}: there is no such folder; mgk reproduce makes it")
        store = ResultStore(results)
        artifacts = _gathered(store, preset)
        if not (artifacts.trials or artifacts.others or artifacts.bench):
            raise RecipeError(
                f"{results}: there are no results here; mgk reproduce, compare or train makes some"
            )
        if store.presets:
            write_verdicts(artifacts, store)
        if not update_docs:
            page = out or Path("reproduction.html")
            write_file(page, reproduction_page(artifacts))
            count = len(artifacts.trials) + len(artifacts.others)
            typer.echo(f"The page of {count} trials: {page.resolve().as_uri()}")
            return
        if artifacts.trials:  # documents cite tables that are not finished too
            write_artifacts(artifacts, store, EXPERIMENTS.values())
        for path in update_docs:
            names = fill_document(path, artifacts)
            typer.echo(f"{path}: {', '.join(names)}")


def _gathered(store: "ResultStore", preset: str | None) -> "Artifacts":
    """What is in a store, or in a folder of runs."""
    from mgk.experiments.artifacts import gather

    if store.presets:
        return gather(store, preset or store.presets[0])
    from mgk.experiments.reproduce.collect import collect_results  # imports torch
    from mgk.training.recipe import PRESETS

    found = collect_results(store.folder)
    chosen = preset or min((result.trial.preset for result in found), key=PRESETS.index, default="laptop")
    return gather(store, chosen, trials=[result for result in found if result.trial.preset == chosen])
