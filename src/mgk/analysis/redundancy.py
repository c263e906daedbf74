"""The similarity of attention heads, as the paper argues that mixtures reduce it.

The mean over queries of 1 - JS(A_i, B_i) / log 2, with the Jensen-Shannon divergence:
1 for identical heads, 0 for heads that never attend to the same keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.analysis.attention_maps import Example, Map, attention_maps


@dataclass(frozen=True)
class Redundancy:
    """The similarity of every pair of heads, a mean over examples."""

    similarity: NDArray[np.float64]  # (K, K), in the order of ``heads``
    heads: tuple[tuple[int, int], ...]  # (layer, head) of each, from 0

    @property
    def within_layers(self) -> float | None:
        """Mean over pairs in one layer; None with one head a layer."""
        return self._mean(is_same_layer=True)

    @property
    def across_layers(self) -> float | None:
        """Mean over pairs in different layers; None with one layer."""
        return self._mean(is_same_layer=False)

    def _mean(self, *, is_same_layer: bool) -> float | None:
        layers = np.array([layer for layer, _ in self.heads])
        pairs = (layers[:, None] == layers) == is_same_layer
        np.fill_diagonal(pairs, False)
        return float(self.similarity[pairs].mean()) if pairs.any() else None


def similarity(first: Map, second: Map) -> float:
    """Mean over queries of 1 - JS(A_i, B_i) / log 2, of maps (L, S)."""
    from scipy.special import rel_entr

    a, b = first.astype(np.float64), second.astype(np.float64)
    middle = (a + b) / 2
    divergence = (rel_entr(a, middle) + rel_entr(b, middle)).sum(-1) / 2
    return float(1 - divergence.mean() / np.log(2))


def redundancy(model: Any, examples: Sequence[Example]) -> Redundancy:
    """The similarity of the heads of a model on some examples."""
    if not examples:
        raise ValueError("examples must be at least one, got none")
    tables = []
    for example in examples:
        (maps,) = attention_maps(model, [example])
        heads = [weights for _, weights in maps.items()]
        table = np.eye(len(heads))
        for a, b in combinations(range(len(heads)), 2):
            table[a, b] = table[b, a] = similarity(heads[a], heads[b])
        tables.append(table)
    places = tuple(product(maps.layers, maps.heads))
    return Redundancy(np.mean(tables, 0), places)
