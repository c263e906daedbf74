"""The paper's figures as data, from what was measured: curves, rank histograms, maps, costs. Free of torch.

The page draws them in its own colours, ``mgk.experiments.render.figure_png`` as pictures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from mgk.analysis import cost_model
from mgk.analysis.attention_maps import NEAR, AttentionMaps, Reach, reach
from mgk.analysis.formula import Quantity
from mgk.experiments.compare.page import series_over_seeds
from mgk.experiments.evidence.claims import TECHNIQUES
from mgk.experiments.evidence.decision_rules import Findings
from mgk.experiments.evidence.effects import Measured
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.model_spec import HALVED, ModelSpec, sizes_of_paper
from mgk.experiments.render.charts import Series
from mgk.experiments.render.numbers import percent
from mgk.experiments.reproduce.registry import Experiment
from mgk.experiments.result_store import Curve, TrialResult

_BINS = 20
# Points of a training curve that are averaged into one.
_SMOOTHING = 3


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Curves over one axis.

    Attributes:
        title: of the panel.
        x_label: below.
        y_label: at the side.
        series: the curves.
        formulas: that the points were computed by, of costs.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    formulas: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """In words, for those who do not see it."""
        return f"{self.title}, {self.y_label} over {self.x_label}: {'; '.join(map(_course, self.series))}."


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Attention maps of one model: a row a layer, a column a head."""

    title: str
    maps: AttentionMaps

    def describe(self, layer: int, head: int) -> str:
        """One map in words, by its place."""
        found = self._reach(layer, head)
        return (
            f"{self.maps.title(layer, head)}: the average query spreads over {found.positions:.1f} of"
            f" {self.maps.weights.shape[-1]} positions, {percent(found.nearby)} of its weight within {NEAR} of itself"
        )

    @property
    def description(self) -> str:
        """All maps in words, for those who do not see them."""
        layers, heads, _, positions = self.maps.weights.shape
        parts = [
            f"{self._reach(layer, head).positions:.1f} in {self.maps.title(layer, head)}"
            for layer in range(layers)
            for head in range(heads)
        ]
        spread = f"of {positions} positions the average query spreads over {', '.join(parts)}"
        return f"Attention maps of {self.title}: {spread}."

    def _reach(self, layer: int, head: int) -> Reach:
        weights = self.maps.weights[layer, head]
        return reach(weights / weights.sum(-1, keepdims=True).clip(1e-9))


Panel = Lines | Maps


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure.

    Attributes:
        id: of the experiment.
        title: of it.
        preset: of the trials.
        caption: what is seen and where it comes from.
        panels: side by side.
        command: that makes it.
    """

    id: str
    title: str
    preset: str
    caption: str
    panels: tuple[Panel, ...]
    command: str

    def to_json(self) -> dict[str, Any]:
        """As JSON data; maps by their titles alone, as they lie in files of their own."""
        panels = [asdict(panel) if isinstance(panel, Lines) else {"maps": panel.title} for panel in self.panels]
        return {"format": 1, **asdict(self), "panels": panels}


def make_figure(experiment: Experiment, findings: Findings) -> Figure | None:
    """The figure of an experiment from what was found; None where something is missing for it."""
    caption, made = _MAKERS[experiment.id](experiment, findings)
    panels = [panel for panel in made if isinstance(panel, Maps) or panel.series]
    if not panels:
        return None
    return Figure(
        id=experiment.id,
        title=experiment.title,
        preset=findings.preset,
        caption=caption,
        panels=tuple(panels),
        command=experiment.command(findings.preset),
    )


def _course(curve: Series) -> str:
    """Where a curve begins and ends, and its peak where that is between the two."""
    first, last = curve.points[0], curve.points[-1]
    peak = max(curve.points, key=lambda point: point[1])
    between = [peak] if peak[1] > max(first[1], last[1]) else []
    path = [f"{y:,.4g} at {x:,.6g}" for x, y in (first, *between, last)]
    return f"{curve.name} goes from {' to '.join(path)}"


_Made = tuple[str, list[Panel]]


def _training_curves(experiment: Experiment, findings: Findings) -> _Made:
    """Figure 1: loss above accuracy, a family on the left and one on the right."""
    (task,) = experiment.tasks_at(findings.preset)
    above: list[Panel] = []
    below: list[Panel] = []
    for name, models in _families(experiment, findings.preset):
        found = _found(findings.measured, task, models)
        if not found:
            continue
        label = next(iter(found.values()))[0].data.label
        looked_at = next(iter(found.values()))[0].recipe.evaluation.split
        losses = [
            series_over_seeds(model.title, [record.losses for record in records], _SMOOTHING)
            for model, records in found.items()
        ]
        values = [
            series_over_seeds(model.title, [_in_per_cent(record) for record in records])
            for model, records in found.items()
        ]
        title = f"{name}, {label}"
        above.append(Lines(title=title, x_label="steps", y_label="training loss", series=_some(losses)))
        below.append(Lines(title=title, x_label="steps", y_label=f"{looked_at} accuracy, %", series=_some(values)))
    return (
        "Training loss and accuracy while training, means over seeds; bands span the seeds. The paper looks at the test"
        " split here; we look at it only at the end, and at the validation split on the way.",
        above + below,
    )


def _perplexity_curves(experiment: Experiment, findings: Findings) -> _Made:
    """Figure 4."""
    (task,) = experiment.tasks_at(findings.preset)
    panels: list[Panel] = []
    for name, models in _families(experiment, findings.preset):
        found = _found(findings.measured, task, models)
        if found:
            label = next(iter(found.values()))[0].data.label
            series = [
                series_over_seeds(model.title, [_settled(record) for record in records])
                for model, records in found.items()
            ]
            panels.append(
                Lines(title=f"{name}, {label}", x_label="steps", y_label="validation perplexity", series=_some(series))
            )
    caption = "Validation perplexity by segments while training, means over seeds; bands span the seeds."
    return f"{caption} The first tenth of training, which would dwarf the rest, is left out.", panels


def _maps_and_ranks(experiment: Experiment, findings: Findings) -> _Made:
    """Figure 2: maps on the left, ranks on the right."""
    seen = _seen(experiment, findings)
    caption, maps = _only_maps(experiment, findings)
    _, ranks = _only_ranks(experiment, findings)
    if not seen:
        return caption, []
    return f"{caption} {_rank_caption(seen)}", [*maps, *ranks]


def _only_maps(experiment: Experiment, findings: Findings) -> _Made:
    """Figures 5 and 8."""
    seen = _seen(experiment, findings)
    panels: list[Panel] = [Maps(title=model.title, maps=inside.maps) for model, inside in seen.items()]
    tokens = next((inside.tokens for inside in seen.values()), 0)
    return (
        f"Attention maps of one test example of {tokens:,} tokens, averaged down; a row a layer, a column a head. A"
        " row of a map is a query, a column a key; lighter is more, each map to its own largest weight.",
        panels,
    )


def _only_ranks(experiment: Experiment, findings: Findings) -> _Made:
    """Figure 6: histograms of the first layer and of the fifth, or the last where there are fewer."""
    seen = _seen(experiment, findings)
    if not seen:
        return "", []
    layers = min(len(inside.ranks) for inside in seen.values())
    chosen = range(layers) if experiment.id == "fig2" else sorted({0, min(4, layers - 1)})
    panels: list[Panel] = []
    for layer in chosen:
        values = {model.title: inside.ranks[layer].ranks for model, inside in seen.items()}
        low, high = min(map(min, values.values())), max(map(max, values.values()))
        edges = np.linspace(low - 0.5, high + 0.5, min(_BINS, high - low + 1) + 1)
        series = tuple(Series(name, _steps(ranks, edges)) for name, ranks in values.items())
        panels.append(
            Lines(title=f"Ranks in layer {layer + 1}", x_label="rank", y_label="share of matrices", series=series)
        )
    return _rank_caption(seen), panels


def _rank_caption(seen: Mapping[ModelSpec, ModelAnalysis]) -> str:
    counts = sorted({len(inside.ranks[0].ranks) for inside in seen.values()})
    parts = []
    for model, inside in seen.items():
        means = ", ".join(f"{np.mean(layer.ranks):.1f} ({np.mean(layer.effective):.1f})" for layer in inside.ranks)
        parts.append(f"{model.title}: {means}")
    return (
        f"Ranks of {' or '.join(f'{count:,}' for count in counts)} attention matrices of each layer, of examples that"
        " no model was trained on, by singular values of 10⁻⁶ and more. Mean rank, and effective rank in brackets, by"
        f" layer: {'; '.join(parts)}."
    )


def _heads_and_costs(experiment: Experiment, findings: Findings) -> _Made:
    """Figure 3: both families, as Eq. 9 is written and with shifted keys sharing their product."""
    panels: list[Panel] = []
    for single, mixtures in (("softmax", ("mgk", "smgk")), ("linear", ("mlk", "smlk"))):
        for what, count in (("FLOPs", cost_model.forward_flops), ("parameters", cost_model.model_parameters)):
            quantities: dict[str, list[tuple[int, Quantity]]] = {}
            for heads in reversed(HALVED):
                quantities.setdefault(single, []).append(
                    (2 * heads, count(sizes_of_paper(ModelSpec(single, 2 * heads))))
                )
                for name in mixtures:
                    entry = (2 * heads, count(sizes_of_paper(ModelSpec(name, heads))))
                    quantities.setdefault(f"{name}, half the heads", []).append(entry)
                if (single, what) == ("softmax", "FLOPs"):
                    entry = (2 * heads, count(sizes_of_paper(ModelSpec("smgk", heads), formulation="plain")))
                    quantities.setdefault("smgk as Eq. 9 is written, half the heads", []).append(entry)
            panels.append(_costs(f"{single} and its mixtures", "heads of the baseline", what, quantities))
    return f"{_COSTS} Mixtures have half the heads that the axis says.", panels


def _techniques(experiment: Experiment, findings: Findings) -> _Made:
    """Figure 7."""
    panels: list[Panel] = []
    for what, count in (
        ("FLOPs", cost_model.forward_flops),
        ("FLOPs of training", cost_model.training_flops),
        ("parameters", cost_model.model_parameters),
    ):
        quantities = {
            name: [
                (heads, count(sizes_of_paper(ModelSpec(name.partition(" ")[0], heads, **options))))
                for heads in reversed(HALVED)
            ]
            for name, options in TECHNIQUES.items()
        }
        panels.append(_costs("inference and learning", "heads", what, quantities))
    return f"{_COSTS} Soft-E is setting B, whose M-step counts cost in training only.", panels


_COSTS = (
    "By formula, at the paper's sizes: Retrieval, a pair of documents of 4,000 bytes, 2 layers of width 64, heads of"
    " width 32, M = 2. A multiply-add is 2 FLOPs."
)


def _costs(title: str, x_label: str, what: str, quantities: Mapping[str, Sequence[tuple[int, Quantity]]]) -> Lines:
    factor, unit = (1e9, "billion") if "FLOPs" in what else (1e3, "thousand")
    series = tuple(Series(name, [(h, q.value / factor) for h, q in points]) for name, points in quantities.items())
    formulas = tuple(f"{name}\n{points[-1][1].explain()}" for name, points in quantities.items())
    return Lines(title=title, x_label=x_label, y_label=f"{unit} {what}", series=series, formulas=formulas)


_MAKERS: Mapping[str, Callable[[Experiment, Findings], _Made]] = {
    "fig1": _training_curves,
    "fig2": _maps_and_ranks,
    "fig3": _heads_and_costs,
    "fig4": _perplexity_curves,
    "fig5": _only_maps,
    "fig6": _only_ranks,
    "fig7": _techniques,
    "fig8": _only_maps,
}


def _families(experiment: Experiment, preset: str) -> list[tuple[str, list[ModelSpec]]]:
    models = experiment.models_at(preset)
    linear = [model for model in models if model.attention in ("linear", "mlk", "smlk")]
    return [("softmax and mgk", [model for model in models if model not in linear]), ("linear and mlk", linear)]


def _found(measured: Measured, task: str, models: Sequence[ModelSpec]) -> dict[ModelSpec, list[TrialResult]]:
    return {model: records for model in models if (records := measured.of(task, model))}


def _seen(experiment: Experiment, findings: Findings) -> dict[ModelSpec, ModelAnalysis]:
    """All models of the experiment, of their first seed, or nothing."""
    (task,) = experiment.tasks_at(findings.preset)
    models = experiment.models_at(findings.preset)
    seen = {model: inside[0] for model in models if (inside := findings.inside.get((task, model)))}
    return seen if len(seen) == len(models) else {}


def _some(series: Sequence[Series]) -> tuple[Series, ...]:
    return tuple(curve for curve in series if curve.points)


def _in_per_cent(record: TrialResult) -> Curve:
    return tuple((step, 100 * value) for step, value in record.validation)


def _settled(record: TrialResult) -> Curve:
    start = record.recipe.training.max_steps / 10
    return tuple((step, value) for step, value in record.validation if step > start) or record.validation


def _steps(ranks: Sequence[int], edges: "np.ndarray[Any, Any]") -> list[tuple[float, float]]:
    """A histogram as the outline of its bars."""
    shares = np.histogram(ranks, edges)[0] / len(ranks)
    corners = chain.from_iterable(
        ((float(left), float(share)), (float(right), float(share)))
        for left, right, share in zip(edges[:-1], edges[1:], shares, strict=True)
    )
    return [(float(edges[0]), 0.0), *corners, (float(edges[-1]), 0.0)]
