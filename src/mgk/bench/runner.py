"""Runs a benchmark by name on its device and threads."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mgk._util.errors import UserError
from mgk._util.files import write_json
from mgk._util.machine import Machine, cpu_threads, describe
from mgk.bench.registry import BENCHMARKS, KernelsSettings, Settings

OnStep = Callable[[int, int], None]
Row = dict[str, Any]

# The CPU's allocator raises a plain RuntimeError with one of these in it.
_OUT_OF_MEMORY = ("allocate memory", "Storage size calculation overflowed")


class BenchError(UserError):
    """A benchmark that cannot be run as asked."""


@dataclass(frozen=True)
class Outcome:
    """Rows in the types of JSON, notes on what was left out, limits missed."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()
    failures: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """An outcome with what is needed to measure it again."""

    benchmark: str
    settings: Settings
    machine: Machine
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """Benchmark, settings, machine, rows and notes as JSON data."""
        settings = {
            name: list(x) if isinstance(x, tuple) else str(x) if isinstance(x, Path) else x
            for name, x in asdict(self.settings).items()
        }
        return {
            "benchmark": self.benchmark,
            "settings": settings,
            "machine": asdict(self.machine),
            "rows": list(self.outcome.rows),
            "notes": list(self.outcome.notes),
        }

    def write(self, path: Path) -> None:
        """Write the JSON; rows of kernel experiments not run now are kept."""
        data = self.to_json()
        if isinstance(self.settings, KernelsSettings) and path.exists():
            ran = self.settings.experiments
            old = json.loads(path.read_text())["rows"]
            data["rows"] = [row for row in old if row["experiment"] not in ran] + data["rows"]
        write_json(path, data)


def run(name: str, settings: Settings, on_step: OnStep = lambda done, total: None) -> Report:
    """Run the benchmark; ``BenchError`` without the device or enough memory."""
    module, _, function = BENCHMARKS[name].entry.partition(":")
    measure = getattr(import_module(f"mgk.bench.{module}"), function)
    device = _usable_device(getattr(settings, "device", "cpu"))
    try:
        with cpu_threads(getattr(settings, "threads", None)):
            return Report(name, settings, describe(device), measure(settings, on_step))
    except RuntimeError as error:
        is_reported = any(text in str(error) for text in _OUT_OF_MEMORY)
        if not is_reported and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise BenchError("there is not enough memory for these sizes: choose smaller ones") from error


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter without CUDA
        reason = str(error).splitlines()[0]
        raise BenchError(f"device {name!r} cannot be used here: {reason}") from error
    return device
