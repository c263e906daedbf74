"""What is seen inside a trained model, in small arrays: maps, ranks, similarity of heads, use of components.

Taken right after a trial that a figure asks for, so that figures can be drawn anew without the run.
"""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mgk.analysis.attention_maps import AttentionMaps
from mgk.experiments.trials import ModelSpec, Trial

FORMAT = 1
# Of a map: enough to see its pattern. Where a model has many, a page shows them small.
_SIDE, _SMALL_SIDE, _MANY = 96, 48, 24


@dataclass(frozen=True, kw_only=True)
class LayerRanks:
    """Of the sampled attention matrices of a layer: ranks, effective ranks, and N, which no rank exceeds."""

    ranks: tuple[int, ...]
    effective: tuple[float, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayerUsage:
    """Of the components of a layer, as in :class:`mgk.analysis.mixture_usage.MixtureUsage`; lists over heads."""

    prior: list[list[float]]
    share: list[list[float]]
    certainty: list[float]
    distance: list[list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class ModelAnalysis:
    """One model.

    Attributes:
        trial: of the model.
        tokens: of the example that the maps are of.
        maps: averaged down, in steps of 1/255 of each map's largest weight.
        ranks: a distribution a layer.
        head_similarity: of the heads of a layer, on each of some examples; empty where a layer has one head.
        usage: of mixtures, a layer each.
    """

    trial: Trial
    tokens: int
    maps: AttentionMaps
    ranks: tuple[LayerRanks, ...]
    head_similarity: tuple[float, ...]
    usage: tuple[LayerUsage, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "format": FORMAT,
            "trial": asdict(self.trial),
            "tokens": self.tokens,
            "layers": self.maps.layers,
            "heads": self.maps.heads,
            "side": self.maps.weights.shape[-1],
            "maps": [[_packed(weights) for weights in layer] for layer in self.maps.weights],
            "ranks": [asdict(layer) for layer in self.ranks],
            "head_similarity": self.head_similarity,
            "usage": [asdict(layer) for layer in self.usage],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """From JSON data; ``KeyError``, ``TypeError`` or ``ValueError`` when it is something else."""
        if data["format"] != FORMAT:
            raise TypeError(f"this is format {data['format']}, not {FORMAT}")
        trial, side = data["trial"], data["side"]
        weights = np.stack([np.stack([_unpacked(item, side) for item in layer]) for layer in data["maps"]])
        return cls(
            trial=Trial(**{**trial, "model": ModelSpec(**trial["model"])}),
            tokens=data["tokens"],
            maps=AttentionMaps(weights, tuple(data["layers"]), tuple(data["heads"])),
            ranks=tuple(
                LayerRanks(**{name: tuple(values) for name, values in layer.items()}) for layer in data["ranks"]
            ),
            head_similarity=tuple(data["head_similarity"]),
            usage=tuple(LayerUsage(**layer) for layer in data["usage"]),
        )


def side_of(maps: int) -> int:
    """Pixels of a side, for so many maps in a model."""
    return _SIDE if maps <= _MANY else _SMALL_SIDE


def _packed(weights: NDArray[np.float32]) -> dict[str, Any]:
    most = float(weights.max()) or 1.0
    levels = np.rint(weights / most * 255).astype(np.uint8)
    return {"most": float(f"{most:.5g}"), "levels": base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode()}


def _unpacked(data: Mapping[str, Any], side: int) -> NDArray[np.float32]:
    levels = np.frombuffer(zlib.decompress(base64.b64decode(data["levels"])), np.uint8).reshape(side, side)
    return (levels * np.float32(data["most"] / 255)).astype(np.float32)
