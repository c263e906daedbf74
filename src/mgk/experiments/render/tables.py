"""The paper's tables with our numbers beside its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.evidence.effects import PresetResults, is_above_chance, late_change, mean_of
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.render.numbers import interval_text, json_safe, short, signed, text
from mgk.experiments.reproduce.published import AVERAGE, EXTRA_TASKS, LRA, TABLES
from mgk.experiments.reproduce.registry import Experiment
from mgk.experiments.result_store import TrialResult
from mgk.experiments.trials import changes

FORMAT = 1
DASH = "–"

_TrialsByTask = Mapping[str, Sequence[TrialResult]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Our number beside the paper's."""

    mean: float | None  # over seeds; None where nothing was measured
    deviation: float | None  # over seeds; None for one
    values: tuple[float, ...]  # by seed
    paper: float | None  # None where the paper has no number
    difference: Interval | None  # to the reference; None if both are at chance

    @property
    def text(self) -> str:
        """Mean and standard deviation."""
        if self.mean is None:
            return DASH
        return f"{self.mean:.2f}" if self.deviation is None else f"{self.mean:.2f} ± {self.deviation:.2f}"

    @property
    def paper_text(self) -> str:
        """The paper's number."""
        return DASH if self.paper is None else f"{self.paper:.2f}"

    @property
    def difference_text(self) -> str:
        """``+0.50 (−0.20 to +1.20)``; one seed of perplexities has no interval."""
        if self.difference is None:
            return DASH
        if not isfinite(self.difference.low):
            return f"{signed(self.difference.estimate)} (one seed)"
        return interval_text(self.difference, signed)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model."""

    model: str
    paper_model: str | None  # whose numbers are beside, if it is another one
    reference: str | None  # the model that it is compared to
    seeds: tuple[int, int]  # the fewest and the most over the columns
    parameters: tuple[int, int]  # the fewest and the most over tasks
    entries: dict[str, Entry]  # by column

    @property
    def seeds_text(self) -> str:
        """``3``, or ``1 to 3`` where columns differ."""
        return _range(self.seeds, str)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A whole table."""

    id: str  # of the experiment
    title: str
    preset: str
    metric: str  # "accuracy", in per cent, or "perplexity"
    columns: tuple[str, ...]  # tasks and "average", or splits of language models
    labels: dict[str, str]  # of the columns: what the data are
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what limits the comparison
    command: str
    machine: tuple[str, ...]  # where and when it was measured, at which commit

    @property
    def unit(self) -> str:
        """The unit of the differences."""
        return "points" if self.metric == "accuracy" else "% of the perplexity"

    @property
    def header(self) -> list[str]:
        """The headings of :attr:`text_rows`."""
        names = ["model", "seeds", "parameters"]
        for column in self.columns:
            names += [self.labels[column], *(["paper"] if self.has_paper(column) else [])]
        return names

    @property
    def text_rows(self) -> list[list[str]]:
        """Every row: model, seeds, parameters, then our number and the paper's."""
        rows = []
        for row in self.rows:
            cells = [row.model, row.seeds_text, _range(row.parameters, short)]
            for column in self.columns:
                entry = row.entries[column]
                cells += [entry.text, *([entry.paper_text] if self.has_paper(column) else [])]
            rows.append(cells)
        return rows

    @property
    def differences(self) -> tuple[str, list[str], list[list[str]]] | None:
        """Caption, headings and rows of the differences to references; None without any."""
        rows = [
            [row.model, row.reference or "", *(row.entries[column].difference_text for column in self.columns)]
            for row in self.rows
            if any(entry.difference is not None for entry in row.entries.values())
        ]
        if not rows:
            return None
        caption = text("perplexity_differences")
        if self.metric == "accuracy":
            has_single = any(row.reference is not None and row.seeds[0] == 1 for row in self.rows)
            caption = text("accuracy_differences") + (f" {text('one_seed')}" if has_single else "")
        return caption, ["model", "vs", *(self.labels[column] for column in self.columns)], rows

    def has_paper(self, column: str) -> bool:
        """Whether the paper has numbers in a column."""
        return any(row.entries[column].paper is not None for row in self.rows)

    def markdown(self) -> str:
        """The table and its differences as Markdown."""
        parts = [markdown_table(self.header, self.text_rows)]
        if (found := self.differences) is not None:
            caption, columns, rows = found
            parts += [caption, markdown_table(columns, rows)]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts) + "\n"

    def to_json(self) -> dict[str, Any]:
        """JSON data; unbounded intervals have null."""
        data: dict[str, Any] = json_safe({"format": FORMAT, **asdict(self)})
        return data


def make_table(experiment: Experiment, results: PresetResults) -> Table | None:
    """The table of an experiment; None where nothing was measured.

    Additional tasks are columns where all models of the experiment were
    measured on them.
    """
    models = experiment.models_at(results.preset)
    default = experiment.tasks_at(results.preset)
    more = [task for task in experiment.more_tasks if all(results.trials(task, model) for model in models)]
    tasks = [task for task in (*default, *more) if any(results.trials(task, model) for model in models)]
    by_model = {model: {task: results.trials(task, model) for task in tasks} for model in models}
    trials = [trial for task in tasks for by_task in by_model.values() for trial in by_task[task]]
    if not trials:
        return None
    columns = ("validation", "test") if experiment.is_language else tuple(tasks)
    if set(LRA) <= set(tasks):
        columns = (*LRA, AVERAGE, *(task for task in tasks if task not in LRA))
    rows = (_row(experiment, results, model, by_task, columns) for model, by_task in by_model.items())
    return Table(
        id=experiment.id,
        title=experiment.title,
        preset=results.preset,
        metric=trials[0].summary.metric,
        columns=columns,
        labels=_labels(columns, trials),
        rows=tuple(row for row in rows if row.seeds[1]),
        notes=tuple(_notes(experiment, results, trials)),
        command=experiment.command(results.preset, tasks=[*default, *more] if more else None),
        machine=machines(trials),
    )


def machines(trials: Sequence[TrialResult]) -> tuple[str, ...]:
    """The machine, days and commits of trials: a line per machine."""
    groups: dict[str, list[TrialResult]] = {}
    for trial in trials:
        machine = trial.machine
        name = "{processor}, {cores} cores, torch {torch}, mgk {mgk}".format_map(machine)
        groups.setdefault(name, []).append(trial)
    lines = []
    for name, group in groups.items():
        days = sorted({trial.date for trial in group})
        commits = sorted({(trial.machine["commit"] or "no commit")[:10] for trial in group})
        lines.append(f"{name}; {_range((days[0], days[-1]), str)}; commit {', '.join(commits)}")
    return tuple(lines)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Any table as Markdown, numbers on the right."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(
    experiment: Experiment,
    results: PresetResults,
    model: ModelSpec,
    trials: _TrialsByTask,
    columns: Sequence[str],
) -> Row:
    published = experiment.published(model, results.preset)
    reference = experiment.reference(model, results.preset)
    table = TABLES.get(experiment.id, {})
    entries: dict[str, Entry] = {}
    for column in columns:
        paper = table.get(published, {}).get(column)
        if column == AVERAGE:
            entries[column] = _average([entries[task] for task in LRA], paper, [trials[task] for task in LRA])
            continue
        task = next(iter(trials)) if experiment.is_language else column
        values = [trial.test for trial in trials[task]]
        interval = None if reference is None else _difference(results, task, model, reference)
        if column == "validation":
            values = [trial.summary.metrics["best_validation_perplexity"] for trial in trials[task]]
            interval = None
        entries[column] = _entry(values, paper, interval)
    counts = [len(entries[column].values) for column in columns]
    sizes = [trial.summary.parameters for group in trials.values() for trial in group]
    is_other = published != model and published in table
    return Row(
        model=model.title,
        paper_model=published.title if is_other else None,
        reference=None if reference is None else reference.title,
        seeds=(min(counts), max(counts)),
        parameters=(min(sizes, default=0), max(sizes, default=0)),
        entries=entries,
    )


def _difference(results: PresetResults, task: str, model: ModelSpec, reference: ModelSpec) -> Interval | None:
    """None where one was not measured, or both are at chance."""
    is_informative = all(results.trials(task, one) for one in (model, reference)) and any(
        is_above_chance(results.trials(task, one)) for one in (model, reference)
    )
    return results.difference(task, model, reference) if is_informative else None


def _entry(values: Sequence[float], paper: float | None, difference: Interval | None) -> Entry:
    return Entry(
        mean=fmean(values) if values else None,
        deviation=stdev(values) if len(values) > 1 else None,
        values=tuple(round(value, 4) for value in values),
        paper=paper,
        difference=difference,
    )


def _average(entries: Sequence[Entry], paper: float | None, trials: Sequence[Sequence[TrialResult]]) -> Entry:
    """Over the paper's tasks, for each seed that all of them have."""
    by_seed = [{trial.trial.seed: trial.test for trial in group} for group in trials]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    means = [fmean(values[seed] for values in by_seed) for seed in seeds]
    differences = [entry.difference for entry in entries if entry.difference is not None]
    return _entry(means, paper, mean_of(differences) if len(differences) == len(entries) else None)


def _labels(columns: Sequence[str], trials: Sequence[TrialResult]) -> dict[str, str]:
    by_task = {trial.trial.task: trial.data.label for trial in trials}
    first = next(iter(by_task.values()))
    names = {AVERAGE: "Average", "validation": f"{first}, validation", "test": f"{first}, test", **by_task}
    names |= {task: f"{by_task[task]}, ours" for task in EXTRA_TASKS if task in by_task}
    return {column: names[column] for column in columns}


def _notes(experiment: Experiment, results: PresetResults, trials: Sequence[TrialResult]) -> list[str]:
    notes = []
    by_task: dict[str, list[TrialResult]] = {}
    for trial in trials:
        by_task.setdefault(trial.trial.task, []).append(trial)
    if any(trial.data.is_synthetic for trial in trials):
        notes.append(text("synthetic"))
    for task, group in by_task.items():
        last, data = group[-1], group[-1].data
        if last.summary.metric == "accuracy":
            chance = f"{data.label}: the majority-class baseline has {100 * data.chance:.2f}"
            models = {trial.trial.model for trial in group}
            has_learned = any(is_above_chance(results.trials(task, model)) for model in models)
            notes.append(f"{chance}{'' if has_learned else '; no model here is above it'}.")
        else:
            how = "by a sliding window" if last.metric == "test_sliding_perplexity" else "by segments"
            notes.append(f"{data.label}: test perplexity {how}; a unigram model has {data.chance:.2f}.")
        if (change := late_change(group)) is not None:
            notes.append(f"{data.label}: {_late_change_text(last, change)}")
        if task == "retrieval" and "in place of AAN" in data.label:
            notes.append(text("retrieval"))
    is_smaller_language = experiment.is_language and results.preset != "paper"
    is_papers = experiment.is_ours or all(trial.data.is_papers for trial in trials)
    conditions = {
        "ours": experiment.is_ours,
        "extra_tasks": not by_task.keys().isdisjoint(EXTRA_TASKS),
        "language": is_smaller_language,
        "smaller": not is_papers and not is_smaller_language,
        "several_recipes": any(map(_has_several_recipes, by_task.values())),
    }
    return [*notes, *(text(name) for name, holds in conditions.items() if holds)]


def _late_change_text(trial: TrialResult, change: float) -> str:
    """Whether models were still learning when training ended."""
    split, metric = trial.recipe.evaluation.split, trial.summary.metric
    size = f"{100 * change:+.1f} points" if metric == "accuracy" else f"{change:+.2f}"
    name = metric.replace("_", " ")
    size = f"{size.replace('-', '−')}, mean of all trials"
    return f"over the last quarter of training {split} {name} changed by {size}."


def _has_several_recipes(trials: Sequence[TrialResult]) -> bool:
    """Apart from model and seed, and the learning rate of a plan."""
    first, *others = (trial.recipe for trial in trials)
    planned = {"training.learning_rate"} if all(trial.plan for trial in trials) else set()
    found = {path for other in others for path in changes(first, other)} - {"seed", *planned}
    return any(not path.startswith("model.") for path in found)


def _range(bounds: tuple[Any, Any], text: Callable[[Any], str]) -> str:
    low, high = map(text, bounds)
    return low if low == high else f"{low} to {high}"
