"""Progress of a job on stderr: a bar on a terminal, else lines."""

import sys
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

OnStep = Callable[[int, int], None]
# Between two lines of a log file, where there is no terminal.
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows how much of a job is done; call it with ``(done, total)``.

    The time left follows from the work since the first update.
    ``time_left`` is what was shown last, such as "12 min left", or empty.

    Args:
        label: what the job is.
        is_shown: False shows nothing, for ranks other than the first.
    """

    def __init__(self, label: str, *, is_shown: bool = True) -> None:
        self.label, self.is_shown = label, is_shown
        self.time_left = ""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[details]}"))
        is_off = not (is_shown and console.is_terminal)
        self._bar = Bar(*columns, console=console, transient=True, disable=is_off)
        self._task = self._bar.add_task(label, total=None, details="")
        self._created = self._last_line = time.monotonic()
        self._begin: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def __call__(self, done: float, total: float) -> None:
        """``done`` of ``total`` steps are done."""
        self.update(done, total)

    def update(
        self,
        done: float,
        total: float,
        *,
        details: str | None = None,
        label: str | None = None,
        now: bool = False,
    ) -> None:
        """``done`` of ``total`` are done, or what ``details`` say.

        ``label`` replaces the job's; ``now`` prints a line at once without a terminal.
        """
        self.label = label or self.label
        if self._begin is None:  # more than one step: a resumed job
            self._begin = (0.0, self._created) if done <= 1 else (done, time.monotonic())
        self.time_left = self._time_left(done, total)
        if details is None:
            details = f"{done:,.0f} of {total:,.0f}"
        text = ", ".join(filter(None, [details, self.time_left]))
        self._bar.update(self._task, description=self.label, completed=done, total=total, details=text)
        is_due = now or done >= total or time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES
        if self.is_shown and self._bar.disable and is_due:
            self._last_line = time.monotonic()
            print(f"{self.label}: {text}", file=sys.stderr, flush=True)

    def restart(self, label: str) -> None:
        """Another job begins; its time left is estimated from now."""
        self.label, self._begin, self._created = label, None, time.monotonic()

    def note(self, text: str) -> None:
        """A line of its own that stays."""
        if self.is_shown:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _time_left(self, done: float, total: float) -> str:
        first, began = self._begin or (done, time.monotonic())
        if done <= first or done >= total:
            return ""
        pace = (time.monotonic() - began) / (done - first)
        return f"{duration(pace * (total - done))} left"


def duration(seconds: float) -> str:
    """A duration in words: ``45 s``, ``12 min``, ``3.5 h``, ``2.1 days``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"
