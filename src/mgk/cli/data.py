"""``mgk data``: what data sets there are, making them ready, looking at them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mgk.cli.options import one_of
from mgk.data.errors import DataError, UsageError
from mgk.data.folders import data_folder
from mgk.data.manifest import MANIFEST, damage, read_manifest
from mgk.data.task_registry import TASKS, find_task

if TYPE_CHECKING:
    from mgk.data.inspection import SplitSummary
    from mgk.data.manifest import Manifest
    from mgk.data.preparation import Prepared

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The data sets: list, prepare, inspect, verify.")

_FORMATS = ("arrays", "tsv")
_BAR = 40
_REASONS = 3


def _task(name: str) -> str:
    try:
        return find_task(name).name
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None


def _tasks(names: list[str]) -> list[str]:
    return [_task(name) for name in names]


TaskName = Annotated[str, typer.Argument(metavar="TASK", callback=_task, help="One of those that 'list' shows.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder", metavar="DIR", file_okay=False, help="Where the prepared sets are.", show_default="MGK_DATA"
    ),
]


@app.command("list")
def list_(folder: Folder = None) -> None:
    """What there is, where it comes from, its licence and size, and what is present here."""
    root = _root(folder)
    for task in TASKS.values():
        typer.echo(f"{task.name:24}{_presence(root / task.name)}")
        typer.echo(f"    {task.title}")
        if not task.is_synthetic:
            origin = f"generated here, or from {task.url}" if task.is_generated else task.url
            typer.echo(f"    from: {origin}\n    size: {task.size}; licence: {task.licence}")
    typer.echo(f"\nPrepared sets are in {root}. Make one ready with: mgk data prepare TASK [--source PATH]")


def _root(folder: Path | None) -> Path:
    try:
        return data_folder() if folder is None else folder
    except DataError as error:
        _stop(error)


def _presence(folder: Path) -> str:
    try:
        manifest = read_manifest(folder)
    except (DataError, OSError):
        return "damaged: see mgk data verify"
    return "not here" if manifest is None else f"here: {_counts(manifest)}"


def _counts(manifest: "Manifest") -> str:
    return ", ".join(f"{split} {manifest.examples(split):,}" for split in manifest.splits)


@app.command()
def prepare(
    task: TaskName,
    source: Annotated[
        Path | None,
        typer.Option(metavar="PATH", exists=True, help="Folder or archive with the official files."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", file_okay=False, help="Where to put the set, as DIR/TASK.", show_default="MGK_DATA"
        ),
    ] = None,
    from_hub: Annotated[bool, typer.Option("--from-hub", help="Fetch it from the Hugging Face hub.")] = False,
    format: Annotated[  # noqa: A002  the option's name
        str,
        typer.Option(callback=one_of(_FORMATS), help="tsv, of listops: write the official files to DIR instead."),
    ] = "arrays",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that generate.", show_default="one a core")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of what is generated or held out.")] = None,
    train: Annotated[int | None, typer.Option(min=1, help="Training examples to generate.")] = None,
    validation: Annotated[int | None, typer.Option(min=0, help="Examples to generate, or to hold out.")] = None,
    test: Annotated[int | None, typer.Option(min=1, help="Test examples to generate.")] = None,
    min_length: Annotated[int | None, typer.Option(min=0, help="listops: longer than this.")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="listops: shorter than this.")] = None,
    max_depth: Annotated[int | None, typer.Option(min=2, help="listops: of the expressions.")] = None,
    max_args: Annotated[int | None, typer.Option(min=2, help="listops: of an operator.")] = None,
    difficulty: Annotated[str | None, typer.Option(help="pathfinder: easy, intermediate or hard.")] = None,
    unit: Annotated[str | None, typer.Option(help="plain: byte or word.")] = None,
    validation_percent: Annotated[int | None, typer.Option(min=1, help="plain: of the text.")] = None,
    test_percent: Annotated[int | None, typer.Option(min=1, help="plain: of the text.")] = None,
) -> None:
    """Make a data set ready: from its files, from the hub, or by generating it."""
    from mgk._util.progress import Progress

    values = {
        "seed": seed,
        "train": train,
        "validation": validation,
        "test": test,
        "min_length": min_length,
        "max_length": max_length,
        "max_depth": max_depth,
        "max_args": max_args,
        "difficulty": difficulty,
        "unit": unit,
        "validation_percent": validation_percent,
        "test_percent": test_percent,
    }
    options = {name: value for name, value in values.items() if value is not None}
    cores = _cores() if workers is None else workers
    try:
        if from_hub and source is not None:
            raise UsageError("give --source or --from-hub, not both")
        if format == "tsv" and from_hub:
            raise UsageError("--format tsv is for files or what is generated, not for --from-hub")
        if format == "tsv":
            _write_tsv(task, source, out, options, cores)
            return
        with Progress(f"prepare {task}") as on_step:
            if from_hub:
                from mgk.data.hub import prepare_from_hub

                ready = prepare_from_hub(task, out=out, options=options, on_step=on_step)
            else:
                from mgk.data.preparation import prepare as prepare_set

                ready = prepare_set(task, source, out=out, options=options, workers=cores, on_step=on_step)
        _show_prepared(ready)
    except (DataError, OSError) as error:
        _stop(error)
    except KeyboardInterrupt:
        typer.echo("mgk: interrupted; what was there before is as it was", err=True)
        raise typer.Exit(130) from None


def _write_tsv(task: str, source: Path | None, out: Path | None, options: dict[str, Any], workers: int) -> None:
    from mgk._util.progress import Progress
    from mgk.data.listops import generate, read, write_official
    from mgk.data.preparation import checked_options
    from mgk.data.sources import Source

    if task != "listops" or out is None:
        raise UsageError("--format tsv is for listops, with --out DIR")
    chosen = checked_options(find_task(task), source is not None, options)
    with Progress(f"prepare {task}") as on_step:
        write_official(read(Source(source)) if source else generate(chosen, workers, on_step), out)
    typer.echo(f"{out}: basic_train.tsv, basic_val.tsv, basic_test.tsv")


def _show_prepared(ready: "Prepared") -> None:
    for reason in ready.reasons[:_REASONS]:
        typer.echo(f"Note: {reason}; prepared anew.", err=True)
    if len(ready.reasons) > _REASONS:
        typer.echo(f"Note: and {len(ready.reasons) - _REASONS:,} more of this kind.", err=True)
    typer.echo(f"{ready.folder}: {_counts(ready.manifest)}{'' if ready.is_new else ' (nothing to do)'}")


@app.command()
def inspect(
    task: TaskName,
    folder: Folder = None,
    first: Annotated[int, typer.Option(min=0, help="How many examples to show of each split.")] = 3,
) -> None:
    """Counts, lengths, classes and first examples of a prepared set."""
    from mgk.data.inspection import inspect as inspect_set

    try:
        manifest, splits = inspect_set(task, folder=folder, first=first)
    except (DataError, OSError) as error:
        _stop(error)
    kind = ", a made-up sample, not the real task" if manifest.synthetic else ""
    typer.echo(f"{task}{kind}: prepared {manifest.created} by mgk {manifest.mgk}")
    typer.echo(f"options {manifest.options or 'none'}; vocabulary of {manifest.facts['vocab_size']:,}")
    for split in splits:
        _show_split(split)


def _show_split(split: "SplitSummary") -> None:
    unit = "examples" if split.classes else "tokens"
    typer.echo(f"\n{split.name}: {split.examples:,} {unit}")
    typer.echo(f"  length {split.shortest:,} to {split.longest:,}, mean {split.mean:,.1f}")
    most = max((count for _, _, count in split.histogram), default=1)
    for low, high, count in split.histogram:
        typer.echo(f"  {f'{low:,}-{high:,}':>15} {count:>9,} {'#' * (-(-count * _BAR // most))}")
    if split.classes:
        typer.echo("  classes " + ", ".join(f"{label}: {count:,}" for label, count in enumerate(split.classes)))
    for text in split.first:
        typer.echo(f"  {text}")


@app.command()
def verify(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK]...", callback=lambda names: _tasks(names or []), help="All that are here if none."
        ),
    ] = None,
    folder: Folder = None,
) -> None:
    """Compare every file of the prepared sets with the hash it had when it was written."""
    root = _root(folder)
    present = tasks or [name for name in TASKS if (root / name / MANIFEST).exists()]
    if not present:
        typer.echo(f"nothing is prepared in {root}")
    wrong = False
    for name in present:
        count, found = _check(root, name)
        wrong = wrong or bool(found)
        for sentence in found:
            typer.echo(f"mgk: {sentence}", err=True)
        if not found:
            typer.echo(f"{name}: {count} files, all as they were written")
    if wrong:
        raise typer.Exit(1)


def _check(root: Path, name: str) -> tuple[int, list[str]]:
    """How many files a set has, and what is wrong with them."""
    try:
        manifest = read_manifest(root / name)
        if manifest is None:
            return 0, [f"{name} is not prepared in {str(root)!r}: {find_task(name).how_to_get()}"]
        return len(manifest.files), damage(root / name, manifest, thorough=True)
    except (DataError, OSError) as error:
        return 0, [str(error)]


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stop(error: DataError | OSError) -> NoReturn:
    typer.echo(f"mgk: {error}", err=True)
    raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
