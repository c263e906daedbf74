"""Figures as PNG files, for documents."""

import io
from math import ceil
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mgk.analysis.attention_maps import draw_maps
from mgk.experiments.render.charts import FewPoints, Lines, Maps
from mgk.experiments.render.figures import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2
_TITLE_WIDTH = 50  # characters that fit above a panel
_COLOURS = ("#3b4754", "#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#d4a72c")
_DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))


def draw(figure: Figure) -> bytes:
    """The figure as a PNG."""
    from matplotlib.figure import Figure as Canvas

    lines = [panel for panel in figure.panels if isinstance(panel, Lines)]
    maps = [panel for panel in figure.panels if isinstance(panel, Maps)]
    rows = ceil(len(lines) / _COLUMNS)
    depth = max((len(panel.maps.layers) for panel in maps), default=0)
    heights = ([0.9 * depth + 0.5] if maps else []) + ([3.0 * rows] if lines else [])
    canvas = Canvas(figsize=(8.0, sum(heights)), layout="constrained")
    parts = list(canvas.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if maps:
        _draw_all_maps(parts.pop(0), maps)
    if lines:
        axes = parts.pop(0).subplots(rows, _COLUMNS, squeeze=False).flat
        for place, panel in zip(axes, lines, strict=False):
            _draw_lines(place, panel)
        for place in axes[len(lines) :]:
            place.set_axis_off()
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def _draw_lines(axes: "Axes", panel: Lines) -> None:
    for number, curve in enumerate(panel.series):
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        style: dict[str, Any] = {"label": curve.name, "linewidth": 1.4, "color": colour, "linestyle": dash}
        if isinstance(panel, FewPoints):
            style |= {"marker": "o", "markersize": 3.5}
        axes.plot(*zip(*curve.points, strict=True), **style)
        if curve.band:
            xs, low, high = zip(*curve.band, strict=True)
            if isinstance(panel, FewPoints):
                axes.vlines(xs, low, high, color=colour, linewidth=0.9, alpha=0.6)
                continue
            axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_title(fill(panel.title, _TITLE_WIDTH), fontsize=9)
    axes.set_xlabel(panel.x_label, fontsize=8)
    axes.set_ylabel(panel.y_label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _draw_all_maps(part: Any, maps: list[Maps]) -> None:
    """A block per model, side by side, as wide as it has heads."""
    blocks = part.subfigures(
        1, len(maps), width_ratios=[len(panel.maps.heads) for panel in maps], squeeze=False
    )[0]
    for block, panel in zip(blocks, maps, strict=True):
        draw_maps(block, panel.maps, has_labels=False)
        block.suptitle(panel.title, fontsize=9)
