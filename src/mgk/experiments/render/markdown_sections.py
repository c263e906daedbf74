"""The generated parts of documents, so that what they say cannot drift from what was measured. Free of torch.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end of generated: NAME -->``, each on a line of its own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from mgk._util.files import write_file
from mgk.experiments.artifacts import Outputs
from mgk.experiments.evidence.claims import CLAIMS, verdicts
from mgk.experiments.evidence.decision_rules import NOT_MEASURED
from mgk.experiments.render.bench_tables import bench_parts
from mgk.experiments.render.figure_png import draw
from mgk.experiments.render.tables import DASH, machines, markdown, markdown_table
from mgk.experiments.reproduce.published import AVERAGE, LRA
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.result_store import FIGURES, TABLES
from mgk.training.errors import RecipeError, TrainingError

# Beside the document that shows them.
PICTURES = "images/reproduction"
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated: \2 -->)", re.DOTALL)


def fill(text: str, outputs: Outputs, results: str) -> str:
    """The text with all its generated parts made anew.

    Args:
        text: of the document.
        outputs: what was measured.
        results: the folder, as the text calls it.
    """
    makers = _makers(outputs, results)

    def make(match: re.Match[str]) -> str:
        if match[2] not in makers:
            raise RecipeError(f"there is no generated part {match[2]!r}: choose one of {', '.join(makers)}")
        return f"{match[1]}\n{makers[match[2]]().strip()}\n\n{match[3]}"

    return _PART.sub(make, text)


def fill_document(path: Path, outputs: Outputs, results: str) -> list[str]:
    """Fill a document in place and put the pictures that it shows beside it; the names of its parts."""
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
    for figure in outputs.figures.values():
        picture = f"{PICTURES}/{figure.id}.png"
        if picture in filled:
            write_file(path.parent / picture, draw(figure))
    write_file(path, filled)
    return names


def _makers(outputs: Outputs, results: str) -> Mapping[str, Callable[[], str]]:
    makers: dict[str, Callable[[], str]] = {
        "claims": partial(_claims, outputs),
        "verdicts": partial(_verdicts, outputs, results),
        "measured": partial(_measured, outputs),
        "summary": partial(_summary, outputs, results),
        **bench_parts(outputs.bench, results),
    }
    for experiment in EXPERIMENTS.values():
        make = _table if experiment.kind == "table" else _figure
        makers[experiment.id] = partial(make, outputs, results, experiment.id)
    return makers


def _claims(outputs: Outputs) -> str:
    """Every claim with its verdict and what it rests on."""
    found = verdicts(outputs.findings)
    parts = []
    for claim in CLAIMS:
        verdict = found[claim.id]
        lines = [f"**{claim.text}** ({claim.where}): **{verdict.word}**."]
        lines += [f"  - {item.sentence}" for item in verdict.evidence]
        parts.append("- " + "\n".join(lines))
    return "\n".join(parts)


def _verdicts(outputs: Outputs, results: str) -> str:
    """One line a claim."""
    found = verdicts(outputs.findings)
    rows = [[claim.text, claim.where, f"**{found[claim.id].word}**"] for claim in CLAIMS]
    return markdown_table(["claim of the paper", "where", "measured"], rows).replace("---:", "---")


def _measured(outputs: Outputs) -> str:
    """Where and when."""
    if not outputs.records:
        return "Nothing has been measured yet."
    made_up = " on made-up data, which say nothing about the real tasks" if _is_made_up(outputs) else ""
    trials = f"{len(outputs.records)} trials at preset `{outputs.findings.preset}`{made_up}, measured on:"
    return "\n".join([trials, "", *(f"- {line}" for line in machines(outputs.records))])


def _is_made_up(outputs: Outputs) -> bool:
    return any(record.data.is_synthetic for record in outputs.records)


def _table(outputs: Outputs, results: str, name: str) -> str:
    preset = outputs.findings.preset
    table = outputs.tables.get(name)
    if table is None:
        return f"Not measured yet: `{EXPERIMENTS[name].command(preset)}`."
    return f"`{table.command}` (data: `{results}/{TABLES}/{preset}/{name}.json`)\n\n{markdown(table)}"


def _figure(outputs: Outputs, results: str, name: str) -> str:
    preset = outputs.findings.preset
    figure = outputs.figures.get(name)
    if figure is None:
        return f"Not measured yet: `{EXPERIMENTS[name].command(preset)}`."
    alt = " ".join(panel.description for panel in figure.panels).replace("[", "(").replace("]", ")")
    shown = f"![{alt}]({PICTURES}/{name}.png)"
    return f"`{figure.command}` (data: `{results}/{FIGURES}/{preset}/{name}.json`)\n\n{shown}\n\n{figure.caption}"


def _summary(outputs: Outputs, results: str) -> str:
    """For a first page: verdicts, and one number of each model."""
    preset = outputs.findings.preset
    if not outputs.records:
        return (
            "Nothing has been measured yet: `mgk reproduce all` measures every table and figure, and"
            f" `mgk report` makes a page of what is in `{results}/`."
        )
    words = [verdict.word for verdict in verdicts(outputs.findings).values() if verdict.word != NOT_MEASURED]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    parts = [f"Of the paper's claims, at preset `{preset}`: {counts} (`{results}/{TABLES}/{preset}/claims.json`)."]
    parts += _headlines(outputs, f"{results}/{TABLES}/{preset}", ["table1", "table2", "table4"], AVERAGE)
    parts += _headlines(outputs, f"{results}/{TABLES}/{preset}", ["table3"], "test")
    return "\n\n".join(parts)


def _headlines(outputs: Outputs, folder: str, names: Sequence[str], column: str) -> list[str]:
    """One column of tables that have it, a row for each model, and what a reader must know; nothing where none has."""
    tables = [outputs.tables[name] for name in names if name in outputs.tables]
    tables = [table for table in tables if column in table.columns]
    if not tables:
        return []
    first = tables[0]
    files = ", ".join(f"`{folder}/{table.id}.json`" for table in tables)
    labels = ", ".join(first.labels[task] for task in LRA if task in first.labels)
    what = f"Test accuracy, mean of {labels}" if column == AVERAGE else f"Perplexity, {first.labels[column]}"
    rows: dict[str, list[str]] = {}
    for row in (row for table in tables for row in table.rows):
        entry = row.entries[column]
        texts = [entry.text, entry.paper_text, row.reference or DASH, entry.difference_text]
        if entry.mean is not None:
            rows.setdefault(row.model, [row.model, *texts])
    caption = f"{what}, of {len(first.rows[0].entries[column].values)} seeds ({files}). {first.notes[-1]}"
    shown = markdown_table(["model", "measured", "paper", "against", f"better by, {first.unit}"], list(rows.values()))
    return [caption, shown]
