"""Attention maps of a model as arrays and as images, in grids as in Figures 2, 5 and 8 of the paper.

Row i of a map holds the attention weights A_ij of query i (Eq. 9, 12 or 14). Rows sum to 1; lighter is more.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Map = NDArray[np.float32]
Example = Mapping[str, "Tensor"]

# Keys at most this many positions away from a query count as nearby.
NEAR = 2
_COLOURS = "viridis"


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one example.

    Attributes:
        weights: (layers, heads, L, L), of the chosen layers and heads.
        layers: the index of each layer, from 0.
        heads: the index of each head, from 0.
    """

    weights: Map
    layers: tuple[int, ...]
    heads: tuple[int, ...]

    def title(self, layer: int, head: int) -> str:
        """The name of the map at ``weights[layer, head]``, numbered from 1."""
        return f"layer {self.layers[layer] + 1}, head {self.heads[head] + 1}"

    def items(self) -> Iterator[tuple[str, Map]]:
        """Title and weights of every map, layer by layer."""
        for layer, row in enumerate(self.weights):
            for head, weights in enumerate(row):
                yield self.title(layer, head), weights


@dataclass(frozen=True)
class AttentionSpread:
    """How the average query of a map distributes its weight.

    Attributes:
        positions: the effective number of positions: exp of the mean row entropy.
        nearby: the share of the weight within ``NEAR`` positions of the query.
        top_share: the share of the position with the largest mean weight.
        top_position: that position.
    """

    positions: float
    nearby: float
    top_share: float
    top_position: int


@contextmanager
def inference(model: Any) -> Iterator[Callable[[Example], dict[str, "Tensor"]]]:
    """Evaluation mode without gradients; yields a function from an example to the inputs of a batch of one."""
    import torch  # only here, so that images of maps can be made without it

    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield lambda example: {name: x[None].to(device) for name, x in example.items() if "labels" not in name}
    finally:
        model.train(was_training)


def attention_maps(
    model: Any,
    examples: Sequence[Example],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[AttentionMaps]:
    """The maps of some examples, each in a batch of its own, so that nothing is padded.

    Args:
        model: one of :mod:`mgk.models`; for a pair of documents the maps are those of the first.
        examples: as the data sets of :mod:`mgk.data` give them, without a batch dimension; labels are ignored.
        layers: indices from 0, all by default; negative ones count from the last.
        heads: likewise.
    """
    chosen_layers = _indices("layers", layers, model.config.num_hidden_layers)
    chosen_heads = _indices("heads", heads, model.config.num_attention_heads)
    results = []
    with inference(model) as inputs:
        for example in examples:
            options = {"use_cache": False} if "shift_labels" in example else {}
            out = model(**inputs(example), output_attentions=True, **options)
            weights = [out.attentions[layer][0, list(chosen_heads)].float().cpu().numpy() for layer in chosen_layers]
            results.append(AttentionMaps(np.stack(weights), chosen_layers, chosen_heads))
    return results


def attention_spread(weights: Map) -> AttentionSpread:
    """How the average query of one map (L, L) distributes its weight.

    Rows are normalised first: maps that were stored with 8 bits do not sum to exactly 1.
    """
    weights = weights / weights.sum(-1, keepdims=True).clip(1e-9)
    positive = weights[weights > 0]
    entropy = -float((positive * np.log(positive)).sum()) / len(weights)
    distance = np.abs(np.arange(weights.shape[0])[:, None] - np.arange(weights.shape[1]))
    columns = weights.mean(0)
    return AttentionSpread(
        positions=float(np.exp(entropy)),
        nearby=float(weights[distance <= NEAR].sum() / len(weights)),
        top_share=float(columns.max()),
        top_position=int(columns.argmax()),
    )


def map_png(weights: Map) -> bytes:
    """One map (L, L) as a PNG with a pixel per pair; its largest weight is the lightest."""
    from matplotlib import image

    buffer = io.BytesIO()
    image.imsave(buffer, weights, cmap=_COLOURS, vmin=0.0, vmax=float(weights.max()), format="png")
    return buffer.getvalue()


def draw_maps(canvas: Any, maps: AttentionMaps, *, has_labels: bool = True) -> None:
    """Draw all maps onto a ``matplotlib`` figure or subfigure: a row per layer, a column per head."""
    axes = canvas.subplots(*maps.weights.shape[:2], squeeze=False)
    for place, (_, weights) in zip(axes.flat, maps.items(), strict=True):
        place.imshow(weights, cmap=_COLOURS, vmin=0.0, interpolation="nearest")
        place.set(xticks=[], yticks=[])
    if has_labels:
        for place, head in zip(axes[0], maps.heads, strict=True):
            place.set_title(f"head {head + 1}", fontsize=9)
        for place, layer in zip(axes[:, 0], maps.layers, strict=True):
            place.set_ylabel(f"layer {layer + 1}", fontsize=9)


def draw_grid(maps: AttentionMaps, *, title: str | None = None, file: Path | None = None) -> Any:
    """All maps of an example as a ``matplotlib`` figure with a row per layer and a column per head.

    Args:
        maps: of one example.
        title: above the grid.
        file: where to save it, by its suffix as PNG, SVG or PDF.
    """
    from matplotlib.figure import Figure

    rows, columns = maps.weights.shape[:2]
    figure = Figure(figsize=(1.2 + 2.0 * columns, 0.6 + 2.0 * rows), layout="constrained")
    draw_maps(figure, maps)
    if title is not None:
        figure.suptitle(title, fontsize=10)
    if file is not None:
        figure.savefig(file, dpi=150)
    return figure


def _indices(name: str, chosen: Sequence[int] | None, count: int) -> tuple[int, ...]:
    for index in chosen or ():
        if not -count <= index < count:
            raise ValueError(f"{name} must be from 0 to {count - 1}, got {index}")
    return tuple(range(count)) if chosen is None else tuple(index % count for index in chosen)
