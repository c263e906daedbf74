"""``mgk compare``: models under one budget, their accuracy and cost."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import split

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
        from mgk.cli.comparison import prepare_bytes, run, write
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
            prepare_bytes()
        before = None if beside is None else read_comparison(beside)
        folder = out or Path(f"comparison-{name}")
        comparison, inspection = run(plan, folder)
        if before is not None and not comparison.is_of(before):
            typer.echo(f"{beside} is of another task, preset or number of steps, and is not shown", err=True)
            before = None
        write(comparison, inspection, folder, before)
