"""The Triton kernels on a GPU: the long self-check, then times."""

import itertools
from collections.abc import Iterator

import torch

from mgk.bench import variants_by_backend
from mgk.bench.registry import PASSES, AttentionSettings, GpuSettings
from mgk.bench.runner import BenchError, OnStep, Outcome, Row
from mgk.functional import available_backends
from mgk.functional.mixture.backends.triton_backend import self_check

_VARIANTS = ("softmax", "mgk", "mgk-hard", "smgk", "smgk-hard", "linear", "mlk")


def run(settings: GpuSettings, on_step: OnStep) -> Outcome:
    """One row per check, then one per setting, pass and alternative."""
    status = available_backends()["triton"]
    if status != "ready":
        raise BenchError(f"the GPU kernels cannot be measured: backend 'triton' is {status}")
    checks = list(self_check.checks(torch.device(settings.device), quick=False))
    rows: list[Row] = []
    for check in checks:
        dtype, limit = str(check.dtype).removeprefix("torch."), self_check.TOLERANCES[check.dtype]
        row = {"experiment": "correctness", "call": check.name, "dtype": dtype}
        rows.append(row | {"error": check.error, "limit": limit})
    notes: dict[str, None] = {}
    calls = list(_calls(settings))
    for number, call in enumerate(calls, 1):
        outcome = variants_by_backend.run(call, lambda done, total: None)
        on_step(number, len(calls))
        sizes = {"B": call.batch, "N": call.length, "D": call.head_dim, "M": call.mixtures}
        mask = ", causal" if call.causal else ""
        for row in outcome.rows:
            title = f"{row['passes']}, {call.dtype}, D={call.head_dim}{mask}"
            shared = {"experiment": title, "dtype": call.dtype, "causal": call.causal}
            rows.append(shared | sizes | row)
        notes |= dict.fromkeys(outcome.notes)
    return Outcome(rows, list(notes), [str(check) for check in checks if not check.passes])


def _calls(settings: GpuSettings) -> Iterator[AttentionSettings]:
    for dtype, head_dim, causal in itertools.product(settings.dtypes, settings.head_dims, (False, True)):
        yield AttentionSettings(
            device=settings.device,
            batch=settings.batch,
            heads=settings.heads,
            length=settings.length,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
            variants=_VARIANTS,
            backends=("triton", "sdpa"),
            passes=PASSES,
            rounds=settings.rounds,
        )
