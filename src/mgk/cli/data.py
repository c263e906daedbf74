"""``mgk data``. Imports NumPy only to do the work, torch never."""

import os
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from mgk._util.errors import Interrupted
from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import one_of, with_options
from mgk.data.errors import DataError, UsageError
from mgk.data.manifest import MANIFEST, data_folder, read_manifest, verify
from mgk.data.task_registry import TASKS, find_task

if TYPE_CHECKING:
    from mgk.data.inspection import SplitSummary

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The data sets: list, prepare, inspect, verify."
)

_BAR = 40
_REASONS = 3
# Options of some tasks: name, type, minimum and help.
_OPTIONS: tuple[tuple[str, type, int | None, str], ...] = (
    ("seed", int, 0, "Of what is generated or held out."),
    ("train", int, 1, "Training examples to generate."),
    ("validation", int, 0, "Examples to generate, or to hold out."),
    ("test", int, 1, "Test examples to generate."),
    ("min_length", int, 0, "listops: longer than this."),
    ("max_length", int, 2, "listops: shorter than this."),
    ("max_depth", int, 2, "listops: of the expressions."),
    ("max_args", int, 2, "listops: of an operator."),
    ("difficulty", str, None, "pathfinder: easy, intermediate or hard."),
    ("unit", str, None, "plain: byte or word."),
    ("validation_percent", int, 1, "plain: of the text."),
    ("test_percent", int, 1, "plain: of the text."),
)


def _task(name: str) -> str:
    try:
        return find_task(name).name
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None


TaskName = Annotated[str, Argument(metavar="TASK", callback=_task, help="One of those that 'list' shows.")]
Folder = Annotated[
    Path | None,
    Option(metavar="DIR", file_okay=False, help="The folder of all prepared sets.", show_default="MGK_DATA"),
]


@app.command("list")
def list_(folder: Folder = None) -> None:
    """What there is: origin, licence, size, and what is present here."""
    with cli_errors():
        root = folder or data_folder()
    for task in TASKS.values():
        typer.echo(f"{task.name:24}{_presence(root / task.name)}\n    {task.title}")
        if not task.is_synthetic:
            origin = f"generated here, or from {task.url}" if task.is_generated else task.url
            typer.echo(f"    from: {origin}\n    size: {task.size}; licence: {task.licence}")
    command = "mgk data prepare TASK [--source PATH]"
    typer.echo(f"\nPrepared sets are in {root}. Make one ready with: {command}")


def _presence(folder: Path) -> str:
    try:
        manifest = read_manifest(folder)
    except (DataError, OSError):
        return "corrupt: see mgk data verify"
    return "not here" if manifest is None else f"here: {manifest.counts}"


@app.command()
@with_options(
    {name: Annotated[kind | None, Option(min=least, help=text)] for name, kind, least, text in _OPTIONS}
)
def prepare(
    task: TaskName,
    source: Annotated[
        Path | None,
        Option(metavar="PATH", exists=True, help="Folder or archive with the official files."),
    ] = None,
    out: Folder = None,
    from_hub: Annotated[bool, Option("--from-hub", help="Fetch it from the Hugging Face hub.")] = False,
    format: Annotated[  # noqa: A002  the option's name
        str,
        Option(
            callback=one_of(("arrays", "tsv")), help="tsv, of listops: write the official files to DIR instead."
        ),
    ] = "arrays",
    workers: Annotated[
        int | None, Option(min=1, help="Processes that generate.", show_default="one a core")
    ] = None,
    **options: Any,
) -> None:
    """Make a data set ready, as DIR/TASK: from its files, from the hub, or by generating it."""
    given = {name: value for name, value in options.items() if value is not None}
    with cli_errors():
        if from_hub and (source is not None or format == "tsv"):
            raise UsageError("--from-hub takes neither --source nor --format tsv")
        try:
            typer.echo(_prepare(task, source, out, given, workers or _cores(), from_hub, format == "tsv"))
        except KeyboardInterrupt as stop:
            number = getattr(stop, "number", SIGINT)
            raise Interrupted("interrupted; an older prepared set is unchanged", number) from None


def _prepare(
    task: str,
    source: Path | None,
    out: Path | None,
    options: dict[str, Any],
    workers: int,
    from_hub: bool,
    as_tsv: bool,
) -> str:
    """Prepare a set; the sentence that says what is there now."""
    from mgk._util.progress import Progress
    from mgk.data import hub, listops, preparation
    from mgk.data.sources import Source

    with Progress(f"prepare {task}") as on_step:
        if as_tsv:
            if task != "listops" or out is None:
                raise UsageError("--format tsv is for listops, with --out DIR")
            chosen = preparation.checked_options(find_task(task), source is not None, options)
            if source is not None:
                examples = listops.read(Source(source))
            else:
                examples = listops.generate(chosen, workers, on_step)
            listops.write_official(examples, out)
            return f"{out}: {', '.join(listops.FILES.values())}"
        if from_hub:
            ready = hub.prepare_from_hub(task, out=out, options=options, on_step=on_step)
        else:
            ready = preparation.prepare(
                task, source, out=out, options=options, workers=workers, on_step=on_step
            )
    for reason in ready.reasons[:_REASONS]:
        typer.echo(f"Note: {reason}; prepared anew.", err=True)
    if len(ready.reasons) > _REASONS:
        typer.echo(f"Note: and {len(ready.reasons) - _REASONS:,} more of this kind.", err=True)
    suffix = "" if ready.is_new else " (nothing to do)"
    return f"{ready.folder}: {ready.manifest.counts}{suffix}"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@app.command()
def inspect(
    task: TaskName,
    folder: Folder = None,
    first: Annotated[int, Option(min=0, help="How many examples to show of each split.")] = 3,
) -> None:
    """Counts, lengths, classes and first examples of a prepared set."""
    from mgk.data.inspection import inspect as inspect_set

    with cli_errors():
        manifest, splits = inspect_set(task, folder=folder, first=first)
    kind = ", a synthetic sample, not the real task" if manifest.synthetic else ""
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
        bar = "#" * -(-count * _BAR // most)
        typer.echo(f"  {f'{low:,}-{high:,}':>15} {count:>9,} {bar}")
    if split.classes:
        counts = (f"{label}: {count:,}" for label, count in enumerate(split.classes))
        typer.echo(f"  classes {', '.join(counts)}")
    for text in split.first:
        typer.echo(f"  {text}")


@app.command("verify")
def verify_(
    tasks: Annotated[
        list[str] | None,
        Argument(
            metavar="[TASK]...",
            callback=lambda names: [_task(name) for name in names or []],
            help="All that are here if none.",
        ),
    ] = None,
    folder: Folder = None,
) -> None:
    """Compare every file of the prepared sets with its recorded hash."""
    with cli_errors():
        root = folder or data_folder()
    present = tasks or [name for name in TASKS if (root / name / MANIFEST).exists()]
    if not present:
        typer.echo(f"nothing is prepared in {root}")
    if any({name: _check(root, name) for name in present}.values()):
        raise typer.Exit(1)


def _check(root: Path, name: str) -> list[str]:
    """Show how many files a set has, or what is wrong; return the latter."""
    try:
        manifest = read_manifest(root / name)
        if manifest is None:
            advice = find_task(name).how_to_get()
            raise DataError(f"{name} is not prepared in {str(root)!r}: {advice}")
        errors = verify(root / name, manifest)
        if not errors:
            typer.echo(f"{name}: {len(manifest.files)} files, all as they were written")
    except (DataError, OSError) as error:
        errors = [str(error)]
    for sentence in errors:
        typer.echo(f"mgk: {sentence}", err=True)
    return errors
