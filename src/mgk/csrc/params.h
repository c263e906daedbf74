// The arguments of a call. Python holds them in ctypes structures of the same names (backends/cpu_kernels.py).
//
// Each list is the only declaration of its fields: the struct and the layout that the library reports are made from it.
// B batch, H heads, M components, L queries, S keys, F features, D key width, E value width.
#pragma once

#include <cstdint>

constexpr int64_t MAX_COMPONENTS = 8;  // arrays of a tile have room for this many

enum class Mode { FORWARD, BACKWARD, COUNT };

template <int DIMENSIONS>
using Strides = int64_t[DIMENSIONS];  // in elements

// s_ijr = query_i . keys_jr + query_bias_ir + key_bias_jr. Every tensor is contiguous but for the mask.
#define MGK_ATTENTION_PARAMS(FIELD)                                                                                  \
    FIELD(int64_t, batch_size)                                                                                       \
    FIELD(int64_t, num_heads)                                                                                        \
    FIELD(int64_t, num_components)                                                                                   \
    FIELD(int64_t, num_queries)                                                                                      \
    FIELD(int64_t, num_keys)                                                                                         \
    FIELD(int64_t, num_features)                                                                                     \
    FIELD(int64_t, value_width)                                                                                      \
    FIELD(int64_t, is_shared) /* the components share the product: keys has one component */                         \
    FIELD(int64_t, is_hard)                                                                                          \
    FIELD(int64_t, is_causal)                                                                                        \
    FIELD(int64_t, is_double)                                                                                        \
    FIELD(int64_t, num_threads)                                                                                      \
    FIELD(const void*, query)      /* (B, H, L, F) */                                                                \
    FIELD(const void*, keys)       /* (B, H, M or 1, S, F) */                                                        \
    FIELD(const void*, query_bias) /* (B, H, M, L) when shared, else null */                                         \
    FIELD(const void*, key_bias)   /* (B, H, M, S) */                                                                \
    FIELD(const void*, value)      /* (B, H, S, E) */                                                                \
    FIELD(const void*, mask)       /* (B, H, L, S): additive, or bytes that are 0 where a pair is excluded; or null */ \
    FIELD(int64_t, mask_is_bool)                                                                                     \
    FIELD(Strides<4>, mask_strides)                                                                                  \
    FIELD(uint64_t, dropout_seed)                                                                                    \
    FIELD(int64_t, dropout_threshold) /* p times 2^32: a weight is dropped when its 32 random bits are below */      \
    FIELD(void*, out)                 /* (B, H, L, E) */                                                             \
    FIELD(void*, row_max)             /* (B, H, L), in units of log 2; +inf for a query with no key left */          \
    FIELD(void*, row_sum)             /* (B, H, L), the sum of 2^(score - row_max); 1 for a query with no key left */ \
    FIELD(const void*, grad)          /* (B, H, L, E) */                                                             \
    FIELD(void*, d_query)                                                                                            \
    FIELD(void*, d_keys)                                                                                             \
    FIELD(void*, d_query_bias)                                                                                       \
    FIELD(void*, d_key_bias)                                                                                         \
    FIELD(double*, d_score_affine) /* (2, B, H, M, L) or null: of a_ir = 1 and b_ir = 0 in a_ir s_ijr + b_ir */      \
    FIELD(void*, d_value)                                                                                            \
    FIELD(const void*, query_weight) /* (B, L) or null, for the counts */                                            \
    FIELD(void*, counts)             /* (B, H, M, S) */

// One query against a long cache. Rows of keys and values are contiguous; every other stride is given.
#define MGK_DECODE_PARAMS(FIELD)                                                                                     \
    FIELD(int64_t, batch_size)                                                                                       \
    FIELD(int64_t, num_heads)                                                                                        \
    FIELD(int64_t, num_components)                                                                                   \
    FIELD(int64_t, num_keys)                                                                                         \
    FIELD(int64_t, key_width)                                                                                        \
    FIELD(int64_t, value_width)                                                                                      \
    FIELD(int64_t, is_dot)                                                                                           \
    FIELD(int64_t, is_hard)                                                                                          \
    FIELD(int64_t, is_double)                                                                                        \
    FIELD(int64_t, num_threads)                                                                                      \
    FIELD(const void*, query)  /* (B, H, 1, D), contiguous */                                                        \
    FIELD(const void*, shifts) /* (H, M, D), contiguous; or null, then keys has M components */                      \
    FIELD(const void*, keys)   /* (B, H, M or 1, S, D) */                                                            \
    FIELD(Strides<4>, key_strides)                                                                                   \
    FIELD(const void*, value) /* (B, H, S, E) */                                                                     \
    FIELD(Strides<3>, value_strides)                                                                                 \
    FIELD(const void*, log_prior) /* (B, H, M, S) or null */                                                         \
    FIELD(Strides<4>, log_prior_strides)                                                                             \
    FIELD(const void*, variance) /* (B, H, M, S) */                                                                  \
    FIELD(Strides<4>, variance_strides)                                                                              \
    FIELD(const void*, mask) /* (B, H, S): additive, or bytes that are 0 where a key is excluded; or null */         \
    FIELD(int64_t, mask_is_bool)                                                                                     \
    FIELD(Strides<3>, mask_strides)                                                                                  \
    FIELD(void*, out) /* (B, H, 1, E), contiguous */

#define MGK_DECLARE_FIELD(type, name) type name;

struct AttentionParams {
    MGK_ATTENTION_PARAMS(MGK_DECLARE_FIELD)
};

struct DecodeParams {
    MGK_DECODE_PARAMS(MGK_DECLARE_FIELD)
};

#undef MGK_DECLARE_FIELD
