"""The forward kernel: online softmax in base 2, M scores and one value product per pair.

m <- max(m, s), p_ij = sum_r 2^(s_ijr - m_i), l <- l 2^(m_old - m) + sum_j p_ij, o likewise with p_ij v_j; h = o / l.
Shifted keys have one product for all r: p_ij = 2^(base_ij - m_i) sum_r u_ir w_jr with u_ir = 2^(a_ir - max_r a_ir) and
w_jr alike, where neither spread over r is so large that the sum could underflow; else M exponentials.
"""

import triton
import triton.language as tl

from mgk.functional.mixture.backends.triton_backend.pairs import (
    LN2,
    LOG2E,
    NEG_INF,
    apply_mask,
    component_scores,
    dropout_factors,
    finite,
    finite_or_zero,
    head_of,
    key_range,
    load_rows,
    load_vector,
    product,
    segment_of,
    store_rows,
    zero_tile,
)

# Positions that share one spread.
SPREAD_BLOCK = tl.constexpr(32)
# 1.5 * 2^23: a float32 near 0 added to it is an integer in its last bits.
ROUNDS_TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def key_row(row, j, bk, call, other, full: tl.constexpr, spec: tl.constexpr):
    """A row of the key bias at the keys j."""
    at = call.features.key_bias + (bk * spec.bias_rows + row) * call.sizes.num_keys
    return load_vector(at, j, call.sizes.num_keys, other, full)


@triton.jit
def query_row(row, i, bh, call, full: tl.constexpr, spec: tl.constexpr):
    """A row of the query bias at the queries i."""
    at = call.features.query_bias + (bh * (2 * spec.mixtures + 1) + row) * call.sizes.num_queries
    return load_vector(at, i, call.sizes.num_queries, 0.0, full)


@triton.jit
def is_factored(first_query, first_key, bh, bk, call, spec: tl.constexpr):
    """Whether sum_r u_ir w_jr, at least 2^-(the smaller spread), keeps its precision in the tile."""
    if spec.mask == "float":  # beside a large mask the scores of all components round alike, a factor would not
        result = False
    elif spec.max_spread == float("inf"):
        result = True
    else:
        a_spread = query_row(2 * spec.mixtures, first_query, bh, call, False, spec)
        for n in tl.static_range(SPREAD_BLOCK, spec.query_tile, SPREAD_BLOCK):
            spread = query_row(2 * spec.mixtures, first_query + n, bh, call, False, spec)
            a_spread = tl.maximum(a_spread, spread)
        b_spread = key_row(2 * spec.mixtures, first_key, bk, call, 0.0, False, spec)
        for n in tl.static_range(SPREAD_BLOCK, spec.key_tile, SPREAD_BLOCK):
            spread = key_row(2 * spec.mixtures, first_key + n, bk, call, 0.0, False, spec)
            b_spread = tl.maximum(b_spread, spread)
        result = (tl.minimum(a_spread, b_spread) <= spec.max_spread) & (b_spread < float("inf"))
    return result


@triton.jit
def has_keys(start, bk, call, spec: tl.constexpr):
    """Whether a key of the tile is alive."""
    if spec.has_dead_keys:
        j = start + tl.arange(0, spec.key_tile)
        top = key_row(0, j, bk, call, NEG_INF, False, spec)
        for r in tl.static_range(1, spec.mixtures):
            top = tl.maximum(top, key_row(r, j, bk, call, NEG_INF, False, spec))
        result = tl.max((top != NEG_INF).to(tl.int32), 0) > 0
    else:
        result = True
    return result


@triton.jit
def load_component(r, j, bk, call, full: tl.constexpr, spec: tl.constexpr):
    """Keys, bias and excess of one component; the keys that all share if they are shifted."""
    features, num_keys = call.features, call.sizes.num_keys
    bias = j
    if spec.has_bias:
        bias = key_row(r, j, bk, call, NEG_INF, full, spec)
    excess = bias
    if spec.is_varying:
        excess = load_vector(features.excess + (bk * spec.mixtures + r) * num_keys, j, num_keys, 0.0, full)
    keys = features.keys + (bk * spec.key_mixtures + r) * num_keys * spec.width
    return load_rows(keys, spec.width, j, num_keys, spec.width, spec.padded_width, full), bias, excess


@triton.jit
def _masked(s, own, j, place, call, full: tl.constexpr, spec: tl.constexpr):
    """The scores with the mask added, and -inf for pairs that do not take part."""
    _, _, _, i, first, stop = own
    b, h, _, _ = place
    return apply_mask(s, i, j, b, h, first, stop, call.mask, call.sizes, full, spec)


@triton.jit
def _shared_scores(own, j, bk, call, full: tl.constexpr, spec: tl.constexpr):
    """log2(e) q_i . k_j / sigma^2, the part of the score that shifted components share."""
    k, bias, excess = load_component(0, j, bk, call, full, spec)
    return product(own[0], tl.trans(k), zero_tile(spec), spec) * (own[2] * LOG2E)


@triton.jit
def _shifted_weights(peak, own, start, j, place, call, full: tl.constexpr, spec: tl.constexpr):
    """p_ij, and the row's new maximum or a bound of it."""
    i = own[3]
    _, _, bh, bk = place
    base = _shared_scores(own, j, bk, call, full, spec)
    u = ()
    w = ()
    for r in tl.static_range(spec.mixtures):
        u = u + (query_row(spec.mixtures + r, i, bh, call, False, spec),)
        w = w + (key_row(spec.mixtures + r, j, bk, call, 0.0, full, spec),)
    if is_factored(tl.program_id(0) * spec.query_tile, start, bh, bk, call, spec):
        factor = zero_tile(spec)
        for r in tl.static_range(spec.mixtures):
            factor += u[r][:, None] * w[r][None, :]
        top = key_row(2 * spec.mixtures + 1, j, bk, call, NEG_INF, full, spec)
        s = _masked(base + top[None, :], own, j, place, call, full, spec)
        new_peak = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - finite_or_zero(new_peak)[:, None]) * factor
    else:
        new_peak = peak
        p = zero_tile(spec)
        for r in tl.static_range(spec.mixtures):
            a = query_row(r, i, bh, call, False, spec)
            b = key_row(r, j, bk, call, NEG_INF, full, spec)
            s = _masked(base + (a[:, None] + b[None, :]), own, j, place, call, full, spec)
            p, new_peak = _add_component(p, new_peak, s)
    return p, new_peak


@triton.jit
def polynomial_exp2(x):
    """2^x for x <= 0 by a cubic, to a relative 8e-5, at least 2^-126."""
    x = tl.maximum(x, -126.0)
    rounded = x + ROUNDS_TO_INTEGER
    f = x - (rounded - ROUNDS_TO_INTEGER)
    y = ((f * 0.05517155 + 0.24261136) * f + 0.69326102) * f + 0.99992806
    exponent = rounded.to(tl.int32, bitcast=True) << 23
    return (y.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


@triton.jit
def mixed_exp2(x):
    """2^x for x <= 0, an eighth of it by the polynomial: both units work."""
    rows: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    first, second = tl.split(tl.permute(tl.reshape(x, [rows, 2, half]), (0, 2, 1)))
    even, odd = tl.split(tl.reshape(second, [rows, half // 2, 2]))
    second = tl.reshape(tl.join(tl.exp2(even), polynomial_exp2(odd)), [rows, half])
    return tl.reshape(tl.permute(tl.join(tl.exp2(first), second), (0, 2, 1)), [rows, 2 * half])


@triton.jit
def _add_component(p, peak, s):
    """``p + 2^s`` relative to the new row maximum, and that maximum."""
    new_peak = tl.maximum(peak, tl.max(s, 1))
    safe = finite_or_zero(new_peak)
    return p * tl.exp2(peak - safe)[:, None] + tl.exp2(s - safe[:, None]), new_peak


@triton.jit
def _best_scores(own, j, place, call, full: tl.constexpr, spec: tl.constexpr):
    """max_r s_ijr before masks."""
    _, _, bh, bk = place
    if spec.is_shifted:
        best = (
            query_row(0, own[3], bh, call, False, spec)[:, None]
            + key_row(0, j, bk, call, NEG_INF, full, spec)[None, :]
        )
        for r in tl.static_range(1, spec.mixtures):
            a = query_row(r, own[3], bh, call, False, spec)
            b = key_row(r, j, bk, call, NEG_INF, full, spec)
            best = tl.maximum(best, a[:, None] + b[None, :])
        best += _shared_scores(own, j, bk, call, full, spec)
    else:
        best = _component(0, own, j, bk, call, full, spec)
        for r in tl.static_range(1, spec.mixtures):
            best = tl.maximum(best, _component(r, own, j, bk, call, full, spec))
    return best


@triton.jit
def _component(r, own, j, bk, call, full: tl.constexpr, spec: tl.constexpr):
    """s_ijr before masks."""
    k, bias, excess = load_component(r, j, bk, call, full, spec)
    return component_scores(own[0], k, bias, own[1], excess, own[2], spec)


@triton.jit
def _tile(state, start, own, place, call, full: tl.constexpr, spec: tl.constexpr):
    """The state (o, l, m) after a tile of keys."""
    acc, total, peak = state
    i = own[3]
    b, h, bh, bk = place
    j = start + tl.arange(0, spec.key_tile)
    new_peak = peak
    if spec.is_hard:
        s = _best_scores(own, j, place, call, full, spec)
        s = _masked(s, own, j, place, call, full, spec)
        new_peak = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - finite_or_zero(new_peak)[:, None])
    elif spec.is_shifted:
        p, new_peak = _shifted_weights(peak, own, start, j, place, call, full, spec)
    else:
        s = _component(0, own, j, bk, call, full, spec)
        s = _masked(s, own, j, place, call, full, spec)
        new_peak = tl.maximum(peak, tl.max(s, 1))
        s -= finite_or_zero(new_peak)[:, None]
        p = mixed_exp2(s) if spec.mixes_exp2 and full else tl.exp2(s)
        for r in tl.static_range(1, spec.mixtures):
            s = _component(r, own, j, bk, call, full, spec)
            s = _masked(s, own, j, place, call, full, spec)
            p, new_peak = _add_component(p, new_peak, s)
    decay = tl.exp2(peak - finite_or_zero(new_peak))
    total = total * decay + tl.sum(p, 1)
    if spec.has_dropout:
        p = p * dropout_factors(i, j, bh, call.dropout, spec)
    num_keys = call.sizes.num_keys
    value = head_of(call.value, b, bk - b * call.sizes.heads)
    v = load_rows(value, call.value.last, j, num_keys, spec.value_width, spec.padded_value_width, full)
    if not full:
        v = finite(v)
    acc = product(p.to(v.dtype), v, acc * decay[:, None], spec)
    return acc, total, new_peak


@triton.jit
def _tiles(state, lo, hi, own, place, call, full: tl.constexpr, spec: tl.constexpr):
    """The state after the tiles of keys in [lo, hi); tiles without a living key are skipped."""
    for start in range(lo, hi, spec.key_tile):
        if has_keys(start, place[3], call, spec):
            state = _tile(state, start, own, place, call, full, spec)
    return state


@triton.jit
def lse_constant(norm, least, spec: tl.constexpr):
    """What lse_i adds to the scores, in base 2: the part of them that is of i alone."""
    return norm * least if spec.is_varying else norm


@triton.jit
def forward(out, lse, row_max, row_sum, call, spec: tl.constexpr):
    """h_i = sum_j A_ij v_j (Eq. 10), lse_i, row maxima and sums; a program owns a tile of queries."""
    features, sizes, num_queries = call.features, call.sizes, call.sizes.num_queries
    tile = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    heads = sizes.heads * sizes.groups
    b, h = bh // heads, bh % heads
    bk = b * sizes.heads + h // sizes.groups
    i = tile * spec.query_tile + tl.arange(0, spec.query_tile)
    row = bh * num_queries
    query = features.query + row * spec.width
    q = load_rows(query, spec.width, i, num_queries, spec.width, spec.padded_width, False)
    norm = load_vector(features.query_norm + row, i, num_queries, 0.0, False)
    least = tl.load(features.least + bk)
    first, stop = segment_of(i, num_queries, b, sizes.offset, sizes, spec)
    lo, full_lo, full_hi, hi = key_range(tile, first, stop, sizes, spec)
    own, place = (q, norm, least, i, first, stop), (b, h, bh, bk)
    acc = tl.zeros([spec.query_tile, spec.padded_value_width], tl.float32)
    total = tl.zeros([spec.query_tile], tl.float32)
    state = (acc, total, tl.full([spec.query_tile], NEG_INF, tl.float32))
    if spec.has_left or spec.has_segments:
        state = _tiles(state, lo, full_lo, own, place, call, False, spec)
    state = _tiles(state, full_lo, full_hi, own, place, call, True, spec)
    state = _tiles(state, full_hi, hi, own, place, call, False, spec)
    acc, total, peak = state
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    out += row * spec.value_width
    store_rows(out, acc / total[:, None], i, num_queries, spec.value_width, spec.padded_value_width)
    at, inside = row + i, i < num_queries
    log_sum = (peak + tl.log2(total) + lse_constant(norm, least, spec)) * LN2
    tl.store(lse + at, tl.where(is_empty, NEG_INF, log_sum), mask=inside)
    # no gradient flows through a row that sees a key that is not finite
    is_dead = is_empty | (total != total)
    tl.store(row_max + at, tl.where(is_dead, float("inf"), peak), mask=inside)
    tl.store(row_sum + at, tl.where(is_dead, 1.0, total), mask=inside)
