"""Attention maps as arrays and images, as in Figures 2, 5 and 8 of the paper.

Row i of a map holds the weights A_ij of query i (Eq. 9, 12 or 14) and sums to 1.
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

# Keys this close to a query are nearby.
NEAR = 2
_COLOURS = "viridis"


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one example; layers and heads are counted from 0."""

    weights: Map  # (layers, heads, L, L)
    layers: tuple[int, ...]
    heads: tuple[int, ...]

    def title(self, layer: int, head: int) -> str:
        """The name of ``weights[layer, head]``, counted from 1."""
        return f"layer {self.layers[layer] + 1}, head {self.heads[head] + 1}"

    def items(self) -> Iterator[tuple[str, Map]]:
        """Title and weights of every map, layer by layer."""
        for layer, row in enumerate(self.weights):
            for head, weights in enumerate(row):
                yield self.title(layer, head), weights


@dataclass(frozen=True)
class AttentionSpread:
    """How the average query of a map distributes its weight."""

    positions: float  # effective number: exp of the mean row entropy
    nearby: float  # share within ``NEAR`` positions of the query
    top_share: float  # share of the position with the largest mean weight
    top_position: int


@contextmanager
def inference(model: Any) -> Iterator[Callable[[Example], dict[str, "Tensor"]]]:
    """Evaluation without gradients; yields a function example -> batch."""
    import torch  # images of maps are made without it

    device = next(model.parameters()).device
    was_training = model.training

    def batch(example: Example) -> dict[str, "Tensor"]:
        names = (name for name in example if "labels" not in name)
        return {name: example[name][None].to(device) for name in names}

    model.eval()
    try:
        with torch.no_grad():
            yield batch
    finally:
        model.train(was_training)


def attention_maps(
    model: Any,
    examples: Sequence[Example],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[AttentionMaps]:
    """The maps of each example, in a batch of its own: nothing is padded.

    Args:
        model: One of :mod:`mgk.models`; of two documents, the first is mapped.
        examples: As in :mod:`mgk.data`, without a batch dimension.
        layers: Indices from 0, or from the last if negative; None: all.
        heads: Likewise.
    """
    chosen_layers = _indices("layers", layers, model.config.num_hidden_layers)
    chosen_heads = _indices("heads", heads, model.config.num_attention_heads)
    results = []
    with inference(model) as inputs:
        for example in examples:
            options = {"use_cache": False} if "shift_labels" in example else {}
            out = model(**inputs(example), output_attentions=True, **options)
            weights = (out.attentions[layer][0, list(chosen_heads)] for layer in chosen_layers)
            maps = np.stack([x.float().cpu().numpy() for x in weights])
            results.append(AttentionMaps(maps, chosen_layers, chosen_heads))
    return results


def attention_spread(weights: Map) -> AttentionSpread:
    """How the average query of one map (L, L) distributes its weight."""
    # maps that were stored with 8 bits do not sum to exactly 1
    weights = weights / weights.sum(-1, keepdims=True).clip(1e-9)
    positive = weights[weights > 0]
    entropy = -float((positive * np.log(positive)).sum()) / len(weights)
    rows, columns = np.indices(weights.shape)
    is_near = np.abs(rows - columns) <= NEAR
    by_key = weights.mean(0)
    return AttentionSpread(
        positions=float(np.exp(entropy)),
        nearby=float(weights[is_near].sum() / len(weights)),
        top_share=float(by_key.max()),
        top_position=int(by_key.argmax()),
    )


def map_png(weights: Map) -> bytes:
    """One map (L, L) as a PNG; the largest weight is the lightest pixel."""
    from matplotlib import image

    buffer = io.BytesIO()
    largest = float(weights.max())
    image.imsave(buffer, weights, cmap=_COLOURS, vmin=0.0, vmax=largest, format="png")
    return buffer.getvalue()


def draw_maps(canvas: Any, maps: AttentionMaps, *, has_labels: bool = True) -> None:
    """Draw maps onto a (sub)figure: a row per layer, a column per head."""
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
    """All maps of an example as a ``matplotlib`` figure."""
    from matplotlib.figure import Figure

    rows, columns = maps.weights.shape[:2]
    size = (1.2 + 2.0 * columns, 0.6 + 2.0 * rows)
    figure = Figure(figsize=size, layout="constrained")
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
    return tuple(index % count for index in (range(count) if chosen is None else chosen))
