"""Chunked linear attention in Triton, features and their mixture made in the kernels.

With phibar_j = sum_r pi_jr phi(k_jr), S_c and z_c the sums of phibar_j v_j^T and phibar_j
over the keys before chunk c, and d_i = phi(q_i)^T z_c + sum_(j <= i in c) phi(q_i) . phibar_j:

    h_i = (phi(q_i)^T S_c + sum_(j <= i in c) phi(q_i) . phibar_j v_j^T) / d_i

``states`` walks over the chunks of a head for a block of S, ``outputs`` owns a chunk of
queries. The gradients of S and z are sums over later queries: ``state_gradients`` walks
back. Without causality there is one state, of all keys. Positions are those of keys; query
i is at i + offset. A state goes on into a chunk where its segment does.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from mgk.functional.mixture.backends.triton_backend.pairs import head_of, load_vector


@dataclass(frozen=True)
class LinearSpec:
    """The compile-time arguments."""

    mixtures: int  # M
    width: int  # F
    value_width: int  # E
    block: int  # columns of F at a time
    value_block: int  # columns of E at a time
    blocks: int
    value_blocks: int
    chunk: int  # C
    precision: str  # of products
    is_elu: bool  # phi(x) = elu(x) + 1; else features come
    is_causal: bool
    has_prior: bool
    has_mask: bool
    has_segments: bool
    has_state: bool


class LinearKernelInputs(NamedTuple):
    """The inputs of the kernels; the strided ones are of ``Strided``."""

    query: Any  # (B, Hq, 1, L, F)
    keys: Any  # (B, H, M, S, F)
    value: Any  # (B, H, 1, S, E)
    log_prior: Any  # (B, H, M, S)
    mask: Any  # (B, S), bytes
    starts: Any  # (B, S), int32: where the segment of each position begins
    heads: Any  # H
    groups: Any  # Hq / H
    num_queries: Any
    num_keys: Any
    offset: Any  # S - L, 0 without causality
    first_chunk: Any  # of the queries; below 0 if there are more queries than keys
    num_chunks: Any  # of the keys


class Walk(NamedTuple):
    """States (B, H, n + 1, F, E) and normalisers (B, H, n + 1, F); n = 0 without causality."""

    state: Any
    normaliser: Any


class RowGradients(NamedTuple):
    """dh_i (B, Hq, L, E), 1 / d_i or 0, and the gradient of d_i (B, Hq, L)."""

    grad: Any
    inverse: Any
    denominator: Any


@triton.jit
def _dot(x, y, acc, spec: tl.constexpr):
    return tl.dot(x, y, acc=acc, input_precision=spec.precision)


@triton.jit
def _load(pointer, stride, row, rows, column, columns: tl.constexpr):
    """Rows and columns of a matrix in float32, 0 outside."""
    inside = ((row >= 0) & (row < rows))[:, None] & (column < columns)[None, :]
    at = pointer + row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, x, stride, row, rows, column, columns: tl.constexpr):
    inside = ((row >= 0) & (row < rows))[:, None] & (column < columns)[None, :]
    at = pointer + row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(at, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _phi(x, row, rows, column, spec: tl.constexpr):
    """phi(x), 0 outside."""
    if spec.is_elu:
        x = tl.maximum(x, 0.0) + tl.exp(tl.minimum(x, 0.0))
        x = tl.where(((row >= 0) & (row < rows))[:, None] & (column < spec.width)[None, :], x, 0.0)
    return x


@triton.jit
def _slope(features, spec: tl.constexpr):
    """phi'(x) of phi(x)."""
    return tl.minimum(features, 1.0) if spec.is_elu else tl.full([1, 1], 1.0, tl.float32)


@triton.jit
def _query_features(i, f, b, h, x, spec: tl.constexpr):
    """phi(q_i) (C, block)."""
    q = _load(head_of(x.query, b, h), x.query.last, i, x.num_queries, f, spec.width)
    return _phi(q, i, x.num_queries, f, spec)


@triton.jit
def _component(r, j, f, b, h, x, spec: tl.constexpr):
    """phi(k_jr) (C, block) and pi_jr (C,), 0 for masked keys."""
    keys = head_of(x.keys, b, h) + r * x.keys.third
    k = _phi(_load(keys, x.keys.last, j, x.num_keys, f, spec.width), j, x.num_keys, f, spec)
    alive = (j >= 0) & (j < x.num_keys)
    if spec.has_mask:
        alive = alive & (tl.load(x.mask + b * x.num_keys + j, mask=alive, other=0) != 0)
    if spec.has_prior:
        prior = head_of(x.log_prior, b, h) + r * x.log_prior.third
        prior = tl.exp(tl.load(prior + j * x.log_prior.last, mask=alive, other=0.0).to(tl.float32))
    else:
        prior = tl.full([spec.chunk], 1.0 / spec.mixtures, tl.float32)
    return tl.where(alive[:, None], k, 0.0), tl.where(alive, prior, 0.0)


@triton.jit
def _mixed_keys(j, f, b, h, x, spec: tl.constexpr):
    """phibar_j = sum_r pi_jr phi(k_jr) (C, block)."""
    total = tl.zeros([spec.chunk, spec.block], tl.float32)
    for r in range(spec.mixtures):
        k, prior = _component(r, j, f, b, h, x, spec)
        total += k * prior[:, None]
    return total


@triton.jit
def _values(j, e, b, h, x, spec: tl.constexpr):
    """v_j (C, value block)."""
    return _load(head_of(x.value, b, h), x.value.last, j, x.num_keys, e, spec.value_width)


@triton.jit
def _starts_before(chunk, p, b, x, spec: tl.constexpr):
    """Which positions p of a chunk see the state before it."""
    if spec.has_segments:
        at = x.starts + b * x.num_keys + tl.minimum(tl.maximum(p, 0), x.num_keys - 1)
        result = tl.load(at) < tl.maximum(chunk * spec.chunk, 1)
    else:
        result = p == p
    return result


@triton.jit
def _next_start(chunk, b, x, spec: tl.constexpr):
    """Where the segment that is open after a chunk begins."""
    if spec.has_segments:
        end = tl.minimum((chunk + 1) * spec.chunk, x.num_keys - 1)
        result = tl.load(x.starts + b * x.num_keys + end)
    else:
        result = chunk * 0
    return result


@triton.jit
def _pairs(p, j, b, x, spec: tl.constexpr):
    """Which keys j of its chunk a query at position p sees."""
    seen = (j[None, :] <= p[:, None]) & (j >= 0)[None, :] & (j < x.num_keys)[None, :]
    if spec.has_segments:
        start = tl.load(x.starts + b * x.num_keys + tl.minimum(p, x.num_keys - 1))
        seen = seen & (j[None, :] >= start[:, None])
    return seen


@triton.jit
def _state_at(walk, index, f, e, bh, x, spec: tl.constexpr):
    """A block of a state."""
    count = (x.num_chunks if spec.is_causal else 0) + 1
    at = walk.state + (bh * count + index) * spec.width * spec.value_width
    return _load(at, spec.value_width, f, spec.width, e, spec.value_width)


@triton.jit
def _normaliser_at(walk, index, f, bh, x, spec: tl.constexpr):
    count = (x.num_chunks if spec.is_causal else 0) + 1
    return load_vector(walk.normaliser + (bh * count + index) * spec.width, f, spec.width, 0.0, False)


@triton.jit
def _store_state(walk, s, z, index, f, e, bh, x, spec: tl.constexpr):
    count = (x.num_chunks if spec.is_causal else 0) + 1
    row = (bh * count + index) * spec.width
    _store(walk.state + row * spec.value_width, s, spec.value_width, f, spec.width, e, spec.value_width)
    if tl.program_id(0) % spec.value_blocks == 0:
        tl.store(walk.normaliser + row + f, z, mask=f < spec.width)


@triton.jit
def _block_of_state(spec: tl.constexpr):
    """The columns of F and of E that a walk's program owns, and its head."""
    column = tl.program_id(0)
    f = column // spec.value_blocks * spec.block + tl.arange(0, spec.block)
    e = column % spec.value_blocks * spec.value_block + tl.arange(0, spec.value_block)
    return f, e, tl.program_id(1).to(tl.int64)


@triton.jit
def _start_of_walk(first, f, e, bh, has_state: tl.constexpr, spec: tl.constexpr):
    """The block of the state that a walk begins with."""
    s = tl.zeros([spec.block, spec.value_block], tl.float32)
    z = tl.zeros([spec.block], tl.float32)
    if has_state:
        row = bh * spec.width
        at = first.state + row * spec.value_width
        s = _load(at, spec.value_width, f, spec.width, e, spec.value_width)
        z = load_vector(first.normaliser + row, f, spec.width, 0.0, False)
    return s, z


@triton.jit
def states(walk, first, x, spec: tl.constexpr):
    """The state before each chunk of keys, and after the last."""
    f, e, bh = _block_of_state(spec)
    b, h = bh // x.heads, bh % x.heads
    s, z = _start_of_walk(first, f, e, bh, spec.has_state, spec)
    for chunk in range(x.num_chunks):
        if spec.is_causal:
            _store_state(walk, s, z, chunk, f, e, bh, x, spec)
        j = chunk * spec.chunk + tl.arange(0, spec.chunk)
        k = _mixed_keys(j, f, b, h, x, spec)
        if spec.has_segments:
            start = _next_start(chunk, b, x, spec)
            goes_on = (start < tl.maximum(chunk * spec.chunk, 1)).to(tl.float32)
            k = tl.where((j >= start)[:, None], k, 0.0)
            s *= goes_on
            z *= goes_on
        s = _dot(tl.trans(k), _values(j, e, b, h, x, spec), s, spec)
        z += tl.sum(k, 0)
    _store_state(walk, s, z, x.num_chunks if spec.is_causal else 0, f, e, bh, x, spec)


@triton.jit
def _chunk_of_queries(x, spec: tl.constexpr):
    """A program's chunk, its positions and queries, and which state they see."""
    chunk = tl.program_id(0) + x.first_chunk
    p = chunk * spec.chunk + tl.arange(0, spec.chunk)
    index = tl.maximum(chunk, 0) if spec.is_causal else 0
    return chunk, p, p - x.offset, index


@triton.jit
def _head_of_queries(x):
    """Batch, query head, both, and batch and key head in one."""
    bh = tl.program_id(1).to(tl.int64)
    heads = x.heads * x.groups
    b, h = bh // heads, bh % heads
    return b, h, bh, b * x.heads + h // x.groups


@triton.jit
def outputs(out, denominator, walk, x, spec: tl.constexpr):
    """h_i and d_i of a chunk of queries."""
    chunk, p, i, index = _chunk_of_queries(x, spec)
    b, h, bh, bk = _head_of_queries(x)
    e = tl.program_id(2) * spec.value_block + tl.arange(0, spec.value_block)
    seen = _starts_before(chunk, p, b, x, spec)
    acc = tl.zeros([spec.chunk, spec.value_block], tl.float32)
    total = tl.zeros([spec.chunk], tl.float32)
    products = tl.zeros([spec.chunk, spec.chunk], tl.float32)
    for block in range(spec.blocks):
        f = block * spec.block + tl.arange(0, spec.block)
        q = _query_features(i, f, b, h, x, spec)
        if spec.is_causal:
            k = _mixed_keys(p, f, b, h // x.groups, x, spec)
            products = _dot(q, tl.trans(k), products, spec)
        q = tl.where(seen[:, None], q, 0.0)
        acc = _dot(q, _state_at(walk, index, f, e, bk, x, spec), acc, spec)
        total += tl.sum(q * _normaliser_at(walk, index, f, bk, x, spec)[None, :], 1)
    if spec.is_causal:
        products = tl.where(_pairs(p, p, b, x, spec), products, 0.0)
        acc = _dot(products, _values(p, e, b, h // x.groups, x, spec), acc, spec)
        total += tl.sum(products, 1)
    row = bh * x.num_queries
    result = tl.where(total == 0.0, 0.0, 1.0)[:, None] * acc / tl.where(total == 0.0, 1.0, total)[:, None]
    _store(out + row * spec.value_width, result, spec.value_width, i, x.num_queries, e, spec.value_width)
    if tl.program_id(2) == 0:
        tl.store(denominator + row + i, total, mask=(i >= 0) & (i < x.num_queries))


@triton.jit
def row_gradients(inverse_out, gradient_out, out, grad, denominator, num_rows, spec: tl.constexpr):
    """1 / d_i, and the gradient -(dh_i . h_i) / d_i of d_i; 0 where d_i is."""
    i = tl.program_id(0).to(tl.int64) * spec.chunk + tl.arange(0, spec.chunk)
    total = tl.zeros([spec.chunk], tl.float32)
    for block in range(spec.value_blocks):
        e = block * spec.value_block + tl.arange(0, spec.value_block)
        h = _load(out, spec.value_width, i, num_rows, e, spec.value_width)
        total += tl.sum(h * _load(grad, spec.value_width, i, num_rows, e, spec.value_width), 1)
    d = load_vector(denominator, i, num_rows, 0.0, False)
    inverse = tl.where(d == 0.0, 0.0, 1.0 / tl.where(d == 0.0, 1.0, d))
    tl.store(inverse_out + i, inverse, mask=i < num_rows)
    tl.store(gradient_out + i, -total * inverse, mask=i < num_rows)


@triton.jit
def _rows(rows, i, bh, x):
    """1 / d_i and the gradient of d_i, 0 outside."""
    inside = (i >= 0) & (i < x.num_queries)
    at = bh * x.num_queries + i
    inverse = tl.load(rows.inverse + at, mask=inside, other=0.0)
    return inverse, tl.load(rows.denominator + at, mask=inside, other=0.0)


@triton.jit
def _numerator_gradient(rows, inverse, i, e, bh, x, spec: tl.constexpr):
    """dh_i / d_i (C, value block)."""
    at = rows.grad + bh * x.num_queries * spec.value_width
    return _load(at, spec.value_width, i, x.num_queries, e, spec.value_width) * inverse[:, None]


@triton.jit
def state_gradients(walk, last, rows, x, spec: tl.constexpr):
    """The gradient of the state before each chunk of keys, and after the last."""
    f, e, bk = _block_of_state(spec)
    b, h = bk // x.heads, bk % x.heads
    s, z = _start_of_walk(last, f, e, bk, True, spec)
    stop = x.num_chunks if spec.is_causal else tl.cdiv(x.num_queries, spec.chunk)
    for back in range(stop - tl.minimum(x.first_chunk, 0)):
        chunk = stop - 1 - back
        if spec.is_causal:
            if chunk >= 0:
                _store_state(walk, s, z, chunk + 1, f, e, bk, x, spec)
        p = chunk * spec.chunk + tl.arange(0, spec.chunk)
        if spec.has_segments:
            goes_on = _next_start(chunk, b, x, spec) < tl.maximum(chunk * spec.chunk, 1)
            s *= goes_on.to(tl.float32)
            z *= goes_on.to(tl.float32)
        seen = _starts_before(chunk, p, b, x, spec)
        for group in range(x.groups):
            head = h * x.groups + group
            bh = bk * x.groups + group
            q = tl.where(seen[:, None], _query_features(p - x.offset, f, b, head, x, spec), 0.0)
            inverse, d_total = _rows(rows, p - x.offset, bh, x)
            g = _numerator_gradient(rows, inverse, p - x.offset, e, bh, x, spec)
            s = _dot(tl.trans(q), g, s, spec)
            z += tl.sum(q * d_total[:, None], 0)
    _store_state(walk, s, z, 0, f, e, bk, x, spec)


@triton.jit
def _weight_gradients(rows, i, p, j, bh, b, h, x, spec: tl.constexpr):
    """(v_j . dh_i) / d_i + the gradient of d_i, of the pairs of a chunk (C, C)."""
    inverse, d_total = _rows(rows, i, bh, x)
    products = tl.zeros([spec.chunk, spec.chunk], tl.float32)
    for block in range(spec.value_blocks):
        e = block * spec.value_block + tl.arange(0, spec.value_block)
        g = _numerator_gradient(rows, inverse, i, e, bh, x, spec)
        products = _dot(g, tl.trans(_values(j, e, b, h, x, spec)), products, spec)
    return tl.where(_pairs(p, j, b, x, spec), products + d_total[:, None], 0.0)


@triton.jit
def query_gradients(d_query, walk, rows, x, spec: tl.constexpr):
    """dq_i of a chunk of queries, a block of features."""
    chunk, p, i, index = _chunk_of_queries(x, spec)
    b, h, bh, bk = _head_of_queries(x)
    f = tl.program_id(2) * spec.block + tl.arange(0, spec.block)
    inverse, d_total = _rows(rows, i, bh, x)
    acc = d_total[:, None] * _normaliser_at(walk, index, f, bk, x, spec)[None, :]
    for block in range(spec.value_blocks):
        e = block * spec.value_block + tl.arange(0, spec.value_block)
        s = _state_at(walk, index, f, e, bk, x, spec)
        g = _numerator_gradient(rows, inverse, i, e, bh, x, spec)
        acc = _dot(g, tl.trans(s), acc, spec)
    acc = tl.where(_starts_before(chunk, p, b, x, spec)[:, None], acc, 0.0)
    if spec.is_causal:
        weights = _weight_gradients(rows, i, p, p, bh, b, h // x.groups, x, spec)
        acc = _dot(weights, _mixed_keys(p, f, b, h // x.groups, x, spec), acc, spec)
    acc *= _slope(_query_features(i, f, b, h, x, spec), spec)
    _store(d_query + bh * x.num_queries * spec.width, acc, spec.width, i, x.num_queries, f, spec.width)


@triton.jit
def _chunk_of_keys(x, spec: tl.constexpr):
    """A program's keys, batch, head and both, the state after them, and which keys go into it."""
    chunk = tl.program_id(0)
    bk = tl.program_id(1).to(tl.int64)
    b, h = bk // x.heads, bk % x.heads
    j = chunk * spec.chunk + tl.arange(0, spec.chunk)
    index = chunk + 1 if spec.is_causal else 0
    return j, b, h, bk, index, j >= _next_start(chunk, b, x, spec)


@triton.jit
def value_gradients(d_value, walk, rows, x, spec: tl.constexpr):
    """dv_j of a chunk of keys, a block of columns."""
    j, b, h, bk, index, is_open = _chunk_of_keys(x, spec)
    e = tl.program_id(2) * spec.value_block + tl.arange(0, spec.value_block)
    acc = tl.zeros([spec.chunk, spec.value_block], tl.float32)
    for block in range(spec.blocks):
        f = block * spec.block + tl.arange(0, spec.block)
        k = tl.where(is_open[:, None], _mixed_keys(j, f, b, h, x, spec), 0.0)
        acc = _dot(k, _state_at(walk, index, f, e, bk, x, spec), acc, spec)
    if spec.is_causal:
        for group in range(x.groups):
            products = tl.zeros([spec.chunk, spec.chunk], tl.float32)
            for block in range(spec.blocks):
                f = block * spec.block + tl.arange(0, spec.block)
                q = _query_features(j - x.offset, f, b, h * x.groups + group, x, spec)
                products = _dot(q, tl.trans(_mixed_keys(j, f, b, h, x, spec)), products, spec)
            products = tl.where(_pairs(j, j, b, x, spec), products, 0.0)
            inverse, _ = _rows(rows, j - x.offset, bk * x.groups + group, x)
            g = _numerator_gradient(rows, inverse, j - x.offset, e, bk * x.groups + group, x, spec)
            acc = _dot(tl.trans(products), g, acc, spec)
    at = d_value + bk * x.num_keys * spec.value_width
    _store(at, acc, spec.value_width, j, x.num_keys, e, spec.value_width)


@triton.jit
def key_gradients(d_keys, d_prior, walk, rows, x, spec: tl.constexpr):
    """dk_jr and the gradient of log pi_jr of a chunk of keys, a block of features."""
    j, b, h, bk, index, is_open = _chunk_of_keys(x, spec)
    f = tl.program_id(2) * spec.block + tl.arange(0, spec.block)
    acc = tl.zeros([spec.chunk, spec.block], tl.float32)
    acc += _normaliser_at(walk, index, f, bk, x, spec)[None, :]
    for block in range(spec.value_blocks):
        e = block * spec.value_block + tl.arange(0, spec.value_block)
        s = _state_at(walk, index, f, e, bk, x, spec)
        acc = _dot(_values(j, e, b, h, x, spec), tl.trans(s), acc, spec)
    acc = tl.where(is_open[:, None], acc, 0.0)
    if spec.is_causal:
        for group in range(x.groups):
            bh = bk * x.groups + group
            weights = _weight_gradients(rows, j - x.offset, j, j, bh, b, h, x, spec)
            q = _query_features(j - x.offset, f, b, h * x.groups + group, x, spec)
            acc = _dot(tl.trans(weights), q, acc, spec)
    for r in range(spec.mixtures):
        k, prior = _component(r, j, f, b, h, x, spec)
        row = (bk * spec.mixtures + r) * x.num_keys
        d_k = acc * prior[:, None] * _slope(k, spec)
        _store(d_keys + row * spec.width, d_k, spec.width, j, x.num_keys, f, spec.width)
        if spec.has_prior:
            at = d_prior + (row + j) * spec.blocks + tl.program_id(2)
            tl.store(at, prior * tl.sum(k * acc, 1), mask=j < x.num_keys)


@triton.jit
def step(out, walk, first, x, spec: tl.constexpr):
    """The state with one key added, and the outputs of the queries at its position."""
    bk = tl.program_id(1).to(tl.int64)
    b, h = bk // x.heads, bk % x.heads
    e = tl.program_id(0) * spec.value_block + tl.arange(0, spec.value_block)
    j = tl.arange(0, spec.chunk)  # the first alone is a key
    for group in range(x.groups):
        head = h * x.groups + group
        acc = tl.zeros([spec.value_block], tl.float32)
        total = 0.0
        for block in range(spec.blocks):
            f = block * spec.block + tl.arange(0, spec.block)
            s, z = _start_of_walk(first, f, e, bk, spec.has_state, spec)
            k = tl.sum(_mixed_keys(j, f, b, h, x, spec), 0)
            v = tl.sum(_values(j, e, b, h, x, spec), 0)
            s += k[:, None] * v[None, :]
            z += k
            if group == 0:
                _store_state(walk, s, z, 0, f, e, bk, x, spec)
            q = tl.sum(_query_features(j, f, b, head, x, spec), 0)
            acc += tl.sum(q[:, None] * s, 0)
            total += tl.sum(q * z, 0)
        acc = tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total))
        at = out + (bk * x.groups + group) * spec.value_width + e
        tl.store(at, acc.to(out.dtype.element_ty), mask=e < spec.value_width)
