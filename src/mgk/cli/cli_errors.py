"""Errors as one sentence on stderr, with their exit code.

2 for a usage error, 128 + the signal after one, 141 for a closed output, else 1.
"""

import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from mgk._util.errors import Interrupted, UserError

# Modules of the extra "train".
_TRAIN_EXTRA = (
    "accelerate",
    "markupsafe",
    "pydantic",
    "safetensors",
    "scipy",
    "tensorboard",
    "transformers",
    "yaml",
)


@contextmanager
def cli_errors() -> Iterator[None]:
    """Print an error as one sentence and exit; ``--debug`` adds the traceback."""
    try:
        yield
    except UserError as error:
        _exit(error, error.exit_code)
    except KeyboardInterrupt as stop:
        number = signal.Signals(getattr(stop, "number", signal.SIGINT))
        _exit(Interrupted(f"stopped by {number.name}", number), 128 + number)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            raise  # to typer and main, which end silently
        _exit(error, 1)
    except ImportError as error:
        if error.name not in _TRAIN_EXTRA:
            raise
        _exit(UserError(f"this needs {error.name}, which is not installed: pip install 'mgk[train]'"), 1)


def is_first_rank() -> bool:
    """Whether this process is torchrun's first, or alone."""
    return os.environ.get("RANK", "0") == "0"


def _has_no_reader() -> bool:
    """Whether the reader of the output is gone, as ``head`` after its lines."""
    try:
        poll = select.poll()
        poll.register(1, select.POLLOUT)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # Windows has no poll
        return True


def _exit(error: Exception, code: int) -> NoReturn:
    if "--debug" in sys.argv:
        traceback.print_exception(error)
    if is_first_rank() or not isinstance(error, Interrupted):  # every rank stops, one reports
        typer.echo(f"mgk: {error}", err=True)
    raise typer.Exit(code) from None
