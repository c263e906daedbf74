"""The machine: its description, CPU threads, devices and peak memory."""

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from mgk._util.errors import UsageError
from mgk._util.files import commit_of
from mgk._util.limits import MAX_THREADS

_PROC = Path("/proc/self")


@dataclass(frozen=True)
class Machine:
    """Hardware, software and time of a measurement."""

    processor: str
    cores: int  # logical cores of the whole machine
    threads: int  # CPU threads of torch
    instructions: str  # the widest instruction set of torch's own kernels
    accelerator: str | None
    system: str
    python: str
    torch: str
    mgk: str
    commit: str | None  # by mgk._util.files.commit_of
    date: str  # UTC, ISO 8601

    def __str__(self) -> str:
        return ", ".join(
            [
                *([self.accelerator] if self.accelerator else []),
                self.processor,
                f"{self.threads} of {self.cores} cores",
                self.instructions,
                f"torch {self.torch}",
                f"mgk {self.mgk}" + (f" ({self.commit[:10]})" if self.commit else ""),
                self.date,
            ]
        )


def describe(device: torch.device | None = None) -> Machine:
    """This machine, now; ``device`` adds the name of an accelerator."""
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        accelerator=_accelerator(device),
        system=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        mgk=version("mgk"),
        commit=commit_of(Path(__file__)),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Set torch's number of CPU threads in the block; None: unchanged."""
    before = torch.get_num_threads()
    if number is not None and not 1 <= number <= MAX_THREADS:
        raise UsageError(f"threads must be from 1 to {MAX_THREADS}, got {number}")
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work given to it."""
    torch.get_device_module(device).synchronize()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerator(device: torch.device | None) -> str | None:
    if device is None or device.type == "cpu":
        return None
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(get_name(device)) if get_name else device.type


class PeakMemory:
    """Peak memory since it was made, beyond what was in use then.

    On the CPU: resident memory of the process, to about a megabyte.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, None
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            if hasattr(self._module, "max_memory_allocated"):
                synchronize(device)
                self._module.reset_peak_memory_stats(device)
                self._before = self._module.memory_allocated(device)
        elif sys.platform == "linux":
            # glibc keeps freed pages resident, which a run would reuse
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            with suppress(OSError):
                (_PROC / "clear_refs").write_text("5")  # VmHWM becomes VmRSS
                self._before = _status_bytes("VmRSS")

    def extra_bytes(self) -> int | None:
        """The peak so far; None where it cannot be measured."""
        if self._before is None:
            return None
        if self._device.type == "cpu":
            peak = _status_bytes("VmHWM")
        else:
            synchronize(self._device)
            peak = self._module.max_memory_allocated(self._device)
        return None if peak is None else max(0, peak - self._before)


def peak_extra_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory during ``run()`` beyond that before; None: not measurable.

    A first run also fills the caches of threads and libraries.
    """
    peak = PeakMemory(device)
    run()
    return peak.extra_bytes()


def peak_process_bytes() -> int:
    """Peak resident memory of the process so far; not on Windows."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(field: str) -> int | None:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
