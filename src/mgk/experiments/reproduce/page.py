"""The page of a folder of results: claims with verdicts, tables beside the paper's, figures, each with its command."""

from collections.abc import Sequence
from statistics import fmean

from mgk.analysis.attention_maps import picture
from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.artifacts import Outputs
from mgk.experiments.evidence.claims import CLAIMS, verdicts
from mgk.experiments.evidence.decision_rules import CONFIRMED, CONTRADICTED, NOT_MEASURED, NOT_SEEN, Claim, Verdict
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.render.charts import Bar, interval_chart, line_chart
from mgk.experiments.render.figures import Figure, Lines, Maps
from mgk.experiments.render.html import (
    Content,
    Markup,
    code_block,
    details,
    facts,
    figure,
    grid,
    page,
    paragraph,
    png,
    section,
)
from mgk.experiments.render.html import table as html_table
from mgk.experiments.render.numbers import short
from mgk.experiments.render.tables import (
    Table,
    difference_caption,
    difference_header,
    difference_rows,
    header,
    machines,
    text_rows,
)
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.result_store import TrialResult

_SIGNS = {CONFIRMED: "✓", NOT_SEEN: "○", CONTRADICTED: "✗", NOT_MEASURED: "–"}


def reproduction_page(outputs: Outputs) -> str:
    """The whole page."""
    preset = outputs.findings.preset
    parts: list[Content] = [paragraph(sentence) for sentence in _opening(outputs)]
    parts.append(section("The paper's claims", *_claims(outputs)))
    parts += [section(table.title, *_table(table)) for table in outputs.tables.values()]
    parts += [section(item.title, *_figure(item)) for item in outputs.figures.values()]
    if outputs.findings.inside:
        parts.append(section("Heads and components", *_inside(list(outputs.findings.inside.values()))))
    if outputs.others:
        parts.append(section("Other runs", _others(outputs.others)))
    missing = [
        item.command(preset)
        for item in EXPERIMENTS.values()
        if item.id not in outputs.tables and item.id not in outputs.figures
    ]
    if missing and outputs.records:
        parts.append(section("Not measured yet", code_block("\n".join(missing))))
    parts.append(section("How this was made", *_origin(outputs)))
    return page(f"Improving Transformers with Probabilistic Attention Keys, reproduced at preset {preset}", parts)


def _opening(outputs: Outputs) -> list[str]:
    words = [verdict.word for verdict in verdicts(outputs.findings).values()]
    counts = ", ".join(f"{words.count(word)} {word}" for word in _SIGNS if word in words)
    trials = f"{len(outputs.records)} trials (one model on one task with one seed)"
    sentences = [f"Of {len(words)} claims of the paper: {counts}. Measured in {trials}."]
    if any(record.data.is_synthetic for record in outputs.records):
        sentences.append(
            "These are made-up data: they show that everything works and say nothing about the real tasks."
        )
    elif outputs.findings.preset != "paper":
        sentences.append(
            "These are the paper's models at a smaller scale: fewer heads, shorter inputs, less training. A claim that"
            " is not seen here may still hold at the paper's own."
        )
    return sentences


def _claims(outputs: Outputs) -> list[Content]:
    """Each claim with its verdict, and below it, for those who ask, what the verdict rests on."""
    found = verdicts(outputs.findings)
    rules = (
        "Better: the 95% interval of the difference lies above 0. Comparable: above −1 point of accuracy, or −2% of"
        " perplexity. Contradicted: it lies wholly on the other side of that. Otherwise the claim is not seen."
    )
    return [*(_claim(claim, found[claim.id]) for claim in CLAIMS), paragraph(rules)]


def _claim(claim: Claim, verdict: Verdict) -> Markup:
    items = [paragraph(f"{_SIGNS[item.word]} {item.sentence}") for item in verdict.evidence]
    commands = "\n".join(f"mgk reproduce {name}" for name in claim.experiments)
    summary = f"{_SIGNS[verdict.word]} {verdict.word}: {claim.text}"
    return details(summary, paragraph(f"In the paper: {claim.where}."), *items, code_block(commands))


def _table(table: Table) -> list[Content]:
    sizes = "Means over seeds ± standard deviation; beside them the paper's numbers, means over its 5 seeds."
    parts: list[Content] = [html_table(sizes, header(table), text_rows(table))]
    rows = difference_rows(table)
    if rows:
        parts.append(html_table(difference_caption(table), difference_header(table), rows))
        parts.append(
            grid([_difference_chart(table, column) for column in table.columns if _has_differences(table, column)])
        )
    parts += [paragraph(note) for note in table.notes]
    parts.append(code_block(table.command))
    return parts


def _difference_chart(table: Table, column: str) -> Markup:
    label = table.labels[column]
    compared = [row for row in table.rows if row.entries[column].difference is not None]
    words = "; ".join(f"{row.model} against {row.reference} {row.entries[column].difference_text}" for row in compared)
    chart = interval_chart(
        [_bar(row.model, row.entries[column].difference) for row in compared],
        x_label=f"difference in {table.unit}; right is better",
        alt=f"Differences on {label}: {words}.",
    )
    return figure(chart, label)


def _bar(name: str, interval: Interval | None) -> Bar:
    assert interval is not None
    return Bar(name, interval.estimate, interval.low, interval.high)


def _has_differences(table: Table, column: str) -> bool:
    return any(row.entries[column].difference is not None for row in table.rows)


def _figure(item: Figure) -> list[Content]:
    lines = [
        figure(
            line_chart(panel.series, x_label=panel.x_label, y_label=panel.y_label, alt=panel.description), panel.title
        )
        for panel in item.panels
        if isinstance(panel, Lines)
    ]
    parts: list[Content] = []
    for panel in item.panels:
        if isinstance(panel, Maps):
            parts += [Markup(f"<h3>{panel.title}</h3>"), _maps(panel)]
    if lines:
        parts.append(grid(lines))
    parts.append(paragraph(item.caption))
    formulas = [text for panel in item.panels if isinstance(panel, Lines) for text in panel.formulas]
    if formulas:
        parts.append(details("The formulas, at the most heads", code_block("\n\n".join(formulas))))
    return [*parts, code_block(item.command)]


def _maps(panel: Maps) -> Markup:
    layers, heads = panel.maps.weights.shape[:2]
    pictures = []
    for layer in range(layers):
        for head in range(heads):
            alt = f"Attention map of {panel.title}, {panel.describe(layer, head)}"
            image = png(picture(panel.maps.weights[layer, head]), alt)
            pictures.append(figure(image, panel.maps.title(layer, head)))
    return grid(pictures, columns=heads)


def _inside(models: Sequence[tuple[ModelAnalysis, ...]]) -> list[Content]:
    """Of each model the seeds that were looked into, of which the components of the first are shown."""
    alike = [
        (
            f"{seeds[0].trial.model.title} on {seeds[0].trial.task}",
            ", ".join(f"{fmean(item.head_similarity):.3f}" for item in seeds),
        )
        for seeds in models
        if seeds[0].head_similarity
    ]
    parts: list[Content] = []
    if alike:
        parts.append(
            html_table(
                "How alike two heads of a layer are: the mean over queries of 1 − JS / log 2, JS the Jensen-Shannon"
                " divergence of where they look; 1 is always the same places, 0 never.",
                ("model", "likeness, by seed"),
                alike,
            )
        )
    usage = [
        (
            f"{item.trial.model.title} on {item.trial.task}",
            str(number),
            str(head + 1),
            ", ".join(f"{value:.2f}" for value in layer.prior[head]),
            ", ".join(f"{value:.2f}" for value in layer.share[head]),
            f"{layer.certainty[head]:.2f}",
            f"{max(map(max, layer.distance[head])):.2f}",
        )
        for item, *_ in models
        for number, layer in enumerate(item.usage, 1)
        for head in range(len(layer.prior))
    ]
    if usage:
        parts.append(
            html_table(
                "What the components of a key do, in models of the first seed: their priors, their share of the"
                " attention, how much of a pair the strongest has, and the largest distance between two of them in"
                " standard deviations.",
                ("model", "layer", "head", "priors", "shares", "certainty", "distance"),
                usage,
            )
        )
    return parts


def _others(records: Sequence[TrialResult]) -> Markup:
    rows = [
        (
            record.trial.model.title,
            record.data.label,
            str(record.trial.seed),
            f"{record.summary.steps:,}",
            short(record.summary.parameters),
            f"{record.metric.removeprefix('test_').replace('_', ' ')} {record.test:.2f}",
        )
        for record in records
    ]
    return html_table("Runs that no table asks for.", ("model", "data", "seed", "steps", "parameters", "test"), rows)


def _origin(outputs: Outputs) -> list[Content]:
    records = outputs.records
    if not records:
        return [
            paragraph("Nothing has been measured yet; what is above is by formula."),
            code_block("mgk reproduce all"),
        ]
    hours = sum(record.seconds / record.jobs for record in records) / 3600
    recipes = {record.trial.task: record for record in records}
    return [
        facts(
            [
                *(("machine", line) for line in machines(records)),
                ("time", f"{hours:.1f} hours for all trials"),
                ("data", "; ".join(sorted({record.data.label for record in records}))),
            ]
        ),
        code_block(f"mgk reproduce all --preset {outputs.findings.preset}\nmgk report"),
        *(
            details(
                f"The recipe of {record.data.label}, {record.trial.model.title}; the others differ in model and seed",
                code_block(record.recipe.to_yaml()),
            )
            for record in recipes.values()
        ),
    ]
