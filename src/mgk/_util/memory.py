"""Peak memory: of one call beyond what was in use before it, and of the whole process."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from mgk._util.machine import synchronize

_PROC = Path("/proc/self")


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
