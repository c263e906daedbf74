"""How alike the heads of a model are: the paper argues that mixtures avoid redundant heads; this measures it.

The similarity of two heads on an example is the mean over queries of 1 - JS(A_i, B_i) / log 2, JS being the
Jensen-Shannon divergence of the two rows: 1 for heads that always look at the same places, 0 for heads that never do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgk.analysis.attention_maps import Map, attention_maps

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Redundancy:
    """The similarity of every two heads, a mean over examples.

    Attributes:
        similarity: (K, K) for K heads in all layers, in the order of ``heads``; the diagonal is 1.
        heads: (layer, head) of each, from 0.
    """

    similarity: NDArray[np.float64]
    heads: tuple[tuple[int, int], ...]

    @property
    def within_layers(self) -> float | None:
        """The mean over pairs of heads in one layer; None where a layer has one head."""
        return self._mean([a[0] == b[0] for a in self.heads for b in self.heads])

    @property
    def across_layers(self) -> float | None:
        """The mean over pairs of heads in different layers; None where there is one layer."""
        return self._mean([a[0] != b[0] for a in self.heads for b in self.heads])

    def _mean(self, wanted: Sequence[bool]) -> float | None:
        pairs = np.reshape(wanted, self.similarity.shape) & ~np.eye(len(self.heads), dtype=bool)
        return float(self.similarity[pairs].mean()) if pairs.any() else None


def similarity(first: Map, second: Map) -> float:
    """The mean over queries of 1 - JS(A_i, B_i) / log 2, of two maps (L, S)."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    middle = (a + b) / 2
    divergence = (_relative_entropy(a, middle) + _relative_entropy(b, middle)) / 2
    return float(1 - divergence.mean() / np.log(2))


def redundancy(model: Any, examples: Sequence[Mapping[str, "Tensor"]]) -> Redundancy:
    """How alike the heads of a model are on some examples.

    Args:
        model: one of :mod:`mgk.models`.
        examples: as the data sets of :mod:`mgk.data` give them, without a batch dimension.
    """
    if not examples:
        raise ValueError("examples must be at least one, got none")
    total: NDArray[np.float64] | None = None
    for example in examples:
        (maps,) = attention_maps(model, [example])
        flat = maps.weights.reshape(-1, *maps.weights.shape[2:])  # (K, L, S)
        table = np.eye(len(flat))
        for row in range(len(flat)):
            for column in range(row):
                table[row, column] = table[column, row] = similarity(flat[row], flat[column])
        total = table if total is None else total + table
    assert total is not None
    heads = tuple((layer, head) for layer in maps.layers for head in maps.heads)
    return Redundancy(total / len(examples), heads)


def _relative_entropy(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """sum_j p_j log(p_j / q_j) of every row, 0 log 0 being 0."""
    terms: NDArray[np.float64] = np.zeros_like(p)
    inside = p > 0
    terms[inside] = p[inside] * np.log(p[inside] / q[inside])
    found: NDArray[np.float64] = terms.sum(-1)
    return found
