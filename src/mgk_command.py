"""The console script ``mgk``; outside the package, whose own imports a signal may interrupt."""

import os
import signal
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"mgk: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, _end)

from mgk.cli import main  # noqa: E402  only now

__all__ = ["main"]
