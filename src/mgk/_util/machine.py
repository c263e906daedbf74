"""The machine: its description for reports, its CPU threads, its devices and the peak memory of a call."""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

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
    commit: str | None  # of the running checkout, with "-dirty" if files were changed; None outside of a checkout
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
        commit=_commit(Path(__file__)),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Set the number of CPU threads of torch inside the block; None leaves it unchanged."""
    before = torch.get_num_threads()
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
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _accelerator(device: torch.device | None) -> str | None:
    if device is None or device.type == "cpu":
        return None
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(get_name(device)) if get_name else device.type


def _commit(file: Path) -> str | None:
    """The commit of the repository that tracks the file; a repository around a virtual environment does not count."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def peak_extra_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory during ``run()`` minus the memory in use before; None where it cannot be measured.

    Outputs and gradients count, inputs do not. The first run of a kind also fills the caches of threads and
    libraries: warm up before. On the CPU this is the resident memory of the process, exact to about a megabyte.
    """
    return _on_cpu(run) if device.type == "cpu" else _on_accelerator(run, device)


def peak_process_bytes() -> int:
    """Peak resident memory of the process so far, libraries included; not on Windows."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _on_cpu(run: Callable[[], object]) -> int | None:
    if sys.platform != "linux":
        return None
    # glibc keeps freed pages resident; a run that used them again would seem to take no memory
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        (_PROC / "clear_refs").write_text("5")  # lowers VmHWM to the present VmRSS
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    run()
    after = _status_bytes("VmHWM")
    return None if before is None or after is None else max(0, after - before)


def _status_bytes(field: str) -> int | None:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _on_accelerator(run: Callable[[], object], device: torch.device) -> int | None:
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return None
    synchronize(device)
    module.reset_peak_memory_stats(device)
    before: int = module.memory_allocated(device)
    run()
    synchronize(device)
    return module.max_memory_allocated(device) - before
