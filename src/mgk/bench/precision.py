"""Largest float32 errors of every backend against the equations in float64.

With a hard E-step only the output is compared: float32 may break a near tie
otherwise.
"""

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk._util.machine import cpu_threads
from mgk.bench.registry import PrecisionSettings
from mgk.bench.runner import OnStep, Outcome, Row
from mgk.functional import available_backends, mixture_attention, shifted_mixture_attention

HEAD_DIM, MIXTURES = 32, 2
_VARIANCE_SHAPES = {"no": None, "head": (1, 1, 1, 1), "component": (1, 1, MIXTURES, 1)}


class Case(NamedTuple):
    """One kind of call."""

    variant: str
    e_step: str
    causal: bool
    learned_variance: str

    def inputs(self, seed: int, length: int) -> dict[str, Tensor]:
        """Float64 that float32 can hold; ``upstream`` is the output's gradient."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).double()

        per_token = (1, 1, length, HEAD_DIM)
        inputs = {name: normal(*per_token) for name in ("query", "value", "upstream")}
        inputs["log_prior"] = normal(1, 1, MIXTURES, 1).log_softmax(2).float().double()
        shape = _VARIANCE_SHAPES[self.learned_variance]
        if shape is not None:
            scale = 0.8 + 0.4 * torch.rand(shape, generator=generator)
            inputs["variance"] = (HEAD_DIM**0.5 * scale).double()
        if self.variant == "mgk":
            return inputs | {"keys": normal(1, 1, MIXTURES, length, HEAD_DIM)}
        return inputs | {"key": normal(*per_token), "shifts": normal(1, MIXTURES, HEAD_DIM)}

    def results(self, backend: str, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The output, and with a soft E-step every gradient."""
        leaves: dict[str, Any] = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        upstream = leaves.pop("upstream").detach()
        options: dict[str, Any] = {"e_step": self.e_step, "is_causal": self.causal, "backend": backend}
        attention = mixture_attention if self.variant == "mgk" else shifted_mixture_attention
        out = attention(**leaves, **options)
        if self.e_step == "hard":
            return {"output": out.detach()}
        gradients = torch.autograd.grad(out, list(leaves.values()), upstream)
        return {"output": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def run(settings: PrecisionSettings, on_step: OnStep) -> Outcome:
    """One row per case, number of threads and backend."""
    backends = [name for name, status in available_backends().items() if status == "ready"]
    cases = product(("mgk", "smgk"), ("soft", "hard"), (False, True), _VARIANCE_SHAPES)
    threads = sorted({1, torch.get_num_threads()})
    jobs = [
        (Case(*case), number, backend)
        for case, number, backend in product(cases, threads, backends)
        if case[1] == "soft" or (backend != "sdpa" and case[3] == "no")
    ]
    rows: list[Row] = []
    for done, (case, number, backend) in enumerate(jobs, 1):
        with cpu_threads(number):
            errors = errors_of(case, backend, settings)
        name = max(errors, key=lambda name: errors[name]["largest"])
        above = sum(found["above"] for found in errors.values())
        row = {"threads": number, **case._asdict(), "backend": backend, "errors": errors}
        rows.append(row | {"largest": errors[name]["largest"], "largest_of": name, "above": above})
        on_step(done, len(jobs))
    above = sum(row["above"] for row in rows)
    return Outcome(rows, failures=[f"{above} errors are above {settings.bound:g}"] if above else [])


def errors_of(case: Case, backend: str, settings: PrecisionSettings) -> dict[str, dict[str, float]]:
    """The field ``errors`` of a row."""
    errors: dict[str, list[float]] = {}
    for seed in range(settings.seeds):
        truth = _truth(case, seed, settings.length)
        results = case.results(backend, case.inputs(seed, settings.length), torch.float32)
        for name, x in results.items():
            scale = max(1.0, truth[name].abs().max().item())
            error = (x.double() - truth[name]).abs().max().item() / scale
            errors.setdefault(name, []).append(error)
    return {
        name: {
            "largest": max(found),
            "root_mean_square": (sum(error**2 for error in found) / len(found)) ** 0.5,
            "above": sum(error > settings.bound for error in found),
        }
        for name, found in errors.items()
    }


@lru_cache(maxsize=64)
def _truth(case: Case, seed: int, length: int) -> dict[str, Tensor]:
    """The equations in float64; kept for the next backend."""
    return case.results("reference", case.inputs(seed, length), torch.float64)
