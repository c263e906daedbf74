"""What a comparison found, as data: the page and the table are made from it, and ``comparison.json`` holds it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from mgk.analysis.attention_maps import AttentionMaps
from mgk.analysis.confidence_intervals import Interval, PairedDifference
from mgk.analysis.formula import Quantity

Curve = tuple[tuple[float, float], ...]  # (step, value)

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """One contender.

    Attributes:
        name: ``mgk:4``.
        title: for people.
        parameters: of the model.
        flops: of the forward of one example, by the cost model.
        flops_formula: in symbols and numbers.
        seconds_per_step: the median over steps, and over seeds.
        peak_memory_bytes: beyond what was in use before training, the most over seeds; None: not measured.
        values: the metric on the test split, by seed.
        score: their mean, with its 95% interval.
        losses: of training, a curve for each seed.
        validation: the metric on the split that is looked at, a curve for each seed.
        paired: the difference to the baseline, example by example; None for the baseline and for perplexities.
        gap: the difference to the baseline of a perplexity, seed by seed.
        runs: the folders, by seed.
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All contenders, the baseline first.

    Attributes:
        task: the recipe's.
        data: the data set's; "synthetic-..." is a made-up sample.
        preset: the recipe's.
        metric: "accuracy" or "perplexity".
        chance: of always answering the most frequent class; None for perplexities.
        test_examples: how many; tokens of running text.
        length: tokens of the example that the FLOPs are for, the mean of the test split.
        steps: of every run.
        seeds: of the runs of each contender.
        results: of the contenders.
        command: that made this.
        machine: where, with which versions.
        date: UTC, ISO 8601.
        recipe: of the baseline's first run, as YAML.
    """

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
    format: int = FORMAT

    @property
    def baseline(self) -> Result:
        """The first contender."""
        return self.results[0]

    @property
    def is_accuracy(self) -> bool:
        """Whether higher is better."""
        return self.metric == "accuracy"

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """From JSON data; ``KeyError`` or ``TypeError`` when it is something else."""
        if data["format"] != FORMAT:
            raise TypeError(f"this is format {data['format']}, not {FORMAT}")
        results = tuple(_result(item) for item in data["results"])
        return cls(**{**data, "seeds": tuple(data["seeds"]), "results": results})


@dataclass(frozen=True)
class Look:
    """What is seen in the models of a comparison.

    Attributes:
        flops: of the forward of one example of mean length, by contender.
        length: that length.
        chance: of always answering the most frequent class of the test split; None for running text.
        maps: of one example, by contender.
        example: the example as text, cut where it is long; of images a few words.
        tokens: how many it has.
        machine: this one.
        date: now, UTC.
    """

    flops: dict[str, Quantity]
    length: int
    chance: float | None
    maps: dict[str, AttentionMaps]
    example: str
    tokens: int
    machine: str
    date: str


def _result(data: Mapping[str, Any]) -> Result:
    paired, gap = data["paired"], data["gap"]
    return Result(
        **{
            **data,
            "values": tuple(data["values"]),
            "score": Interval(**data["score"]),
            "losses": _curves(data["losses"]),
            "validation": _curves(data["validation"]),
            "paired": paired and PairedDifference(**{**paired, "difference": Interval(**paired["difference"])}),
            "gap": gap and Interval(**gap),
            "runs": tuple(data["runs"]),
        }
    )


def _curves(data: Any) -> tuple[Curve, ...]:
    return tuple(tuple((step, value) for step, value in curve) for curve in data)
