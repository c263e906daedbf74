"""The generated parts of documents, which always agree with the results.

A part is between the lines ``<!-- generated: NAME -->`` and ``<!-- end of generated: NAME -->``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from mgk._util.files import write_file
from mgk.experiments.artifacts import Artifacts
from mgk.experiments.evidence.claims import CLAIMS
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
from mgk.experiments.render.tables import DASH, machines, markdown_table
from mgk.experiments.reproduce.published import AVERAGE, LRA
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.result_store import FIGURES, TABLES
from mgk.training.errors import RecipeError, TrainingError

# Relative to the document.
IMAGES = "images/reproduction"
_Report = TypeVar("_Report", bound=StudyReport)
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated: \2 -->)", re.DOTALL)


def fill(text: str, artifacts: Artifacts) -> str:
    """The text with all its generated parts made anew.

    Args:
        text: of the document.
        artifacts: the tables, figures and results.
    """
    makers = _makers(artifacts)

    def make(match: re.Match[str]) -> str:
        if match[2] not in makers:
            raise RecipeError(f"there is no generated part {match[2]!r}: choose one of {', '.join(makers)}")
        return f"{match[1]}\n{makers[match[2]]().strip()}\n\n{match[3]}"

    return _PART.sub(make, text)


def fill_document(path: Path, artifacts: Artifacts) -> list[str]:
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
        filled = fill(text, artifacts)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    studies = (_measured_study(artifacts, kind) for kind in STUDIES.values())
    figures = [figure for study in studies if study and (figure := study.figure())]
    for figure in (*artifacts.figures.values(), *figures):
        image = f"{IMAGES}/{figure.id}.png"
        if image in filled:
            write_file(path.parent / image, draw(figure))
    write_file(path, filled)
    return names


def _makers(artifacts: Artifacts) -> Mapping[str, Callable[[], str]]:
    return {
        "abstract": partial(_abstract, artifacts),
        "claims": partial(_claims, artifacts),
        "verdicts": partial(_verdicts, artifacts),
        "measured": partial(_measured, artifacts),
        "summary": partial(_summary, artifacts),
        "headlines": partial(_headlines, artifacts),
        **{name: partial(_study, artifacts, name) for name in STUDIES},
        **bench_parts(artifacts.bench, artifacts.cited),
        **{name: partial(_experiment, artifacts, name) for name in EXPERIMENTS},
    }


def _study(artifacts: Artifacts, name: str) -> str:
    """A study: its figure, if it has one, its tables and its choice."""
    found = _measured_study(artifacts, STUDIES[name])
    plan = f"its plan `{artifacts.cited}/{name}/{PLAN}`"
    if found is None:
        return f"Not measured yet: `mgk reproduce {name}` ({plan})."
    parts = [f"`mgk reproduce {name}` (data: `{artifacts.cited}/{name}/{SUMMARY}`, {plan})"]
    if (figure := found.figure()) is not None:
        alt = " ".join(panel.description for panel in figure.panels)
        parts.append(f"![{alt}]({IMAGES}/{name}.png)")
    return "\n\n".join([*parts, found.markdown()])


def _measured_study(artifacts: Artifacts, kind: type[_Report]) -> _Report | None:
    """The study in the folder of results, once it has some."""
    found = None if artifacts.folder is None else kind.read(artifacts.folder)
    return found if found is not None and found.results else None


_OUTCOMES: Mapping[Outcome, str] = {
    CONFIRMED: "Holds",
    EQUIVALENT: "Makes no difference beyond the margin",
    CONTRADICTED: "Does not hold",
    INCONCLUSIVE: "Not decided",
    NOT_MEASURED: "Not measured",
}


def _abstract(artifacts: Artifacts) -> str:
    """The claims by outcome; then the frontier's pairs by outcome."""
    outcomes = artifacts.verdicts
    lines = []
    for outcome, name in _OUTCOMES.items():
        if texts := [claim.text for claim in CLAIMS if outcomes[claim.id].outcome == outcome]:
            where = f" at preset `{artifacts.results.preset}`"
            lines.append(f"- **{name}**{where}: {' '.join(texts)}")
    if found := _measured_study(artifacts, Frontier):
        lines.append("- **On bytes** ([frontier](frontier.md)):")
        lines += [f"  - {line}" for line in found.comparisons()]
    return "\n".join(lines)


def _claims(artifacts: Artifacts) -> str:
    """Every claim with its verdict and the evidence."""
    found = artifacts.verdicts
    lines = []
    for claim in CLAIMS:
        verdict = found[claim.id]
        lines.append(f"- **{claim.text}** ({claim.where}): **{verdict.outcome}**.")
        lines += [f"  - {item.sentence}" for item in verdict.evidence]
    return "\n".join(lines)


def _verdicts(artifacts: Artifacts) -> str:
    """One line per claim."""
    found = artifacts.verdicts
    rows = [[claim.text, claim.where, f"**{found[claim.id].outcome}**"] for claim in CLAIMS]
    return markdown_table(["claim of the paper", "where", "measured"], rows).replace("---:", "---")


def _measured(artifacts: Artifacts) -> str:
    """The number of trials, and where and when they were measured."""
    if not artifacts.trials:
        return "Nothing has been measured yet."
    is_synthetic = any(trial.data.is_synthetic for trial in artifacts.trials)
    on = " on synthetic data, which say nothing about the real tasks" if is_synthetic else ""
    opening = f"{len(artifacts.trials)} trials at preset `{artifacts.results.preset}`{on}, measured on:"
    return "\n".join([opening, "", *(f"- {line}" for line in machines(artifacts.trials))])


def _experiment(artifacts: Artifacts, name: str) -> str:
    """A table or a figure with its command and its data file."""
    preset = artifacts.results.preset
    item = artifacts.tables.get(name) or artifacts.figures.get(name)
    if item is None:
        return f"Not measured yet: `{EXPERIMENTS[name].command(preset)}`."
    if name in artifacts.tables:
        folder, content = TABLES, artifacts.tables[name].markdown()
    else:
        figure = artifacts.figures[name]
        alt = " ".join(panel.description for panel in figure.panels).replace("[", "(").replace("]", ")")
        folder, content = FIGURES, f"![{alt}]({IMAGES}/{name}.png)\n\n{figure.caption}"
    return f"`{item.command}` (data: `{artifacts.cited}/{folder}/{preset}/{name}.json`)\n\n{content}"


def _summary(artifacts: Artifacts) -> str:
    """The number of claims by outcome, for a first page."""
    preset = artifacts.results.preset
    if not artifacts.trials:
        return sentence("not_measured", results=artifacts.cited)
    folder = f"{artifacts.cited}/{TABLES}/{preset}"
    outcomes = sorted(verdict.outcome for verdict in artifacts.verdicts.values())
    counts = ", ".join(
        f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes) if name != NOT_MEASURED
    )
    claims = f"Of the paper's claims, at preset `{preset}`: {counts} (`{folder}/claims.json`)."
    if found := _measured_study(artifacts, Frontier):
        lines = "\n".join(f"- {line}" for line in found.comparisons())
        claims += f"\n\nOn bytes (`{artifacts.cited}/{found.id}/{SUMMARY}`):\n\n{lines}"
    return claims


def _headlines(artifacts: Artifacts) -> str:
    """One number of each model beside the paper's."""
    folder = f"{artifacts.cited}/{TABLES}/{artifacts.results.preset}"
    parts = _headline_table(artifacts, folder, ["table1", "table2", "table4"], AVERAGE)
    parts += _headline_table(artifacts, folder, ["table3"], "test")
    return "\n\n".join(parts) or "Nothing has been measured yet."


def _headline_table(artifacts: Artifacts, folder: str, names: Sequence[str], column: str) -> list[str]:
    """One column of the tables that have it, with its caption."""
    tables = [table for name in names if (table := artifacts.tables.get(name)) and column in table.columns]
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
