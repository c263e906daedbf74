"""The page of a comparison: what was found in words, then the table, differences, curves and attention maps."""

from collections.abc import Sequence
from math import isfinite

from mgk.analysis.attention_maps import NEAR, AttentionMaps, picture, reach
from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.compare.result import Comparison, Result
from mgk.experiments.model_analysis import Inspection
from mgk.experiments.render.charts import Bar, Series, interval_chart, line_chart, smoothed
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
    subheading,
)
from mgk.experiments.render.html import table as html_table
from mgk.experiments.render.numbers import bytes_text, interval_text, percent, points, seconds_text, short
from mgk.experiments.result_store import Curve

# Points of a training curve that are averaged into one.
_SMOOTHING = 5


def comparison_page(comparison: Comparison, look: Inspection) -> str:
    """The whole page."""
    return page(
        title(comparison),
        [
            *(paragraph(sentence) for sentence in findings(comparison)),
            section("What it costs and what it gives", result_table(comparison)),
            section("Differences to the baseline", *_differences(comparison)),
            section("While training", _curves(comparison)),
            section("Where the heads look", *_maps(comparison, look)),
            section("How this was made", *_origin(comparison)),
        ],
    )


def title(comparison: Comparison) -> str:
    """Who against whom on what."""
    others = " and ".join(result.title for result in comparison.results[1:])
    return f"{comparison.data}: {others} against {comparison.baseline.title}"


def findings(comparison: Comparison) -> list[str]:
    """The result in sentences, one a candidate."""
    baseline = comparison.baseline
    sentences = []
    if comparison.data.startswith("synthetic-"):
        sentences.append("These are made-up data: they show that everything works and say nothing about the real task.")
    opening = f"{baseline.title}: {_score(comparison, baseline)}, {short(baseline.parameters)} parameters"
    chance = f" Always answering the most frequent class has {percent(comparison.chance)}." if comparison.chance else ""
    sentences.append(f"{opening}, {short(baseline.flops)} FLOPs an example.{chance}")
    for result in comparison.results[1:]:
        sizes = f"{_less(result.parameters, baseline.parameters)} parameters and {_less(result.flops, baseline.flops)}"
        sentences.append(f"{result.title} has {sizes} FLOPs; {verdict(comparison, result)}")
    return sentences


def verdict(comparison: Comparison, result: Result) -> str:
    """What the difference of a candidate to the baseline tells, and what it does not."""
    gap = _gap(result)
    if comparison.is_accuracy:
        size, low, high = (f"{points(value)}" for value in (abs(gap.estimate), gap.low, gap.high))
        size += " points"
    else:
        size, low, high = (f"{value:.2f}" for value in (abs(gap.estimate), gap.low, gap.high))
    way = "higher" if gap.estimate > 0 else "lower"
    found = "the same" if gap.estimate == 0 else f"{size} {way}"
    if not isfinite(gap.low):
        return f"its {comparison.metric} is {found}, and one seed does not tell whether that is luck."
    is_one = len(comparison.seeds) == 1
    interval = f"95% interval{' over the test examples' if is_one else ''} {low} to {high}"
    if gap.low <= 0 <= gap.high:
        return f"its {comparison.metric} is {found} ({interval}), which may be luck: no difference is shown."
    if is_one:  # the examples are not all that varies: another seed trains another model
        return (
            f"its {comparison.metric} is {found} ({interval}) in this one run each; more seeds tell whether it holds."
        )
    is_better = (gap.estimate > 0) == comparison.is_accuracy
    return f"its {comparison.metric} is {found} ({interval}): {'better' if is_better else 'worse'} than the baseline."


COLUMNS = ("model", "parameters", "FLOPs", "step", "memory")


def result_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The trials of the table, the same on the page and in the terminal: model, metric, then the costs."""
    baseline = comparison.baseline
    rows: list[tuple[str, ...]] = []
    for result in comparison.results:
        rows.append(
            (
                result.title,
                _score(comparison, result),
                _with_ratio(short(result.parameters), result.parameters, baseline.parameters, result is baseline),
                _with_ratio(short(result.flops), result.flops, baseline.flops, result is baseline),
                _with_ratio(
                    seconds_text(result.seconds_per_step),
                    result.seconds_per_step,
                    baseline.seconds_per_step,
                    result is baseline,
                ),
                _memory(result, baseline),
            )
        )
    return rows


def result_columns(comparison: Comparison) -> tuple[str, ...]:
    """The headings of :func:`result_rows`."""
    return (COLUMNS[0], f"test {comparison.metric}", *COLUMNS[1:])


def table_caption(comparison: Comparison) -> str:
    """What the numbers of the table are."""
    seeds = len(comparison.seeds)
    runs = "one run each" if seeds == 1 else f"the mean of {seeds} runs each"
    sure = f"with its 95% interval over the {comparison.test_examples:,} test examples"
    if seeds > 1:
        sure += " and the seeds"
    if not comparison.is_accuracy:
        sure = "with its 95% interval over the seeds" if seeds > 1 else "of one seed"
    return (
        f"Test {comparison.metric}, {runs}, {sure}; FLOPs of the forward of one example by the cost model, at the mean"
        f" length of {comparison.length} tokens; median time of a training step; peak of the memory that training takes"
        " beyond what was in use before. In brackets: the ratio to the baseline."
    )


def result_table(comparison: Comparison) -> Markup:
    """The table of the page."""
    return html_table(table_caption(comparison), result_columns(comparison), result_rows(comparison))


def _score(comparison: Comparison, result: Result) -> str:
    if comparison.is_accuracy:
        return interval_text(result.score, percent)
    if not isfinite(result.score.low):
        return f"perplexity {result.score.estimate:.2f}"
    return interval_text(result.score, lambda value: f"{value:.2f}")


def _with_ratio(text: str, value: float, baseline: float, is_baseline: bool) -> str:
    return text if is_baseline or not baseline else f"{text} ({value / baseline:.2f})"


def _memory(result: Result, baseline: Result) -> str:
    if result.peak_memory_bytes is None:
        return "not measured"
    text = bytes_text(result.peak_memory_bytes)
    if baseline.peak_memory_bytes is None:
        return text
    return _with_ratio(text, result.peak_memory_bytes, baseline.peak_memory_bytes, result is baseline)


def _less(value: float, baseline: float) -> str:
    change = value / baseline - 1
    return f"{abs(change):.0%} {'fewer' if change < 0 else 'more'}"


def _differences(comparison: Comparison) -> list[Content]:
    candidates = comparison.results[1:]
    is_accuracy = comparison.is_accuracy
    factor, unit = (100.0, "points of accuracy") if is_accuracy else (1.0, "perplexity")
    bars, sentences = [], []
    for result in candidates:
        gap = _gap(result)
        bars.append(Bar(result.title, factor * gap.estimate, factor * gap.low, factor * gap.high))
        sentences.append(f"{result.title}: {verdict(comparison, result)}")
    better = "right of the line is better" if is_accuracy else "left of the line is better"
    chart = interval_chart(
        bars,
        x_label=f"difference in {unit}; {better}",
        alt=f"Difference to {comparison.baseline.title}. " + " ".join(sentences),
        colour_from=1,
    )
    parts: list[Content] = [figure(chart, " ".join(sentences))]
    if is_accuracy:
        parts.append(_paired_table(comparison))
    return parts


def _gap(result: Result) -> Interval:
    gap = result.gap if result.paired is None else result.paired.difference
    assert gap is not None
    return gap


def _paired_table(comparison: Comparison) -> Markup:
    rows = []
    for result in comparison.results[1:]:
        paired = result.paired
        assert paired is not None
        rows.append(
            (
                result.title,
                interval_text(paired.difference, points),
                f"{paired.gained:,}",
                f"{paired.lost:,}",
                f"{paired.p_value:.3f}" if paired.p_value >= 0.001 else "below 0.001",
            )
        )
    seeds = "" if len(comparison.seeds) == 1 else " and seeds"
    caption = (
        f"Every model answers the same {comparison.test_examples:,} test examples, so they are compared example by"
        f" example: the difference in points, its 95% interval over examples{seeds}, the answers that"
        " only one of the two has right, and how likely so uneven a split is by luck (McNemar's exact test, which"
        " takes the examples as all that varies)."
    )
    columns = ("model", "difference", "only it is right", "only the baseline is right", "p")
    return html_table(caption, columns, rows)


def _curves(comparison: Comparison) -> Markup:
    figures = []
    for what, name, curves, width in (
        ("Training loss", "loss", [result.losses for result in comparison.results], _SMOOTHING),
        (f"Validation {comparison.metric}", comparison.metric, [r.validation for r in comparison.results], 1),
    ):
        series = [
            series_over_seeds(result.title, runs, width)
            for result, runs in zip(comparison.results, curves, strict=True)
            if any(runs)
        ]
        if not series:
            continue
        sentence = f"{what}: " + "; ".join(_course(curve) for curve in series) + "."
        band = " Bands span the seeds." if len(comparison.seeds) > 1 else ""
        figures.append(figure(line_chart(series, x_label="steps", y_label=name, alt=sentence), sentence + band))
    return grid(figures)


def series_over_seeds(name: str, runs: Sequence[Curve], width: int = 1) -> Series:
    """The mean over seeds, and the band between the least and the most."""
    steps = sorted(set.intersection(*({step for step, _ in run} for run in runs)))
    by_step = [dict(run) for run in runs]
    values = [[run[step] for run in by_step] for step in steps]
    means = smoothed([(s, sum(v) / len(v)) for s, v in zip(steps, values, strict=True)], width)
    if len(runs) == 1:
        return Series(name, means)
    lows = smoothed([(s, min(v)) for s, v in zip(steps, values, strict=True)], width)
    highs = smoothed([(s, max(v)) for s, v in zip(steps, values, strict=True)], width)
    return Series(name, means, [(x, low, high) for (x, low), (_, high) in zip(lows, highs, strict=True)])


def _course(curve: Series) -> str:
    first, last = curve.points[0], curve.points[-1]
    return f"{curve.name} goes from {first[1]:.3g} at step {first[0]:,.0f} to {last[1]:.3g} at step {last[0]:,.0f}"


def _maps(comparison: Comparison, look: Inspection) -> list[Content]:
    parts: list[Content] = [
        paragraph(
            f"One example of the test split, of {look.tokens} tokens, through the first model of each kind. A row is a"
            " query, a column a key; the lighter, the more weight. Each map is scaled to its own largest weight."
        ),
        code_block(look.example),
    ]
    for result in comparison.results:
        maps = look.maps[result.name]
        layers, heads = maps.weights.shape[:2]
        pictures = [_map(result, maps, layer, head) for layer in range(layers) for head in range(heads)]
        parts.append(subheading(result.title))
        parts.append(figure(grid(pictures, columns=heads), _seen(result, maps)))
    return parts


def _map(result: Result, maps: AttentionMaps, layer: int, head: int) -> Markup:
    weights = maps.weights[layer, head]
    found = reach(weights)
    where = maps.title(layer, head)
    alt = (
        f"Attention map of {result.title}, {where}: the average query spreads over {found.positions:.1f} of"
        f" {weights.shape[-1]} positions, {percent(found.nearby)} of its weight within {NEAR} of itself"
    )
    return figure(png(picture(weights), alt), where)


def _seen(result: Result, maps: AttentionMaps) -> str:
    """What the maps show, in words: the narrowest and the widest head, and what the heads prefer."""
    places = [(layer, head) for layer in range(len(maps.layers)) for head in range(len(maps.heads))]
    found = {place: reach(maps.weights[place]) for place in places}
    size = maps.weights.shape[-1]
    narrow, wide = min(places, key=lambda p: found[p].positions), max(places, key=lambda p: found[p].positions)
    local = max(places, key=lambda p: found[p].nearby)
    sentence = (
        f"In {result.title}, the average query looks at {found[narrow].positions:.1f} of {size} positions in"
        f" {maps.title(*narrow)}"
    )
    if wide != narrow:
        sentence += f", the most focused one, and at {found[wide].positions:.1f} in {maps.title(*wide)}, the widest"
    return (
        f"{sentence}. Most weight near the query itself, {percent(found[local].nearby)} within {NEAR} positions, is in"
        f" {maps.title(*local)}."
    )


def _origin(comparison: Comparison) -> list[Content]:
    formulas = "\n\n".join(f"{result.title}\n{result.flops_formula}" for result in comparison.results)
    return [
        facts(
            [
                ("task", f"{comparison.task}, preset {comparison.preset}, data {comparison.data}"),
                ("budget", f"{comparison.steps:,} steps for every model, the same data in the same order"),
                ("seeds", ", ".join(map(str, comparison.seeds))),
                ("machine", comparison.machine),
                ("date", comparison.date),
            ]
        ),
        paragraph("The command:"),
        code_block(comparison.command),
        details("The FLOPs, by formula", code_block(formulas)),
        details(
            f"The recipe of {comparison.baseline.title}; the others differ in attention and heads",
            code_block(comparison.recipe),
        ),
    ]
