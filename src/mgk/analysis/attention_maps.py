"""What the heads of a model look at: attention matrices as arrays and as pictures, in grids as in the paper's Fig. 2.

Row i of a map is where query i looks, A_ij (Eq. 9, 12 or 14); rows sum to 1. Lighter is more.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Map = NDArray[np.float32]

_COLOURS = "viridis"


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one example.

    Attributes:
        weights: (layers, heads, L, L), of the layers and heads asked for.
        layers: the number of each layer, from 0.
        heads: the number of each head, from 0.
    """

    weights: Map
    layers: tuple[int, ...]
    heads: tuple[int, ...]

    def title(self, layer: int, head: int) -> str:
        """The name of a map by its place in ``weights``; people count from 1."""
        return f"layer {self.layers[layer] + 1}, head {self.heads[head] + 1}"


@dataclass(frozen=True)
class Reach:
    """Where the average query of a map looks, in three numbers.

    Attributes:
        positions: over how many positions it spreads: exp of the entropy of its row.
        nearby: the share of its weight within ``NEAR`` positions of itself.
        share_of_top: the share of the position that gets most of all queries' weight.
        top: that position.
    """

    positions: float
    nearby: float
    share_of_top: float
    top: int


NEAR = 2


def attention_maps(
    model: Any,
    examples: Sequence[Mapping[str, "Tensor"]],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[AttentionMaps]:
    """The maps of some examples, each by itself, so that nothing is padded.

    Args:
        model: one of :mod:`mgk.models`; of a pair of documents the maps of the first are taken.
        examples: as the data sets of :mod:`mgk.data` give them, without a batch dimension; labels are ignored.
        layers: which, from 0; all if not given. Negative ones count from the last.
        heads: likewise.

    Returns:
        The maps of every example.
    """
    import torch  # only here, so that pictures of maps can be made without it

    chosen_layers = _chosen("layers", layers, model.config.num_hidden_layers)
    chosen_heads = _chosen("heads", heads, model.config.num_attention_heads)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    found = []
    try:
        with torch.no_grad():
            for example in examples:
                inputs = {name: x[None].to(device) for name, x in example.items() if "labels" not in name}
                options = {"use_cache": False} if "shift_labels" in example else {}
                out = model(**inputs, output_attentions=True, **options)
                weights = torch.stack([out.attentions[layer][0] for layer in chosen_layers])  # (layers, H, L, L)
                array = weights[:, list(chosen_heads)].float().cpu().numpy()
                found.append(AttentionMaps(array, chosen_layers, chosen_heads))
        return found
    finally:
        model.train(was_training)


def reach(weights: Map) -> Reach:
    """Where the average query of one map (L, L) looks."""
    positive = weights[weights > 0]
    entropy = -float((positive * np.log(positive)).sum()) / len(weights)
    distance = np.abs(np.arange(weights.shape[0])[:, None] - np.arange(weights.shape[1]))
    columns = weights.mean(0)
    return Reach(
        positions=float(np.exp(entropy)),
        nearby=float(weights[distance <= NEAR].sum() / len(weights)),
        share_of_top=float(columns.max()),
        top=int(columns.argmax()),
    )


def picture(weights: Map, *, most: float | None = None) -> bytes:
    """One map (L, L) as a PNG, a pixel a pair; ``most`` is the weight that is lightest, the map's own if not given."""
    from matplotlib import image

    buffer = io.BytesIO()
    image.imsave(buffer, weights, cmap=_COLOURS, vmin=0.0, vmax=most or float(weights.max()), format="png")
    return buffer.getvalue()


def draw_grid(maps: AttentionMaps, *, title: str | None = None, file: Path | None = None) -> Any:
    """All maps of an example in a grid, a row a layer and a column a head, as in Fig. 2, 5 and 8.

    Args:
        maps: of one example.
        title: above the grid.
        file: where to save it, by its ending as PNG, SVG or PDF.

    Returns:
        The ``matplotlib`` figure.
    """
    from matplotlib.figure import Figure

    rows, columns = maps.weights.shape[:2]
    figure = Figure(figsize=(1.2 + 2.0 * columns, 0.6 + 2.0 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for row in range(rows):
        for column in range(columns):
            place = axes[row][column]
            place.imshow(maps.weights[row, column], cmap=_COLOURS, vmin=0.0, interpolation="nearest")
            place.set(xticks=[], yticks=[])
            if row == 0:
                place.set_title(f"head {maps.heads[column] + 1}", fontsize=9)
            if column == 0:
                place.set_ylabel(f"layer {maps.layers[row] + 1}", fontsize=9)
    if title is not None:
        figure.suptitle(title, fontsize=10)
    if file is not None:
        figure.savefig(file, dpi=150)
    return figure


def _chosen(name: str, wanted: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if wanted is None:
        return tuple(range(count))
    for number in wanted:
        if not -count <= number < count:
            raise ValueError(f"{name} must be from 0 to {count - 1}, got {number}")
    return tuple(number % count for number in wanted)
