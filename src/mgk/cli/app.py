"""The verbs of ``mgk``. Nothing here imports torch: help answers at once."""

from typing import Annotated

import typer
from typer import Option

from mgk import __version__
from mgk.cli import analyze, bench, data
from mgk.cli.compare import compare
from mgk.cli.doctor import doctor
from mgk.cli.eval import evaluate
from mgk.cli.explore import explore
from mgk.cli.generate import generate
from mgk.cli.report import report
from mgk.cli.reproduce import reproduce
from mgk.cli.train import train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # a message stays one line that can be searched for
    pretty_exceptions_enable=False,
)
for _name, _verbs in (("analyze", analyze), ("bench", bench), ("data", data)):
    app.add_typer(_verbs.app, name=_name)
app.command("eval")(evaluate)
for _verb in (compare, doctor, explore, generate, report, reproduce, train):
    app.command()(_verb)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"mgk {__version__}")
        raise typer.Exit


@app.callback()
def mgk(
    version: Annotated[
        bool,
        Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    debug: Annotated[  # taken from the arguments before they are parsed
        bool, Option("--debug", help="Show Python's traceback when something fails.")
    ] = False,
) -> None:
    """Transformers with a mixture of Gaussian keys (MGK) or linear keys (MLK)."""
