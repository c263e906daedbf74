"""Ctrl-C and SIGTERM: the step in progress is finished and saved, then the run ends."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from mgk.training.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# torchrun passes on what the terminal has sent to all processes already: that is not a second wish.
_SECONDS_OF_ONE_WISH = 1.0


class StopSignals:
    """While it is entered, signals set :attr:`requested` during training and raise ``Interrupted`` elsewhere.

    A second one, some time after the first, raises at once.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.is_training = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # the only one that may, and that gets them
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if not self.is_training or (self.requested and now - self._first > _SECONDS_OF_ONE_WISH):
            raise Interrupted(f"stopped by {name}")
        if not self.requested:
            self.requested, self._first = name, now
