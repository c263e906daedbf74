"""N_jr = sum_i gamma_ijr, gamma_ijr the softmax over r of s_ijr (Eq. 11)."""

import triton
import triton.language as tl

from mgk.functional.mixture.backends.triton_backend.forward import key_row, load_component, query_row
from mgk.functional.mixture.backends.triton_backend.pairs import (
    NEG_INF,
    component_scores,
    finite,
    finite_or_zero,
    load_rows,
    load_vector,
    pair_mask,
    query_range,
    segment_of,
)


@triton.jit
def _scores(r, q, norm, i, j, bh, bk, call, spec: tl.constexpr):
    """s_ijr, less what all components share if the keys are shifted."""
    if spec.is_shifted:
        a, b = query_row(r, i, bh, call, False, spec), key_row(r, j, bk, call, NEG_INF, False, spec)
        s = a[None, :] + b[:, None]
    else:
        k, bias, excess = load_component(r, j, bk, call, False, spec)
        s = component_scores(q, k, bias, norm, excess, tl.load(call.features.least + bk), spec)
    return s


@triton.jit
def counts(result, query_mask, call, spec: tl.constexpr):
    """N_jr over the queries of ``query_mask`` (B, L); a program owns a tile of keys."""
    features, sizes, num_queries = call.features, call.sizes, call.sizes.num_queries
    tile = tl.program_id(0)
    bk = tl.program_id(1).to(tl.int64)
    b, hk = bk // sizes.heads, bk % sizes.heads
    j = tile * spec.key_tile + tl.arange(0, spec.key_tile)
    first, stop = segment_of(j, sizes.num_keys, b, 0, sizes, spec)
    lo, full_lo, full_hi, hi = query_range(tile, first, stop, sizes, spec)
    sums = ()
    for r in tl.static_range(spec.mixtures):
        sums = sums + (tl.zeros([spec.key_tile], tl.float32),)
    for group in range(sizes.groups):
        h = hk * sizes.groups + group
        bh = b * sizes.heads * sizes.groups + h
        row = bh * num_queries
        for start in range(lo, hi, spec.query_tile):
            i = start + tl.arange(0, spec.query_tile)
            q = load_rows(
                features.query + row * spec.width,
                spec.width,
                i,
                num_queries,
                spec.width,
                spec.padded_width,
                False,
            )
            norm = finite(load_vector(features.query_norm + row, i, num_queries, 0.0, False))
            q = finite(q)
            ok, extra = pair_mask(i, j, b, h, first, stop, call.mask, sizes, False, spec)
            if spec.has_query_mask:
                ok = ok & (load_vector(query_mask + b * num_queries, i, num_queries, 0, False) != 0)[None, :]
            best = _scores(0, q, norm, i, j, bh, bk, call, spec)
            winner = tl.zeros_like(best).to(tl.int32)
            for r in tl.static_range(1, spec.mixtures):
                s = _scores(r, q, norm, i, j, bh, bk, call, spec)
                winner = tl.where(s > best, r, winner)
                best = tl.maximum(best, s)
            ok = ok & (best != NEG_INF)
            if spec.is_hard:
                new = ()
                for r in tl.static_range(spec.mixtures):
                    new = new + (sums[r] + tl.sum(tl.where(ok & (winner == r), 1.0, 0.0), 1),)
            else:
                best = finite_or_zero(best)
                total = tl.zeros_like(best)
                for r in tl.static_range(spec.mixtures):
                    total += tl.exp2(_scores(r, q, norm, i, j, bh, bk, call, spec) - best)
                inverse = tl.where(ok, 1.0 / total, 0.0)
                new = ()
                for r in tl.static_range(spec.mixtures):
                    e = tl.exp2(_scores(r, q, norm, i, j, bh, bk, call, spec) - best)
                    new = new + (sums[r] + tl.sum(tl.where(ok, e * inverse, 0.0), 1),)
            sums = new
    for r in tl.static_range(spec.mixtures):
        at = result + (bk * spec.mixtures + r) * sizes.num_keys + j
        tl.store(at, sums[r], mask=j < sizes.num_keys)
