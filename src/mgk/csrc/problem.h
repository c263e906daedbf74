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
    void* peak;          // (B, H, L), in units of log 2; +inf for a query with no key left
    void* total;         // (B, H, L), the sum of 2^(score - peak); 1 for a query with no key left
    const void* grad;    // (B, H, L, E)
    void *d_query, *d_keys, *d_row, *d_column;
    double* d_affine;  // (2, B, H, M, L) or null: of a_ir = 1 and b_ir = 0 in a_ir s_ijr + b_ir
    void* d_value;
    const void* query_weight;  // (B, L) or null, for the counts
    void* counts;              // (B, H, M, S)
};

// One query against a long cache. Rows of keys and values are contiguous; every other stride is given, in elements.
struct Decode {
    int64_t batch, heads, mixtures, num_keys, width, value_width;
    int64_t is_dot, hard, is_double, threads;
    const void* query;   // (B, H, 1, D), contiguous
    const void* shifts;  // (H, M, D), contiguous, or null: then keys has M components
    const void* keys;
    int64_t key_strides[4];  // of b, h, r, j
    const void* value;
    int64_t value_strides[3];  // of b, h, j
    const void* log_prior;     // or null
    int64_t prior_strides[4];
    const void* variance;
    int64_t variance_strides[4];
    const void* mask;  // additive, or bytes that are 0 where a key is excluded; or null
    int64_t mask_is_bool, mask_strides[3];  // of b, h, j
    void* out;  // (B, H, 1, E), contiguous
};
