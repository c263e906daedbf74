"""SIGINT and SIGTERM: save, clean up, pass on to child processes."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Self

from mgk._util.errors import Interrupted

BROKEN_PIPE = 128 + 13
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# torchrun repeats what the terminal has sent to all processes: no second signal.
_SECONDS_OF_ONE_SIGNAL = 1.0


class Stopped(KeyboardInterrupt):
    """A signal came; ``number`` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_signals() -> Callable[[], int | None]:
    """The first signal raises :class:`Stopped`, a later one ends the process.

    During an import one ends it at once: an exception there aborts in C++.

    Returns:
        A function that gives the first signal: libraries may swallow errors.
    """
    came: list[tuple[int, float]] = []
    pid = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a forked process has inherited this
            end_by(number)
        if _is_importing(frame):
            os.write(2, f"mgk: stopped by {signal.Signals(number).name}\n".encode())
            os._exit(128 + number)
        if not came:
            came.append((number, time.monotonic()))
            raise Stopped(number)
        if time.monotonic() - came[0][1] > _SECONDS_OF_ONE_SIGNAL:
            os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, stop)
    return lambda: came[0][0] if came else None


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def end_by(number: int) -> NoReturn:
    """End this process by a signal, silently."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # where the signal is blocked


@contextmanager
def starting_processes() -> Iterator[None]:
    """Block signals, in new processes until they call :func:`unblock`."""
    if sys.platform == "win32":
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock() -> None:
    """Deliver the signals that :func:`starting_processes` has blocked."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call ``handler`` on both signals; only the main thread gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def forwarding(pids: Callable[[], Iterable[int]]) -> Iterator[list[int]]:
    """Pass signals on to the processes of ``pids()``; the list holds them."""
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for pid in pids():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)

    with handling(forward):
        yield came


class StopSignals:
    """Signals set :attr:`requested` in training; elsewhere ``Interrupted``.

    A second one raises at once.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.is_training = False
        self._first = 0.0
        self._handling = handling(self._handle)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handling.__exit__(*error)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        came, now = signal.Signals(number), time.monotonic()
        is_second = self.requested and now - self._first > _SECONDS_OF_ONE_SIGNAL
        if not self.is_training or is_second:
            raise Interrupted(f"stopped by {came.name}", came)
        if not self.requested:
            self.requested, self._first = came, now
