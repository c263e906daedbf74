"""The study of initialisations and the default by its criterion. Does not import torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log10
from statistics import fmean
from typing import Any

from mgk.analysis.initial_scores import score_std
from mgk.experiments.evidence.decision_rules import least_regret, regrets
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.render.charts import Lines, Series
from mgk.experiments.render.figures import Figure
from mgk.experiments.render.numbers import signed, text
from mgk.experiments.render.study_report import StudyReport
from mgk.experiments.render.tables import DASH, machines, markdown_table
from mgk.training.recipe import ModelSection

# The criterion: regrets that count as equal, the largest that one initialisation for
# all families may have, and points of accuracy that it may lose to the paper's.
TOLERANCE, MAX_REGRET, MAX_LOSS = 0.002, 0.01, 1.0
PAPER = "paper"
_WIDE_FIRST = (PAPER, "0.4", "0.1", "0.02")

Row = dict[str, list[float]]  # init -> values by seed


@dataclass(frozen=True)
class Initialisation(StudyReport):
    """What the study has measured so far."""

    id = "initialisation"

    @cached_property
    def grids(self) -> dict[tuple[str, float | str | None], dict[str, Row]]:
        """Values by task and learning rate, then by model, initialisation and seed.

        Validation bits per byte, or test accuracy in per cent.
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
        """Bits per byte of the first stage by model and initialisation.

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
            name: row for name, row in self.means.items() if ModelSpec.parse(name).variant.family in families
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
        if len(self.inits) < 2:
            return [f"{self.progress}; no initialisation is chosen yet."]
        init, worst = self.choice()
        progress = text("initialisation_progress", progress=self.progress, inits=", ".join(self.inits))
        choice = text("initialisation_for_all", progress=progress, init=init, worst=worst)
        if worst <= MAX_REGRET:
            return [choice, *self.checks(init)]
        softmax, linear = (self.choice([family]) for family in ("softmax", "linear"))
        own = text("initialisation_by_family", limit=MAX_REGRET, softmax=softmax, linear=linear)
        return [f"{choice} {own}", *self.checks(init)]

    def checks(self, init: str) -> list[str]:
        """Whether a choice stands beside the paper's initialisation, where that is measured.

        On bytes at each model's best learning rate, on other tasks by the mean accuracy.
        """
        found = []
        best: dict[str, dict[str, float]] = {}
        bytes_rows = [rows for (task, _), rows in self.grids.items() if task == "bytes"]
        for name in self.study.stages[0].models:
            at_rates = [rows[name] for rows in bytes_rows if {init, PAPER} <= rows.get(name, {}).keys()]
            if len(at_rates) == len(self._rates):
                best[name] = {one: min(row[one][0] for row in at_rates) for one in (init, PAPER)}
        if len(best) == len(self.study.stages[0].models):
            worst = {one: max(values.values()) for one, values in regrets(best).items()}
            values = {
                "own": worst[init],
                "paper": worst[PAPER],
                "verdict": _stands(worst[init] <= worst[PAPER]),
            }
            found.append(text("initialisation_rates", init=init, **values))
        for (task, _), rows in self.grids.items():
            pairs = [(row[init][0], row[PAPER][0]) for row in rows.values() if {init, PAPER} <= row.keys()]
            if task == "bytes" or len(pairs) < self._models_of(task):
                continue
            gain = fmean(own - paper for own, paper in pairs)
            values = {"data": self._label(task), "gain": signed(gain), "verdict": _stands(gain >= -MAX_LOSS)}
            found.append(text("initialisation_task", init=init, **values))
        return found

    @property
    def _rates(self) -> set[float | str | None]:
        """The learning rates of bytes."""
        return {rate for stage in self.study.stages if stage.task == "bytes" for rate in stage.learning_rates}

    def _label(self, task: str) -> str:
        """The title of its data."""
        return next(result.data.label for result in self.results if result.trial.task == task)

    def _models_of(self, task: str) -> int:
        return max(len(stage.models) for stage in self.study.stages if stage.task == task)

    def to_json(self) -> dict[str, Any]:
        """Values, regrets and choices as JSON data."""
        grids = [
            {"task": task, "learning_rate": rate, "values": rows} for (task, rate), rows in self.grids.items()
        ]
        return {
            **super().to_json(),
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
            at = "" if rate is None else f", learning rate {rate:g}"
            parts += [
                f"{self._label(task)}: {what}, one number a seed{at}.",
                markdown_table(["model", *inits], lines),
            ]
        return "\n\n".join([*parts, *self.sentences(), *(f"- {line}" for line in machines(self.results))])

    def figure(self) -> Figure:
        """Bits per byte over the initial spread of the scores, by family."""
        model = self.results[0].recipe.model
        panels = []
        for family, title in (("softmax", "softmax, mgk and smgk"), ("linear", "linear, mlk and smlk")):
            series = []
            for name, row in self.means.items():
                spec = ModelSpec.parse(name)
                if spec.variant.family == family:
                    points = [(log10(_score_std(spec, init, model)), row[init]) for init in row]
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
            id=self.id,
            title="Initialisation of queries and keys",
            preset=self.study.stages[0].preset,
            caption=text("initialisation"),
            panels=tuple(panel for panel in panels if panel.series),
            command=f"mgk reproduce {self.id}",
        )


def _score_std(spec: ModelSpec, init: str, model: ModelSection) -> float:
    return score_std(
        spec.attention,
        embed_dim=model["hidden_size"],
        num_heads=spec.heads,
        head_dim=model["head_dim"],
        init=init if init == PAPER else float(init),
    )


def _stands(is_good: bool) -> str:
    return "the choice stands" if is_good else "the choice does not stand"


def _values(values: Iterable[float] | None) -> str:
    return DASH if values is None else ", ".join(f"{value:.3f}" for value in values)
