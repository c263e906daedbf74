"""Run in a process of its own: a training run that is killed, from outside or at one of its writes."""

import os
import signal
from itertools import count
from pathlib import Path
from unittest import mock

from mgk._util import files
from mgk.training.recipe import Recipe
from mgk.training.run import train


def work(recipe: Recipe, out: Path, write: int | None, step: int | None = None) -> None:
    """Go on with a run; the process is killed before the given write, counted from 0, is durable, or after the step."""
    numbers, sync = count(), files.sync

    def counted(path: Path) -> None:
        if next(numbers) == write:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)

    def on_step(done: int, total: int) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(files, "sync", counted):
        train(recipe, out, resume=True, on_step=on_step)
