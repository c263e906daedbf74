"""Tables, figures and verdicts of a folder of results, made on demand."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mgk._util.files import write_file
from mgk._util.json_codec import write_compact
from mgk.experiments.evidence.claims import verdicts, verdicts_json
from mgk.experiments.evidence.decision_rules import Verdict
from mgk.experiments.evidence.effects import PresetResults
from mgk.experiments.render.bench_tables import BENCH, Bench, read_bench
from mgk.experiments.render.figures import Figure, make_figure
from mgk.experiments.render.tables import Table, make_table
from mgk.experiments.reproduce.registry import EXPERIMENTS, Experiment, make_trial
from mgk.experiments.result_store import FIGURES, TABLES, ResultStore, TrialResult
from mgk.experiments.trials import changes

CLAIMS = "claims.json"


@dataclass(frozen=True)
class Artifacts:
    """All that a page is made of, at a preset.

    Attributes:
        trials: the results of the experiments.
        others: results of a folder of runs that belong to no experiment.
    """

    results: PresetResults
    trials: tuple[TrialResult, ...] = ()
    others: tuple[TrialResult, ...] = ()
    folder: Path | None = None

    @property
    def cited(self) -> str:
        """The folder of all results, as documents cite it."""
        return "results" if self.folder is None else self.folder.resolve().name

    @cached_property
    def tables(self) -> dict[str, Table]:
        """The tables with measurements, by experiment."""
        made = (make_table(item, self.results) for item in EXPERIMENTS.values() if item.kind == "table")
        return {table.id: table for table in made if table is not None}

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """The figures with measurements or formulas, by experiment."""
        made = (make_figure(item, self.results) for item in EXPERIMENTS.values() if item.kind != "table")
        return {figure.id: figure for figure in made if figure is not None}

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on every claim of the paper, by its id."""
        return verdicts(self.results)

    @cached_property
    def bench(self) -> Bench:
        """The files of the benchmarks, by name."""
        return {} if self.folder is None else read_bench(self.folder / BENCH)


def gather(store: ResultStore, preset: str, *, trials: Sequence[TrialResult] | None = None) -> Artifacts:
    """The results of a preset, from the store or as given."""
    found = store.results(preset) if trials is None else trials
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
        if (result.trial.model, result.trial.task) in known and (trials is None or _has_own_recipe(result))
    ]
    others = tuple(result for result in found if result not in mine)
    results = PresetResults(preset, mine, store.analyses(preset))
    return Artifacts(results, tuple(mine), others, store.folder)


def write_artifacts(artifacts: Artifacts, store: ResultStore, experiments: Iterable[Experiment]) -> list[Path]:
    """Write the tables and figures of some experiments; the paths."""
    from mgk.experiments.render.figure_png import draw

    preset = artifacts.results.preset
    tables, figures = (store.folder / name / preset for name in (TABLES, FIGURES))
    written = []
    for experiment in experiments:
        name = experiment.id
        if experiment.kind == "table" and (table := artifacts.tables.get(name)) is not None:
            write_compact(tables / f"{name}.json", table.to_json())
            write_file(tables / f"{name}.md", f"# {table.title}\n\n`{table.command}`\n\n{table.markdown()}")
            written.append(tables / f"{name}.md")
        elif experiment.kind != "table" and (figure := artifacts.figures.get(name)) is not None:
            write_compact(figures / f"{name}.json", figure.to_json())
            write_file(figures / f"{name}.png", draw(figure))
            written.append(figures / f"{name}.png")
    return written


def write_verdicts(artifacts: Artifacts, store: ResultStore) -> None:
    """Write the verdicts on the paper's claims."""
    path = store.folder / TABLES / artifacts.results.preset / CLAIMS
    write_compact(path, verdicts_json(artifacts.results))


def _has_own_recipe(result: TrialResult) -> bool:
    trial = result.trial
    own = make_trial(trial.preset, trial.task, trial.model, trial.seed)
    return not changes(own.recipe, result.recipe)
