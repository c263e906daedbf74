"""Time and memory of every variant on every backend that serves it, against softmax with twice the heads."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mgk._util import machine
from mgk.bench import memory, timing, variants
from mgk.bench.conditions import measuring, usable_device
from mgk.bench.errors import BenchError
from mgk.bench.report import YARDSTICK_BACKEND, Report, Row
from mgk.bench.settings import Passes, Settings
from mgk.bench.variants import Inputs


@dataclass(frozen=True)
class _Alternative:
    variant: str
    heads: int
    backend: str
    is_auto: bool
    run: Callable[[], object]

    @property
    def name(self) -> str:
        return f"{self.variant} by {self.backend}"


def run(settings: Settings, on_step: Callable[[int, int], None] = lambda done, total: None) -> Report:
    """Measure what the settings ask for.

    Args:
        settings: shapes and options.
        on_step: told after each run how many of how many are done.

    Returns:
        The rows, per pass: the yardstick first, then the variants in the order asked for.

    Raises:
        BenchError: when the device is missing, the memory does not suffice or nothing is left to measure.
    """
    device = usable_device(settings.device)
    with measuring(settings.threads, smaller="batch or length"):
        return _run(settings, device, on_step)


def reference_bytes(variant: str, settings: Settings) -> int:
    """About what the reference needs at its peak, forward and backward: N x N tensors, counted by measuring."""
    mixtures = 1 if variant == "softmax" else settings.mixtures
    tensors = 3 if variants.BY_NAME[variant].is_linear else 5 + 2 * mixtures
    itemsize = 8 if settings.dtype == "float64" else 4  # half precision is computed in float32
    return tensors * settings.batch * settings.heads * settings.length**2 * itemsize


def _run(settings: Settings, device: torch.device, on_step: Callable[[int, int], None]) -> Report:
    inputs = variants.make_inputs(settings, device)
    notes: dict[str, None] = {}  # in order, each once
    plans = {passes: _plan(settings, passes, inputs, notes) for passes in settings.passes}
    if all(len(plan) == 1 for plan in plans.values()):
        raise BenchError("; ".join(["nothing is left to measure", *notes]))
    runs = settings.rounds + 1 + settings.memory
    total = runs * sum(len(plan) for plan in plans.values())
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        on_step(done, total)

    rows = [row for passes, plan in plans.items() for row in _measure(settings, passes, plan, device, step)]
    if settings.memory and any(row.peak_extra_mb is None for row in rows):
        notes["peak memory cannot be measured on this system"] = None
    return Report(settings=settings, machine=machine.describe(device), rows=tuple(rows), notes=tuple(notes))


def _plan(settings: Settings, passes: Passes, inputs: Inputs, notes: dict[str, None]) -> list[_Alternative]:
    """The yardstick and every alternative that can serve; what cannot goes to the notes."""
    plan = [_yardstick(settings, passes, inputs)]
    for name in settings.variants:
        variant = variants.BY_NAME[name]
        with torch.set_grad_enabled(passes != "forward"):  # a backend may refuse, or lose to another, for its gradients
            auto = variants.auto_backend(name, inputs, settings.causal)
            backends = settings.backends or variants.backends_of(name)
            reasons = {
                backend: variants.unsupported_reason(name, backend, inputs, settings.causal) for backend in backends
            }
        needed = reference_bytes(name, settings) / 1e9
        for backend, reason in reasons.items():
            if reason is None and backend in ("reference", "eager") and needed > settings.memory_limit_gb:
                reason = f"it needs about {needed:.2g} GB, the limit is {settings.memory_limit_gb:g} GB"
            if reason is not None:
                notes[f"{name} by {backend} was not measured: {reason}"] = None
                continue
            leaves = [getattr(inputs, leaf) for leaf in variant.leaves]
            forward = _bind(variant.attend, inputs, backend, settings.causal)
            work = _work(forward, leaves, passes, like=inputs.query)
            plan.append(_Alternative(name, settings.heads, backend, backend == auto, work))
    return plan


def _yardstick(settings: Settings, passes: Passes, inputs: Inputs) -> _Alternative:
    """Softmax attention with 2H heads."""
    query, key, value = (
        torch.cat([x.detach(), x.detach().flip(2)], 1).requires_grad_()
        for x in (inputs.query, inputs.key, inputs.value)
    )

    def forward() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=settings.causal)

    work = _work(forward, [query, key, value], passes, like=query)
    return _Alternative("softmax", 2 * settings.heads, YARDSTICK_BACKEND, False, work)


def _bind(attend: Callable[..., Tensor], inputs: Inputs, backend: str, is_causal: bool) -> Callable[[], Tensor]:
    return lambda: attend(inputs, backend=backend, is_causal=is_causal)


def _work(forward: Callable[[], Tensor], leaves: list[Tensor], passes: Passes, like: Tensor) -> Callable[[], object]:
    """The forward without a graph, or the forward and the gradients of the leaves."""
    if passes == "forward":
        return torch.no_grad()(forward)
    gradient = torch.ones_like(like)
    return lambda: torch.autograd.grad(forward(), leaves, gradient)


def _measure(
    settings: Settings,
    passes: Passes,
    plan: list[_Alternative],
    device: torch.device,
    step: Callable[[], None],
) -> list[Row]:
    alternatives = {alternative.name: alternative.run for alternative in plan}
    timings = timing.compare(alternatives, plan[0].name, rounds=settings.rounds, device=device, on_run=step)
    rows = []
    for alternative in plan:
        peak = None
        if settings.memory:
            peak = memory.peak_extra_bytes(alternative.run, device)
            step()
        rows.append(
            Row(
                variant=alternative.variant,
                heads=alternative.heads,
                backend=alternative.backend,
                is_auto=alternative.is_auto,
                passes=passes,
                peak_extra_mb=None if peak is None else peak / 1e6,
                **asdict(timings[alternative.name]),
            )
        )
    return rows
