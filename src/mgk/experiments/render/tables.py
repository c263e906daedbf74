"""Tables as the paper has them, our numbers beside its own; and as data, Markdown and rows for any other form."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.evidence.effects import Measured, has_learned, mean_of
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.render.numbers import short
from mgk.experiments.reproduce.published import AVERAGE, EXTRA_TASKS, LRA, TABLES
from mgk.experiments.reproduce.registry import Experiment
from mgk.experiments.result_store import TrialResult
from mgk.experiments.trials import changes

FORMAT = 1
DASH = "–"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A number of ours beside the paper's.

    Attributes:
        mean: over seeds; None where nothing was measured.
        deviation: the standard deviation over seeds; None for one.
        values: by seed.
        paper: the paper's number; None where it has none.
        difference: to the row's reference; None for baselines, and where neither has learned anything.
    """

    mean: float | None
    deviation: float | None
    values: tuple[float, ...]
    paper: float | None
    difference: Interval | None

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
        """The difference with its interval."""
        return difference_text(self.difference)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model.

    Attributes:
        model: the model's title.
        paper_model: whose number of the paper stands beside, if that is another one.
        reference: what it is compared to.
        seeds: of the entries, the fewest and the most.
        parameters: of the model; those of several tasks differ by their vocabulary.
        entries: by column.
    """

    model: str
    paper_model: str | None
    reference: str | None
    seeds: tuple[int, int]
    parameters: tuple[int, int]
    entries: dict[str, Entry]

    @property
    def seeds_text(self) -> str:
        """How many: ``3``, or ``1 to 3`` where columns differ."""
        return _range(self.seeds)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A whole table.

    Attributes:
        id: of the experiment.
        title: of it.
        preset: of the trials.
        metric: "accuracy", in per cent, or "perplexity".
        columns: the keys of the entries: tasks, "average"; of language models "validation" and "test".
        labels: of the columns, which say what the data are.
        rows: the models.
        notes: what a reader must know.
        command: that makes it.
        machine: where it was measured, when, by which commit.
    """

    id: str
    title: str
    preset: str
    metric: str
    columns: tuple[str, ...]
    labels: dict[str, str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    command: str
    machine: tuple[str, ...]

    @property
    def unit(self) -> str:
        """Of the differences."""
        return "points" if self.metric == "accuracy" else "% of the perplexity"

    def to_json(self) -> dict[str, Any]:
        """As JSON data; an interval without bounds has null for them."""
        data: dict[str, Any] = _finite({"format": FORMAT, **asdict(self)})
        return data


def make_table(experiment: Experiment, preset: str, measured: Measured) -> Table | None:
    """The table of an experiment from what was measured; None where nothing was.

    Tasks beyond its own are columns where all of its models were measured on them.
    """
    models = experiment.models_at(preset)
    wanted = experiment.tasks_at(preset)
    more = [task for task in experiment.more_tasks if all(measured.of(task, model) for model in models)]
    tasks = [task for task in (*wanted, *more) if any(measured.of(task, model) for model in models)]
    records = [record for task in tasks for model in models for record in measured.of(task, model)]
    if not records:
        return None
    columns = ("validation", "test") if experiment.is_language else tuple(tasks)
    if set(LRA) <= set(tasks):
        columns = (*LRA, AVERAGE, *(task for task in tasks if task not in LRA))
    rows = tuple(_row(experiment, preset, measured, model, tasks, columns) for model in models)
    return Table(
        id=experiment.id,
        title=experiment.title,
        preset=preset,
        metric=records[0].summary.metric,
        columns=columns,
        labels=_labels(columns, records),
        rows=tuple(row for row in rows if row.seeds[1]),
        notes=tuple(_notes(experiment, preset, records)),
        command=experiment.command(preset, tasks=[*wanted, *more] if more else None),
        machine=machines(records),
    )


def machines(records: Sequence[TrialResult]) -> tuple[str, ...]:
    """Where records were measured: a line for each machine, with its days and commits."""
    found: dict[str, list[TrialResult]] = {}
    for record in records:
        machine = record.machine
        name = f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, mgk {machine['mgk']}"
        found.setdefault(name, []).append(record)
    lines = []
    for name, group in found.items():
        days = sorted({record.date for record in group})
        commits = sorted({(record.machine["commit"] or "no commit")[:10] for record in group})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        lines.append(f"{name}; {when}; commit {', '.join(commits)}")
    return tuple(lines)


def header(table: Table) -> list[str]:
    """The headings of :func:`text_rows`."""
    names = ["model", "seeds", "parameters"]
    for column in table.columns:
        names += [table.labels[column], "paper"] if has_paper(table, column) else [table.labels[column]]
    return names


def text_rows(table: Table) -> list[list[str]]:
    """Every row as text: model, seeds, parameters, then ours and the paper's number of each column."""
    rows = []
    for row in table.rows:
        trials = [row.model, row.seeds_text, _range(row.parameters, short)]
        for column in table.columns:
            entry = row.entries[column]
            trials += [entry.text, entry.paper_text] if has_paper(table, column) else [entry.text]
        rows.append(trials)
    return rows


def difference_header(table: Table) -> list[str]:
    """The headings of :func:`difference_rows`."""
    return ["model", "against", *(table.labels[column] for column in table.columns)]


def difference_rows(table: Table) -> list[list[str]]:
    """For each row with a reference: the differences with their intervals."""
    return [
        [row.model, row.reference or "", *(row.entries[column].difference_text for column in table.columns)]
        for row in table.rows
        if any(entry.difference is not None for entry in row.entries.values())
    ]


def difference_caption(table: Table) -> str:
    """What the differences are."""
    if table.metric == "accuracy":
        text = (
            "Differences in points of accuracy, above 0 where the model is better, with a 95% interval that covers the"
            " luck of seeds, by Student's t, and of test examples; models are paired by seed and example."
        )
        has_single = any(row.reference is not None and row.seeds[0] == 1 for row in table.rows)
        return text + " Where there is one seed, it covers the luck of test examples alone." if has_single else text
    return (
        "Differences in per cent of the baseline's perplexity, above 0 where the model is better, with the 95% interval"
        " by Student's t over the seeds."
    )


def has_paper(table: Table, column: str) -> bool:
    """Whether the paper has numbers in a column."""
    return any(row.entries[column].paper is not None for row in table.rows)


def difference_text(interval: Interval | None) -> str:
    """``+0.50 (−0.20 to +1.20)``; without an interval where one seed tells none."""
    if interval is None:
        return DASH
    if not isfinite(interval.low):
        return f"{_signed(interval.estimate)} (one seed)"
    return f"{_signed(interval.estimate)} ({_signed(interval.low)} to {_signed(interval.high)})"


def markdown(table: Table) -> str:
    """The table and its differences, as Markdown."""
    parts = [markdown_table(header(table), text_rows(table))]
    if difference_rows(table):
        parts += [difference_caption(table), markdown_table(difference_header(table), difference_rows(table))]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(parts) + "\n"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Any table as Markdown, numbers on the right."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(
    experiment: Experiment,
    preset: str,
    measured: Measured,
    model: ModelSpec,
    tasks: Sequence[str],
    columns: Sequence[str],
) -> Row:
    published = experiment.published(model, preset)
    reference = experiment.reference(model, preset)
    records = {task: measured.of(task, model) for task in tasks}
    table = TABLES.get(experiment.id, {})
    entries: dict[str, Entry] = {}
    for column in columns:
        paper = table.get(published, {}).get(column)
        if column == AVERAGE:
            entries[column] = _average([entries[task] for task in LRA], paper, [records[task] for task in LRA])
            continue
        task = tasks[0] if experiment.is_language else column
        values = [record.test for record in records[task]]
        interval = None if reference is None else _difference(measured, task, model, reference)
        if column == "validation":
            values = [record.summary.metrics["best_validation_perplexity"] for record in records[task]]
            interval = None
        entries[column] = _entry(values, paper, interval)
    counts = [len(entries[column].values) for column in columns]
    sizes = [record.summary.parameters for group in records.values() for record in group]
    is_other = published != model and published in table
    return Row(
        model=model.title,
        paper_model=published.title if is_other else None,
        reference=None if reference is None else reference.title,
        seeds=(min(counts), max(counts)),
        parameters=(min(sizes, default=0), max(sizes, default=0)),
        entries=entries,
    )


def _difference(measured: Measured, task: str, model: ModelSpec, reference: ModelSpec) -> Interval | None:
    """None where one was not measured, or neither has learned anything: what they answer alike says nothing."""
    found = measured.difference(task, model, reference)
    if found is None or not any(has_learned(measured.of(task, one)) for one in (model, reference)):
        return None
    return found.interval


def _entry(values: Sequence[float], paper: float | None, difference: Interval | None) -> Entry:
    return Entry(
        mean=fmean(values) if values else None,
        deviation=stdev(values) if len(values) > 1 else None,
        values=tuple(round(value, 4) for value in values),
        paper=paper,
        difference=difference,
    )


def _average(entries: Sequence[Entry], paper: float | None, records: Sequence[Sequence[TrialResult]]) -> Entry:
    """Over the paper's tasks, seed by seed; nothing where one of them is missing."""
    by_seed = [{record.trial.seed: record.test for record in group} for group in records]
    seeds = sorted(set.intersection(*(set(values) for values in by_seed)))
    means = [fmean(values[seed] for values in by_seed) for seed in seeds]
    parts = [entry.difference for entry in entries]
    known = [part for part in parts if part is not None]
    return _entry(means, paper, mean_of(known) if known and len(known) == len(parts) else None)


def _labels(columns: Sequence[str], records: Sequence[TrialResult]) -> dict[str, str]:
    by_task = {record.trial.task: record.data.label for record in records}
    first = next(iter(by_task.values()))
    language = {"validation": f"{first}, validation", "test": f"{first}, test"}
    labels = {}
    for column in columns:
        name = by_task.get(column) or language.get(column) or "Average"
        labels[column] = f"{name}, ours" if column in EXTRA_TASKS else name
    return labels


def _notes(experiment: Experiment, preset: str, records: Sequence[TrialResult]) -> list[str]:
    notes = []
    by_task = {record.trial.task: record for record in records}
    if any(record.data.is_synthetic for record in records):
        notes.append("These are made-up data: they show that everything works and say nothing about the real tasks.")
    for task, record in by_task.items():
        data = record.data
        if record.summary.metric == "accuracy":
            text = f"{data.label}: always answering the most frequent class has {100 * data.chance:.2f}"
            notes.append(f"{text}{'' if _is_learned(records, task) else '; no model here is better than that'}.")
        else:
            how = "by a sliding window" if record.metric == "test_sliding_perplexity" else "by segments"
            notes.append(
                f"{data.label}: test perplexity {how}; of words by their frequency alone it is {data.chance:.2f}."
            )
        if task == "retrieval" and "in place of AAN" in data.label:
            notes.append(
                "Retrieval here is not the paper's: the pairs stand in for those of the ACL Anthology Network, so the"
                " two columns are not comparable."
            )
    if experiment.is_ours:
        notes.append("What a name leaves out is as in the paper: M = 2, constant variances, features elu + 1.")
    if not by_task.keys().isdisjoint(EXTRA_TASKS):
        notes.append("Columns marked as ours are not in the paper; the average leaves them out.")
    if experiment.is_language and preset != "paper":
        notes.append(
            "The paper's numbers are of WikiText-103, models with four times the heads and longer training: compare"
            " rows, not columns."
        )
    elif not all(record.data.is_papers for record in records) and not experiment.is_ours:
        notes.append("The paper's numbers are of the full tasks and longer training: compare rows, not columns.")
    if any(_mixed(records, task) for task in by_task):
        notes.append("Some trials of one column were trained by different recipes: do not compare them.")
    return notes


def _is_learned(records: Sequence[TrialResult], task: str) -> bool:
    """Whether some model of a column is better than answering without looking."""
    by_model: dict[ModelSpec, list[TrialResult]] = {}
    for record in records:
        if record.trial.task == task:
            by_model.setdefault(record.trial.model, []).append(record)
    return any(has_learned(group) for group in by_model.values())


def _mixed(records: Sequence[TrialResult], task: str) -> bool:
    first, *others = (record.recipe for record in records if record.trial.task == task)
    return any(not path.startswith("model.") and path != "seed" for other in others for path in changes(first, other))


def _range(pair: tuple[int, int], text: Any = str) -> str:
    low, high = text(pair[0]), text(pair[1])
    return low if low == high else f"{low} to {high}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
