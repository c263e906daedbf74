"""Progress of a long job on stderr: a bar on a terminal, now and then a plain line elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

OnStep = Callable[[int, int], None]
# Between two plain lines: few enough for a log file, often enough to see that the job lives.
SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(label: str, *, is_shown: bool = True) -> Iterator[OnStep]:
    """A function that takes how many steps of how many are done and shows it, with the time left."""
    if not is_shown:
        yield lambda done, total: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(label)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(label: str) -> OnStep:
    start = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        left = (now - start) / done * (total - done)
        print(f"{label}: {done} of {total}, {left:.0f} s left", file=sys.stderr, flush=True)

    return show
