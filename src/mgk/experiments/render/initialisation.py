"""The study of initialisations and the default by its criterion. Does not import torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log10
from pathlib import Path
from statistics import fmean
from typing import Any

from mgk._util.files import write_file
from mgk._util.json_codec import compact_json
from mgk.analysis.initial_scores import score_std
from mgk.experiments.evidence.decision_rules import least_regret, regrets
from mgk.experiments.plan import PLAN
from mgk.experiments.render.charts import Lines, Series
from mgk.experiments.render.figure_png import draw
from mgk.experiments.render.figures import Figure
from mgk.experiments.render.tables import DASH, machines, markdown_table
from mgk.experiments.result_store import ResultStore, TrialResult
from mgk.experiments.study import Study, read_study
from mgk.training.recipe import ModelSection
from mgk.variants import VARIANTS

ID = "initialisation"
SUMMARY = "summary.json"
# Of the criterion: what counts as equal, and what one for all may cost.
TOLERANCE, MAX_REGRET = 0.002, 0.01
_WIDE_FIRST = ("paper", "0.4", "0.1", "0.02")

Row = dict[str, list[float]]  # init -> values by seed


@dataclass(frozen=True)
class Initialisation:
    """What the study has measured so far."""

    study: Study
    results: tuple[TrialResult, ...]

    @cached_property
    def grids(self) -> dict[tuple[str, float | str | None], dict[str, Row]]:
        """By task and learning rate: every model's values by initialisation and seed.

        Bits per byte on the validation split, or accuracy in per cent on the test split.
        """
        found: dict[tuple[str, float | str | None], dict[str, Row]] = {}
        for result in self.results:
            trial, metrics = result.trial, result.summary.metrics
            bits = metrics.get("validation_bits_per_byte")
            value = result.test if bits is None else bits
            rows = found.setdefault((trial.task, trial.learning_rate), {})
            name, init = replace(trial.model, init=None).name, str(trial.model.init)
            rows.setdefault(name, {}).setdefault(init, []).append(value)
        return found

    @cached_property
    def means(self) -> dict[str, dict[str, float]]:
        """Bits per byte of the stage with all of them, the widest first.

        The mean over the seeds that all initialisations of a model have.
        """
        first = self.study.stages[0]
        rows = self.grids.get((first.task, first.learning_rates[0]), {})
        seeds = {name: min(map(len, rows[name].values())) for name in first.models if name in rows}
        return {
            name: {init: fmean(rows[name][init][:count]) for init in _WIDE_FIRST if init in rows[name]}
            for name, count in seeds.items()
        }

    def choice(self, families: Sequence[str] = ("softmax", "linear")) -> tuple[str, float]:
        """The choice by the criterion for some families, and its largest regret."""
        values = {
            name: row for name, row in self.means.items() if VARIANTS[name.partition(":")[0]].family in families
        }
        init = least_regret(values, tolerance=TOLERANCE)
        return init, max(regrets(values)[init].values())

    @property
    def inits(self) -> list[str]:
        """Initialisations of the first stage that every model has."""
        if len(self.means) < len(self.study.stages[0].models):
            return []
        return list(regrets(self.means))

    def sentences(self) -> list[str]:
        """What the criterion says."""
        progress = f"{len(self.results)} of {len(self.study.trials)} trials are done"
        if len(self.inits) < 2:
            return [f"{progress}; no initialisation is chosen yet."]
        init, worst = self.choice()
        progress += f"; the initialisations that every model has so far are {', '.join(self.inits)}"
        text = f"{progress}. One for all models: {init}, with a regret of at most {worst:.2%} for any of them."
        if worst <= MAX_REGRET:
            return [text]
        softmax, linear = (self.choice([family]) for family in ("softmax", "linear"))
        return [
            f"{text} That is above {MAX_REGRET:.0%}, so each family has its own: softmax, mgk and smgk {softmax[0]} (at"
            f" most {softmax[1]:.2%}), linear, mlk and smlk {linear[0]} (at most {linear[1]:.2%})."
        ]

    def to_json(self) -> dict[str, Any]:
        """Values, regrets and choices as JSON data."""
        grids = [
            {"task": task, "learning_rate": rate, "values": rows} for (task, rate), rows in self.grids.items()
        ]
        return {
            "format": 1,
            "plan": self.study.sha256,
            "trials": {"done": len(self.results), "all": len(self.study.trials)},
            "grids": grids,
            "means": self.means,
            "regrets": regrets(self.means),
            "sentences": self.sentences(),
        }

    def markdown(self) -> str:
        """The tables, the choice and where it was measured."""
        parts = []
        for (task, rate), rows in self.grids.items():
            inits = [init for init in _WIDE_FIRST if any(init in row for row in rows.values())]
            lines = [[name, *(_values(row.get(init)) for init in inits)] for name, row in rows.items()]
            what = "validation bits per byte" if task == "bytes" else "test accuracy, %"
            label = next(result.data.label for result in self.results if result.trial.task == task)
            at = "" if rate is None else f", learning rate {rate:g}"
            parts += [f"{label}: {what}, one number a seed{at}.", markdown_table(["model", *inits], lines)]
        return "\n\n".join([*parts, *self.sentences(), *(f"- {line}" for line in machines(self.results))])

    def figure(self) -> Figure:
        """Bits per byte over the initial spread of the scores, by family."""
        model = self.results[0].recipe.model
        panels = []
        for family, title in (("softmax", "softmax, mgk and smgk"), ("linear", "linear, mlk and smlk")):
            series = []
            for name, row in self.means.items():
                variant, _, heads = name.partition(":")
                if VARIANTS[variant].family == family:
                    points = [(log10(_score_std(variant, int(heads), init, model)), row[init]) for init in row]
                    series.append(Series(name, sorted(points)))
            panels.append(
                Lines(
                    title=title,
                    x_label="log10 of the initial standard deviation of the scores",
                    y_label="validation bits per byte",
                    series=tuple(series),
                )
            )
        return Figure(
            id=ID,
            title="Initialisation of queries and keys",
            preset=self.study.stages[0].preset,
            caption="Bits per byte over the initial spread of the scores (linear attention: of the weights).",
            panels=tuple(panel for panel in panels if panel.series),
            command=f"mgk reproduce {ID}",
        )


def read_initialisation(results: Path) -> Initialisation | None:
    """The study in a folder of results; None where there is none."""
    folder = results / ID
    if not (folder / PLAN).is_file():
        return None
    study, store = read_study(folder), ResultStore(folder)
    return Initialisation(study, store.found(study.trials))


def write_initialisation(results: Path) -> list[Path]:
    """Write the summary and the figure beside the plan; the paths."""
    found = read_initialisation(results)
    if found is None or not found.results:
        return []
    paths = [results / ID / SUMMARY, results / ID / f"{ID}.png"]
    write_file(paths[0], compact_json(found.to_json()))
    write_file(paths[1], draw(found.figure()))
    return paths


def _score_std(variant: str, heads: int, init: str, model: ModelSection) -> float:
    return score_std(
        variant,
        embed_dim=model["hidden_size"],
        num_heads=heads,
        head_dim=model["head_dim"],
        init=init if init == "paper" else float(init),
    )


def _values(values: Iterable[float] | None) -> str:
    return DASH if values is None else ", ".join(f"{value:.3f}" for value in values)
