"""SIGINT and SIGTERM: the step in progress is finished and saved, then the run ends; child processes get them too."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from mgk._util.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# torchrun passes on what the terminal has sent to all processes already: that is not a second signal.
_SECONDS_OF_ONE_SIGNAL = 1.0


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], signals: Iterable[int] = _SIGNALS) -> Iterator[None]:
    """Call ``handler`` on the signals; outside of the main thread, which alone gets them, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def forwarding(pids: Callable[[], Iterable[int]], signals: Iterable[int] = _SIGNALS) -> Iterator[list[int]]:
    """Pass the signals on to the processes of ``pids()``; the list that is given holds those that came."""
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for pid in pids():
            os.kill(pid, number)

    with handling(forward, signals):
        yield came


class StopSignals:
    """While it is entered, signals set :attr:`requested` during training and raise ``Interrupted`` elsewhere.

    A second one, some time after the first, raises at once.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.is_training = False
        self._first = 0.0
        self._handling = handling(self._handle)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handling.__exit__(*error)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if not self.is_training or (self.requested and now - self._first > _SECONDS_OF_ONE_SIGNAL):
            raise Interrupted(f"stopped by {name}")
        if not self.requested:
            self.requested, self._first = name, now
