"""Line and interval charts as SVG inside a page: drawn in the page's own colours, so they follow light and dark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from mgk.experiments.render.html import Markup

# Small enough that a phone shows it at nearly its own size, text included.
_WIDTH, _HEIGHT = 400, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 14, 40
_COLOURS = 6
_DASHES = ("", "7 4", "2 4", "10 3 2 3", "4 2", "1 3")


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: for the legend.
        points: (x, y), x rising.
        band: (x, low, high), the spread over seeds; may be empty.
    """

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = field(default=())


@dataclass(frozen=True)
class Bar:
    """One interval with its estimate."""

    name: str
    estimate: float
    low: float
    high: float


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, alt: str) -> Markup:
    """Curves over a common axis, with a legend below; colours and dashes both tell them apart."""
    xs = [x for curve in series for x, _ in curve.points]
    ys = [y for curve in series for _, y in curve.points]
    ys += [y for curve in series for _, low, high in curve.band for y in (low, high)]
    if not xs:
        raise ValueError("a line chart needs at least one point")
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    to_x = _scale(min(x_ticks[0], min(xs)), max(x_ticks[-1], max(xs)), _LEFT, _WIDTH - _RIGHT)
    to_y = _scale(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(x_ticks, y_ticks, to_x, to_y, x_label, y_label)]
    for number, curve in enumerate(series):
        if curve.band:
            upper = " ".join(f"{to_x(x):.1f},{to_y(high):.1f}" for x, _, high in curve.band)
            lower = " ".join(f"{to_x(x):.1f},{to_y(low):.1f}" for x, low, _ in reversed(curve.band))
            parts.append(f'<polygon class="band" fill="{_colour(number)}" points="{upper} {lower}"/>')
        line = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in curve.points)
        parts.append(f'<polyline class="curve" {_stroke(number)} points="{line}"/>')
        if len(curve.points) == 1:
            x, y = curve.points[0]
            parts.append(f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3" fill="{_colour(number)}"/>')
    return Markup(_svg(_HEIGHT, alt, parts) + _legend([curve.name for curve in series]))


def interval_chart(bars: Sequence[Bar], *, x_label: str, alt: str, colour_from: int = 0) -> Markup:
    """Estimates with their intervals, one below the other, against a line at zero."""
    finite = [x for bar in bars for x in (bar.estimate, bar.low, bar.high) if abs(x) != float("inf")]
    ticks = _ticks(min([0.0, *finite]), max([0.0, *finite]))
    to_x = _scale(ticks[0], ticks[-1], 16, _WIDTH - 16)
    row = 44
    height = row * len(bars) + _BOTTOM + 6
    bottom = height - _BOTTOM
    zero = to_x(0.0)
    parts = [f'<line class="grid-line" x1="{to_x(t):.1f}" x2="{to_x(t):.1f}" y1="4" y2="{bottom}"/>' for t in ticks]
    parts.append(f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="4" y2="{bottom}" stroke="currentColor"/>')
    parts += [
        f'<text class="tick" x="{to_x(t):.1f}" y="{bottom + 16}" text-anchor="middle">{_number(t)}</text>'
        for t in ticks
    ]
    parts.append(f'<text x="{_WIDTH / 2}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>')
    for number, bar in enumerate(bars):
        y = 32 + row * number
        low, high = (min(max(x, ticks[0]), ticks[-1]) for x in (bar.low, bar.high))
        colour = _colour(number + colour_from)
        parts.append(f'<text class="on-lines" x="16" y="{y - 12}">{escape(bar.name)}</text>')
        parts.append(
            f'<line x1="{to_x(low):.1f}" x2="{to_x(high):.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="4"'
            f' stroke-linecap="round"/>'
        )
        parts.append(f'<circle cx="{to_x(bar.estimate):.1f}" cy="{y}" r="6" fill="{colour}"/>')
    return Markup(_svg(height, alt, parts))


def _svg(height: float, alt: str, parts: Sequence[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(alt)}">\n'
        f"<title>{escape(alt)}</title>\n{inner}\n</svg>"
    )


def _axes(
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    x_label: str,
    y_label: str,
) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in y_ticks:
        y = to_y(tick)
        parts.append(f'<line class="grid-line" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_ticks:
        anchor = "end" if to_x(tick) > right - 10 else "middle"
        parts.append(
            f'<text class="tick" x="{to_x(tick):.1f}" y="{bottom + 16}" text-anchor="{anchor}">{_number(tick)}</text>'
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (_TOP + bottom) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 12 {middle:.0f})"'
    parts.append(f'<text x="12" y="{middle:.0f}" {turned}>{escape(y_label)}</text>')
    return "\n".join(parts)


def _legend(names: Sequence[str]) -> str:
    items = "\n".join(
        f'<li><svg viewBox="0 0 28 12" aria-hidden="true"><line x1="1" x2="27" y1="6" y2="6" {_stroke(number)}'
        f' stroke-width="3"/></svg>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'\n<ul class="legend">\n{items}\n</ul>'


def _colour(number: int) -> str:
    return f"var(--series-{number % _COLOURS + 1})"


def _stroke(number: int) -> str:
    dash = _DASHES[number % len(_DASHES)]
    return f'stroke="{_colour(number)}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that span the range: steps of 1, 2, 2.5 or 5 times a power of ten."""
    if high <= low:
        pad = abs(low) / 2 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / wanted
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def _number(value: float) -> str:
    text = f"{value:,.6g}" if abs(value) < 1e4 else f"{value / 1000:,.6g}k"
    return text.replace("-", "−")


def smoothed(points: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """Means of ``width`` neighbouring points, for a noisy curve; as they are where there are few."""
    if width < 2 or len(points) < 2 * width:
        return list(points)
    bounds = [*range(0, len(points), width), len(points)]
    parts = [points[first:last] for first, last in pairwise(bounds)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
