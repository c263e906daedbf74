"""The spread of scores at initialisation (docs/initialisation.md)."""

import math

from mgk import variants
from mgk.variants import VARIANTS


def key_variance(embed_dim: int, num_heads: int, head_dim: int, init: str | float = "paper") -> float:
    """Var(q_m) = d Var(w) = v, where the inputs have variance 1.

    The paper's is Glorot's over d inputs and H D outputs, v = 2 d / (d + H D).
    """
    if init == "paper":
        return 2 * embed_dim / (embed_dim + num_heads * head_dim)
    return variants.NARROW_SCORE_STD if isinstance(init, str) else init


def score_std(
    variant: str,
    *,
    embed_dim: int,
    num_heads: int,
    head_dim: int,
    num_mixtures: int = variants.DEFAULT_NUM_MIXTURES,
    kernel: str = variants.DEFAULT_KERNEL,
    init: str | float = "paper",
) -> float:
    """The standard deviation over keys of a query's scores.

    - q.k / sqrt(D): v.
    - -|q - k|^2 / (2 sqrt(D)): sqrt(3/2) v.
    - the same with shifts of variance t, 1 in the paper, else v: sqrt(3/2 v^2 + v t).
    - linear attention, weights relative to their mean, small v: sqrt(v (1 + v) / D).

    Of mixtures it is that of the mean over components: terms of independent components are
    divided by M.
    """
    spec = VARIANTS[variant]
    components = spec.num_components(num_mixtures)
    v = key_variance(embed_dim, num_heads, head_dim, init)
    shift = (1.0 if init == "paper" else v) if spec.is_shifted else 0.0
    independent = 1 if spec.is_shifted else components  # shared projection
    if spec.is_linear:
        return math.sqrt(v * (1 + v) / head_dim / independent)
    if variant == "softmax" or kernel == "dot":
        return v / math.sqrt(independent)
    return math.sqrt(1.5 * v**2 / independent + v * shift / components)
