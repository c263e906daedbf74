"""The rank of attention matrices as the paper defines it: singular values of 10^-6 and more (Section 3.3).

The weights are float32, whose rounding of entries near 1/N adds singular values of about 10^-9. The decomposition is
in float64: in float32 its own error, 10^-7 of the largest value, would reach the threshold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mgk.analysis.attention_maps import Example, Map, attention_maps

THRESHOLD = 1e-6
Numbers = NDArray[np.float64]


class Examples(Protocol):
    """A data set of :mod:`mgk.data`, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True)
class RankDistribution:
    """The ranks of sampled attention matrices of one layer.

    Attributes:
        layer: its index, from 0.
        ranks: how many singular values reach the threshold, per matrix.
        effective: the effective rank of each matrix.
        lengths: N, the rows of each matrix, which bound its rank.
    """

    layer: int
    ranks: NDArray[np.int64]
    effective: Numbers
    lengths: NDArray[np.int64]


def singular_values(weights: Map) -> Numbers:
    """The singular values of matrices (..., L, S), largest first, in float64."""
    import torch  # several times faster than NumPy here

    values: Numbers = torch.linalg.svdvals(torch.from_numpy(np.asarray(weights)).double()).numpy()
    return values


def rank(values: Numbers, threshold: float = THRESHOLD) -> NDArray[np.int64]:
    """The number of s_k >= threshold among singular values (..., K)."""
    return (values >= threshold).sum(-1)


def effective_rank(values: Numbers) -> Numbers:
    """exp(-sum_k p_k log p_k), p_k = s_k / sum s, of singular values (..., K) (Roy and Vetterli 2007).

    1 for a matrix with identical rows, N for a permutation. Unlike the rank it does not depend on a threshold.
    """
    total = values.sum(-1, keepdims=True)
    p = values / np.where(total > 0, total, 1.0)
    ranks: Numbers = np.exp(-(p * np.log(np.where(p > 0, p, 1.0))).sum(-1))
    return ranks


def rank_distributions(
    model: Any,
    data: Examples,
    *,
    count: int = 1000,
    threshold: float = THRESHOLD,
    seed: int = 0,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> list[RankDistribution]:
    """The ranks of ``count`` attention matrices of every layer, of randomly drawn examples (Fig. 2 right, Fig. 6).

    Args:
        model: one of :mod:`mgk.models`.
        data: as :func:`mgk.data.load` gives it.
        count: matrices per layer; an example has one per head. Data with fewer examples gives fewer.
        threshold: the smallest singular value that counts.
        seed: of the draw.
        on_step: called with the number of examples that are done and their total.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    total = min(-(-count // model.config.num_attention_heads), len(data))
    chosen = np.random.Generator(np.random.PCG64(seed)).permutation(len(data))[:total]
    samples: list[list[tuple[NDArray[np.int64], Numbers, NDArray[np.int64]]]]
    samples = [[] for _ in range(model.config.num_hidden_layers)]
    for done, index in enumerate(chosen, 1):
        (maps,) = attention_maps(model, [data[int(index)]])
        for layer, weights in zip(samples, maps.weights, strict=True):
            values = singular_values(weights)  # (heads, K)
            lengths = np.full(len(weights), weights.shape[-1])
            layer.append((rank(values, threshold), effective_rank(values), lengths))
        on_step(done, total)
    return [
        RankDistribution(number, *(np.concatenate(part)[:count] for part in zip(*layer, strict=True)))
        for number, layer in enumerate(samples)
    ]
