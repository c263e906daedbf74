"""The rank of attention matrices, as the paper counts it: singular values of 10^-6 and more (Section 3.3).

The weights come in float32, whose rounding of entries near 1/N adds singular values of about 10^-9; the decomposition
is in float64, because in float32 its own noise, 10^-7 of the largest value, would reach the threshold.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mgk.analysis.attention_maps import Map, attention_maps

if TYPE_CHECKING:
    from torch import Tensor

THRESHOLD = 1e-6
Numbers = NDArray[np.float64]


class Examples(Protocol):
    """A data set of :mod:`mgk.data`, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, "Tensor"]: ...


@dataclass(frozen=True)
class RankDistribution:
    """The ranks of sampled attention matrices of one layer.

    Attributes:
        layer: its number, from 0.
        ranks: how many singular values reach the threshold, for each matrix.
        effective: the effective rank of each matrix.
        lengths: N, the rows of each matrix: no rank is above it.
    """

    layer: int
    ranks: NDArray[np.int64]
    effective: Numbers
    lengths: NDArray[np.int64]


def singular_values(weights: Map) -> Numbers:
    """The singular values of matrices (..., L, S), largest first, in float64."""
    import torch  # several times faster than NumPy here

    found: Numbers = torch.linalg.svdvals(torch.from_numpy(np.asarray(weights)).double()).numpy()
    return found


def rank(values: Numbers, threshold: float = THRESHOLD) -> NDArray[np.int64]:
    """How many s_k >= threshold there are, of singular values (..., K)."""
    return (values >= threshold).sum(-1)


def effective_rank(values: Numbers) -> Numbers:
    """exp(-sum_k p_k log p_k), p_k = s_k / sum s, of singular values (..., K) (Roy and Vetterli 2007).

    1 for a matrix whose rows are all alike, N for a permutation; unlike the rank it does not hang on a threshold.
    """
    total = values.sum(-1, keepdims=True)
    p = values / np.where(total > 0, total, 1.0)
    found: Numbers = np.exp(-(p * np.log(np.where(p > 0, p, 1.0))).sum(-1))
    return found


def rank_distributions(
    model: Any,
    data: Examples,
    *,
    count: int = 1000,
    threshold: float = THRESHOLD,
    seed: int = 0,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> list[RankDistribution]:
    """The ranks of ``count`` attention matrices of every layer, of examples drawn at random (Fig. 2 right, Fig. 6).

    Args:
        model: one of :mod:`mgk.models`.
        data: as :func:`mgk.data.load` gives it.
        count: matrices of a layer; an example has as many as the model has heads.
        threshold: of a singular value that counts.
        seed: of the draw.
        on_step: called with how many examples of how many are done.

    Returns:
        A distribution a layer. Where the data has too few examples for ``count`` matrices, those of all of them.
    """
    heads = model.config.num_attention_heads
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    wanted = min(-(-count // heads), len(data))
    chosen = np.random.Generator(np.random.PCG64(seed)).permutation(len(data))[:wanted]
    found: list[list[tuple[NDArray[np.int64], Numbers, int]]] = [[] for _ in range(model.config.num_hidden_layers)]
    for done, index in enumerate(chosen, 1):
        (maps,) = attention_maps(model, [data[int(index)]])
        for layer, weights in enumerate(maps.weights):
            values = singular_values(weights)  # (heads, K)
            found[layer].append((rank(values, threshold), effective_rank(values), weights.shape[-1]))
        on_step(done, wanted)
    return [_joined(layer, parts, count) for layer, parts in enumerate(found)]


def _joined(layer: int, parts: Sequence[tuple[NDArray[np.int64], Numbers, int]], count: int) -> RankDistribution:
    return RankDistribution(
        layer,
        np.concatenate([ranks for ranks, _, _ in parts])[:count],
        np.concatenate([effective for _, effective, _ in parts])[:count],
        np.concatenate([np.full(len(ranks), length) for ranks, _, length in parts])[:count],
    )
