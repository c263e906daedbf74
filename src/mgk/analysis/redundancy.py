"""The similarity of a model's attention heads: the paper argues that mixtures avoid redundant heads; this measures it.

The similarity of two heads on an example is the mean over queries of 1 - JS(A_i, B_i) / log 2, where JS is the
Jensen-Shannon divergence of the two rows: 1 for identical heads, 0 for heads that never attend to the same keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.analysis.attention_maps import Example, Map, attention_maps


@dataclass(frozen=True)
class Redundancy:
    """The similarity of every pair of heads, a mean over examples.

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

    def _mean(self, is_chosen: Sequence[bool]) -> float | None:
        pairs = np.reshape(is_chosen, self.similarity.shape) & ~np.eye(len(self.heads), dtype=bool)
        return float(self.similarity[pairs].mean()) if pairs.any() else None


def similarity(first: Map, second: Map) -> float:
    """The mean over queries of 1 - JS(A_i, B_i) / log 2, of two maps (L, S)."""
    from scipy.special import rel_entr

    a, b = first.astype(np.float64), second.astype(np.float64)
    middle = (a + b) / 2
    divergence = (rel_entr(a, middle) + rel_entr(b, middle)).sum(-1) / 2
    return float(1 - divergence.mean() / np.log(2))


def redundancy(model: Any, examples: Sequence[Example]) -> Redundancy:
    """The similarity of the heads of a model on some examples.

    Args:
        model: one of :mod:`mgk.models`.
        examples: as the data sets of :mod:`mgk.data` give them, without a batch dimension.
    """
    if not examples:
        raise ValueError("examples must be at least one, got none")
    tables = []
    for example in examples:
        (maps,) = attention_maps(model, [example])
        heads = [weights for _, weights in maps.items()]
        table = np.eye(len(heads))
        for row, column in zip(*np.tril_indices(len(heads), -1), strict=True):
            table[row, column] = table[column, row] = similarity(heads[row], heads[column])
        tables.append(table)
    return Redundancy(np.mean(tables, 0), tuple((layer, head) for layer in maps.layers for head in maps.heads))
