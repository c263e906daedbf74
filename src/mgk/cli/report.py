"""``mgk report``: one page of everything that was measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import one_of, writable_file

if TYPE_CHECKING:
    from mgk.experiments.artifacts import Outputs

_PRESETS = ("paper", "laptop", "smoke")


def _preset(name: str | None) -> str | None:
    return None if name is None else one_of(_PRESETS)(name)


def report(
    results: Annotated[
        Path, typer.Option(metavar="DIR", help="What mgk reproduce has written, or any folder of runs.")
    ] = Path("results"),
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable_file, help="The page.", show_default="reproduction.html"),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(callback=_preset, help="paper, laptop or smoke.", show_default="the largest with results"),
    ] = None,
    markdown: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Fill the generated parts of this document instead; may be given several times."
        ),
    ] = None,
) -> None:
    """Make one page of all results: claims with verdicts, tables beside the paper's, figures. It needs no network."""
    with cli_errors():
        from mgk.training.errors import RecipeError

        if markdown and out is not None:
            raise RecipeError("give --out for a page or --markdown for documents, not both")
        if not results.is_dir():
            raise RecipeError(f"{results}: there is no such folder; mgk reproduce makes it")
        outputs = _gathered(results, preset)
        if markdown:
            from mgk.experiments.artifacts import write_outputs
            from mgk.experiments.render.markdown_sections import fill_document
            from mgk.experiments.reproduce.registry import EXPERIMENTS
            from mgk.experiments.result_store import ResultStore

            if outputs.records:  # what documents cite, also where a table is not finished
                write_outputs(outputs, ResultStore(results), EXPERIMENTS.values())
            for path in markdown:
                names = fill_document(path, outputs, results.resolve().name)
                typer.echo(f"{path}: {', '.join(names)}")
            return
        from mgk.experiments.reproduce.page import reproduction_page
        from mgk.experiments.result_store import write_text

        page = out or Path("reproduction.html")
        write_text(page, reproduction_page(outputs))
        typer.echo(f"The page of {len(outputs.records) + len(outputs.others)} trials: {page.resolve().as_uri()}")


def _gathered(folder: Path, preset: str | None) -> "Outputs":
    from mgk.experiments.artifacts import find_runs, gather, presets_of
    from mgk.experiments.result_store import ResultStore

    results = ResultStore(folder)
    known = presets_of(results)
    if known or not (runs := find_runs(folder)):
        return gather(results, preset or (known[0] if known else "laptop"))
    from mgk.experiments.reproduce.collect import collect_results

    records = collect_results(runs)
    kept = preset or min((record.trial.preset for record in records), key=_PRESETS.index)
    return gather(results, kept, records=[record for record in records if record.trial.preset == kept])
