"""Tables, figures and verdicts of a folder of results, made on demand."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mgk._util.files import write_file
from mgk._util.json_codec import compact_json
from mgk.experiments.evidence.claims import verdicts_json
from mgk.experiments.evidence.effects import PresetResults
from mgk.experiments.render.bench_tables import BENCH, Bench, read_bench
from mgk.experiments.render.figures import Figure, make_figure
from mgk.experiments.render.tables import Table, make_table, markdown
from mgk.experiments.reproduce.registry import EXPERIMENTS, Experiment, make_trial
from mgk.experiments.result_store import FIGURES, TABLES, ResultStore, TrialResult
from mgk.experiments.trials import changes

CLAIMS = "claims.json"


@dataclass(frozen=True)
class Outputs:
    """All that a page is made of, at a preset.

    Attributes:
        others: results of no experiment, of a folder of runs.
    """

    results: PresetResults
    records: tuple[TrialResult, ...] = ()
    others: tuple[TrialResult, ...] = ()
    folder: Path | None = None

    @cached_property
    def tables(self) -> dict[str, Table]:
        """By experiment, those that something was measured for."""
        made = (make_table(item, self.results) for item in EXPERIMENTS.values() if item.kind == "table")
        return {table.id: table for table in made if table is not None}

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """By experiment, where something was measured or is by formula."""
        made = (make_figure(item, self.results) for item in EXPERIMENTS.values() if item.kind != "table")
        return {figure.id: figure for figure in made if figure is not None}

    @cached_property
    def bench(self) -> Bench:
        """The files of the benchmarks, by name."""
        return {} if self.folder is None else read_bench(self.folder / BENCH)


def gather(store: ResultStore, preset: str, *, records: Sequence[TrialResult] | None = None) -> Outputs:
    """The results of a preset, from the store or as given."""
    found = store.results(preset) if records is None else records
    known = {
        (model, task)
        for experiment in EXPERIMENTS.values()
        for model in experiment.models_at(preset)
        for task in (*experiment.tasks_at(preset), *experiment.more_tasks)
    }
    # of a folder of runs, those with the recipe of the reproduction
    mine = [
        result
        for result in found
        if (result.trial.model, result.trial.task) in known and (records is None or _has_own_recipe(result))
    ]
    others = tuple(result for result in found if result not in mine)
    results = PresetResults(preset, mine, store.analyses(preset))
    return Outputs(results, tuple(mine), others, store.folder)


def write_artifacts(outputs: Outputs, store: ResultStore, experiments: Iterable[Experiment]) -> list[Path]:
    """Write the tables and figures of some experiments; the paths."""
    from mgk.experiments.render.figure_png import draw

    preset = outputs.results.preset
    tables, figures = (store.folder / name / preset for name in (TABLES, FIGURES))
    written = []
    for experiment in experiments:
        name = experiment.id
        if experiment.kind == "table" and (table := outputs.tables.get(name)) is not None:
            write_file(tables / f"{name}.json", compact_json(table.to_json()))
            write_file(tables / f"{name}.md", f"# {table.title}\n\n`{table.command}`\n\n{markdown(table)}")
            written.append(tables / f"{name}.md")
        elif experiment.kind != "table" and (figure := outputs.figures.get(name)) is not None:
            write_file(figures / f"{name}.json", compact_json(figure.to_json()))
            write_file(figures / f"{name}.png", draw(figure))
            written.append(figures / f"{name}.png")
    return written


def write_verdicts(outputs: Outputs, store: ResultStore) -> None:
    """Write the verdicts on the paper's claims."""
    path = store.folder / TABLES / outputs.results.preset / CLAIMS
    write_file(path, compact_json(verdicts_json(outputs.results)))


def _has_own_recipe(result: TrialResult) -> bool:
    trial = result.trial
    own = make_trial(trial.preset, trial.task, trial.model, trial.seed)
    return not changes(own.recipe, result.recipe)
