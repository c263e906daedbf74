"""Time and memory of every variant and backend, beside softmax."""

from dataclasses import asdict

import torch

from mgk._util.machine import peak_extra_bytes
from mgk.bench import calls, timing
from mgk.bench.registry import AttentionSettings, AttentionShape, Passes
from mgk.bench.runner import BenchError, OnStep, Outcome, Row
from mgk.bench.timing import Steps, Work

BASELINE = "torch"

# What identifies a row, with what is measured; the baseline comes first.
_Plan = list[tuple[Row, Work]]


def run(settings: AttentionSettings, on_step: OnStep) -> Outcome:
    """One row per pass and alternative, the baseline first."""
    inputs = calls.make_inputs(settings, dtype=getattr(torch, settings.dtype), device=settings.device)
    notes: dict[str, None] = {}  # in order, each once
    plans = [_plan(settings, passes, inputs, notes) for passes in settings.passes]
    if all(len(plan) == 1 for plan in plans):
        raise BenchError("; ".join(["nothing is left to measure", *notes]))
    runs_each = settings.rounds + 1 + settings.memory
    steps = Steps(on_step, runs_each * sum(len(plan) for plan in plans))
    rows = [row for plan in plans for row in _measure(settings, plan, steps)]
    if settings.memory and any(row["peak_extra_mb"] is None for row in rows):
        notes["peak memory cannot be measured on this system"] = None
    return Outcome(rows, list(notes))


def reference_bytes(variant: str, shape: AttentionShape, itemsize: int = 4) -> int:
    """Peak of ``reference`` with backward, by a measured number of tensors."""
    spec = calls.spec_of(variant)
    tensors = 3 if spec.is_linear else 5 + 2 * spec.num_components(shape.mixtures)
    return tensors * shape.batch * shape.heads * shape.length**2 * itemsize


def _plan(settings: AttentionSettings, passes: Passes, x: calls.Inputs, notes: dict[str, None]) -> _Plan:
    """The baseline and what can be measured; the rest goes to the notes."""
    causal = settings.causal
    itemsize = 8 if settings.dtype == "float64" else 4  # half is computed in float32

    def row(name: str, heads: int, backend: str, is_auto: bool) -> Row:
        return {"variant": name, "heads": heads, "backend": backend, "is_auto": is_auto, "passes": passes}

    baseline = calls.softmax_baseline(x, passes, is_causal=causal)
    plan: _Plan = [(row("softmax", 2 * settings.heads, BASELINE, False), baseline)]
    for name in settings.variants:
        backends = settings.backends or calls.backends_of(name)
        with torch.set_grad_enabled(passes != "forward"):  # backends depend on it
            auto = calls.auto_backend(name, x, causal)
            reasons = {backend: calls.unsupported_reason(name, backend, x, causal) for backend in backends}
        needed, limit = reference_bytes(name, settings, itemsize) / 1e9, settings.memory_limit_gb
        for backend, reason in reasons.items():
            if reason is None and backend in ("reference", "eager") and needed > limit:
                reason = f"it needs about {needed:.2g} GB, the limit is {limit:g} GB"
            if reason is not None:
                notes[f"{name} by {backend} was not measured: {reason}"] = None
                continue
            work = calls.variant_work(name, x, passes, backend=backend, is_causal=causal)
            plan.append((row(name, settings.heads, backend, backend == auto), work))
    return plan


def _measure(settings: AttentionSettings, plan: _Plan, steps: Steps) -> list[Row]:
    device = torch.device(settings.device)
    works = {str(number): work for number, (_, work) in enumerate(plan)}
    timings = timing.compare(works, "0", rounds=settings.rounds, device=device, on_run=steps)
    rows = []
    for (row, work), times in zip(plan, timings.values(), strict=True):
        megabytes = None
        if settings.memory:
            peak = peak_extra_bytes(work, device)
            megabytes = None if peak is None else peak / 1e6
            steps()
        rows.append({**row, **asdict(times), "peak_extra_mb": megabytes})
    return rows
