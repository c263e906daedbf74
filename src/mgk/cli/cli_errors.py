"""How a verb ends when it cannot do its work: one sentence on stderr, exit code 2 for a wrong request, 1 otherwise."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from mgk._util.errors import Interrupted, UserError

# What the extra "train" brings, by the names to import.
_OF_THE_EXTRA = ("accelerate", "markupsafe", "pydantic", "safetensors", "scipy", "tensorboard", "transformers", "yaml")


@contextmanager
def cli_errors() -> Iterator[None]:
    """Turn the errors of the library into a sentence and an exit code."""
    try:
        yield
    except UserError as error:
        _end(error, error.exit_code)
    except OSError as error:
        _end(error, 1)
    except ImportError as error:
        if error.name not in _OF_THE_EXTRA:
            raise
        _end(UserError(f"this needs {error.name}, which is not installed: pip install 'mgk[train]'"), 1)


def _end(error: Exception, code: int) -> NoReturn:
    if "--debug" in sys.argv:
        traceback.print_exception(error)
    if not isinstance(error, Interrupted) or os.environ.get("RANK", "0") == "0":  # all ranks stop alike
        typer.echo(f"mgk: {error}", err=True)
    raise typer.Exit(code) from None
