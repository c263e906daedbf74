"""What the kernels are specialised for, and the groups of arguments that they take."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Spec:
    """The compile-time arguments of a kernel."""

    mixtures: int  # M
    key_mixtures: int  # M, or 1 where all components share the product of query and key
    width: int  # D
    value_width: int  # E
    padded_width: int  # D and E as powers of two of at least 16, which the products of tiles need
    padded_value_width: int
    bias_rows: int  # of the key bias
    query_tile: int
    key_tile: int
    splits_columns: bool = False  # whether the warps of a program share the columns of a tile too
    mixes_exp2: bool = False  # whether some exponentials of the first component are polynomials
    owns_keys: bool = False  # whether programs own keys, not queries
    keys_first: bool = False  # whether the rows of a tile are keys
    is_shifted: bool = False
    is_hard: bool = False
    is_varying: bool = False  # whether sigma^2 differs between the keys that a query sees
    is_dot: bool = False
    mask: str = "none"  # "none", "bool" or "float"
    has_left: bool = False
    has_right: bool = False
    has_segments: bool = False
    has_dead_keys: bool = False  # whether a key mask or a prior of positions may remove keys
    has_dropout: bool = False
    needs_variance_grad: bool = False
    needs_mask_grad: bool = False
    has_query_mask: bool = False
    has_shifts: bool = False
    has_prior: bool = False
    has_bias: bool = True  # whether the keys have a bias; not those of softmax attention
    centre: str = "mean"  # "mean" of the living keys, or the "first" of them
    keeps_small: bool = False  # whether inputs near 0 are not centred
    checks_values: bool = False  # whether some queries do not see all values, which may then hold anything
    precision: str = "ieee"  # of products of float32 tensors
    max_spread: float = 60.0  # the largest spread over r, in base 2, at which the rank-M factor is used


class Features(NamedTuple):
    """s_ijr = log2(e) (least + excess_jr) query_i . keys_jr + query_bias_ir + query_norm_i excess_jr + key_bias_jr.

    All but query and keys are in float32. Shifted keys have more rows behind the M biases: M factors 2^(bias_r - top)
    with top = max_r bias_r, the largest spread top - min_r bias_r among 32 positions, and for the keys top itself.
    """

    query: Any  # q - c (B, Hq, L, D)
    keys: Any  # k - c (B, H, M, S, D), or (B, H, 1, S, D) if shifted
    key_bias: Any  # (B, H, M or 2 M + 2, S); -inf: the key is dead, NaN: the key or its value is not finite
    query_norm: Any  # -log2(e) |q_i - c|^2 / 2 (B, Hq, L) if variances vary, else what lse_i adds to the scores
    least: Any  # least 1 / sigma_jr^2 of a head (B, H): what the excess leaves out
    query_bias: Any  # less its largest component (B, Hq, 2 M + 1, L); shifted keys only
    excess: Any  # 1 / sigma_jr^2 - least (B, H, M, S); varying variances only


class Rows(NamedTuple):
    """P_ijr = 2^(s_ijr - row_max_i) / row_sum_i, all (B, Hq, L), float32."""

    row_max: Any  # +inf for a query with no key left
    inverse_sum: Any  # 1 / row_sum_i
    delta: Any  # sum_j A_ij dA_ij, less the gradient of lse_i, over row_sum_i


class Strided(NamedTuple):
    """A tensor and the strides of its first four dimensions, 0 where it is broadcast; features lie side by side.

    They are (B, H, M, S) of a prior or a variance, with D behind for keys, (B, H, 1, S, E) of a value and
    (B, Hq, L, S) of a mask.
    """

    pointer: Any
    batch: Any
    head: Any
    third: Any
    last: Any


class Sizes(NamedTuple):
    """Query i is at position i + offset and sees keys from -left to +right."""

    heads: Any  # H, of the keys
    groups: Any  # Hq / H
    num_queries: Any
    num_keys: Any
    offset: Any  # S - L
    left: Any
    right: Any
    segments: Any  # first and last + 1 position of each position's segment (B, 2, S), int32


class Dropout(NamedTuple):
    """Weights with 32 random bits below ``threshold`` are dropped, others scaled."""

    seed: Any  # (1,), int64
    threshold: Any
    scale: Any


class Inputs(NamedTuple):
    """What the features are made of."""

    query: Strided  # (B, Hq, 1, L, D)
    keys: Strided
    value: Strided
    log_prior: Strided
    variance: Strided
    shifts: Any  # (H, M, D)
    least: Any
    sizes: Sizes


class KernelInputs(NamedTuple):
    """The inputs of the forward and backward kernels."""

    features: Features
    value: Strided  # (B, H, 1, S, E)
    mask: Strided  # (B, Hq, L, S), a bool mask as bytes
    sizes: Sizes
    dropout: Dropout
