"""``mgk eval``: the metrics of the model of a run."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mgk._util.files import write_json
from mgk._util.progress import Progress
from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import one_of, writable_file

if TYPE_CHECKING:
    from mgk.training import Evaluation

_SPLITS = ("train", "validation", "test")
_RECIPE = "the recipe's"


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    split: Annotated[str, typer.Option(callback=one_of(_SPLITS), help=f"One of {', '.join(_SPLITS)}.")] = "test",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples at a time; the results do not depend on it.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Language models: tokens of the sliding window.", show_default=_RECIPE),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Language models: tokens between two windows.", show_default=_RECIPE),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, help="Language models: tokens to slide over; 0 for all.", show_default=_RECIPE)
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable_file, help="Write the metrics to this file too.")
    ] = None,
) -> None:
    """Evaluate the model of a run: accuracy and confusion, or perplexity. Every example counts."""
    with cli_errors():
        from mgk.training.run_dir import read_run_recipe

        read_run_recipe(run)  # before torch is imported

        from mgk.training.evaluation import evaluate as evaluate_run

        is_first = os.environ.get("RANK", "0") == "0"
        with Progress(f"eval {split}", is_shown=is_first) as on_step:
            found = evaluate_run(
                run,
                split=split,
                batch_size=batch_size,
                window=window,
                stride=stride,
                max_tokens=max_tokens,
                on_step=on_step,
            )
        if is_first:
            _show(found)
        if is_first and json is not None:
            write_json(json, asdict(found))


def _show(found: "Evaluation") -> None:
    if found.interval is None:
        typer.echo(f"{found.data}, {found.split}: {found.examples:,} tokens, loss {found.loss:.4f}")
        typer.echo(f"by segments: {found.perplexity}")
        if found.sliding is not None:
            typer.echo(f"by a sliding window: {found.sliding}")
        return
    typer.echo(
        f"{found.data}, {found.split}: accuracy {found.value:.2%} (95% CI {found.interval.low:.2%} to"
        f" {found.interval.high:.2%}), loss {found.loss:.4f}, {found.examples:,} examples"
    )
    rows = found.confusion or []
    width = max(5, *(len(f"{number:,}") + 1 for row in rows for number in row))
    typer.echo("confusion matrix, rows: true class, columns: predicted class")
    typer.echo("     " + "".join(f"{place:>{width}}" for place in range(len(rows))))
    for place, row in enumerate(rows):
        typer.echo(f"{place:>5}" + "".join(f"{number:>{width},}" for number in row))
