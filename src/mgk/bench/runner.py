"""Runs a benchmark by name: its device and threads, one report, one JSON form."""

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
    """What a benchmark measured.

    Attributes:
        rows: the measurements, in the types of JSON.
        notes: what was left out, and why.
        failures: limits that were missed.
    """

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
        """``{"benchmark", "settings", "machine", "rows", "notes"}`` in the types of JSON."""
        settings = {
            name: list(x) if isinstance(x, tuple) else str(x) if isinstance(x, Path) else x
            for name, x in asdict(self.settings).items()
        }
        rows, notes = list(self.outcome.rows), list(self.outcome.notes)
        machine = asdict(self.machine)
        return {"benchmark": self.benchmark, "settings": settings, "machine": machine, "rows": rows, "notes": notes}

    def write(self, path: Path) -> None:
        """Write the JSON; rows in ``path`` of kernel experiments that were not run now are kept."""
        data = self.to_json()
        if isinstance(self.settings, KernelsSettings) and path.exists():
            old = json.loads(path.read_text())["rows"]
            data["rows"] = [row for row in old if row["experiment"] not in self.settings.experiments] + data["rows"]
        write_json(path, data)


def run(name: str, settings: Settings, on_step: OnStep = lambda done, total: None) -> Report:
    """Run the benchmark.

    Args:
        name: a key of ``BENCHMARKS``.
        settings: of the benchmark's own class.
        on_step: called with the number of finished runs and of all runs.

    Raises:
        BenchError: if the device is missing, memory does not suffice or nothing is left to measure.
    """
    module, _, function = BENCHMARKS[name].entry.partition(":")
    measure: Callable[[Settings, OnStep], Outcome] = getattr(import_module(f"mgk.bench.{module}"), function)
    device = _usable_device(getattr(settings, "device", "cpu"))
    try:
        with cpu_threads(getattr(settings, "threads", None)):
            outcome = measure(settings, on_step)
            return Report(name, settings, describe(device), outcome)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
            raise BenchError("there is not enough memory for these sizes: choose smaller ones") from error
        raise


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA raises AssertionError
        raise BenchError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
