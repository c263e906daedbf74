"""The demo's table over the seeds of its plan. Does not import torch."""

from dataclasses import replace
from pathlib import Path

from mgk._util import json_codec
from mgk.experiments.compare.result import compare_results
from mgk.experiments.model_analysis import Inspection, inspect_models
from mgk.experiments.runner import run_isolated
from mgk.experiments.study import Study

ID = "demo"
COMPARISON = "comparison.json"


def write_demo(study: Study, *, runs: Path) -> list[Path]:
    """Compare the models of all seeds; nothing where a trial is missing."""
    plan = study.plan()
    found = {result.trial: result for result in study.measured}
    if len(found) < len(plan.trials):
        return []
    calls: dict[int, tuple[dict[str, Path]]] = {}
    for trial in plan.trials:
        calls.setdefault(trial.seed, ({},))[0][trial.model.name] = trial.path(runs)
    inspections: dict[int, Inspection] = run_isolated(inspect_models, calls)
    comparison = compare_results(plan, found, inspections[plan.trials[0].seed])
    models = tuple(
        replace(
            result,
            step_seconds=tuple(one.step_seconds[result.name] for one in inspections.values()),
            tokens_per_second=tuple(
                one.writings[result.name].tokens_per_second for one in inspections.values()
            ),
        )
        for result in comparison.results
    )
    path = study.folder / COMPARISON
    json_codec.write(path, replace(comparison, results=models))
    return [path]
