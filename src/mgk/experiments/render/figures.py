"""The paper's figures as data, from results: curves, rank histograms, maps, costs.

The page draws them in its own colours, :mod:`mgk.experiments.render.figure_png`
as PNG files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from mgk.analysis import cost_model
from mgk.analysis.formula import Quantity
from mgk.experiments.evidence.claims import TECHNIQUES
from mgk.experiments.evidence.effects import PresetResults
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.model_spec import HALVED, ModelSpec, sizes_of_paper
from mgk.experiments.render.charts import Lines, Maps, Points, Series, series_over_seeds
from mgk.experiments.render.numbers import text
from mgk.experiments.reproduce.registry import Experiment
from mgk.experiments.result_store import TrialResult

_BINS = 20
# Points of a training curve that are averaged into one.
_SMOOTHING = 3

Panel = Lines | Maps
_Content = tuple[str, list[Panel]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of an experiment at a preset."""

    id: str
    title: str
    preset: str
    caption: str
    panels: tuple[Panel, ...]
    command: str

    def to_json(self) -> dict[str, Any]:
        """JSON data; maps, which the analyses store, by their titles."""
        panels = [asdict(panel) if isinstance(panel, Lines) else {"maps": panel.title} for panel in self.panels]
        return {"format": 1, **asdict(self), "panels": panels}


def make_figure(experiment: Experiment, results: PresetResults) -> Figure | None:
    """The figure of an experiment; None where results are missing for it."""
    caption, panels = _MAKERS[experiment.id](experiment, results)
    panels = [panel for panel in panels if isinstance(panel, Maps) or panel.series]
    if not panels:
        return None
    return Figure(
        id=experiment.id,
        title=experiment.title,
        preset=results.preset,
        caption=caption,
        panels=tuple(panels),
        command=experiment.command(results.preset),
    )


def _training_curves(experiment: Experiment, results: PresetResults) -> _Content:
    """Figure 1: loss above accuracy, a family on each side."""
    losses: list[Panel] = []
    accuracies: list[Panel] = []
    for title, trials in _families(experiment, results):
        split = next(iter(trials.values()))[0].recipe.evaluation.split
        losses.append(_curves(title, "training loss", trials, lambda trial: trial.losses, _SMOOTHING))
        accuracies.append(_curves(title, f"{split} accuracy, %", trials, _validation_percent))
    return text("training_curves"), losses + accuracies


def _perplexity_curves(experiment: Experiment, results: PresetResults) -> _Content:
    """Figure 4."""
    families = _families(experiment, results)
    label = "validation perplexity"
    return text("perplexity_curves"), [
        _curves(title, label, trials, _after_warmup) for title, trials in families
    ]


def _families(
    experiment: Experiment, results: PresetResults
) -> list[tuple[str, dict[ModelSpec, list[TrialResult]]]]:
    """The trials of the softmax and of the linear family, with titles."""
    (task,) = experiment.tasks_at(results.preset)
    families = []
    for name, is_linear in (("softmax and mgk", False), ("linear and mlk", True)):
        models = [m for m in experiment.models_at(results.preset) if m.variant.is_linear == is_linear]
        trials = {model: found for model in models if (found := results.trials(task, model))}
        if trials:
            families.append((f"{name}, {next(iter(trials.values()))[0].data.label}", trials))
    return families


def _curves(
    title: str,
    y_label: str,
    trials: Mapping[ModelSpec, Sequence[TrialResult]],
    curve: Callable[[TrialResult], Points],
    smoothing: int = 1,
) -> Lines:
    series = [
        series_over_seeds(model.title, list(map(curve, group)), smoothing) for model, group in trials.items()
    ]
    return Lines(
        title=title, x_label="steps", y_label=y_label, series=tuple(one for one in series if one.points)
    )


def _validation_percent(trial: TrialResult) -> Points:
    return [(step, 100 * value) for step, value in trial.validation]


def _after_warmup(trial: TrialResult) -> Points:
    start = trial.recipe.training.max_steps / 10
    return [(step, value) for step, value in trial.validation if step > start] or trial.validation


def _maps_and_ranks(experiment: Experiment, results: PresetResults) -> _Content:
    """Figure 2: maps on the left, ranks on the right."""
    maps_caption, maps = _maps(experiment, results)
    ranks_caption, ranks = _rank_histograms(experiment, results)
    return f"{maps_caption} {ranks_caption}", [*maps, *ranks]


def _maps(experiment: Experiment, results: PresetResults) -> _Content:
    """Figures 5 and 8."""
    analyses = _first_seed(experiment, results)
    panels: list[Panel] = [Maps(title=model.title, maps=analysis.maps) for model, analysis in analyses.items()]
    tokens = next((analysis.tokens for analysis in analyses.values()), 0)
    return text("maps", tokens=tokens), panels


def _rank_histograms(experiment: Experiment, results: PresetResults) -> _Content:
    """Figure 6: the first and the fifth or last layer; Figure 2: all."""
    analyses = _first_seed(experiment, results)
    if not analyses:
        return "", []
    layers = min(len(analysis.ranks) for analysis in analyses.values())
    chosen = range(layers) if experiment.id == "fig2" else sorted({0, min(4, layers - 1)})
    panels: list[Panel] = []
    for layer in chosen:
        ranks = {model.title: analysis.ranks[layer].ranks for model, analysis in analyses.items()}
        low, high = min(map(min, ranks.values())), max(map(max, ranks.values()))
        edges = np.linspace(low - 0.5, high + 0.5, min(_BINS, high - low + 1) + 1)
        series = tuple(Series(name, _histogram(values, edges)) for name, values in ranks.items())
        title = f"Ranks in layer {layer + 1}"
        panels.append(Lines(title=title, x_label="rank", y_label="share of matrices", series=series))
    counts = sorted({len(analysis.ranks[0].ranks) for analysis in analyses.values()})
    means = []
    for model, analysis in analyses.items():
        pairs = ((np.mean(layer.ranks), np.mean(layer.effective)) for layer in analysis.ranks)
        by_layer = ", ".join(f"{rank:.1f} ({effective:.1f})" for rank, effective in pairs)
        means.append(f"{model.title}: {by_layer}")
    shown = " or ".join(f"{count:,}" for count in counts)
    return text("ranks", counts=shown, means="; ".join(means)), panels


def _first_seed(experiment: Experiment, results: PresetResults) -> dict[ModelSpec, ModelAnalysis]:
    """The first analysis of every model; nothing where one is missing."""
    (task,) = experiment.tasks_at(results.preset)
    models = experiment.models_at(results.preset)
    analyses = {model: found[0] for model in models if (found := results.analyses(task, model))}
    return analyses if len(analyses) == len(models) else {}


def _histogram(ranks: Sequence[int], edges: "np.ndarray[Any, Any]") -> Points:
    """A histogram as the outline of its bars."""
    shares = np.histogram(ranks, edges)[0] / len(ranks)
    corners = chain.from_iterable(
        ((float(left), float(share)), (float(right), float(share)))
        for left, right, share in zip(edges[:-1], edges[1:], shares, strict=True)
    )
    return [(float(edges[0]), 0.0), *corners, (float(edges[-1]), 0.0)]


def _costs_of_heads(experiment: Experiment, results: PresetResults) -> _Content:
    """Figure 3: both families; smgk also unfused, as in Eq. 9."""
    panels: list[Panel] = []
    for family, mixtures in (("softmax", ("mgk", "smgk")), ("linear", ("mlk", "smlk"))):
        for what, count in (("FLOPs", cost_model.forward_flops), ("parameters", cost_model.model_parameters)):
            curves: dict[str, list[tuple[int, Quantity]]] = {}
            for heads in reversed(HALVED):
                half = {f"{name}, half the heads": sizes_of_paper(ModelSpec(name, heads)) for name in mixtures}
                if (family, what) == ("softmax", "FLOPs"):
                    unfused = sizes_of_paper(ModelSpec("smgk", heads), fused=False)
                    half["smgk unfused, half the heads"] = unfused
                for name, sizes in {family: sizes_of_paper(ModelSpec(family, 2 * heads)), **half}.items():
                    curves.setdefault(name, []).append((2 * heads, count(sizes)))
            panels.append(_costs(f"{family} and its mixtures", "heads of the baseline", what, curves))
    return f"{text('costs')} Mixtures have half the heads of the axis.", panels


def _costs_of_techniques(experiment: Experiment, results: PresetResults) -> _Content:
    """Figure 7."""
    panels: list[Panel] = []
    for what, count in (
        ("FLOPs", cost_model.forward_flops),
        ("FLOPs of training", cost_model.training_flops),
        ("parameters", cost_model.model_parameters),
    ):
        curves: dict[str, list[tuple[int, Quantity]]] = {name: [] for name in TECHNIQUES}
        for name, model in TECHNIQUES.items():
            for heads in reversed(HALVED):
                sizes = sizes_of_paper(replace(model, heads=heads))
                curves[name].append((heads, count(sizes)))
        panels.append(_costs("inference and learning", "heads", what, curves))
    return f"{text('costs')} Soft-E is setting B, whose M-step counts cost in training only.", panels


def _costs(title: str, x_label: str, what: str, curves: Mapping[str, Sequence[tuple[int, Quantity]]]) -> Lines:
    factor, unit = (1e9, "billion") if "FLOPs" in what else (1e3, "thousand")
    scaled = {name: [(h, q.value / factor) for h, q in points] for name, points in curves.items()}
    series = tuple(Series(name, points) for name, points in scaled.items())
    formulas = tuple(f"{name}\n{points[-1][1].explain()}" for name, points in curves.items())
    return Lines(title=title, x_label=x_label, y_label=f"{unit} {what}", series=series, formulas=formulas)


_MAKERS: Mapping[str, Callable[[Experiment, PresetResults], _Content]] = {
    "fig1": _training_curves,
    "fig2": _maps_and_ranks,
    "fig3": _costs_of_heads,
    "fig4": _perplexity_curves,
    "fig5": _maps,
    "fig6": _rank_histograms,
    "fig7": _costs_of_techniques,
    "fig8": _maps,
}
