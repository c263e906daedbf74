"""The most memory that one run takes beyond what was in use before it."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from mgk.bench.timing import synchronize

_PROC = Path("/proc/self")


def peak_extra_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Run once and return the peak of memory minus what was in use before; None where it cannot be measured.

    Outputs and gradients count, inputs do not. The first run of a kind also fills the caches of threads and
    libraries: warm up before. On the CPU this is the resident memory of the process, known to about a megabyte.
    """
    return _on_cpu(run) if device.type == "cpu" else _on_accelerator(run, device)


def _on_cpu(run: Callable[[], object]) -> int | None:
    if sys.platform != "linux":
        return None
    _return_freed_memory()
    try:
        (_PROC / "clear_refs").write_text("5")  # lowers VmHWM to the present VmRSS
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    run()
    after = _status_bytes("VmHWM")
    return None if before is None or after is None else max(0, after - before)


def _return_freed_memory() -> None:
    """Freed pages stay resident with glibc; a run that used them again would seem to take no memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
