"""The fused kernels with 4 heads against softmax attention with 8."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mgk._util.machine import cpu_threads, peak_extra_bytes
from mgk.bench import calls, timing
from mgk.bench.registry import PASSES, AttentionShape, KernelsSettings, Passes
from mgk.bench.runner import BenchError, OnStep, Outcome, Row
from mgk.bench.timing import CPU, Work

BASELINE, UNFUSED = "softmax, 8 heads, torch", "mgk unfused, 4 heads"
_MIXTURES = {
    "mgk soft, 4 heads": "mgk",
    "smgk soft, 4 heads": "smgk",
    "mgk hard, 4 heads": "mgk-hard",
    "smgk hard, 4 heads": "smgk-hard",
}
_LINEAR = {"linear, 4 heads": "linear", "mlk, 4 heads": "mlk"}
# Of any number of heads, by the backend of "auto"; softmax has twice as many.
SOFTMAX, UNBOUNDED = "softmax", "without window"
_AUTO = {"mgk": "mgk", "smgk": "smgk", UNBOUNDED: "smgk"}
_VARIANTS = {**_MIXTURES, **_LINEAR, **_AUTO}
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True)
class Case(AttentionShape):
    """One comparison; the first alternative is the baseline."""

    experiment: str
    passes: Passes
    alternatives: tuple[str, ...] = (BASELINE, *_MIXTURES)
    rounds: int
    padded: float = 0.0
    causal: bool = False
    dtype: str = "float32"
    window: int | None = None
    repeats: int = 1  # timed together, so that the clock is fine enough
    threads: int | None = None

    @property
    def decodes(self) -> bool:
        """Whether there is one query."""
        return self.experiment.startswith("decod")

    def works(self) -> dict[str, Work]:
        """What to time, by alternative."""
        num_queries = 1 if self.decodes else None
        x = calls.make_inputs(self, num_queries=num_queries, dtype=getattr(torch, self.dtype))
        mask = None
        if self.padded:
            mask = (torch.arange(self.length) < self.length * (1 - self.padded))[None, None, None]
        options = {"is_causal": self.causal, "attn_mask": mask}
        works = {name: self._work(name, x, options) for name in self.alternatives}
        return {name: _repeated(work, self.repeats) for name, work in works.items()}

    def _work(self, name: str, x: calls.Inputs, options: dict[str, Any]) -> Work:
        if name in (BASELINE, SOFTMAX):
            return calls.softmax_baseline(x, self.passes, **options)
        if name == UNFUSED:
            prior = x.log_prior[None, :, :, None]
            run = partial(calls.unfused_attention, x.query, x.keys, x.value, prior)
            return calls.work(run, x.leaves("mgk"), self.passes)
        variant = _VARIANTS[name]
        if calls.spec_of(variant).is_linear:
            return calls.variant_work(variant, x, self.passes, is_causal=self.causal)
        if name not in _AUTO:
            options = options | {"backend": "cpu"}
        elif name != UNBOUNDED:
            options = options | {"window": self.window}
        return calls.variant_work(variant, x, self.passes, **options)

    def row(self) -> Row:
        """The fields that its rows share."""
        sizes = {"B": self.batch, "H": self.heads, "N": self.length, "D": self.head_dim}
        mask = {"padded": self.padded, "causal": self.causal, "window": self.window}
        kind = {"experiment": self.experiment, "dtype": self.dtype, "passes": self.passes}
        return {**kind, **sizes, **mask}


def _repeated(work: Work, times: int) -> Work:
    if times == 1:
        return work
    return lambda: [work() for _ in range(times)]


def cases() -> Iterator[Case]:
    """All comparisons, in the order of the documents."""
    for head_dim in (32, 64):
        for passes in PASSES:
            yield Case(experiment="table", head_dim=head_dim, passes=passes, rounds=15)
    for passes in PASSES:
        yield Case(experiment="causal", passes=passes, causal=True, rounds=11)
        yield Case(experiment="padding", passes=passes, padded=0.5, rounds=11)
        unfused = (BASELINE, "mgk soft, 4 heads", UNFUSED)
        yield Case(experiment="unfused", passes=passes, alternatives=unfused, rounds=3)
    for length in _LENGTHS:
        for passes in PASSES:
            rounds = max(2, min(15, 2**15 // length))
            yield Case(experiment="length", batch=1, length=length, passes=passes, rounds=rounds)
    soft = (BASELINE, "mgk soft, 4 heads", "smgk soft, 4 heads")
    yield Case(
        experiment="decoding",
        batch=4,
        length=8192,  # beyond the CPU's cache
        head_dim=64,
        passes="forward",
        alternatives=soft,
        rounds=60,
    )
    # Not all three in turn: smgk takes a second and slows down what follows it.
    for other, rounds in (("mlk, 4 heads", 41), ("smgk soft, 4 heads", 9)):
        yield Case(
            experiment="linear",
            batch=1,
            length=16384,
            passes="forward+backward",
            causal=True,
            alternatives=("linear, 4 heads", other),
            rounds=rounds,
        )
    yield from _more_cases()


def _more_cases() -> Iterator[Case]:
    """Short and wide calls, half precision, tiny calls and windows, by "auto"."""
    both = PASSES[1]
    auto: dict[str, Any] = {"alternatives": (SOFTMAX, "mgk", "smgk"), "rounds": 15}
    sizes: dict[str, Any]
    for length in (32, 128):
        sizes = {"batch": 64, "heads": 1, "length": length, "head_dim": 32}
        yield Case(experiment="short", passes=both, repeats=10, **sizes, **auto)
    sizes = {"batch": 24, "heads": 4, "length": 256, "head_dim": 16}
    yield Case(experiment="language model", passes=both, causal=True, **sizes, **auto)
    for passes in PASSES:
        yield Case(experiment="half", passes=passes, dtype="bfloat16", head_dim=64, **auto)
    yield Case(experiment="wide", passes=both, causal=True, head_dim=128, **auto)
    tiny: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": 16, "repeats": 1000, "threads": 1}
    yield Case(experiment="tiny", passes="forward", length=4, **tiny, **auto)
    yield Case(experiment="decoded token", passes="forward", length=64, **tiny, **auto)
    sizes = {"batch": 1, "length": 8192, "window": 256, "rounds": 5}
    for causal in (False, True):
        names = (UNBOUNDED, "smgk")
        yield Case(experiment="window", passes=both, causal=causal, alternatives=names, **sizes)


def run(settings: KernelsSettings, on_step: OnStep) -> Outcome:
    """One row per case and alternative."""
    calls.require_kernels()
    if settings.plot is not None and "length" not in settings.experiments:
        raise BenchError("the plot shows the experiment 'length', which is not to be run")
    chosen = [case for case in cases() if case.experiment in settings.experiments]
    rows: list[Row] = []
    for number, case in enumerate(chosen, 1):
        rows += measure(case)
        on_step(number, len(chosen))
    if settings.plot is not None:
        plot([row for row in rows if row["experiment"] == "length"], settings.plot)
    return Outcome(rows)


def measure(case: Case) -> Iterator[Row]:
    """The rows of one comparison."""
    works = case.works()
    with cpu_threads(case.threads):
        compared = timing.compare(works, case.alternatives[0], rounds=case.rounds)
    for name, times in compared.items():
        times = replace(times, milliseconds=times.milliseconds / case.repeats)
        row = case.row() | {"alternative": name} | asdict(times)
        if case.experiment == "length":
            peak = peak_extra_bytes(works[name], CPU)
            row["peak_extra_mb"] = None if peak is None else peak / 1e6
        yield row


def plot(rows: list[Row], path: Path) -> None:
    """Draw the ratio over the length, a panel per pass."""
    import matplotlib.pyplot as plt

    ticks = [f"{length // 1024}k" if length >= 1024 else str(length) for length in _LENGTHS]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, passes in zip(axes, PASSES, strict=True):
        for name in (BASELINE, *_MIXTURES):
            mine = [row for row in rows if (row["alternative"], row["passes"]) == (name, passes)]
            points = [(row["N"], row["ratio"]) for row in mine]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set(xscale="log", xlabel="length N", title=passes, ylim=(0, 1.2))
        axis.set_xticks(_LENGTHS, ticks)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time / softmax with 8 heads")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
