"""The page of results: claims, tables, figures, commands."""

from collections.abc import Sequence
from statistics import fmean

from markupsafe import Markup

from mgk.experiments.artifacts import Artifacts
from mgk.experiments.evidence import decision_rules
from mgk.experiments.evidence.claims import CLAIMS
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.render import html
from mgk.experiments.render.charts import Lines, Maps, interval_chart
from mgk.experiments.render.figures import Figure
from mgk.experiments.render.numbers import short, text
from mgk.experiments.render.tables import Table, machines
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.result_store import TrialResult

_SYMBOLS = {
    decision_rules.CONFIRMED: "✓",
    decision_rules.EQUIVALENT: "≈",
    decision_rules.INCONCLUSIVE: "○",
    decision_rules.CONTRADICTED: "✗",
    decision_rules.NOT_MEASURED: "–",
}


def reproduction_page(artifacts: Artifacts) -> str:
    """The whole page."""
    preset = artifacts.results.preset
    parts = [
        *map(html.paragraph, _opening(artifacts)),
        html.section("The paper's claims", *_claims(artifacts)),
        *(html.section(table.title, *_table(table)) for table in artifacts.tables.values()),
        *(html.section(item.title, *_figure(item)) for item in artifacts.figures.values()),
    ]
    if analyses := artifacts.results.all_analyses():
        parts.append(html.section("Heads and components", *_heads_and_components(analyses)))
    if artifacts.others:
        parts.append(html.section("Other runs", _other_runs(artifacts.others)))
    made = artifacts.tables.keys() | artifacts.figures.keys()
    missing = [item.command(preset) for item in EXPERIMENTS.values() if item.id not in made]
    if missing and artifacts.trials:
        parts.append(html.section("Not measured yet", html.code_block("\n".join(missing))))
    parts.append(html.section("How this was made", *_origin(artifacts)))
    return html.page(
        f"Improving Transformers with Probabilistic Attention Keys, reproduced at preset {preset}", parts
    )


def _opening(artifacts: Artifacts) -> list[str]:
    outcomes = [verdict.outcome for verdict in artifacts.verdicts.values()]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in _SYMBOLS if outcome in outcomes)
    sentences = [
        f"Of {len(outcomes)} claims of the paper: {counts}. Measured in {len(artifacts.trials)} trials"
        " (one model on one task with one seed)."
    ]
    if any(trial.data.is_synthetic for trial in artifacts.trials):
        sentences.append(text("synthetic"))
    elif artifacts.results.preset != "paper":
        sentences.append(text("smaller_scale"))
    return sentences


def _claims(artifacts: Artifacts) -> list[Markup]:
    """Each claim with its verdict, and folded below it the evidence."""
    found = artifacts.verdicts
    return [*(_claim(claim, found[claim.id]) for claim in CLAIMS), html.paragraph(text("rules"))]


def _claim(claim: decision_rules.Claim, verdict: decision_rules.Verdict) -> Markup:
    return html.details(
        f"{_SYMBOLS[verdict.outcome]} {verdict.outcome}: {claim.text}",
        html.paragraph(f"In the paper: {claim.where}."),
        *(html.paragraph(f"{_SYMBOLS[item.outcome]} {item.sentence}") for item in verdict.evidence),
        html.code_block("\n".join(f"mgk reproduce {name}" for name in claim.experiments)),
    )


def _table(table: Table) -> list[Markup]:
    parts = [html.table(text("paper_table"), table.header, table.text_rows)]
    if (differences := table.differences) is not None:
        parts.append(html.table(*differences))
        charts = (_difference_chart(table, column) for column in table.columns)
        parts.append(html.grid(chart for chart in charts if chart is not None))
    return [*parts, *map(html.paragraph, table.notes), html.code_block(table.command)]


def _difference_chart(table: Table, column: str) -> Markup | None:
    label = table.labels[column]
    entries = [(row, row.entries[column]) for row in table.rows]
    found = ((row.model, entry.difference) for row, entry in entries)
    intervals = [(model, difference) for model, difference in found if difference is not None]
    if not intervals:
        return None
    texts = [
        f"{row.model} vs {row.reference} {entry.difference_text}" for row, entry in entries if entry.difference
    ]
    chart = interval_chart(
        intervals,
        x_label=f"difference in {table.unit}; right is better",
        alt=f"Differences on {label}: {'; '.join(texts)}.",
    )
    return html.figure(chart, label)


def _figure(item: Figure) -> list[Markup]:
    lines = [panel for panel in item.panels if isinstance(panel, Lines)]
    parts = []
    for panel in item.panels:
        if isinstance(panel, Maps):
            parts += [html.subheading(panel.title), panel.to_html()]
    if lines:
        parts.append(html.grid(panel.to_html() for panel in lines))
    parts.append(html.paragraph(item.caption))
    if formulas := [formula for panel in lines for formula in panel.formulas]:
        parts.append(html.details("The formulas, at the most heads", html.code_block("\n\n".join(formulas))))
    return [*parts, html.code_block(item.command)]


def _heads_and_components(models: Sequence[Sequence[ModelAnalysis]]) -> list[Markup]:
    """Head similarity by seed, and the components of the first."""
    similarity = [
        (_name(seeds[0]), ", ".join(f"{fmean(item.head_similarity):.3f}" for item in seeds))
        for seeds in models
        if seeds[0].head_similarity
    ]
    usage = [
        (
            _name(item),
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
    parts = []
    if similarity:
        parts.append(html.table(text("similarity"), ("model", "head similarity, by seed"), similarity))
    if usage:
        columns = ("model", "layer", "head", "priors", "shares", "certainty", "distance")
        parts.append(html.table(text("usage"), columns, usage))
    return parts


def _name(item: ModelAnalysis) -> str:
    return f"{item.trial.model.title} on {item.trial.task}"


def _other_runs(trials: Sequence[TrialResult]) -> Markup:
    rows = [
        (
            trial.trial.model.title,
            trial.data.label,
            str(trial.trial.seed),
            f"{trial.summary.steps:,}",
            short(trial.summary.parameters),
            f"{trial.metric.removeprefix('test_').replace('_', ' ')} {trial.test:.2f}",
        )
        for trial in trials
    ]
    return html.table("Runs of no table.", ("model", "data", "seed", "steps", "parameters", "test"), rows)


def _origin(artifacts: Artifacts) -> list[Markup]:
    trials = artifacts.trials
    if not trials:
        sentence = "Nothing has been measured yet; what is above is by formula."
        return [html.paragraph(sentence), html.code_block("mgk reproduce all")]
    hours = sum(trial.seconds / trial.jobs for trial in trials) / 3600
    by_task = {trial.trial.task: trial for trial in trials}
    return [
        html.definitions(
            [
                *(("machine", line) for line in machines(trials)),
                ("time", f"{hours:.1f} hours for all trials"),
                ("data", "; ".join(sorted({trial.data.label for trial in trials}))),
            ]
        ),
        html.code_block(f"mgk reproduce all --preset {artifacts.results.preset}\nmgk report"),
        *(
            html.details(
                f"The recipe of {trial.data.label}, {trial.trial.model.title};"
                " the others differ in model and seed",
                html.code_block(trial.recipe.to_yaml()),
            )
            for trial in by_task.values()
        ),
    ]
