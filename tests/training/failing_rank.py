"""Run by torchrun: the command ``mgk``, whose last rank alone fails, or whose first is killed, in a step."""

import os
import signal
from typing import Any
from unittest import mock

from mgk.cli import main
from mgk.training.errors import TrainingError
from mgk.training.loop import TrainingLoop


def failing(loop: TrainingLoop, *arguments: Any) -> float:
    """Fails on one rank, before the gradients that the others wait for."""
    if loop.progress.step == 3 and os.environ["RANK"] == os.environ.get("KILLED_RANK"):
        os.kill(os.getpid(), signal.SIGKILL)
    if loop.progress.step == 3 and os.environ["RANK"] == "1" and "KILLED_RANK" not in os.environ:
        raise TrainingError("the last rank has failed")
    return backward(loop, *arguments)


if __name__ == "__main__":
    backward = TrainingLoop._backward
    with mock.patch.object(TrainingLoop, "_backward", failing):
        main()
