"""The page of ``mgk explore``: one file, for one model or two.

The scripts in ``explorer/`` read JSON with one entry per model. Its ``data``, zlib and
base64, holds by layer the row maxima of all heads as 16-bit integers, then bytes:
sqrt(A_ij / max_i) in ``levels`` steps, gamma_ijr but the last in ``shares`` steps.
"""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from mgk.analysis.explorer import Exploration, LayerAttention
from mgk.experiments.render import html
from mgk.experiments.render.numbers import text

# The size of a page with at most 256 tokens; it grows with longer texts.
MOST_BYTES = 3_000_000
_USUAL_TOKENS = 256
_SCRIPTS = tuple(f"explorer/{name}.js" for name in ("core", "heads", "map", "panel", "app"))


@dataclass(frozen=True)
class Precision:
    """How exactly weights are stored.

    Attributes:
        levels: steps of sqrt(A_ij / max_i).
        shares: steps of gamma_ijr.
        floor: weights below this part of the row's largest are stored as 0.
    """

    levels: int
    shares: int
    floor: float = 0.0


# Best first: a page takes the first that fits.
PRECISIONS = (
    Precision(255, 63),
    Precision(127, 31),
    Precision(63, 15),
    Precision(31, 15),
    Precision(15, 15),
    Precision(15, 7, 0.02),
    Precision(15, 7, 0.05),
    Precision(7, 7, 0.1),
    Precision(7, 3, 0.25),
    Precision(3, 3, 0.25),
)


def explorer_page(found: Sequence[Exploration], *, note: str = "") -> str:
    """The page.

    Args:
        found: one model or two.
        note: on the text, such as that it was cut.
    """
    length = max(len(exploration.example.tokens) for exploration in found)
    most = MOST_BYTES * max(1.0, length / _USUAL_TOKENS)
    for precision in PRECISIONS:
        page = _page(found, note, precision)
        if len(page.encode()) <= most:
            break
    return page


def encode(layers: Sequence[LayerAttention], precision: Precision) -> bytes:
    """The attention of all layers in the form that the scripts read."""
    parts = []
    for layer in layers:
        maxima = layer.weights.max(-1, keepdims=True)
        ratio = layer.weights / maxima.clip(np.finfo(np.float32).tiny)
        codes = np.rint(precision.levels * np.sqrt(ratio)).astype(np.uint8)
        codes[ratio < precision.floor] = 0
        parts += [np.rint(maxima * 65535).astype("<u2").tobytes(), codes.tobytes()]
        if layer.responsibilities is not None:
            shares = np.rint(precision.shares * layer.responsibilities[:, :-1]).astype(np.uint8)
            parts.append((shares * (codes[:, None] > 0)).tobytes())
    return zlib.compress(b"".join(parts), 6)


def _page(found: Sequence[Exploration], note: str, precision: Precision) -> str:
    models = [_model(exploration, precision) for exploration in found]
    steps = {"levels": precision.levels, "shares": precision.shares}
    data = json.dumps({"steps": steps, "models": models}, ensure_ascii=False, separators=(",", ":"))
    several = any(layer.num_components > 1 for exploration in found for layer in exploration.layers)
    title = "Attention of " + " and ".join(exploration.name for exploration in found)
    parts = [
        html.paragraph(
            "Point at a token, or tap it, to see which positions it attends to.",
            "A key of a mixture has several components, each with its colour." if several else "",
            note,
        ),
        Markup('<div id="explorer"><noscript>This page needs JavaScript.</noscript></div>'),
        _help(several, precision),
        # in JSON a "<" stands in strings only: no tag ends the element
        Markup('<script type="application/json" id="explorer-data">{}</script>').format(
            Markup(data.replace("<", "\\u003c"))
        ),
    ]
    return html.page(title, parts, styles=("style.css", "explorer/style.css"), scripts=_SCRIPTS)


def _model(exploration: Exploration, precision: Precision) -> dict[str, Any]:
    example, prediction = exploration.example, exploration.prediction
    layers = [
        {
            "heads": len(layer.weights),
            "components": layer.num_components,
            "priors": None if layer.prior is None else np.round(layer.prior, 4).tolist(),
        }
        for layer in exploration.layers
    ]
    return {
        "name": exploration.name,
        "about": exploration.about,
        "tokens": example.tokens,
        "letters": all(len(token) == 1 or token.startswith("\\x") for token in example.tokens),
        "image": None if example.pixels is None else vars(example.pixels),
        "layers": layers,
        "prediction": None
        if prediction is None
        else {
            "kind": prediction.kind,
            "candidates": [[[name, round(value, 5)] for name, value in row] for row in prediction.candidates],
            "actual": [round(value, 5) for value in prediction.actual],
        },
        "data": base64.b64encode(encode(exploration.layers, precision)).decode("ascii"),
    }


def _help(several: bool, precision: Precision) -> Markup:
    keys = [("← →", "previous, next token"), ("h, H", "next, previous head"), ("l, L", "next, previous layer")]
    if several:
        keys.append(("c", "next component"))
    keys.append(("+ − 0", "zoom, when the map has the focus"))
    rows = [(Markup("<kbd>{}</kbd>").format(key), meaning) for key, meaning in keys]
    floor = ""
    if precision.floor:
        floor = f"; those below {precision.floor:.0%} of the largest are left out"
    texts = [html.paragraph(text("explorer_weights", levels=precision.levels, floor=floor))]
    if several:
        texts.append(html.paragraph(text("explorer_components")))
    return html.details("Keys and meaning", html.definitions(rows), *texts)
