"""Peak extra memory of one long call of mgk by the blockwise backend."""

from dataclasses import replace

from mgk._util.machine import peak_extra_bytes
from mgk.bench.attention import reference_bytes
from mgk.bench.calls import make_inputs, variant_work
from mgk.bench.registry import MemorySettings
from mgk.bench.runner import OnStep, Outcome
from mgk.bench.timing import CPU, Steps, Work


def run(settings: MemorySettings, on_step: OnStep) -> Outcome:
    """One row: the peak, its limit, and what ``reference`` would need."""
    step = Steps(on_step, 2)
    short = replace(settings, length=min(settings.length, 256))
    _work(short)()  # fills the caches of threads and libraries
    step()
    peak = peak_extra_bytes(_work(settings), CPU)
    step()
    limit = round(settings.limit_gb * 1e9)
    scores = settings.batch * settings.heads * settings.mixtures * settings.length**2
    row = {
        "peak_extra_bytes": peak,
        "limit_bytes": limit,
        "reference_bytes": reference_bytes("mgk", settings),
        "reference_score_bytes": 4 * scores,
    }
    failures = []
    if peak is None:
        failures = ["peak memory cannot be measured on this system"]
    elif peak > limit:
        failures = [f"peak extra memory is {peak:,} bytes, above the limit"]
    return Outcome([row], failures=failures)


def _work(shape: MemorySettings) -> Work:
    return variant_work("mgk", make_inputs(shape), "forward+backward", backend="blockwise")
