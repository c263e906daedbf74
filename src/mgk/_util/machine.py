"""The machine that a measurement was made on: a figure without it says little."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """Hardware, software and the moment."""

    processor: str
    cores: int  # logical ones, of the whole machine
    threads: int  # the ones that torch uses
    instructions: str  # the widest set that torch's own kernels use
    accelerator: str | None
    system: str
    python: str
    torch: str
    mgk: str
    commit: str | None  # of the checkout that runs, "-dirty" when its files differ from it; None outside of one
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
    """The commit of the repository that tracks the file, not of one that a virtual environment happens to lie in."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
