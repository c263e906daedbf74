"""Peak extra memory of a long forward and backward of mgk by the blockwise backend, against a limit."""

from dataclasses import replace

from mgk._util.machine import peak_extra_bytes
from mgk.bench.attention import reference_bytes
from mgk.bench.calls import make_inputs, variant_work
from mgk.bench.registry import MemorySettings
from mgk.bench.runner import OnStep, Outcome
from mgk.bench.timing import CPU, Steps, Work


def run(settings: MemorySettings, on_step: OnStep) -> Outcome:
    """One row: ``peak_extra_bytes``, ``limit_bytes``, and what ``reference`` would need, in all and for its scores."""
    step = Steps(on_step, 2)
    _work(replace(settings, length=min(settings.length, 256)))()  # fills the caches of threads and libraries
    step()
    peak = peak_extra_bytes(_work(settings), CPU)
    step()
    limit = round(settings.limit_gb * 1e9)
    row = {
        "peak_extra_bytes": peak,
        "limit_bytes": limit,
        "reference_bytes": reference_bytes("mgk", settings),
        "reference_score_bytes": settings.batch * settings.heads * settings.mixtures * settings.length**2 * 4,
    }
    if peak is None:
        return Outcome([row], failures=["peak memory cannot be measured on this system"])
    is_above = peak > limit
    return Outcome([row], failures=[f"peak extra memory is {peak:,} bytes, above the limit"] if is_above else [])


def _work(shape: MemorySettings) -> Work:
    return variant_work("mgk", make_inputs(shape), "forward+backward", backend="blockwise")
