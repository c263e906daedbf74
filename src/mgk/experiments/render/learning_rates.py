"""The study of learning rates. Does not import torch."""

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from mgk.experiments.render.study_report import StudyReport
from mgk.experiments.render.tables import DASH, machines, markdown_table
from mgk.experiments.study import family

Values = dict[float, list[float]]  # by rate and seed


@dataclass(frozen=True)
class LearningRates(StudyReport):
    """What the study has measured so far; other plans refer to its summary."""

    id = "learning-rates"

    @cached_property
    def values(self) -> dict[str, dict[str, Values]]:
        """The metric on the validation split by task, family, rate and seed."""
        found: dict[str, dict[str, Values]] = {}
        for result in self.results:
            trial, summary = result.trial, result.summary
            value = summary.metrics[f"validation_{summary.metric}"]
            rates = found.setdefault(trial.task, {}).setdefault(family(trial.model), {})
            rates.setdefault(trial.learning_rate or 0.0, []).append(value)
        return found

    @cached_property
    def chosen(self) -> dict[str, dict[str, float]]:
        """The rate with the best mean by task and family, once complete."""
        planned: dict[tuple[str, str], int] = {}
        for trial in self.study.trials:
            key = trial.task, family(trial.model)
            planned[key] = planned.get(key, 0) + 1
        found: dict[str, dict[str, float]] = {}
        metrics = {result.trial.task: result.summary.metric for result in self.results}
        for task, families in self.values.items():
            best = max if metrics[task] == "accuracy" else min
            for name, rates in families.items():
                if sum(map(len, rates.values())) == planned[task, name]:
                    rate = best(rates, key=lambda rate: fmean(rates[rate]))
                    found.setdefault(task, {})[name] = rate
        return found

    def to_json(self) -> dict[str, Any]:
        """Values and choices as JSON data."""
        return {**super().to_json(), "values": self.values, "chosen": self.chosen}

    def markdown(self) -> str:
        """A table for each task, the chosen rates in bold."""
        parts = [f"{self.progress}."]
        for task, families in self.values.items():
            rates = sorted({rate for row in families.values() for rate in row})
            first = next(result for result in self.results if result.trial.task == task)
            rows = [[name, *(self._cell(task, name, rate) for rate in rates)] for name in families]
            metric = first.summary.metric.replace("_", " ")
            what = f"{first.data.label}: validation {metric} by learning rate, mean over seeds"
            steps = f"{first.recipe.training.max_steps:,} steps"
            parts += [f"{what}, {steps}.", markdown_table(["family", *map("{:g}".format, rates)], rows)]
        return "\n\n".join([*parts, *(f"- {line}" for line in machines(self.results))])

    def _cell(self, task: str, name: str, rate: float) -> str:
        values = self.values[task][name].get(rate)
        if values is None:
            return DASH
        is_chosen = self.chosen.get(task, {}).get(name) == rate
        return f"**{fmean(values):.3f}**" if is_chosen else f"{fmean(values):.3f}"
