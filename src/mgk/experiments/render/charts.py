"""Panels of figures (curves, attention maps, intervals), and how a page shows them.

Charts are SVG in the page's own colours, so they follow light and dark.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from markupsafe import Markup

from mgk.analysis.attention_maps import NEAR, AttentionMaps, Map, attention_spread, map_png
from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.render import html
from mgk.experiments.render.numbers import text
from mgk.experiments.result_store import averaged

# Small enough that a phone shows it at nearly its own size, text included.
_WIDTH, _HEIGHT = 400, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 14, 40
_RIGHT_EDGE, _FLOOR = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
_COLOURS = 6
_DASHES = ("", "7 4", "2 4", "10 3 2 3", "4 2", "1 3")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A named curve (x, y); ``band`` is its spread over seeds."""

    name: str
    points: Points
    band: Sequence[tuple[float, float, float]] = ()

    @property
    def description(self) -> str:
        """Where the curve begins and ends, and its maximum in between."""
        first, last = self.points[0], self.points[-1]
        top = max(self.points, key=lambda point: point[1])
        between = [top] if top[1] > max(first[1], last[1]) else []
        path = [f"{y:,.4g} at {x:,.6g}" for x, y in (first, *between, last)]
        return f"{self.name} goes from {' to '.join(path)}"


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Curves over one axis; ``formulas`` are those of costs."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    formulas: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """The chart in words, for its alternative text."""
        curves = "; ".join(curve.description for curve in self.series)
        return f"{self.title}, {self.y_label} over {self.x_label}: {curves}."

    def to_html(self) -> Markup:
        """The chart with its title."""
        chart = line_chart(self.series, x_label=self.x_label, y_label=self.y_label, alt=self.description)
        return html.figure(chart, self.title)


@dataclass(frozen=True, kw_only=True)
class FewPoints(Lines):
    """Curves of few points, each of which is marked."""


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Attention maps of one model: a row per layer, a column per head."""

    title: str
    maps: AttentionMaps

    @property
    def description(self) -> str:
        """The narrowest, the widest and the most local head."""
        spreads = {name: attention_spread(weights) for name, weights in self.maps.items()}
        by_width = sorted(spreads, key=lambda name: spreads[name].positions)
        local = max(spreads, key=lambda name: spreads[name].nearby)
        names = {"narrow": by_width[0], "wide": by_width[-1], "local": local}
        found = {f"{kind}_spread": spreads[name] for kind, name in names.items()}
        length = self.maps.weights.shape[-1]
        return text("map_spreads", title=self.title, length=length, near=NEAR, **names, **found)

    def to_html(self) -> Markup:
        """The maps in a grid."""
        images = (
            html.figure(html.png(map_png(weights), self._description_of(name, weights)), name)
            for name, weights in self.maps.items()
        )
        return html.grid(images, columns=len(self.maps.heads))

    def _description_of(self, name: str, weights: Map) -> str:
        spread, length = attention_spread(weights), weights.shape[-1]
        return text("map_spread", title=self.title, name=name, spread=spread, length=length, near=NEAR)


def series_over_seeds(name: str, runs: Sequence[Points], width: int = 1) -> Series:
    """The mean over seeds, and their band; points may be averaged."""
    by_step = [dict(run) for run in runs]
    steps = sorted(set.intersection(*map(set, by_step)))
    values = [[run[step] for run in by_step] for step in steps]

    def over_seeds(reduce: Callable[[Sequence[float]], float]) -> Points:
        points = list(zip(steps, map(reduce, values), strict=True))
        return averaged(points, width if len(points) >= 2 * width else 1)

    means = over_seeds(lambda y: sum(y) / len(y))
    if len(runs) == 1:
        return Series(name, means)
    bounds = zip(over_seeds(min), over_seeds(max), strict=True)
    return Series(name, means, [(x, low, high) for (x, low), (_, high) in bounds])


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, alt: str) -> Markup:
    """Curves over a common axis with a legend below."""
    xs = [x for curve in series for x, _ in curve.points]
    ys = [y for curve in series for _, y in curve.points]
    ys += [y for curve in series for _, low, high in curve.band for y in (low, high)]
    if not xs:
        raise ValueError("a line chart needs at least one point")
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    to_x = _scale(min(x_ticks[0], min(xs)), max(x_ticks[-1], max(xs)), _LEFT, _RIGHT_EDGE)
    to_y = _scale(y_ticks[0], y_ticks[-1], _FLOOR, _TOP)

    def path(points: Points) -> str:
        return " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)

    parts = []
    for tick in y_ticks:
        y = to_y(tick)
        parts.append(_element("line", class_="grid-line", x1=_LEFT, x2=_RIGHT_EDGE, y1=y, y2=y))
        parts.append(_text(_LEFT - 6, y + 4, _number(tick), class_="tick", text_anchor="end"))
    for tick in x_ticks:
        anchor = "end" if to_x(tick) > _RIGHT_EDGE - 10 else "middle"
        parts.append(_text(to_x(tick), _FLOOR + 16, _number(tick), class_="tick", text_anchor=anchor))
    middle = (_TOP + _FLOOR) / 2
    parts += [
        _element("line", class_="axis", x1=_LEFT, x2=_RIGHT_EDGE, y1=_FLOOR, y2=_FLOOR),
        _text((_LEFT + _RIGHT_EDGE) / 2, _HEIGHT - 6, x_label, text_anchor="middle"),
        _text(12, middle, y_label, text_anchor="middle", transform=f"rotate(-90 12 {middle:.0f})"),
    ]
    for number, curve in enumerate(series):
        if curve.band:
            upper = [(x, high) for x, _, high in curve.band]
            lower = [(x, low) for x, low, _ in reversed(curve.band)]
            parts.append(
                _element("polygon", class_="band", fill=_colour(number), points=path([*upper, *lower]))
            )
        parts.append(_element("polyline", class_="curve", **_stroke(number), points=path(curve.points)))
        if len(curve.points) == 1:
            x, y = curve.points[0]
            parts.append(_element("circle", cx=to_x(x), cy=to_y(y), r=3, fill=_colour(number)))
    return _svg(_HEIGHT, alt, parts) + _legend([curve.name for curve in series])


def interval_chart(
    intervals: Sequence[tuple[str, Interval]], *, x_label: str, alt: str, first_colour: int = 0
) -> Markup:
    """Named estimates with their intervals, and a line at zero."""
    bounds = [x for _, item in intervals for x in (item.estimate, item.low, item.high) if isfinite(x)]
    ticks = _ticks(min([0.0, *bounds]), max([0.0, *bounds]))
    to_x = _scale(ticks[0], ticks[-1], 16, _WIDTH - 16)
    row = 44
    bottom = row * len(intervals) + 6
    height = bottom + _BOTTOM
    parts = [_element("line", class_="grid-line", x1=to_x(t), x2=to_x(t), y1=4, y2=bottom) for t in ticks]
    parts.append(_element("line", x1=to_x(0.0), x2=to_x(0.0), y1=4, y2=bottom, stroke="currentColor"))
    parts += [_text(to_x(t), bottom + 16, _number(t), class_="tick", text_anchor="middle") for t in ticks]
    parts.append(_text(_WIDTH / 2, height - 6, x_label, text_anchor="middle"))
    for number, (name, item) in enumerate(intervals):
        y = 32 + row * number
        low, high = (to_x(min(max(x, ticks[0]), ticks[-1])) for x in (item.low, item.high))
        colour = _colour(number + first_colour)
        parts += [
            _text(16, y - 12, name, class_="on-lines"),
            _element(
                "line", x1=low, x2=high, y1=y, y2=y, stroke=colour, stroke_width=4, stroke_linecap="round"
            ),
            _element("circle", cx=to_x(item.estimate), cy=y, r=6, fill=colour),
        ]
    return _svg(height, alt, parts)


def _element(tag: str, content: str = "", **attributes: str | float) -> Markup:
    """An SVG element; ``text_anchor`` stands for ``text-anchor``."""
    texts = (
        Markup(' {}="{}"').format(
            name.rstrip("_").replace("_", "-"), f"{value:.1f}" if isinstance(value, float) else value
        )
        for name, value in attributes.items()
    )
    opening = Markup("<{}{}").format(tag, html.join(texts, ""))
    return Markup("{}>{}</{}>").format(opening, content, tag) if content else opening + Markup("/>")


def _text(x: float, y: float, content: str, **attributes: str) -> Markup:
    return _element("text", content, x=x, y=y, **attributes)


def _svg(height: float, alt: str, parts: Sequence[Markup]) -> Markup:
    content = html.join([_element("title", alt), *parts])
    return _element("svg", content, viewBox=f"0 0 {_WIDTH} {height:.0f}", role="img", aria_label=alt)


def _legend(names: Sequence[str]) -> Markup:
    items = []
    for number, name in enumerate(names):
        line = _element("line", x1=1, x2=27, y1=6, y2=6, **_stroke(number), stroke_width=3)
        key = _element("svg", line, viewBox="0 0 28 12", aria_hidden="true")
        items.append(Markup("<li>{}{}</li>").format(key, name))
    return Markup('\n<ul class="legend">\n{}\n</ul>').format(html.join(items))


def _colour(number: int) -> str:
    return f"var(--series-{number % _COLOURS + 1})"


def _stroke(number: int) -> dict[str, str]:
    dash = _DASHES[number % len(_DASHES)]
    return {"stroke": _colour(number)} | ({"stroke_dasharray": dash} if dash else {})


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that span the range."""
    from matplotlib.ticker import MaxNLocator

    pad = 0.0 if high > low else abs(low) / 2 or 1.0
    locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    return [float(tick) for tick in locator.tick_values(low - pad, high + pad)]


def _number(value: float) -> str:
    short = f"{value:,.6g}" if abs(value) < 1e4 else f"{value / 1000:,.6g}k"
    return short.replace("-", "−")
