"""The page of a comparison."""

from collections.abc import Callable, Sequence
from math import isfinite

from markupsafe import Markup

from mgk.analysis.confidence_intervals import Interval, student_interval
from mgk.data.task_registry import SYNTHETIC
from mgk.experiments.compare.result import Comparison, Result
from mgk.experiments.model_analysis import Inspection
from mgk.experiments.render import html
from mgk.experiments.render.charts import Lines, Maps, interval_chart, series_over_seeds
from mgk.experiments.render.numbers import (
    bytes_text,
    interval_text,
    percent,
    plural,
    points,
    seconds_text,
    short,
    text,
)

# Points of a training curve that are averaged into one.
_SMOOTHING = 5


def comparison_page(comparison: Comparison, inspection: Inspection, before: Comparison | None = None) -> str:
    """The whole page; ``before`` is the same comparison of more seeds."""
    others = " and ".join(result.title for result in comparison.results[1:])
    return html.page(
        f"{comparison.data}: {others} vs {comparison.baseline.title}",
        [
            *map(html.paragraph, summary(comparison)),
            html.section("Results and costs", html.table(*result_table(comparison, before))),
            html.section("Differences to the baseline", *_differences(comparison)),
            html.section("Training curves", _curves(comparison)),
            *([html.section("What the models write", *_writings(comparison))] if inspection.writings else []),
            html.section("Attention maps", *_maps(comparison, inspection)),
            html.section("How this was made", *_origin(comparison)),
        ],
    )


def summary(comparison: Comparison) -> list[str]:
    """The result in sentences, one per candidate."""
    baseline = comparison.baseline
    sentences = [text("synthetic")] if comparison.data.startswith(SYNTHETIC) else []
    opening = f"{baseline.title}: {_score(comparison, baseline)}, {short(baseline.parameters)} parameters"
    chance = f" The majority-class baseline has {percent(comparison.chance)}." if comparison.chance else ""
    sentences.append(f"{opening}, {short(baseline.flops)} FLOPs an example.{chance}")
    for result in comparison.results[1:]:
        sizes = f"{_change(result.parameters, baseline.parameters)} parameters"
        sizes += f" and {_change(result.flops, baseline.flops)} FLOPs"
        sentences.append(f"{result.title} has {sizes}; {verdict(comparison, result)}")
    return sentences


def verdict(comparison: Comparison, result: Result) -> str:
    """The difference to the baseline, and whether it is significant."""
    gap = _gap(result)
    bounds = abs(gap.estimate), gap.low, gap.high
    size, low, high = (
        points(value) if comparison.is_accuracy else f"{value:.{comparison.digits}f}" for value in bounds
    )
    size += " points" if comparison.is_accuracy else ""
    change = "the same" if gap.estimate == 0 else f"{size} {'higher' if gap.estimate > 0 else 'lower'}"
    opening = f"its {comparison.metric_name} is {change}"
    if not isfinite(gap.low):
        return f"{opening}; one seed gives no confidence interval."
    is_one = len(comparison.seeds) == 1
    opening += f" (95% CI over {_sources(comparison)} {low} to {high})"
    if gap.low <= 0 <= gap.high:
        return f"{opening}: not statistically significant."
    if is_one:  # another seed trains another model
        return f"{opening} in one run each; one seed does not show seed variance."
    is_better = (gap.estimate > 0) == comparison.is_accuracy
    return f"{opening}: significantly {'better' if is_better else 'worse'} than the baseline."


def result_table(
    comparison: Comparison, before: Comparison | None = None
) -> tuple[str, list[str], list[tuple[str, ...]]]:
    """Caption, headings and rows: model, metric, then the costs.

    Below each row stands that of ``before``, the same comparison of more seeds.
    """
    caption, rows = _caption(comparison), _rows(comparison)
    columns = ["model", f"test {comparison.metric_name}", "parameters", "FLOPs", "step", "memory"]
    if comparison.baseline.writing is not None:
        columns += ["cache", "tokens/s"]
    if before is None:
        return caption, columns, rows
    seeds, known = len(before.seeds), {result.name: result for result in before.results}
    table = []
    for result, row in zip(comparison.results, rows, strict=True):
        table.append(row)
        if (other := known.get(result.name)) is not None:
            table.append((f"  {plural(seeds, 'seed')}", *_seed_row(before, other)))
    other_data = "" if before.data_label == comparison.data_label else f" on {before.data_label}"
    how = f"Rows of {plural(seeds, 'seed')} were measured before, with 95% CIs over seeds{other_data}"
    return f"{caption} {how}: {before.machine}, {before.date[:10]}.", columns, table


def _rows(comparison: Comparison) -> list[tuple[str, ...]]:
    baseline = comparison.baseline

    def with_ratio(text: str, value: float, reference: float | None) -> str:
        return f"{text} ({value / reference:.2f})" if reference and result is not baseline else text

    rows: list[tuple[str, ...]] = []
    for result in comparison.results:
        memory, seconds = result.peak_memory_bytes, result.seconds_per_step
        row: tuple[str, ...] = (
            result.title,
            _score(comparison, result),
            with_ratio(short(result.parameters), result.parameters, baseline.parameters),
            with_ratio(short(result.flops), result.flops, baseline.flops),
            with_ratio(seconds_text(seconds), seconds, baseline.seconds_per_step),
            "not measured"
            if memory is None
            else with_ratio(bytes_text(memory), memory, baseline.peak_memory_bytes),
        )
        if result.writing is not None and baseline.writing is not None:
            cache, rate = result.writing.cache_bytes, result.writing.tokens_per_second
            first = baseline.writing
            row += (
                with_ratio(bytes_text(cache), cache, first.cache_bytes),
                with_ratio(f"{rate:,.0f}", rate, first.tokens_per_second),
            )
        rows.append(row)
    return rows


def _seed_row(comparison: Comparison, result: Result) -> tuple[str, ...]:
    """The numbers of one model, with intervals where seeds matter."""
    memory, writing = result.peak_memory_bytes, result.writing
    row = [
        _score(comparison, result),
        short(result.parameters),
        short(result.flops),
        _over_seeds(result.step_seconds or (result.seconds_per_step,), seconds_text),
        "not measured" if memory is None else bytes_text(memory),
    ]
    if writing is not None:
        speeds = result.tokens_per_second or (writing.tokens_per_second,)
        row += [bytes_text(writing.cache_bytes), _over_seeds(speeds, "{:,.0f}".format)]
    return tuple(row)


def _over_seeds(values: Sequence[float], number: Callable[[float], str]) -> str:
    interval = student_interval(values)
    return interval_text(interval, number) if len(values) > 1 else number(interval.estimate)


def _caption(comparison: Comparison) -> str:
    """What the numbers of the table are."""
    seeds = len(comparison.seeds)
    runs = "one run each" if seeds == 1 else f"the mean of {seeds} runs each"
    interval = f"with the 95% CI over {_sources(comparison)}"
    if seeds == 1 and comparison.is_accuracy:
        interval = f"with the 95% CI over the {comparison.test_examples:,} test examples"
    elif seeds == 1 and comparison.metric == "perplexity":
        interval = "of one seed"
    values = {"runs": runs, "interval": interval, "length": comparison.length}
    data = f"{comparison.data_label}. " if comparison.data_label else ""
    return data + text("comparison_table", metric=comparison.metric_name, **values)


def _sources(comparison: Comparison) -> str:
    """What an interval covers."""
    seeds = ["seeds"] if len(comparison.seeds) > 1 else []
    within = {"accuracy": ["test examples"], "bits_per_byte": ["blocks of the text"]}
    return " and ".join([*seeds, *within.get(comparison.metric, [])])


def _score(comparison: Comparison, result: Result) -> str:
    if comparison.is_accuracy:
        return interval_text(result.score, percent)
    if not isfinite(result.score.low):
        return f"{comparison.metric_name} {result.score.estimate:.2f}"
    return interval_text(result.score, lambda value: f"{value:.{comparison.digits}f}")


def _change(value: float, baseline: float) -> str:
    change = value / baseline - 1
    return f"{abs(change):.0%} {'fewer' if change < 0 else 'more'}"


def _differences(comparison: Comparison) -> list[Markup]:
    factor, unit, side = (
        (100.0, "points of accuracy", "right")
        if comparison.is_accuracy
        else (1.0, comparison.metric_name, "left")
    )
    intervals, sentences = [], []
    for result in comparison.results[1:]:
        gap = _gap(result)
        scaled = (factor * bound for bound in (gap.estimate, gap.low, gap.high))
        intervals.append((result.title, Interval(*scaled)))
        sentences.append(f"{result.title}: {verdict(comparison, result)}")
    chart = interval_chart(
        intervals,
        x_label=f"difference in {unit}; {side} of the line is better",
        alt=f"Difference to {comparison.baseline.title}. " + " ".join(sentences),
        first_colour=1,
    )
    parts = [html.figure(chart, " ".join(sentences))]
    return [*parts, _paired_table(comparison)] if comparison.is_accuracy else parts


def _gap(result: Result) -> Interval:
    gap = result.gap if result.paired is None else result.paired.difference
    assert gap is not None
    return gap


def _paired_table(comparison: Comparison) -> Markup:
    rows = [
        (
            result.title,
            interval_text(paired.difference, points),
            f"{paired.gained:,}",
            f"{paired.lost:,}",
            f"{paired.p_value:.3f}" if paired.p_value >= 0.001 else "below 0.001",
        )
        for result in comparison.results
        if (paired := result.paired) is not None
    ]
    seeds = "" if len(comparison.seeds) == 1 else " and seeds"
    columns = ("model", "difference", "only it is right", "only the baseline is right", "p")
    return html.table(text("paired", examples=comparison.test_examples, seeds=seeds), columns, rows)


def _curves(comparison: Comparison) -> Markup:
    panels = []
    for what, metric, field, width in (
        ("Training", "loss", "losses", _SMOOTHING),
        ("Validation", comparison.metric_name, "validation", 1),
    ):
        runs = {result.title: getattr(result, field) for result in comparison.results}
        series = tuple(series_over_seeds(name, curves, width) for name, curves in runs.items() if any(curves))
        panels.append(Lines(title=f"{what} {metric}", x_label="steps", y_label=metric, series=series))
    figures = html.grid(panel.to_html() for panel in panels if panel.series)
    bands = [html.paragraph("Bands span the seeds.")] if len(comparison.seeds) > 1 else []
    return html.join([figures, *bands])


def writings(comparison: Comparison) -> list[tuple[str, str]]:
    """The title of each language model and what it writes."""
    return [(result.title, result.writing.text) for result in comparison.results if result.writing is not None]


def _writings(comparison: Comparison) -> list[Markup]:
    samples = (
        part
        for title, sample in writings(comparison)
        for part in (html.subheading(title), html.code_block(sample))
    )
    return [html.paragraph(text("writings")), *samples]


def _maps(comparison: Comparison, inspection: Inspection) -> list[Markup]:
    parts = [
        html.paragraph(text("compared_maps", tokens=inspection.tokens)),
        html.code_block(inspection.example),
    ]
    for result in comparison.results:
        panel = Maps(title=result.title, maps=inspection.maps[result.name])
        parts += [html.subheading(result.title), html.figure(panel.to_html(), panel.description)]
    return parts


def _origin(comparison: Comparison) -> list[Markup]:
    formulas = "\n\n".join(f"{result.title}\n{result.flops_formula}" for result in comparison.results)
    return [
        html.definitions(
            [
                ("task", f"{comparison.task}, preset {comparison.preset}, data {comparison.data}"),
                ("budget", f"{comparison.steps:,} steps for every model, the same data in the same order"),
                ("seeds", ", ".join(map(str, comparison.seeds))),
                ("machine", comparison.machine),
                ("date", comparison.date),
            ]
        ),
        html.code_block(comparison.command),
        html.details("The FLOPs by formula", html.code_block(formulas)),
        html.details(
            f"The recipe of {comparison.baseline.title}; the others differ in attention and heads",
            html.code_block(comparison.recipe),
        ),
    ]
