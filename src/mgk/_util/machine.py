"""The machine: its description for reports, its CPU threads and its devices."""

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch


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
