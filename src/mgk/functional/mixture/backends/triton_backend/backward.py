"""The backward kernels: weights recomputed, no atomics.

With P_ijr = 2^(s_ijr - m_i) / l_i, dP_ij = dh_i . v_j (times the dropout factor) and delta_i = dh_i . h_i - dlse_i:

    g_ijr = P_ijr (dP_ij - delta_i),   for the winner alone, the lowest r on a tie, if the E-step is hard.

``keys_backward`` owns keys and sums over the queries of all heads of the group; ``queries_backward`` owns queries. Both
are one function of tiles. Shifted keys: with e_ij the part that components
share, sum_r g_ijr = e_ij (dP_ij - delta_i) sum_r u_ir w_jr, and each component's sums are products with u or w.
"""

import triton
import triton.language as tl

from mgk.functional.mixture.backends.triton_backend.forward import (
    has_keys,
    is_factored,
    key_row,
    load_component,
    lse_constant,
    query_row,
)
from mgk.functional.mixture.backends.triton_backend.pairs import (
    LOG2E,
    NEG_INF,
    SWAMPING,
    add_log,
    along_keys,
    along_queries,
    component_scores,
    dropout_factors,
    finite,
    head_of,
    key_range,
    load_rows,
    load_vector,
    pair_mask,
    product,
    query_range,
    second_product,
    segment_of,
    store_rows,
    tile_product,
    zero_tile,
)

# The fewest rows that the product of tiles takes.
EQUAL_ROWS = tl.constexpr(16)


@triton.jit
def deltas(delta, inverse_sum, row_sum, out, grad, lse_grad, num_rows, spec: tl.constexpr):
    """1 / l_i, and (dh_i . h_i - dlse_i) / l_i, of contiguous rows."""
    i = tl.program_id(0).to(tl.int64) * spec.query_tile + tl.arange(0, spec.query_tile)
    x = load_rows(out, spec.value_width, i, num_rows, spec.value_width, spec.padded_value_width, False)
    y = load_rows(grad, spec.value_width, i, num_rows, spec.value_width, spec.padded_value_width, False)
    total = tl.sum(finite(x).to(tl.float32) * y.to(tl.float32), 1)
    total -= load_vector(lse_grad, i, num_rows, 0.0, False)
    inverse = 1.0 / load_vector(row_sum, i, num_rows, 1.0, False)
    tl.store(inverse_sum + i, inverse, mask=i < num_rows)
    tl.store(delta + i, total * inverse, mask=i < num_rows)


@triton.jit
def _component(r, own, j, bk, call, full: tl.constexpr, spec: tl.constexpr):
    """Keys, bias and excess of one component: the program's own, or those of the tile."""
    if spec.owns_keys:
        component = own[r]
    else:
        component = load_component(r, j, bk, call, full, spec)
    return component


@triton.jit
def _replace(items, r: tl.constexpr, item, n: tl.constexpr):
    """The tuple with another item in place of r."""
    result = ()
    for s in tl.static_range(n):
        result = result + (item if s == r else items[s],)
    return result


@triton.jit
def _part(items, first: tl.constexpr, n: tl.constexpr):
    """N items of the tuple from the first."""
    result = ()
    for s in tl.static_range(n):
        result = result + (items[first + s],)
    return result


@triton.jit
def _zeros(n: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """A tuple of n matrices of zeros, or of vectors if there are no columns."""
    result = ()
    for _ in tl.static_range(n):
        if columns == 0:
            result = result + (tl.zeros([rows], tl.float32),)
        else:
            result = result + (tl.zeros([rows, columns], tl.float32),)
    return result


@triton.jit
def _zeros_of_keys(n: tl.constexpr, width: tl.constexpr, spec: tl.constexpr):
    """A tuple of n matrices of the keys, which are columns where the rows of a tile are queries."""
    if spec.keys_first:
        result = _zeros(n, spec.key_tile, width)
    else:
        result = _zeros(n, width, spec.key_tile)
    return result


@triton.jit
def _weights(s, peak, ok, extra, full: tl.constexpr, spec: tl.constexpr):
    """2^(s - m), 0 for pairs that do not take part."""
    if spec.mask == "float":
        s = add_log(s, extra)
    # large scores, summed in another order than the forward's, may pass its maximum
    e = tl.exp2(tl.minimum(s - along_queries(peak, spec), 0.0))
    if not full or spec.mask != "none":
        e = tl.where(ok, e, 0.0)
    return e


@triton.jit
def _add_product(products, r: tl.constexpr, g, q, k, spec: tl.constexpr):
    """Sum g q of the component's keys, or sum g k of the queries, with a tile's part added."""
    if spec.owns_keys:
        products = _replace(products, r, _sum_over_queries(g, q, products[r], spec), spec.key_mixtures)
    else:
        products = (second_product(g.to(k.dtype), k, products[0], spec),)
    return products


@triton.jit
def _sum_over_queries(g, x, total, spec: tl.constexpr):
    """sum_i g_ij x_i added to the keys' rows, or to their columns if the rows of g are queries."""
    g = g.to(x.dtype)
    if spec.keys_first:
        total = second_product(g, x, total, spec)
    else:
        total = product(tl.trans(x), g, total, spec)
    return total


@triton.jit
def _add_sum(total, g, q, spec: tl.constexpr):
    """sum_i g_ij added to a vector, or to equal rows: a product with ones if the rows of g are queries."""
    if spec.keys_first:
        total += tl.sum(g, 1)
    else:
        ones = tl.full([EQUAL_ROWS, spec.query_tile], 1.0, q.dtype)
        total = product(ones, g.to(q.dtype), total, spec)
    return total


@triton.jit
def _sums_of_keys(x, spec: tl.constexpr):
    """Sums of ``_sum_over_queries`` with keys as rows."""
    return x if spec.keys_first else tl.trans(x)


@triton.jit
def _best(q, norm, least, own, i, j, extra, place, call, full: tl.constexpr, spec: tl.constexpr):
    """The part of max_r s_ijr that depends on r, and the winner, the lowest r on a tie."""
    _, _, bh, bk = place
    best = tl.full([1, 1], NEG_INF, tl.float32)
    winner = tl.full([1, 1], 0, tl.int32)
    for r in tl.static_range(spec.mixtures):
        if spec.is_shifted:
            s = _biases(r, i, j, bh, bk, call, spec)
        else:
            k, bias, excess = _component(r, own, j, bk, call, full, spec)
            s = component_scores(q, k, bias, norm, excess, least, spec)
        if r == 0:
            best, winner = s, tl.zeros_like(s).to(tl.int32)
        else:
            winner = tl.where(s > best, r, winner)
            best = tl.maximum(best, s)
    if spec.mask == "float":  # all components tie
        winner = tl.where(tl.abs(extra) > SWAMPING, 0, winner)
    return best, winner


@triton.jit
def _biases(r, i, j, bh, bk, call, spec: tl.constexpr):
    """a_ir + b_jr of a tile."""
    a = query_row(r, i, bh, call, False, spec)
    b = key_row(r, j, bk, call, NEG_INF, False, spec)
    return along_queries(a, spec) + along_keys(b, spec)


@triton.jit
def _shifted(
    sums, base, d_weights, peak, ok, extra, i, j, starts, place, call, full: tl.constexpr, spec: tl.constexpr
):
    """p_ij and g_ij, summed over r, and the sums of each component with the tile's part added."""
    _, _, bh, bk = place
    mixtures: tl.constexpr = spec.mixtures
    u = ()
    w = ()
    for r in tl.static_range(spec.mixtures):
        u = u + (query_row(mixtures + r, i, bh, call, full and spec.owns_keys, spec),)
        w = w + (key_row(mixtures + r, j, bk, call, 0.0, full and not spec.owns_keys, spec),)
    other, mine = (u, w) if spec.owns_keys else (w, u)
    if is_factored(starts[0], starts[1], bh, bk, call, spec):
        top = key_row(2 * mixtures + 1, j, bk, call, NEG_INF, False, spec)
        p = _weights(base + along_keys(top, spec), peak, ok, extra, full, spec)
        g = p * d_weights
        factor = tl.zeros_like(p)
        new = ()
        for r in tl.static_range(spec.mixtures):
            factor += along_queries(u[r], spec) * along_keys(w[r], spec)
            new = new + (sums[r] + mine[r] * tl.sum(g * other[r][None, :], 1),)
        p = p * factor
        g = g * factor
        sums = new
    else:
        p = tl.zeros_like(base)
        g = tl.zeros_like(base)
        new = ()
        for r in tl.static_range(spec.mixtures):
            s = base + _biases(r, i, j, bh, bk, call, spec)
            e = _weights(s, peak, ok, extra, full, spec)
            p += e
            g += e * d_weights
            new = new + (sums[r] + tl.sum(e * d_weights, 1),)
        sums = new
    return p, g, sums


@triton.jit
def _initial_state(spec: tl.constexpr):
    """Zeros for sum g q or sum g k, the sums and moments of each component, and dv."""
    if spec.owns_keys:
        products = _zeros_of_keys(spec.key_mixtures, spec.padded_width, spec)
        sums = _zeros_of_keys(spec.mixtures, 0 if spec.keys_first else EQUAL_ROWS, spec)
        moments = _zeros(spec.key_mixtures, spec.key_tile, 0)
        values = _zeros_of_keys(1, spec.padded_value_width, spec)
        state = products + sums + moments + values
    else:
        products = _zeros(1, spec.query_tile, spec.padded_width)
        state = products + _zeros(spec.mixtures if spec.is_shifted else 1, spec.query_tile, 0)
    return state


@triton.jit
def _unpacked(state, spec: tl.constexpr):
    """A state's parts; it is one flat tuple, as loops carry no nested ones."""
    if spec.owns_keys:
        products = _part(state, 0, spec.key_mixtures)
        sums = _part(state, spec.key_mixtures, spec.mixtures)
        moments = _part(state, spec.key_mixtures + spec.mixtures, spec.key_mixtures)
        values = _part(state, 2 * spec.key_mixtures + spec.mixtures, 1)
    else:
        products = _part(state, 0, 1)
        sums = _part(state, 1, spec.mixtures if spec.is_shifted else 1)
        moments = ()
        values = ()
    return products, sums, moments, values


@triton.jit
def _tile(state, i, j, starts, own, sides, place, call, full: tl.constexpr, spec: tl.constexpr):
    """The state after a tile, and the gradient of its scores, summed over r."""
    products, sums, moments, d_value = _unpacked(state, spec)
    components, first, stop = own
    queries, v = sides
    q, grad, norm, peak, inverse_sum, delta = queries
    b, h, bh, bk = place
    sizes = call.sizes
    least = tl.load(call.features.least + bk)
    constant = along_queries(lse_constant(norm, least, spec), spec)
    d_weights = tile_product(grad, v, zero_tile(spec), spec)
    kept = d_weights
    if spec.has_dropout:
        kept = dropout_factors(i, j, bh, call.dropout, spec)
        d_weights = d_weights * kept
    d_weights = d_weights * along_queries(inverse_sum, spec) - along_queries(delta, spec)
    ok, extra = pair_mask(i, j, b, h, first, stop, call.mask, sizes, full, spec)
    if not full or spec.mask != "none":
        d_weights = tl.where(ok, d_weights, 0.0)
    if spec.is_shifted:
        k, _, _ = _component(0, components, j, bk, call, full, spec)
        x = tile_product(q, k, zero_tile(spec), spec) * (least * LOG2E)
        if spec.is_hard:
            best, winner = _best(q, norm, least, components, i, j, extra, place, call, full, spec)
            p = _weights(x + best, peak, ok, extra, full, spec)
            g = p * d_weights
            for r in tl.static_range(spec.mixtures):
                total = sums[r] + tl.sum(tl.where(winner == r, g, 0.0), 1)
                sums = _replace(sums, r, total, spec.mixtures)
        else:
            p, g, sums = _shifted(sums, x, d_weights, peak, ok, extra, i, j, starts, place, call, full, spec)
        products = _add_product(products, 0, g, q, k, spec)
        if spec.needs_variance_grad and spec.owns_keys:
            moments = (moments[0] + tl.sum(g * (x + constant), 1),)
    else:
        p = zero_tile(spec)
        g = zero_tile(spec)
        best, winner = d_weights, d_weights
        if spec.is_hard:
            best, winner = _best(q, norm, least, components, i, j, extra, place, call, full, spec)
            p = _weights(best, peak, ok, extra, full, spec)
            g = p * d_weights
        for r in tl.static_range(spec.mixtures):
            k, bias, excess = _component(r, components, j, bk, call, full, spec)
            if spec.is_hard:
                x = best
                share = tl.where(winner == r, g, 0.0)
            else:
                x = component_scores(q, k, bias, norm, excess, least, spec)
                e = _weights(x, peak, ok, extra, full, spec)
                p = e if r == 0 else p + e
                share = e * d_weights
                if spec.needs_mask_grad:
                    g += share
            if spec.is_varying and not spec.owns_keys:
                scaled = share * (excess + least)[None, :]
                products = _add_product(products, r, scaled, q, k, spec)
                sums = (sums[0] + tl.sum(scaled, 1),)
            else:
                products = _add_product(products, r, share, q, k, spec)
            if spec.owns_keys:
                if spec.has_bias:
                    sums = _replace(sums, r, _add_sum(sums[r], share, q, spec), spec.mixtures)
                if spec.needs_variance_grad:
                    moment = share * tl.where(share != 0.0, x + constant, 0.0)
                    moment = tl.sum(moment, 1 if spec.keys_first else 0)
                    moments = _replace(moments, r, moments[r] + moment, spec.mixtures)
    if spec.owns_keys:
        p = p * along_queries(inverse_sum, spec)
        if spec.has_dropout:
            p = p * kept
        if not full or spec.mask != "none":
            p = tl.where(ok, p, 0.0)
        d_value = (_sum_over_queries(p, grad, d_value[0], spec),)
    return products + sums + moments + d_value, g


@triton.jit
def _load_queries(i, bh, grad, rows, call, full: tl.constexpr, spec: tl.constexpr):
    """Features, output gradient, norm, row maximum, inverse row sum and delta of the queries i."""
    features, num_queries = call.features, call.sizes.num_queries
    row = bh * num_queries
    q, grad = features.query + row * spec.width, grad + row * spec.value_width
    return (
        load_rows(q, spec.width, i, num_queries, spec.width, spec.padded_width, full),
        load_rows(grad, spec.value_width, i, num_queries, spec.value_width, spec.padded_value_width, full),
        load_vector(features.query_norm + row, i, num_queries, 0.0, full),
        load_vector(rows.row_max + row, i, num_queries, 0.0, full),
        load_vector(rows.inverse_sum + row, i, num_queries, 1.0, full),
        load_vector(rows.delta + row, i, num_queries, 0.0, full),
    )


@triton.jit
def _query_tiles(state, lo, hi, own, v, j, place, rows, grad, call, full: tl.constexpr, spec: tl.constexpr):
    """The state of a tile of keys after the queries in [lo, hi)."""
    bh = place[2]
    for start in range(lo, hi, spec.query_tile):
        i = start + tl.arange(0, spec.query_tile)
        q, d_out, norm, peak, inverse_sum, delta = _load_queries(i, bh, grad, rows, call, full, spec)
        if not full:
            q, d_out, norm = finite(q), finite(d_out), finite(norm)
        sides = ((q, d_out, norm, peak, inverse_sum, delta), v)
        state, g = _tile(
            state, i, j, (start, tl.program_id(0) * spec.key_tile), own, sides, place, call, full, spec
        )
    return state


@triton.jit
def keys_backward(d_keys, d_value, d_bias, d_scale, grad, rows, call, spec: tl.constexpr):
    """dk_jr, dv_j, db_jr = sum_i g_ijr, sum_i g_ijr x_ijr; a program owns a tile of keys."""
    features, sizes, num_keys = call.features, call.sizes, call.sizes.num_keys
    tile = tl.program_id(0)
    bk = tl.program_id(1).to(tl.int64)
    b, hk = bk // sizes.heads, bk % sizes.heads
    j = tile * spec.key_tile + tl.arange(0, spec.key_tile)
    components = ()
    for r in tl.static_range(spec.key_mixtures):
        components = components + (load_component(r, j, bk, call, False, spec),)
    value = head_of(call.value, b, hk)
    v = finite(load_rows(value, call.value.last, j, num_keys, spec.value_width, spec.padded_value_width, False))
    first, stop = segment_of(j, num_keys, b, 0, sizes, spec)
    lo, full_lo, full_hi, hi = query_range(tile, first, stop, sizes, spec)
    own = (components, first, stop)
    state = _initial_state(spec)
    if has_keys(tile * spec.key_tile, bk, call, spec):
        for group in range(sizes.groups):
            h = hk * sizes.groups + group
            place = (b, h, b * sizes.heads * sizes.groups + h, bk)
            if spec.has_right or spec.has_segments:
                state = _query_tiles(state, lo, full_lo, own, v, j, place, rows, grad, call, False, spec)
            state = _query_tiles(state, full_lo, full_hi, own, v, j, place, rows, grad, call, True, spec)
            state = _query_tiles(state, full_hi, hi, own, v, j, place, rows, grad, call, False, spec)
    products, sums, moments, values = _unpacked(state, spec)
    inside = j < num_keys
    least = tl.load(features.least + bk)
    store_rows(
        d_value + bk * num_keys * spec.value_width,
        _sums_of_keys(values[0], spec),
        j,
        num_keys,
        spec.value_width,
        spec.padded_value_width,
    )
    if not spec.keys_first:
        equal = ()
        for r in tl.static_range(spec.mixtures):
            equal = equal + (tl.max(sums[r], 0),)
        sums = equal
    for r in tl.static_range(spec.mixtures):
        tl.store(d_bias + (bk * spec.mixtures + r) * num_keys + j, sums[r], mask=inside)
    for r in tl.static_range(spec.key_mixtures):
        k, _, excess = components[r]
        total = sums[r]
        if spec.is_shifted:
            for other in tl.static_range(1, spec.mixtures):
                total += sums[other]
        grad_r = _sums_of_keys(products[r], spec)
        if not spec.is_dot:
            grad_r -= k.to(tl.float32) * total[:, None]
        if spec.is_varying:
            grad_r = grad_r * (excess + least)[:, None]
        else:
            grad_r = grad_r * least
        row = (bk * spec.key_mixtures + r) * num_keys
        store_rows(d_keys + row * spec.width, grad_r, j, num_keys, spec.width, spec.padded_width)
        if spec.needs_variance_grad:
            tl.store(d_scale + row + j, moments[r], mask=inside)


@triton.jit
def _key_tiles(state, lo, hi, own, queries, i, place, d_mask, call, full: tl.constexpr, spec: tl.constexpr):
    """The state of a tile of queries after the keys in [lo, hi)."""
    b, _, bh, bk = place
    sizes, num_keys = call.sizes, call.sizes.num_keys
    value = head_of(call.value, b, bk - b * sizes.heads)
    for start in range(lo, hi, spec.key_tile):
        if has_keys(start, bk, call, spec):
            j = start + tl.arange(0, spec.key_tile)
            v = load_rows(value, call.value.last, j, num_keys, spec.value_width, spec.padded_value_width, full)
            if not full:
                v = finite(v)
            state, g = _tile(
                state,
                i,
                j,
                (tl.program_id(0) * spec.query_tile, start),
                own,
                (queries, v),
                place,
                call,
                full,
                spec,
            )
            if spec.needs_mask_grad:
                at = d_mask + (bh * sizes.num_queries + i)[:, None] * num_keys + j[None, :]
                tl.store(at, g, mask=(i < sizes.num_queries)[:, None] & (j < num_keys)[None, :])
    return state


@triton.jit
def queries_backward(d_query, d_bias, d_mask, grad, lse_grad, rows, call, spec: tl.constexpr):
    """dq_i, da_ir = sum_j g_ijr, the mask's gradient; a program owns a tile of queries."""
    features, sizes, num_queries = call.features, call.sizes, call.sizes.num_queries
    tile = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    heads = sizes.heads * sizes.groups
    b, h = bh // heads, bh % heads
    bk = b * sizes.heads + h // sizes.groups
    place = (b, h, bh, bk)
    row = bh * num_queries
    i = tile * spec.query_tile + tl.arange(0, spec.query_tile)
    queries = _load_queries(i, bh, grad, rows, call, False, spec)
    first, stop = segment_of(i, num_queries, b, sizes.offset, sizes, spec)
    lo, full_lo, full_hi, hi = key_range(tile, first, stop, sizes, spec)
    own = ((), first, stop)
    state = _initial_state(spec)
    if spec.has_left or spec.has_segments:
        state = _key_tiles(state, lo, full_lo, own, queries, i, place, d_mask, call, False, spec)
    state = _key_tiles(state, full_lo, full_hi, own, queries, i, place, d_mask, call, True, spec)
    state = _key_tiles(state, full_hi, hi, own, queries, i, place, d_mask, call, False, spec)
    products, sums, _, _ = _unpacked(state, spec)
    inside = i < num_queries
    least = tl.load(features.least + bk)
    d_lse = load_vector(lse_grad + row, i, num_queries, 0.0, False)
    q, _, _, peak, _, _ = queries
    is_dead = peak == float("inf")
    d_lse = tl.where(is_dead, 0.0, d_lse)
    total = products[0]
    if spec.is_varying:
        if not spec.is_dot:
            total -= q.to(tl.float32) * sums[0][:, None]
    else:
        if not spec.is_dot:
            total -= q.to(tl.float32) * d_lse[:, None]
        total = total * least
    total = tl.where(is_dead[:, None], 0.0, total)
    store_rows(d_query + row * spec.width, total, i, num_queries, spec.width, spec.padded_width)
    if spec.is_shifted:
        for r in tl.static_range(spec.mixtures):
            d_bias_r = tl.where(is_dead, 0.0, sums[r])
            tl.store(d_bias + (bh * spec.mixtures + r) * num_queries + i, d_bias_r, mask=inside)
