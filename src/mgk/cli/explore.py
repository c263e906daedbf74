"""``mgk explore``: a page that shows what a model attends to."""

from pathlib import Path
from typing import Annotated

import typer

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import writable_file

_MODEL = "A finished run, or the folder of a Hugging Face model that returns attentions."


def explore(
    model: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", help=_MODEL)],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="What it reads; twice for a pair.", show_default="an example of the run's test split"
        ),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="A picture, for a model that reads images."
        ),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN|FOLDER", help="A second model, side by side, on the same text.")
    ] = None,
    example: Annotated[int | None, typer.Option(min=1, help="Which example of the test split, from 1.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longer texts are cut.")] = 256,
    out: Annotated[Path, typer.Option(metavar="FILE", callback=writable_file, help="The page.")] = Path(
        "explore.html"
    ),
) -> None:
    """Write a page of what every head attends to, by component, and the prediction."""
    with cli_errors():
        from mgk.analysis.model_source import find_model

        sources = [
            find_model(path) for path in (model, compare) if path is not None
        ]  # before torch is imported

        from mgk._util.files import write_file
        from mgk.analysis import explorer_inputs as inputs
        from mgk.analysis.explorer import explore as run
        from mgk.experiments.render.explorer_page import explorer_page

        content = inputs.choose_content(
            sources[0], text or (), image=image, example=example, max_tokens=max_tokens
        )
        found, notes = [], []
        for source in sources:
            loaded = inputs.load_model(source)
            read, note = inputs.read_content(source, loaded, content, max_tokens=max_tokens)
            found.append(run(loaded, read, name=source.name))
            notes.append(note)
            typer.echo(f"{source.name}: {found[-1].about}, {len(read.tokens)} tokens")
        write_file(out, explorer_page(found, note=notes[0]))
        typer.echo(f"page: {out} ({out.stat().st_size / 1e6:.1f} MB)")
