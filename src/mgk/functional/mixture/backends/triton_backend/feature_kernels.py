"""Kernels of the features: centred, scaled and rounded once.

In base 2 and up to a term of i alone, with query = q - c and keys = k - c:

    s_ijr = log2(e) query_i . keys_jr / sigma_jr^2 + key_bias_jr,
    key_bias = log2(e) (log pi - |k - c|^2 / (2 sigma^2))

With variances that differ the norm of the query adds query_norm_i excess_jr. Shifted keys: k_j + b_r - c enters the key
bias, and query_bias_ir = log2(e) query_i . b_r / sigma^2. The products of half-precision tensors are those of the
inputs themselves unless they lie far from 0: only then a centre is worth its rounding.
Dead keys are zeros with a bias of -inf. Keys that are not finite, or whose value is not, are zeros with a bias of NaN,
which reaches the queries that see them and no others.
"""

import triton
import triton.language as tl

from mgk.functional.mixture.backends.triton_backend.pairs import (
    LOG2E,
    NEG_INF,
    SWAMPING,
    add_log,
    head_of,
    load_rows,
    load_vector,
    store_rows,
)

# |c|^2 / (2 sigma^2) below which the first key is no better a centre than 0.
SMALL_SCORE = tl.constexpr(16.0)
# Positions that share one spread.
SPREAD_BLOCK = tl.constexpr(32)
LARGEST_HALF = tl.constexpr(65504.0)


@triton.jit
def _prior(inputs, b, h, r, j):
    """Log pi_jr."""
    at = head_of(inputs.log_prior, b, h) + r * inputs.log_prior.third
    return tl.load(at + j * inputs.log_prior.last, mask=j < inputs.sizes.num_keys, other=NEG_INF).to(tl.float32)


@triton.jit
def _is_alive(inputs, b, h, j, spec: tl.constexpr):
    """Whether a component of the key is left."""
    alive = j < inputs.sizes.num_keys
    if spec.has_dead_keys:
        top = _prior(inputs, b, h, 0, j)
        for r in tl.static_range(1, spec.mixtures):
            top = tl.maximum(top, _prior(inputs, b, h, r, j))
        alive = alive & (top > NEG_INF)
    return alive


@triton.jit
def _raw_keys(inputs, b, h, r, j, spec: tl.constexpr):
    """k_jr (S, D) in float32, from where it lies."""
    keys, num_keys = inputs.keys, inputs.sizes.num_keys
    at = head_of(keys, b, h) + r * keys.third
    return load_rows(at, keys.last, j, num_keys, spec.width, spec.padded_width, False).to(tl.float32)


@triton.jit
def _shift(inputs, h, r, spec: tl.constexpr):
    """b_r (D,), or 0 without shifts."""
    d = tl.arange(0, spec.padded_width)
    if spec.has_shifts:
        at = inputs.shifts + (h * spec.mixtures + r) * spec.width
        shift = load_vector(at, d, spec.width, 0.0, False).to(tl.float32)
    else:
        shift = tl.zeros([spec.padded_width], tl.float32)
    return shift


@triton.jit
def mean_shift(inputs, h, spec: tl.constexpr):
    """The mean of b_r over r (D,), part of the centre; 0 for the dot kernel."""
    total = tl.zeros([spec.padded_width], tl.float32)
    if not spec.is_dot:
        for r in tl.static_range(spec.mixtures):
            total += _shift(inputs, h, r, spec)
    return total / spec.mixtures


@triton.jit
def centres(centre, inputs, spec: tl.constexpr):
    """The mean of a head's living keys; under causality the first of them."""
    bk = tl.program_id(0).to(tl.int64)
    b, h = bk // inputs.sizes.heads, bk % inputs.sizes.heads
    total = tl.zeros([spec.padded_width], tl.float32)
    count = 0.0
    start = 0
    stop = inputs.sizes.num_keys
    while start < stop:
        j = start + tl.arange(0, spec.key_tile)
        mean = _raw_keys(inputs, b, h, 0, j, spec)
        for r in tl.static_range(1, spec.key_mixtures):
            mean += _raw_keys(inputs, b, h, r, j, spec)
        mean = mean / spec.key_mixtures
        is_finite = tl.min((tl.abs(mean) < float("inf")).to(tl.int32), 1) == 1
        alive = _is_alive(inputs, b, h, j, spec) & is_finite
        if spec.centre == "first":
            alive = alive & (j == tl.min(tl.where(alive, j, inputs.sizes.num_keys), 0))
        total += tl.sum(tl.where(alive[:, None], mean, 0.0), 0)
        count += tl.sum(alive.to(tl.float32), 0)
        start += spec.key_tile
        if spec.centre == "first":
            stop = tl.where(count > 0.0, start, stop)
    total = total / tl.maximum(count, 1.0)
    if spec.keeps_small:
        removed = tl.sum(total * total, 0) * 0.5 * tl.load(inputs.least + bk)
        total = tl.where(removed > SMALL_SCORE, total, 0.0)
    total = total.to(inputs.keys.pointer.dtype.element_ty).to(tl.float32)
    tl.store(centre + bk * spec.padded_width + tl.arange(0, spec.padded_width), total)


@triton.jit
def _rounded(x, pointer):
    """``x`` in the dtype of the features; float16 saturates."""
    if pointer.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -LARGEST_HALF), LARGEST_HALF)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def _load_centre(centre, bk, spec: tl.constexpr):
    return tl.load(centre + bk * spec.padded_width + tl.arange(0, spec.padded_width))


@triton.jit
def query_features(features, centre, inputs, spec: tl.constexpr):
    """The query's features, its norm, and its products with the shifts."""
    sizes, num_queries = inputs.sizes, inputs.sizes.num_queries
    bh = tl.program_id(1).to(tl.int64)
    heads = sizes.heads * sizes.groups
    b, h = bh // heads, bh % heads
    kh = h // sizes.groups
    bk = b * sizes.heads + kh
    i = tl.program_id(0) * spec.query_tile + tl.arange(0, spec.query_tile)
    q = load_rows(
        head_of(inputs.query, b, h), inputs.query.last, i, num_queries, spec.width, spec.padded_width, False
    ).to(tl.float32)
    norm = tl.zeros([spec.query_tile], tl.float32)
    least = tl.load(inputs.least + bk)
    if not spec.is_dot:
        q -= _load_centre(centre, bk, spec)[None, :]
        q -= mean_shift(inputs, kh, spec)[None, :]
        norm = tl.sum(q * q, 1) * (-0.5 * LOG2E)
        if not spec.is_varying:
            norm = norm * least
    at, inside = bh * num_queries + i, i < num_queries
    out = features.query + bh * num_queries * spec.width
    store_rows(out, _rounded(q, features.query), i, num_queries, spec.width, spec.padded_width)
    if spec.is_shifted:
        top = _query_bias(q, kh, 0, least, inputs, spec)
        bottom = top
        for r in tl.static_range(1, spec.mixtures):
            bias = _query_bias(q, kh, r, least, inputs, spec)
            top = tl.maximum(top, bias)
            bottom = tl.minimum(bottom, bias)
        norm += top
        biases = features.query_bias + bh * (2 * spec.mixtures + 1) * num_queries + i
        for r in tl.static_range(spec.mixtures):
            bias = _query_bias(q, kh, r, least, inputs, spec) - top
            tl.store(biases + r * num_queries, bias, mask=inside)
            tl.store(biases + (spec.mixtures + r) * num_queries, tl.exp2(bias), mask=inside)
        spread = _spread(top, bottom, inside, spec.query_tile)
        tl.store(biases + 2 * spec.mixtures * num_queries, spread, mask=inside)
    tl.store(features.query_norm + at, norm, mask=inside)


@triton.jit
def _query_bias(q, h, r, least, inputs, spec: tl.constexpr):
    """log2(e) q_i . b_r / sigma^2."""
    return tl.sum(q * (_shift(inputs, h, r, spec) - mean_shift(inputs, h, spec))[None, :], 1) * (least * LOG2E)


@triton.jit
def _spread(top, bottom, inside, size: tl.constexpr):
    """The largest top - bottom of 32 positions, dead and NaN ones aside."""
    spread = tl.where(inside & (top > NEG_INF), top - bottom, 0.0)
    blocks = tl.max(tl.reshape(spread, [size // SPREAD_BLOCK, SPREAD_BLOCK]), 1)
    return tl.reshape(tl.broadcast_to(blocks[:, None], [size // SPREAD_BLOCK, SPREAD_BLOCK]), [size])


@triton.jit
def key_features(features, value_out, centre, inputs, spec: tl.constexpr):
    """The keys' features and biases; values are zeros where the key is dead."""
    sizes, num_keys = inputs.sizes, inputs.sizes.num_keys
    bk = tl.program_id(1).to(tl.int64)
    b, h = bk // sizes.heads, bk % sizes.heads
    j = tl.program_id(0) * spec.key_tile + tl.arange(0, spec.key_tile)
    inside = j < num_keys
    alive = _is_alive(inputs, b, h, j, spec)
    is_bad = tl.zeros([spec.key_tile], tl.int32)
    if spec.checks_values:
        v = head_of(inputs.value, b, h)
        v = load_rows(v, inputs.value.last, j, num_keys, spec.value_width, spec.padded_value_width, False)
        is_bad = tl.max((tl.abs(v.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, 1)
        if spec.has_dead_keys:
            v = tl.where((alive & (is_bad == 0))[:, None], v, 0.0)
            at = value_out + bk * num_keys * spec.value_width
            store_rows(at, v, j, num_keys, spec.value_width, spec.padded_value_width)
    origin = tl.zeros([spec.padded_width], tl.float32)
    if not spec.is_dot:
        origin = _load_centre(centre, bk, spec)
    for r in tl.static_range(spec.key_mixtures):
        k = _raw_keys(inputs, b, h, r, j, spec)
        if not spec.is_shifted:
            k += _shift(inputs, h, r, spec)[None, :]
        is_bad = tl.maximum(is_bad, tl.max((tl.abs(k) < float("inf")).to(tl.int32) ^ 1, 1))
    is_used = alive & (is_bad == 0)
    least = tl.load(inputs.least + bk)
    mean = mean_shift(inputs, h, spec)
    biases = features.key_bias + bk * spec.bias_rows * num_keys + j
    if spec.is_shifted:
        k = tl.where(is_used[:, None], _raw_keys(inputs, b, h, 0, j, spec) - origin[None, :], 0.0)
        k = _rounded(k, features.keys)
        store_rows(features.keys + bk * num_keys * spec.width, k, j, num_keys, spec.width, spec.padded_width)
        k = k.to(tl.float32)
        top = tl.full([spec.key_tile], NEG_INF, tl.float32)
        bottom = top
        for r in tl.static_range(spec.mixtures):
            x = k + (_shift(inputs, h, r, spec) - mean)[None, :]
            bias = tl.sum(x * x, 1) * (-0.5 * LOG2E * least)
            bias = _key_bias(bias, b, h, r, j, alive, is_bad, inputs, spec)
            tl.store(biases + r * num_keys, bias, mask=inside)
            top = bias if r == 0 else tl.maximum(top, bias)
            bottom = bias if r == 0 else tl.minimum(bottom, bias)
        for r in tl.static_range(spec.mixtures):
            x = k + (_shift(inputs, h, r, spec) - mean)[None, :]
            bias = tl.sum(x * x, 1) * (-0.5 * LOG2E * least)
            bias = _key_bias(bias, b, h, r, j, alive, is_bad, inputs, spec)
            factor = tl.exp2(tl.where(top > NEG_INF, bias - top, 0.0))
            tl.store(biases + (spec.mixtures + r) * num_keys, factor, mask=inside)
        # beside such a bias the products with the shifts round away, beside a factor they would not
        bottom = tl.where(tl.abs(top) > SWAMPING, NEG_INF, bottom)
        spread = _spread(top, bottom, inside, spec.key_tile)
        tl.store(biases + 2 * spec.mixtures * num_keys, spread, mask=inside)
        tl.store(biases + (2 * spec.mixtures + 1) * num_keys, top, mask=inside)
    else:
        for r in tl.static_range(spec.mixtures):
            inverse = tl.zeros([spec.key_tile], tl.float32) + least
            if spec.is_varying:
                variance = head_of(inputs.variance, b, h) + r * inputs.variance.third
                inverse = 1.0 / tl.load(variance + j * inputs.variance.last, mask=inside, other=1.0).to(
                    tl.float32
                )
                row = (bk * spec.mixtures + r) * num_keys
                tl.store(features.excess + row + j, tl.where(is_used, inverse - least, 0.0), mask=inside)
            k = _raw_keys(inputs, b, h, r, j, spec) + (_shift(inputs, h, r, spec) - mean - origin)[None, :]
            k = _rounded(tl.where(is_used[:, None], k, 0.0), features.keys)
            row = (bk * spec.mixtures + r) * num_keys
            store_rows(features.keys + row * spec.width, k, j, num_keys, spec.width, spec.padded_width)
            bias = tl.zeros([spec.key_tile], tl.float32)
            if not spec.is_dot:
                k = k.to(tl.float32)
                bias = tl.sum(k * k, 1) * (-0.5 * LOG2E) * inverse
            bias = _key_bias(bias, b, h, r, j, alive, is_bad, inputs, spec)
            tl.store(biases + r * num_keys, bias, mask=inside)


@triton.jit
def _key_bias(bias, b, h, r, j, alive, is_bad, inputs, spec: tl.constexpr):
    """``log2(e) log pi_jr`` plus the bias; -inf if dead, NaN if not finite."""
    if spec.has_prior:
        bias = add_log(bias, _prior(inputs, b, h, r, j))
    bias = tl.where(is_bad == 1, float("nan"), bias)
    return tl.where(alive, bias, NEG_INF)
