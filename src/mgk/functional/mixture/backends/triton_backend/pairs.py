"""What kernels share: the pairs that take part, scores in base 2, dropout.

A program owns queries, or keys if ``spec.owns_keys``; rows are queries, or keys if ``spec.keys_first``.
A full tile lies wholly inside the sequence, the window and a segment; the tiles at the edges test each pair.
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4e38)
# Scores are rounded away beside a mask or a prior beyond it.
SWAMPING = tl.constexpr(1e18)


@triton.jit
def along_queries(x, spec: tl.constexpr):
    """A vector of the queries, broadcast over the keys of the tile."""
    return x[None, :] if spec.keys_first else x[:, None]


@triton.jit
def along_keys(x, spec: tl.constexpr):
    """A vector of the keys, broadcast over the queries of the tile."""
    return x[:, None] if spec.keys_first else x[None, :]


@triton.jit
def add_log(s, x):
    """``s + log2(e) x``: -inf where either is, else finite."""
    total = tl.maximum(s + x * LOG2E, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((s == NEG_INF) | (x == NEG_INF), NEG_INF, total)


@triton.jit
def finite(x):
    """``x`` with 0 in place of NaN and infinities."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def load_rows(pointer, stride, index, limit, width: tl.constexpr, padded: tl.constexpr, full: tl.constexpr):
    """Rows of a matrix (limit, width), padded with zeros on the right and from ``limit`` on."""
    column = tl.arange(0, padded)
    at = pointer + index[:, None] * stride + column[None, :]
    if full and padded == width:
        x = tl.load(at)
    elif full:
        x = tl.load(at, mask=(column < width)[None, :], other=0.0)
    else:
        x = tl.load(at, mask=(index < limit)[:, None] & (column < width)[None, :], other=0.0)
    return x


@triton.jit
def store_rows(pointer, x, index, limit, width: tl.constexpr, padded: tl.constexpr):
    """Write rows of a contiguous matrix (limit, width)."""
    column = tl.arange(0, padded)
    at = pointer + index[:, None] * width + column[None, :]
    tl.store(at, x.to(pointer.dtype.element_ty), mask=(index < limit)[:, None] & (column < width)[None, :])


@triton.jit
def load_vector(pointer, index, limit, other, full: tl.constexpr):
    """``pointer[index]``, or ``other`` from ``limit`` on."""
    if full:
        x = tl.load(pointer + index)
    else:
        x = tl.load(pointer + index, mask=index < limit, other=other)
    return x


@triton.jit
def head_of(x, b, h):
    """Where a head of a strided tensor begins."""
    return x.pointer + b * x.batch + h * x.head


@triton.jit
def segment_of(index, limit, b, shift, sizes, spec: tl.constexpr):
    """First and last + 1 position of the segments of the program's own positions."""
    if spec.has_segments:
        at = sizes.segments + b * 2 * sizes.num_keys + tl.minimum(index, limit - 1) + shift
        first, stop = tl.load(at), tl.load(at + sizes.num_keys)
    else:
        first, stop = index, index
    return first, stop


@triton.jit
def key_range(tile, first, stop, sizes, spec: tl.constexpr):
    """The keys (lo, full_lo, full_hi, hi) of a tile of queries; all see [full_lo, full_hi)."""
    first_query = tile * spec.query_tile
    last_query = tl.minimum(first_query + spec.query_tile, sizes.num_queries) - 1
    lo = 0
    hi = sizes.num_keys
    full_lo = 0
    full_hi = sizes.num_keys
    if spec.has_right:
        hi = tl.minimum(hi, last_query + sizes.offset + sizes.right + 1)
        full_hi = tl.minimum(full_hi, first_query + sizes.offset + sizes.right + 1)
    if spec.has_left:
        lo = tl.maximum(lo, first_query + sizes.offset - sizes.left)
        full_lo = tl.maximum(full_lo, last_query + sizes.offset - sizes.left)
    if spec.has_segments:
        lo = tl.maximum(lo, tl.min(first, 0))
        hi = tl.minimum(hi, tl.max(stop, 0))
        full_lo = tl.maximum(full_lo, tl.max(first, 0))
        full_hi = tl.minimum(full_hi, tl.min(stop, 0))
    return _whole_tiles(lo, full_lo, full_hi, hi, spec.key_tile)


@triton.jit
def query_range(tile, first, stop, sizes, spec: tl.constexpr):
    """The queries (lo, full_lo, full_hi, hi) of a tile of keys; [full_lo, full_hi) see all."""
    first_key = tile * spec.key_tile - sizes.offset
    last_key = tl.minimum(tile * spec.key_tile + spec.key_tile, sizes.num_keys) - 1 - sizes.offset
    lo = 0
    hi = sizes.num_queries
    full_lo = 0
    full_hi = sizes.num_queries
    if spec.has_right:
        lo = tl.maximum(lo, first_key - sizes.right)
        full_lo = tl.maximum(full_lo, last_key - sizes.right)
    if spec.has_left:
        hi = tl.minimum(hi, last_key + sizes.left + 1)
        full_hi = tl.minimum(full_hi, first_key + sizes.left + 1)
    if spec.has_segments:
        lo = tl.maximum(lo, tl.min(first, 0) - sizes.offset)
        hi = tl.minimum(hi, tl.max(stop, 0) - sizes.offset)
        full_lo = tl.maximum(full_lo, tl.max(first, 0) - sizes.offset)
        full_hi = tl.minimum(full_hi, tl.min(stop, 0) - sizes.offset)
    return _whole_tiles(lo, full_lo, full_hi, hi, spec.query_tile)


@triton.jit
def _whole_tiles(lo, full_lo, full_hi, hi, size: tl.constexpr):
    """The same ranges in whole tiles, in order: lo <= full_lo <= full_hi."""
    lo = tl.maximum(lo, 0) // size * size
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum((tl.maximum(full_lo, 0) + size - 1) // size, (hi + size - 1) // size) * size
    full_hi = tl.maximum(tl.maximum(full_hi, 0) // size * size, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def admitted(i, j, first, stop, sizes, spec: tl.constexpr):
    """Which pairs of a tile the sequence, the window and the segments admit."""
    distance = along_keys(j, spec) - along_queries(i + sizes.offset, spec)
    ok = along_keys(j < sizes.num_keys, spec) & along_queries(i < sizes.num_queries, spec)
    if spec.has_right:
        ok = ok & (distance <= sizes.right)
    if spec.has_left:
        ok = ok & (distance >= -sizes.left)
    if spec.has_segments:
        if spec.owns_keys:
            other = along_queries(i + sizes.offset, spec)
            ok = ok & (other >= along_keys(first, spec)) & (other < along_keys(stop, spec))
        else:
            ok = ok & (j[None, :] >= first[:, None]) & (j[None, :] < stop[:, None])
    return ok


@triton.jit
def load_mask(i, j, b, h, mask, sizes, spec: tl.constexpr):
    """The tile of ``attn_mask``; whatever lies outside the sequence is not read."""
    at = (
        head_of(mask, b, h) + along_queries(i, spec).to(tl.int64) * mask.third + along_keys(j, spec) * mask.last
    )
    inside = along_keys(j < sizes.num_keys, spec) & along_queries(i < sizes.num_queries, spec)
    return tl.load(at, mask=inside, other=0)


@triton.jit
def pair_mask(i, j, b, h, first, stop, mask, sizes, full: tl.constexpr, spec: tl.constexpr):
    """Which pairs take part, and what the mask adds to their scores."""
    ok = along_keys(j, spec) >= 0
    extra = 0.0
    if not full:
        ok = admitted(i, j, first, stop, sizes, spec)
    if spec.mask == "bool":
        ok = ok & (load_mask(i, j, b, h, mask, sizes, spec) != 0)
    if spec.mask == "float":
        extra = load_mask(i, j, b, h, mask, sizes, spec).to(tl.float32)
        ok = ok & (extra > NEG_INF)
    return ok, extra


@triton.jit
def apply_mask(s, i, j, b, h, first, stop, mask, sizes, full: tl.constexpr, spec: tl.constexpr):
    """The scores with the mask added, and -inf for pairs that do not take part."""
    if not full or spec.mask != "none":
        ok, extra = pair_mask(i, j, b, h, first, stop, mask, sizes, full, spec)
        if spec.mask == "float":
            s = add_log(s, extra)
        s = tl.where(ok, s, NEG_INF)
    return s


@triton.jit
def product(x, y, acc, spec: tl.constexpr):
    """``x @ y + acc`` with sums in float32."""
    return tl.dot(x, y, acc=acc, input_precision=spec.precision)


@triton.jit
def second_product(x, y, acc, spec: tl.constexpr):
    """``x @ y + acc`` with x made of products, whose warps may share the columns of a tile."""
    if spec.splits_columns:
        # Else the compiler lets warps own whole rows.
        if tl.num_programs(0) > 0:
            acc = product(x, y, acc, spec)
    else:
        acc = product(x, y, acc, spec)
    return acc


@triton.jit
def tile_product(queries, keys, acc, spec: tl.constexpr):
    """queries_i . keys_j + acc in the orientation of the tile."""
    if spec.keys_first:
        result = product(keys, tl.trans(queries), acc, spec)
    else:
        result = product(queries, tl.trans(keys), acc, spec)
    return result


@triton.jit
def zero_tile(spec: tl.constexpr):
    """A tile of zeros."""
    if spec.keys_first:
        tile = tl.zeros([spec.key_tile, spec.query_tile], tl.float32)
    else:
        tile = tl.zeros([spec.query_tile, spec.key_tile], tl.float32)
    return tile


@triton.jit
def component_scores(q, k, key_bias, norm, excess, least, spec: tl.constexpr):
    """s_ijr of one component."""
    s = tile_product(q, k, zero_tile(spec), spec)
    if spec.is_varying:
        bias = along_keys(key_bias, spec) + along_queries(norm, spec) * along_keys(excess, spec)
        s = s * along_keys((excess + least) * LOG2E, spec) + bias
    elif spec.has_bias:
        s = s * (least * LOG2E) + along_keys(key_bias, spec)
    else:
        s = s * (least * LOG2E)
    return s


@triton.jit
def finite_or_zero(x):
    """X, or 0 in place of -inf: the reference point of an empty row."""
    return tl.where(x == NEG_INF, 0.0, x)


@triton.jit
def dropout_factors(i, j, bh, dropout, spec: tl.constexpr):
    """0, or 1 / (1 - p), from the pair's counter and the seed."""
    query = tl.zeros_like(along_keys(j, spec)) + along_queries(i, spec)
    key = along_keys(j, spec) + tl.zeros_like(query)
    head = tl.zeros_like(query) + bh.to(tl.int32)
    bits, _, _, _ = tl.philox(tl.load(dropout.seed), key, query, head, tl.zeros_like(query))
    return tl.where(bits.to(tl.uint32, bitcast=True).to(tl.int64) >= dropout.threshold, dropout.scale, 0.0)
