"""Progress of a run on stderr: a bar with loss, metric, speed and the time left; elsewhere plain lines."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mgk._util.progress import SECONDS_BETWEEN_LINES


class TrainingProgress:
    """Shows what ``mgk.training.train`` reports."""

    def __init__(self, label: str, *, is_shown: bool = True) -> None:
        self._label, self._is_shown = label, is_shown
        self._values: dict[str, float] = {}
        self._start: tuple[int, float] | None = None
        self._done, self._total, self._last_line = 0, 0, time.monotonic()
        self._tests: TaskID | None = None
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (is_shown and console.is_terminal),
        )
        self._task = self._bar.add_task(label, total=None, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def step(self, done: int, total: int) -> None:
        """So many steps of so many are done."""
        self._start = self._start or (done, time.monotonic())
        self._done, self._total = done, total
        self._bar.update(self._task, completed=done, total=total)

    def log(self, line: dict[str, float]) -> None:
        """A line of metrics."""
        self._values |= line
        self._bar.update(self._task, figures=self._figures())
        is_due = time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES
        if self._is_shown and self._bar.disable and (is_due or "eval_loss" in line):
            self._last_line = time.monotonic()
            print(f"{self._label}: {self._done} of {self._total}, {self._figures()}{self._left()}", file=sys.stderr)

    def test(self, done: int, total: int) -> None:
        """So many steps of the test at the end are done."""
        if self._tests is None:
            self._tests = self._bar.add_task("test", figures="")
        self._bar.update(self._tests, completed=done, total=total)
        is_due = time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES
        if self._is_shown and self._bar.disable and is_due:
            self._last_line = time.monotonic()
            print(f"test: {done} of {total}", file=sys.stderr)

    def say(self, text: str) -> None:
        """A note."""
        if self._is_shown:
            self._bar.console.print(f"Note: {text}", markup=False, highlight=False, soft_wrap=True)

    def _figures(self) -> str:
        values = self._values
        parts = [f"loss {values['loss']:.4f}"] if "loss" in values else []
        if "eval_accuracy" in values:
            parts.append(f"accuracy {values['eval_accuracy']:.2%}")
        if "eval_perplexity" in values:
            parts.append(f"perplexity {values['eval_perplexity']:.2f}")
        if "tokens_per_second" in values:
            parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
        return ", ".join(parts)

    def _left(self) -> str:
        first, began = self._start or (0, time.monotonic())
        if self._done == first:
            return ""
        left = (time.monotonic() - began) / (self._done - first) * (self._total - self._done)
        return f", {left:.0f} s left"
