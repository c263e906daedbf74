"""Decoding: a program owns a chunk of the cached keys; a second kernel joins them.

Keys and values are read once, where they lie in the cache. The distance is taken directly, |q - b_r - k_j|^2, so that
no feature, centre or bias is made; shifted keys read one key a token.
"""

import triton
import triton.language as tl

from mgk.functional.mixture.backends.triton_backend.pairs import (
    LN2,
    LOG2E,
    NEG_INF,
    add_log,
    finite_or_zero,
    head_of,
    load_vector,
)


@triton.jit
def _key_vector(x, b, h, r, j, inside, other):
    """An entry (B, H, M, S) of a prior or a variance at the keys j."""
    return tl.load(head_of(x, b, h) + r * x.third + j * x.last, mask=inside, other=other).to(tl.float32)


@triton.jit
def _scores(r, q, k, j, inside, b, hk, inputs, spec: tl.constexpr):
    """s_ijr in base 2."""
    if spec.has_shifts:
        d = tl.arange(0, spec.padded_width)
        at = inputs.shifts + (hk * spec.mixtures + r) * spec.width
        shift = load_vector(at, d, spec.width, 0.0, False).to(tl.float32)
        k = k + shift[None, :]
    if spec.is_dot:
        s = tl.sum(q[None, :] * k, 1)
    else:
        x = q[None, :] - k
        s = -0.5 * tl.sum(x * x, 1)
    s = s / _key_vector(inputs.variance, b, hk, r, j, inside, 1.0) * LOG2E
    if spec.has_prior:
        s = add_log(s, _key_vector(inputs.log_prior, b, hk, r, j, inside, NEG_INF))
    return s


@triton.jit
def decode(partial, partial_max, partial_sum, mask, inputs, per_chunk, spec: tl.constexpr):
    """The numerator, maximum and sum of one query over one chunk of keys."""
    sizes, num_keys = inputs.sizes, inputs.sizes.num_keys
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    heads = sizes.heads * sizes.groups
    b, h = bh // heads, bh % heads
    hk = h // sizes.groups
    d = tl.arange(0, spec.padded_width)
    q = load_vector(head_of(inputs.query, b, h), d, spec.width, 0.0, False).to(tl.float32)
    lo = chunk * per_chunk
    hi = tl.minimum(lo + per_chunk, num_keys)
    first, stop = 0, num_keys
    if spec.has_left:
        first = tl.maximum(first, sizes.offset - sizes.left)
    if spec.has_right:
        stop = tl.minimum(stop, sizes.offset + sizes.right + 1)
    if spec.has_segments:
        at = sizes.segments + b * 2 * num_keys + sizes.offset
        first = tl.maximum(first, tl.load(at))
        stop = tl.minimum(stop, tl.load(at + num_keys))
    acc = tl.zeros([spec.padded_value_width], tl.float32)
    total = 0.0
    peak = NEG_INF + 0.0
    for start in range(lo, hi, spec.key_tile):
        j = start + tl.arange(0, spec.key_tile)
        inside = (j < hi) & (j >= first) & (j < stop)
        extra = tl.zeros([spec.key_tile], tl.float32)
        if spec.mask == "bool":
            inside = inside & (tl.load(head_of(mask, b, h) + j * mask.last, mask=inside, other=0) != 0)
        if spec.mask == "float":
            extra = tl.load(head_of(mask, b, h) + j * mask.last, mask=inside, other=NEG_INF).to(tl.float32)
            inside = inside & (extra > NEG_INF)
        if spec.has_dead_keys:
            top = _key_vector(inputs.log_prior, b, hk, 0, j, inside, NEG_INF)
            for r in tl.static_range(1, spec.mixtures):
                top = tl.maximum(top, _key_vector(inputs.log_prior, b, hk, r, j, inside, NEG_INF))
            inside = inside & (top > NEG_INF)
        if tl.max(inside.to(tl.int32), 0) > 0:
            best = tl.full([spec.key_tile], NEG_INF, tl.float32)
            weights = tl.zeros([spec.key_tile], tl.float32)
            k = _cache_rows(inputs.keys, b, hk, 0, j, inside, spec.width, spec.padded_width)
            for r in tl.static_range(spec.mixtures):
                if r > 0 and spec.key_mixtures > 1:
                    k = _cache_rows(inputs.keys, b, hk, r, j, inside, spec.width, spec.padded_width)
                s = _scores(r, q, k, j, inside, b, hk, inputs, spec)
                new_best = tl.maximum(best, s)
                if not spec.is_hard:
                    safe = finite_or_zero(new_best)
                    weights = weights * tl.exp2(best - safe) + tl.exp2(s - safe)
                best = new_best
            if spec.is_hard:
                weights += 1.0
            if spec.mask == "float":
                best = add_log(best, extra)
            best = tl.where(inside, best, NEG_INF)
            new_peak = tl.maximum(peak, tl.max(best, 0))
            safe = finite_or_zero(new_peak)
            weights = tl.where(inside, weights * tl.exp2(best - safe), 0.0)
            decay = tl.exp2(peak - safe)
            total = total * decay + tl.sum(weights, 0)
            v = _cache_rows(inputs.value, b, hk, 0, j, inside, spec.value_width, spec.padded_value_width)
            acc = acc * decay + tl.sum(weights[:, None] * v, 0)
            peak = new_peak
    at = bh * tl.num_programs(0) + chunk
    tl.store(partial + at * spec.padded_value_width + tl.arange(0, spec.padded_value_width), acc)
    tl.store(partial_max + at, peak)
    tl.store(partial_sum + at, total)


@triton.jit
def _cache_rows(x, b, h, r, j, inside, width: tl.constexpr, padded: tl.constexpr):
    """Rows of the cache in float32; those that do not take part are not read."""
    column = tl.arange(0, padded)
    at = head_of(x, b, h) + r * x.third + j[:, None].to(tl.int64) * x.last + column[None, :]
    return tl.load(at, mask=inside[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def join_chunks(
    out, lse, partial, partial_max, partial_sum, num_chunks, chunks: tl.constexpr, spec: tl.constexpr
):
    """H = sum_c 2^(m_c - m) o_c / sum_c 2^(m_c - m) l_c."""
    bh = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, chunks)
    e = tl.arange(0, spec.padded_value_width)
    inside = c < num_chunks
    peaks = tl.load(partial_max + bh * num_chunks + c, mask=inside, other=NEG_INF)
    sums = tl.load(partial_sum + bh * num_chunks + c, mask=inside, other=0.0)
    peak = tl.max(peaks, 0)
    weights = tl.exp2(peaks - finite_or_zero(peak))
    total = tl.sum(sums * weights, 0)
    at = partial + (bh * num_chunks + c)[:, None] * spec.padded_value_width + e[None, :]
    acc = tl.sum(tl.load(at, mask=inside[:, None], other=0.0) * weights[:, None], 0)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    tl.store(out + bh * spec.value_width + e, (acc / total).to(out.dtype.element_ty), mask=e < spec.value_width)
    tl.store(lse + bh, tl.where(is_empty, NEG_INF, (peak + tl.log2(total)) * LN2))
