"""The task registry, ``tasks.toml``. Imports neither torch nor NumPy."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal

from mgk._util.suggestions import did_you_mean
from mgk.data.errors import UsageError

Kind = Literal["sequence", "pair", "image", "language"]

SYNTHETIC = "synthetic-"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One data set.

    Attributes:
        module: of ``mgk.data``; its ``prepare`` reads or generates the set.
        layout: what to fetch from ``url``.
        size: of the download, or of the prepared set where there is none.
        max_length: tokens an example keeps, as in the paper.
        num_labels: 0 for running text.
        options: of the preparation, with their defaults.
        source_options: those that apply to files; None for all.
        hub: name and configuration at the Hugging Face hub, if it is there.
        hub_files: the official files, if the hub has them.
    """

    name: str
    title: str
    kind: Kind
    module: str
    layout: str
    url: str
    licence: str
    size: str
    max_length: int
    num_labels: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    source_options: Sequence[str] | None = None
    hub: Sequence[str] = ()
    hub_files: Sequence[str] = ()
    is_generated: bool = False
    is_synthetic: bool = False

    def how_to_get(self) -> str:
        """What to fetch, the command to run then, and the offline sample."""
        command = f"run: mgk data prepare {self.name}"
        if self.is_generated:
            return command
        fetch = f"fetch {self.layout} from {self.url}, or copy it from where it is"
        sample = f"{SYNTHETIC}{self.name} is a sample that is generated (preset smoke)"
        offline = f"without a network, {sample}"
        return f"{fetch}, then {command} --source PATH; {offline}"


def _synthetic(task: Task) -> Task:
    return replace(
        task,
        name=SYNTHETIC + task.name,
        title=f"A tiny synthetic sample in the form of {task.name}; not the real task",
        module="synthetic",
        layout="nothing",
        url="generated here",
        licence="generated here",
        size="below 1 MB prepared",
        options={"seed": 0},
        source_options=None,
        hub=(),
        hub_files=(),
        is_generated=True,
        is_synthetic=True,
    )


_FILE = resources.files("mgk.data") / "tasks.toml"
_TABLES = tomllib.loads(_FILE.read_text(encoding="utf-8"))
_REAL = [Task(**{"name": name, "module": name, **table}) for name, table in _TABLES.items()]
_SYNTHETIC = [_synthetic(task) for task in _REAL]

TASKS: Mapping[str, Task] = {task.name: task for task in _REAL + _SYNTHETIC}


def find_task(name: str) -> Task:
    """The task of this name; the error suggests the nearest one."""
    if name not in TASKS:
        raise UsageError(f"there is no task {name!r}: {did_you_mean(name, TASKS)}")
    return TASKS[name]
