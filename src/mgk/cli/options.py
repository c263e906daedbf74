"""Checks of option values, and options that several commands have."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer import Argument, Option

from mgk.cli.cli_errors import cli_errors

_Command = TypeVar("_Command", bound=Callable[..., None])


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """A check that the value is one of the names."""

    def check(value: str) -> str:
        if value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}")
        return value

    return check


def some_of(names: Sequence[str]) -> Callable[[str | None], str | None]:
    """A check that the value is a list of some of the names."""

    def check(value: str | None) -> str | None:
        if value is not None:
            if not split(value):
                raise typer.BadParameter(f"give at least one of {', '.join(names)}")
            for name in split(value):
                one_of(names)(name)
        return value

    return check


def split(value: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, each once."""
    parts = (part.strip() for part in value.split(","))
    return tuple(dict.fromkeys(part for part in parts if part))


def whole_numbers(value: str) -> str:
    """A check for a list of whole numbers from 1 up; it may be empty."""
    for part in split(value):
        if not part.isdecimal() or int(part) < 1:
            raise typer.BadParameter(f"{part!r} is not a whole number from 1 up")
    return value


def device(names: Sequence[str]) -> Callable[[str], str]:
    """A check for one of the names, with or without a number as in ``cuda:1``."""

    def check(value: str) -> str:
        kind, colon, number = value.partition(":")
        if kind not in names or (colon and not number.isdecimal()):
            known = ", ".join(names)
            raise typer.BadParameter(f"{value!r} is not one of {known}, with or without a number as in cuda:1")
        return value

    return check


def writable_file(path: Path | None) -> Path | None:
    """A check that the file can be written."""
    if path is None:
        return None
    directory = path.absolute().parent
    if not directory.is_dir():
        raise typer.BadParameter(f"the directory {str(directory)!r} does not exist")
    if path.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is a directory")
    if not os.access(directory, os.W_OK):
        raise typer.BadParameter(f"the directory {str(directory)!r} is not writable")
    return path


def with_options(options: Mapping[str, Any]) -> Callable[[_Command], _Command]:
    """Give a command its ``**options``; None where not given."""

    def decorate(command: _Command) -> _Command:
        keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=None)
        more = [keyword(name, annotation=hint) for name, hint in options.items()]
        signature = inspect.signature(command)
        *own, _ = signature.parameters.values()
        # typer reads both
        command.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        command.__annotations__ |= options
        return command

    return decorate


def finished_run(path: Path) -> Path:
    """A check that the run is finished, before torch is imported."""
    with cli_errors():
        from mgk.training.run_dir import finished_recipe

        finished_recipe(path)
    return path


_SPLITS = ("train", "validation", "test")
Run = Annotated[Path, Argument(metavar="RUN", callback=finished_run, help="The folder of a finished run.")]
Split = Annotated[str, Option("--split", callback=one_of(_SPLITS), help=f"One of {', '.join(_SPLITS)}.")]
Json = Annotated[
    Path | None,
    Option("--json", metavar="FILE", callback=writable_file, help="Write the results to this file."),
]
