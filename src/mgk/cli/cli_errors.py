"""Errors of the library as one sentence on stderr: exit code 2 for a usage error, 1 otherwise."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from mgk._util.errors import Interrupted, UserError

# Modules of the extra "train".
_TRAIN_EXTRA = ("accelerate", "markupsafe", "pydantic", "safetensors", "scipy", "tensorboard", "transformers", "yaml")


@contextmanager
def cli_errors() -> Iterator[None]:
    """Print an error of the library as one sentence and exit with its code; ``--debug`` adds the traceback."""
    try:
        yield
    except UserError as error:
        _exit(error, error.exit_code)
    except OSError as error:
        _exit(error, 1)
    except ImportError as error:
        if error.name not in _TRAIN_EXTRA:
            raise
        _exit(UserError(f"this needs {error.name}, which is not installed: pip install 'mgk[train]'"), 1)


def _exit(error: Exception, code: int) -> NoReturn:
    if "--debug" in sys.argv:
        traceback.print_exception(error)
    if not isinstance(error, Interrupted) or os.environ.get("RANK", "0") == "0":  # every rank stops, one reports
        typer.echo(f"mgk: {error}", err=True)
    raise typer.Exit(code) from None
