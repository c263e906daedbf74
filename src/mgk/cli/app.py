"""The verbs of ``mgk``, put together. Nothing here imports torch: help and usage errors answer at once."""

from typing import Annotated

import typer

from mgk import __version__
from mgk.cli import bench, data
from mgk.cli.doctor import doctor

# Plain help and errors: a message stays one line to search for, and a bug shows Python's own traceback.
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.command()(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mgk {__version__}")
        raise typer.Exit


@app.callback()
def mgk(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Transformers with a mixture of Gaussian keys (MGK) or linear keys (MLK)."""
