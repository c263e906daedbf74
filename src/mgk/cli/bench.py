"""``mgk bench NAME``; its options are fields of its settings. No torch here."""

import inspect
import shutil
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer import Option

from mgk.bench.registry import BENCHMARKS, DEVICES, Benchmark
from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import Json, device, one_of, some_of, split, whole_numbers, writable_file
from mgk.cli.tables import print_table

if TYPE_CHECKING:
    from mgk.bench.runner import Report

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure time, memory and precision here.")


@app.command("list")
def list_benchmarks() -> None:
    """List the benchmarks."""
    for name, benchmark in BENCHMARKS.items():
        typer.echo(f"{name}: {benchmark.description}")


def _add_command(name: str, benchmark: Benchmark) -> None:
    hints = get_type_hints(benchmark.settings)
    kinds = {field.name: _kind(hints[field.name]) for field in fields(benchmark.settings)}

    def command(json: Path | None, **values: Any) -> None:
        for option, (_, item) in kinds.items():
            if item is not None and values[option] is not None:
                values[option] = tuple(item(part) for part in split(values[option]))
        with cli_errors():
            # Torch takes a second: only once the options are right.
            from mgk._util.progress import Progress
            from mgk.bench.runner import run

            with Progress(f"bench {name}") as on_step:
                report = run(name, benchmark.settings(**values), on_step)
            _print(report, benchmark)
            if json is not None:
                report.write(json)
        for failure in report.outcome.failures:
            typer.echo(f"mgk: {failure}", err=True)
        if report.outcome.failures:
            raise typer.Exit(1)

    parameters = [_parameter(field, *kinds[field.name]) for field in fields(benchmark.settings)]
    parameters.append(_keyword("json", Json, None))
    command.__doc__ = benchmark.description
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    # typer reads the signature
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name)(command)


def _kind(hint: Any) -> tuple[Any, Callable[[str], Any] | None]:
    """The type of an option; for a comma-separated list also of its items."""
    is_optional = isinstance(hint, UnionType) and NoneType in get_args(hint)
    inner = get_args(hint)[0] if is_optional else hint
    if get_origin(inner) is not tuple:
        return hint, None
    item = get_args(inner)[0]
    return str | None if is_optional else str, int if item is int else str


def _parameter(field: "Field[Any]", kind: Any, item: Callable[[str], Any] | None) -> inspect.Parameter:
    choices: tuple[str, ...] = field.metadata["choices"]
    default: Any = field.default
    options = {key: field.metadata[key] for key in ("help", "min", "max")}
    if choices and item is not None:
        options["callback"] = some_of(choices)
        options["help"] += f" Some of {','.join(choices)}."
    elif choices:
        options["callback"] = one_of(choices)
    elif item is int:
        options["callback"] = whole_numbers
    elif field.name == "device":
        options["callback"] = device(DEVICES)
    elif kind == Path | None:
        options["callback"] = writable_file
    elif kind is Path:
        options["exists"] = True
    if item is not None and default is not None:
        options["show_default"] = "all" if default == choices else True
        default = ",".join(map(str, default))
    return _keyword(field.name, Annotated[kind, Option(**options)], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _print(report: "Report", benchmark: Benchmark) -> None:
    """A table for each title, then legend, settings, machine and notes."""
    data = report.to_json()
    width = max(shutil.get_terminal_size().columns, 120)  # no column is cut
    columns = []
    for column in benchmark.columns.split():
        heading, _, field = column.partition("=")
        columns.append((heading, field or heading))
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        tables.setdefault(benchmark.title.format_map(row), []).append(row)
    for title, rows in tables.items():
        shown = [column for column in columns if any(column[1] in row for row in rows)]
        first = [rows[0].get(field) for _, field in shown]
        texts = [number for number, value in enumerate(first) if isinstance(value, str)]
        cells = [[_cell(row[field]) if field in row else "" for _, field in shown] for row in rows]
        headings = [heading for heading, _ in shown]
        print_table(title or None, headings, cells, left=texts, whole=len(shown), width=width)
    given = {name: value for name, value in data["settings"].items() if value is not None}
    settings = ", ".join(f"{name} {value}" for name, value in given.items())
    notes = [f"Note: {note}." for note in report.outcome.notes]
    summary = f"{report.benchmark}: {settings}"
    for line in (benchmark.legend, summary, str(report.machine), *notes):
        if line:
            typer.echo(line)


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "*" if value else ""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


for _name, _benchmark in BENCHMARKS.items():
    _add_command(_name, _benchmark)
