// One call as it comes from Python. Every tensor is contiguous but for the mask, which has strides.
//
//   s_ijr = query_i . keys_jr + row_ir + column_jr        keys has one component when `shared` is set
#pragma once

#include <cstdint>

struct Problem {
    int64_t batch, heads, mixtures, num_queries, num_keys, width, value_width;
    int64_t shared, hard, causal, is_double, threads;
    const void* query;   // (B, H, L, F)
    const void* keys;    // (B, H, M or 1, S, F)
    const void* row;     // (B, H, M, L) or null
    const void* column;  // (B, H, M, S)
    const void* value;   // (B, H, S, E)
    const void* mask;    // additive, or bytes that are 0 where a pair is excluded; or null
    int64_t mask_is_bool, mask_strides[4];
    uint64_t seed;
    int64_t drop_below;  // of 2^32: a position weight is dropped when its random number is below
    void* out;           // (B, H, L, E)
    void* lse;           // (B, H, L)
    const void* grad;    // (B, H, L, E)
    void *d_query, *d_keys, *d_row, *d_column, *d_value;
    const void* query_weight;  // (B, L) or null, for the counts
    void* counts;              // (B, H, M, S)
};
