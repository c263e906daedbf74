"""One preparation, as the module of a task gets it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mgk.data.errors import UsageError
from mgk.data.sources import Source
from mgk.data.task_registry import Task

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """What to prepare, and how.

    Attributes:
        task: the data set.
        given: its files, or None where it is to be generated.
        options: every option of the task, by name.
        workers: processes that may work on it; the result does not depend on them.
        on_step: called with how many steps of how many are done.
    """

    task: Task
    given: Source | None
    options: Mapping[str, Any]
    workers: int
    on_step: OnStep

    @property
    def source(self) -> Source:
        """The files of a task that needs some."""
        if self.given is None:
            raise UsageError(f"{self.task.name} needs its files: {self.task.how_to_get()}")
        return self.given
