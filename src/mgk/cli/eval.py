"""``mgk eval``: the metrics of the model of a run."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from mgk._util.files import write_json
from mgk._util.progress import Progress
from mgk.cli.cli_errors import cli_errors, is_first_rank
from mgk.cli.options import Json, Run, Split

if TYPE_CHECKING:
    from mgk.training import Evaluation

_RECIPE = "the recipe's"


def evaluate(
    run: Run,
    split: Split = "test",
    batch_size: Annotated[
        int | None, Option(min=1, help="Examples at a time; the results do not depend on it.")
    ] = None,
    window: Annotated[
        int | None,
        Option(min=1, help="Language models: tokens of the sliding window.", show_default=_RECIPE),
    ] = None,
    stride: Annotated[
        int | None,
        Option(min=1, help="Language models: tokens between two windows.", show_default=_RECIPE),
    ] = None,
    max_tokens: Annotated[
        int | None,
        Option(min=0, help="Language models: tokens to slide over; 0 for all.", show_default=_RECIPE),
    ] = None,
    json: Json = None,
) -> None:
    """Evaluate the model of a run on every example: accuracy and confusion, or perplexity."""
    with cli_errors():
        from mgk.training.evaluation import evaluate as evaluate_run

        is_first = is_first_rank()
        with Progress(f"eval {split}", is_shown=is_first) as on_step:
            windows = {"window": window, "stride": stride, "max_tokens": max_tokens}
            found = evaluate_run(run, split=split, batch_size=batch_size, **windows, on_step=on_step)
        if is_first:
            _show(found)
        if is_first and json is not None:
            write_json(json, asdict(found))


def _show(found: "Evaluation") -> None:
    if found.perplexity is not None and found.interval is not None:
        typer.echo(
            f"{found.data}, {found.split}: {found.metric.replace('_', ' ')} {found.value:.4g} (95% CI over blocks"
            f" of the text {found.interval.low:.4g} to {found.interval.high:.4g}), loss {found.loss:.4f},"
            f" {found.examples:,} tokens"
        )
        typer.echo(f"by segments: {found.perplexity}")
        if found.sliding is not None:
            typer.echo(f"by a sliding window: {found.sliding}")
        return
    assert found.interval is not None
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
