"""The generated parts of documents, which always agree with the results.

A part is between the lines ``<!-- generated: NAME -->`` and ``<!-- end of generated: NAME -->``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from mgk._util.files import write_file
from mgk.experiments.artifacts import Outputs
from mgk.experiments.evidence.claims import CLAIMS, verdicts
from mgk.experiments.evidence.decision_rules import (
    CONFIRMED,
    CONTRADICTED,
    EQUIVALENT,
    INCONCLUSIVE,
    NOT_MEASURED,
    Outcome,
)
from mgk.experiments.plan import PLAN
from mgk.experiments.render.bench_tables import bench_parts
from mgk.experiments.render.figure_png import draw
from mgk.experiments.render.frontier import Frontier
from mgk.experiments.render.numbers import text as sentence
from mgk.experiments.render.studies import STUDIES
from mgk.experiments.render.study_report import SUMMARY, StudyReport
from mgk.experiments.render.tables import DASH, machines, markdown, markdown_table
from mgk.experiments.reproduce.published import AVERAGE, LRA
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.result_store import FIGURES, TABLES
from mgk.training.errors import RecipeError, TrainingError

# Relative to the document.
IMAGES = "images/reproduction"
_Report = TypeVar("_Report", bound=StudyReport)
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated: \2 -->)", re.DOTALL)


def fill(text: str, outputs: Outputs, results: str) -> str:
    """The text with all its generated parts made anew.

    Args:
        text: of the document.
        outputs: the tables, figures and results.
        results: the folder of results, as the text cites it.
    """
    makers = _makers(outputs, results)

    def make(match: re.Match[str]) -> str:
        if match[2] not in makers:
            raise RecipeError(f"there is no generated part {match[2]!r}: choose one of {', '.join(makers)}")
        return f"{match[1]}\n{makers[match[2]]().strip()}\n\n{match[3]}"

    return _PART.sub(make, text)


def fill_document(path: Path, outputs: Outputs, results: str) -> list[str]:
    """Fill a document in place, with its images; the names of its parts."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TrainingError(f"{path}: cannot be read ({reason})") from None
    names = [match[2] for match in _PART.finditer(text)]
    if not names:
        raise RecipeError(f"{path}: it has no generated part, from <!-- generated: NAME --> on")
    try:
        filled = fill(text, outputs, results)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    studies = (_measured_study(outputs, kind) for kind in STUDIES.values())
    figures = [figure for study in studies if study and (figure := study.figure())]
    for figure in (*outputs.figures.values(), *figures):
        image = f"{IMAGES}/{figure.id}.png"
        if image in filled:
            write_file(path.parent / image, draw(figure))
    write_file(path, filled)
    return names


def _makers(outputs: Outputs, results: str) -> Mapping[str, Callable[[], str]]:
    return {
        "abstract": partial(_abstract, outputs),
        "claims": partial(_claims, outputs),
        "verdicts": partial(_verdicts, outputs),
        "measured": partial(_measured, outputs),
        "summary": partial(_summary, outputs, results),
        "headlines": partial(_headlines, outputs, results),
        **{name: partial(_study, outputs, results, name) for name in STUDIES},
        **bench_parts(outputs.bench, results),
        **{name: partial(_experiment, outputs, results, name) for name in EXPERIMENTS},
    }


def _study(outputs: Outputs, results: str, name: str) -> str:
    """A study: its figure, if it has one, its tables and its choice."""
    found = _measured_study(outputs, STUDIES[name])
    plan = f"its plan `{results}/{name}/{PLAN}`"
    if found is None:
        return f"Not measured yet: `mgk reproduce {name}` ({plan})."
    parts = [f"`mgk reproduce {name}` (data: `{results}/{name}/{SUMMARY}`, {plan})"]
    if (figure := found.figure()) is not None:
        alt = " ".join(panel.description for panel in figure.panels)
        parts.append(f"![{alt}]({IMAGES}/{name}.png)")
    return "\n\n".join([*parts, found.markdown()])


def _measured_study(outputs: Outputs, kind: type[_Report]) -> _Report | None:
    """The study in the folder of results, once it has some."""
    found = None if outputs.folder is None else kind.read(outputs.folder)
    return found if found is not None and found.results else None


_OUTCOMES: Mapping[Outcome, str] = {
    CONFIRMED: "Holds",
    EQUIVALENT: "Makes no difference beyond the margin",
    CONTRADICTED: "Does not hold",
    INCONCLUSIVE: "Not decided",
    NOT_MEASURED: "Not measured",
}


def _abstract(outputs: Outputs) -> str:
    """The claims by outcome; then the frontier's pairs by outcome."""
    outcomes = verdicts(outputs.results)
    lines = []
    for outcome, name in _OUTCOMES.items():
        if texts := [claim.text for claim in CLAIMS if outcomes[claim.id].outcome == outcome]:
            where = f" at preset `{outputs.results.preset}`"
            lines.append(f"- **{name}**{where}: {' '.join(texts)}")
    if found := _measured_study(outputs, Frontier):
        lines.append("- **On bytes** ([frontier](frontier.md)):")
        lines += [f"  - {line}" for line in found.comparisons()]
    return "\n".join(lines)


def _claims(outputs: Outputs) -> str:
    """Every claim with its verdict and the evidence."""
    found = verdicts(outputs.results)
    lines = []
    for claim in CLAIMS:
        verdict = found[claim.id]
        lines.append(f"- **{claim.text}** ({claim.where}): **{verdict.outcome}**.")
        lines += [f"  - {item.sentence}" for item in verdict.evidence]
    return "\n".join(lines)


def _verdicts(outputs: Outputs) -> str:
    """One line per claim."""
    found = verdicts(outputs.results)
    rows = [[claim.text, claim.where, f"**{found[claim.id].outcome}**"] for claim in CLAIMS]
    return markdown_table(["claim of the paper", "where", "measured"], rows).replace("---:", "---")


def _measured(outputs: Outputs) -> str:
    """Where and when."""
    if not outputs.records:
        return "Nothing has been measured yet."
    is_synthetic = any(record.data.is_synthetic for record in outputs.records)
    on = " on synthetic data, which say nothing about the real tasks" if is_synthetic else ""
    trials = f"{len(outputs.records)} trials at preset `{outputs.results.preset}`{on}, measured on:"
    return "\n".join([trials, "", *(f"- {line}" for line in machines(outputs.records))])


def _experiment(outputs: Outputs, results: str, name: str) -> str:
    """A table or a figure with its command and its data file."""
    preset = outputs.results.preset
    item = outputs.tables.get(name) or outputs.figures.get(name)
    if item is None:
        return f"Not measured yet: `{EXPERIMENTS[name].command(preset)}`."
    if name in outputs.tables:
        folder, content = TABLES, markdown(outputs.tables[name])
    else:
        figure = outputs.figures[name]
        alt = " ".join(panel.description for panel in figure.panels).replace("[", "(").replace("]", ")")
        folder, content = FIGURES, f"![{alt}]({IMAGES}/{name}.png)\n\n{figure.caption}"
    return f"`{item.command}` (data: `{results}/{folder}/{preset}/{name}.json`)\n\n{content}"


def _summary(outputs: Outputs, results: str) -> str:
    """For a first page: the number of claims by outcome."""
    preset = outputs.results.preset
    if not outputs.records:
        return sentence("not_measured", results=results)
    folder = f"{results}/{TABLES}/{preset}"
    outcomes = sorted(verdict.outcome for verdict in verdicts(outputs.results).values())
    counts = ", ".join(
        f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes) if name != NOT_MEASURED
    )
    claims = f"Of the paper's claims, at preset `{preset}`: {counts} (`{folder}/claims.json`)."
    if found := _measured_study(outputs, Frontier):
        lines = "\n".join(f"- {line}" for line in found.comparisons())
        claims += f"\n\nOn bytes (`{results}/{found.id}/{SUMMARY}`):\n\n{lines}"
    return claims


def _headlines(outputs: Outputs, results: str) -> str:
    """One number of each model beside the paper's."""
    folder = f"{results}/{TABLES}/{outputs.results.preset}"
    parts = _headline_table(outputs, folder, ["table1", "table2", "table4"], AVERAGE)
    parts += _headline_table(outputs, folder, ["table3"], "test")
    return "\n\n".join(parts) or "Nothing has been measured yet."


def _headline_table(outputs: Outputs, folder: str, names: Sequence[str], column: str) -> list[str]:
    """One column of the tables that have it, with its caption."""
    tables = [table for name in names if (table := outputs.tables.get(name)) and column in table.columns]
    if not tables:
        return []
    first = tables[0]
    files = ", ".join(f"`{folder}/{table.id}.json`" for table in tables)
    labels = ", ".join(first.labels[task] for task in LRA if task in first.labels)
    what = f"Test accuracy, mean of {labels}" if column == AVERAGE else f"Perplexity, {first.labels[column]}"
    rows: dict[str, list[str]] = {}
    for row in (row for table in tables for row in table.rows):
        entry = row.entries[column]
        if entry.mean is not None:
            texts = [row.model, entry.text, entry.paper_text, row.reference or DASH, entry.difference_text]
            rows.setdefault(row.model, texts)
    caption = f"{what}, of {len(first.rows[0].entries[column].values)} seeds ({files}). {first.notes[-1]}"
    columns = ["model", "measured", "paper", "vs", f"difference, {first.unit} (95% CI)"]
    return [caption, markdown_table(columns, list(rows.values()))]
