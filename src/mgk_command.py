"""The console script ``mgk``; outside the package, whose own imports a signal may interrupt."""

# Built in: a signal may come while ``signal`` loads.
import _signal  # type: ignore[import-not-found]
import os


def _end(number: int, frame: object) -> None:
    name = "SIGINT" if number == _signal.SIGINT else "SIGTERM"
    os.write(2, f"mgk: stopped by {name}\n".encode())
    os._exit(128 + number)


for _number in (_signal.SIGINT, _signal.SIGTERM):
    _signal.signal(_number, _end)

from mgk.cli import main  # noqa: E402  only now

__all__ = ["main"]
