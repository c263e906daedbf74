"""The rank of attention matrices: singular values from 10^-6 (Section 3.3).

In float64: a float32 decomposition errs by 10^-7, near the threshold.
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
    """The ranks of sampled attention matrices of one layer."""

    layer: int  # from 0
    ranks: NDArray[np.int64]  # of each matrix
    effective: Numbers  # effective rank of each
    lengths: NDArray[np.int64]  # rows of each


def singular_values(weights: Map) -> Numbers:
    """Singular values of matrices (..., L, S), largest first."""
    import torch  # several times faster than NumPy here

    matrices = torch.from_numpy(np.asarray(weights)).double()
    values: Numbers = torch.linalg.svdvals(matrices).numpy()
    return values


def rank(values: Numbers, threshold: float = THRESHOLD) -> NDArray[np.int64]:
    """The number of s_k >= threshold, of (..., K)."""
    return (values >= threshold).sum(-1)


def effective_rank(values: Numbers) -> Numbers:
    """exp(-sum_k p_k log p_k), p_k = s_k / sum s (Roy, Vetterli 2007).

    1 for identical rows, N for a permutation; it has no threshold.
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
    """The ranks of attention matrices of random examples (Fig. 2 right, Fig. 6).

    Args:
        count: Matrices per layer, at most; an example has one per head.
        threshold: The smallest singular value that counts.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    total = min(-(-count // model.config.num_attention_heads), len(data))
    generator = np.random.Generator(np.random.PCG64(seed))
    chosen = generator.permutation(len(data))[:total]
    num_layers = model.config.num_hidden_layers
    samples: list[list[tuple[Any, ...]]] = [[] for _ in range(num_layers)]
    for done, index in enumerate(chosen, 1):
        (maps,) = attention_maps(model, [data[int(index)]])
        for layer, weights in zip(samples, maps.weights, strict=True):
            values = singular_values(weights)  # (heads, K)
            lengths = np.full(len(weights), weights.shape[-1])
            layer.append((rank(values, threshold), effective_rank(values), lengths))
        on_step(done, total)
    distributions = []
    for number, layer in enumerate(samples):
        parts = (np.concatenate(part)[:count] for part in zip(*layer, strict=True))
        distributions.append(RankDistribution(number, *parts))
    return distributions
