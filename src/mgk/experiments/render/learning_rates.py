"""The study of learning rates. Does not import torch."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from mgk._util.files import write_file
from mgk._util.json_codec import compact_json
from mgk.experiments.plan import PLAN
from mgk.experiments.render.tables import DASH, machines, markdown_table
from mgk.experiments.result_store import ResultStore, TrialResult
from mgk.experiments.study import Study, family, read_study

ID = "learning-rates"
SUMMARY = "summary.json"

Values = dict[float, list[float]]  # by rate and seed


@dataclass(frozen=True)
class LearningRates:
    """What the study has measured so far."""

    study: Study
    results: tuple[TrialResult, ...]

    @cached_property
    def values(self) -> dict[str, dict[str, Values]]:
        """By task and family: the metric on the validation split, by rate and seed."""
        found: dict[str, dict[str, Values]] = {}
        for result in self.results:
            trial, summary = result.trial, result.summary
            value = summary.metrics[f"validation_{summary.metric}"]
            rates = found.setdefault(trial.task, {}).setdefault(family(trial.model), {})
            rates.setdefault(trial.learning_rate or 0.0, []).append(value)
        return found

    @cached_property
    def chosen(self) -> dict[str, dict[str, float]]:
        """By task and family: the rate with the best mean, once complete."""
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
        return {
            "format": 1,
            "plan": self.study.sha256,
            "trials": {"done": len(self.results), "all": len(self.study.trials)},
            "values": self.values,
            "chosen": self.chosen,
        }

    def markdown(self) -> str:
        """A table for each task, the chosen rates in bold."""
        parts = [f"{len(self.results)} of {len(self.study.trials)} trials are done."]
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


def read_learning_rates(results: Path) -> LearningRates | None:
    """The study in a folder of results; None where there is none."""
    folder = results / ID
    if not (folder / PLAN).is_file():
        return None
    study, store = read_study(folder), ResultStore(folder)
    return LearningRates(study, store.found(study.trials))


def write_learning_rates(results: Path) -> list[Path]:
    """Write the summary, which other plans refer to, beside the plan; its path."""
    found = read_learning_rates(results)
    if found is None or not found.results:
        return []
    path = results / ID / SUMMARY
    write_file(path, compact_json(found.to_json()))
    return [path]
