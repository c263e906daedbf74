"""The verbs of ``mgk``, put together. Nothing here imports torch: help and usage errors answer at once."""

from typing import Annotated

import typer

from mgk import __version__
from mgk.cli import analyze, bench, data
from mgk.cli.compare import compare
from mgk.cli.doctor import doctor
from mgk.cli.eval import evaluate
from mgk.cli.generate import generate
from mgk.cli.report import report
from mgk.cli.reproduce import reproduce
from mgk.cli.train import train

# Plain help and errors: a message stays one line to search for.
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(analyze.app, name="analyze")
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.command()(compare)
app.command()(doctor)
app.command("eval")(evaluate)
app.command()(generate)
app.command()(report)
app.command()(reproduce)
app.command()(train)


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
    debug: Annotated[  # taken out of the arguments before they come here, wherever it stands
        bool, typer.Option("--debug", help="Show Python's traceback when something fails.")
    ] = False,
) -> None:
    """Transformers with a mixture of Gaussian keys (MGK) or linear keys (MLK)."""
