"""What follows from the records of a folder: tables, figures and verdicts, read back and written. Free of torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mgk.experiments.evidence.claims import verdicts_json
from mgk.experiments.evidence.effects import ExperimentResults
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.render.bench_tables import BENCH, Bench, read_bench
from mgk.experiments.render.figures import Figure, make_figure
from mgk.experiments.render.tables import Table, make_table, markdown
from mgk.experiments.reproduce.registry import EXPERIMENTS, Experiment
from mgk.experiments.result_store import (
    FIGURES,
    TABLES,
    ResultStore,
    TrialResult,
    compact_json,
    write_bytes,
    write_text,
)
from mgk.experiments.trials import Trial, changes
from mgk.training.errors import TrainingError
from mgk.training.recipe import PRESETS
from mgk.training.run_dir import RECIPE, SUMMARY

CLAIMS = "claims.json"
_INSIDE = "inside"


@dataclass(frozen=True)
class Outputs:
    """All that a page is made of, at a preset.

    Attributes:
        results: the records and the analyses of models, by task, model and seed.
        records: the records.
        tables: by experiment, those that something was measured for.
        figures: likewise.
        others: records of no experiment, of a folder of runs.
        bench: the files of the benchmarks, by name.
    """

    results: ExperimentResults
    records: tuple[TrialResult, ...]
    tables: dict[str, Table]
    figures: dict[str, Figure]
    others: tuple[TrialResult, ...] = ()
    bench: Bench = field(default_factory=dict)


def analysis_path(results: ResultStore, trial: Trial) -> Path:
    """Where what is seen in a trial's model is, or would be."""
    name = f"{trial.task}-{trial.model.slug}-seed-{trial.seed}.json"
    return results.folder / FIGURES / trial.preset / _INSIDE / name


def read_analysis(results: ResultStore, trial: Trial) -> ModelAnalysis | None:
    """What is seen in a trial's model; None where nobody has looked."""
    path = analysis_path(results, trial)
    return _read_inside(path) if path.is_file() else None


def write_analysis(results: ResultStore, inside: ModelAnalysis) -> None:
    """Store what is seen in a model."""
    write_text(analysis_path(results, inside.trial), compact_json(inside.to_json()))


def presets_of(results: ResultStore) -> list[str]:
    """The presets that there are records of, the paper's first."""
    return [preset for preset in PRESETS if any((results.folder / "trials" / preset).glob("*/*.json"))]


def find_runs(folder: Path) -> list[Path]:
    """The finished runs below a folder."""
    return sorted(path.parent for path in folder.rglob(SUMMARY) if (path.parent / RECIPE).is_file())


def gather(results: ResultStore, preset: str, *, records: Sequence[TrialResult] | None = None) -> Outputs:
    """All tables and figures of a preset, from the store or from records given."""
    found = results.records(preset) if records is None else list(records)
    known = {
        (model, task)
        for experiment in EXPERIMENTS.values()
        for model in experiment.models_at(preset)
        for task in (*experiment.tasks_at(preset), *experiment.more_tasks)
    }
    mine = [
        record
        for record in found
        if (record.trial.model, record.trial.task) in known
        # of a folder of runs, those that are what the trial is
        and (records is None or not changes(record.trial.recipe, record.recipe))
    ]
    analyses = [_read_inside(path) for path in (results.folder / FIGURES / preset / _INSIDE).glob("*.json")]
    measured = ExperimentResults(preset, mine, analyses)
    tables, figures = {}, {}
    for experiment in EXPERIMENTS.values():
        if experiment.kind == "table":
            if (table := make_table(experiment, measured)) is not None:
                tables[experiment.id] = table
        elif (figure := make_figure(experiment, measured)) is not None:
            figures[experiment.id] = figure
    others = tuple(record for record in found if record not in mine)
    return Outputs(measured, tuple(mine), tables, figures, others, read_bench(results.folder / BENCH))


def write_outputs(outputs: Outputs, results: ResultStore, experiments: Iterable[Experiment]) -> list[Path]:
    """Write the tables and figures of some experiments, and the verdicts; the paths."""
    from mgk.experiments.render.figure_png import draw

    preset = outputs.results.preset
    written = []
    for experiment in experiments:
        if (table := outputs.tables.get(experiment.id)) is not None:
            place = results.folder / TABLES / preset
            write_text(place / f"{table.id}.json", compact_json(table.to_json()))
            write_text(place / f"{table.id}.md", f"# {table.title}\n\n`{table.command}`\n\n{markdown(table)}")
            written.append(place / f"{table.id}.md")
        if (figure := outputs.figures.get(experiment.id)) is not None:
            place = results.folder / FIGURES / preset
            write_text(place / f"{figure.id}.json", compact_json(figure.to_json()))
            write_bytes(place / f"{figure.id}.png", draw(figure))
            written.append(place / f"{figure.id}.png")
    write_text(results.folder / TABLES / preset / CLAIMS, compact_json(verdicts_json(outputs.results)))
    return written


def _read_inside(path: Path) -> ModelAnalysis:
    try:
        return ModelAnalysis.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path}: this is not what was seen in a model ({error})") from None
