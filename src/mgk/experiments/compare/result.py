"""A comparison as data, of which page, table and ``comparison.json`` are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mgk._util import json_codec
from mgk.analysis.confidence_intervals import (
    Interval,
    PairedDifference,
    mean_accuracy,
    mean_difference,
    mean_over_blocks,
    paired_difference,
)
from mgk.experiments.model_analysis import Inspection, Writing
from mgk.experiments.plan import Plan
from mgk.experiments.result_store import Curve, TrialResult
from mgk.experiments.trials import Trial


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model.

    Attributes:
        flops: of the forward pass of one example, by the cost model.
        seconds_per_step: the median over steps, and over seeds.
        peak_memory_bytes: beyond what was in use before training, the most over
            seeds; None: not measured.
        validation: the metric on the split that is evaluated during training, a curve
            for each seed.
        paired: the difference to the baseline, example by example; None for the
            baseline and for perplexities.
        gap: the difference to the baseline of a perplexity, seed by seed, or of bits
            per byte, by seed and block of the text.
        writing: of the first model, if it is a language model.
    """

    name: str
    title: str
    parameters: int
    flops: int
    flops_formula: str
    seconds_per_step: float
    peak_memory_bytes: int | None
    values: tuple[float, ...]
    score: Interval
    losses: tuple[Curve, ...]
    validation: tuple[Curve, ...]
    paired: PairedDifference | None
    gap: Interval | None
    runs: tuple[str, ...]
    writing: Writing | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All models, the baseline first.

    Attributes:
        data: the data set's; "synthetic-..." is a synthetic sample.
        chance: the accuracy of the majority-class baseline; None for perplexities.
        test_examples: how many; tokens of running text.
        length: tokens of the example that the FLOPs are for, the mean of the
            test split.
    """

    format: Literal[1] = 1
    task: str
    data: str
    preset: str
    metric: str
    chance: float | None
    test_examples: int
    length: int
    steps: int
    seeds: tuple[int, ...]
    results: tuple[Result, ...]
    command: str
    machine: str
    date: str
    recipe: str

    @property
    def baseline(self) -> Result:
        """The first model."""
        return self.results[0]

    @property
    def is_accuracy(self) -> bool:
        """Whether higher is better."""
        return self.metric == "accuracy"

    @property
    def metric_name(self) -> str:
        """The metric in words."""
        return self.metric.replace("_", " ")

    @property
    def digits(self) -> int:
        """After the point, of a metric that is no accuracy."""
        return 3 if self.metric == "bits_per_byte" else 2


def compare_results(plan: Plan, results: Mapping[Trial, TrialResult], inspection: Inspection) -> Comparison:
    """Compare the results of all trials of a plan; the first model is the baseline."""
    from mgk._util.machine import Machine  # imports torch

    groups = [[results[trial] for trial in plan.trials if trial.model == model] for model in plan.models]
    first = groups[0][0]
    summary = first.summary
    return Comparison(
        task=summary.task,
        data=summary.data,
        preset=summary.preset,
        metric=summary.metric,
        chance=first.data.chance if summary.metric == "accuracy" else None,
        test_examples=summary.examples,
        length=inspection.length,
        steps=summary.steps,
        seeds=tuple(result.trial.seed for result in groups[0]),
        results=tuple(
            _compared(group, None if group is groups[0] else groups[0], inspection) for group in groups
        ),
        command=plan.commands[first.trial],
        machine=str(json_codec.load(Machine, first.machine)),
        date=first.machine["date"],
        recipe=first.recipe.to_yaml(),
    )


def _compared(
    group: Sequence[TrialResult], baseline: Sequence[TrialResult] | None, inspection: Inspection
) -> Result:
    """The results of one model, and what they differ from the baseline's by."""
    model, summaries = group[0].trial.model, [result.summary for result in group]
    values = _values(group)
    peaks = [summary.peak_memory_bytes for summary in summaries]
    paired = gap = None
    if summaries[0].metric == "accuracy":
        correct = [result.correct or () for result in group]
        score = mean_accuracy(correct)
        if baseline is not None:
            paired = paired_difference(correct, [result.correct or () for result in baseline])
    elif summaries[0].metric == "bits_per_byte":
        bits = _block_bits(group)
        score = mean_over_blocks(bits)
        gap = None if baseline is None else mean_over_blocks(bits - _block_bits(baseline))
    else:
        score = mean_difference(values, [0.0] * len(values))
        if baseline is not None:
            gap = mean_difference(values, _values(baseline))
    flops = inspection.flops[model.name]
    return Result(
        name=model.name,
        title=model.phrase,
        parameters=summaries[0].parameters,
        flops=flops.value,
        flops_formula=flops.explain(),
        seconds_per_step=median(summary.seconds_per_step for summary in summaries),
        peak_memory_bytes=None if None in peaks else max(peak for peak in peaks if peak is not None),
        values=values,
        score=score,
        losses=tuple(result.losses for result in group),
        validation=tuple(result.validation for result in group),
        paired=paired,
        gap=gap,
        runs=tuple(str(result.trial) for result in group),
        writing=inspection.writings.get(model.name),
    )


def _block_bits(group: Sequence[TrialResult]) -> NDArray[np.float64]:
    """Bits per byte of the blocks of the test split, (seeds, blocks)."""
    return np.array([result.summary.block_losses for result in group]) / np.log(2)


def _values(group: Sequence[TrialResult]) -> tuple[float, ...]:
    return tuple(result.summary.metrics[f"test_{result.summary.metric}"] for result in group)
