// The arguments of a call. Python holds them in ctypes structures of the same names (backends/cpu_kernels.py).
//
// Each list is the only declaration of its fields: the struct and the layout that the library reports are made from it.
// B batch, Hq query heads, H key heads, M components, L queries, S keys, F features, D key width, E value width.
// A group of G = Hq / H query heads reads one key head.
#pragma once

#include <cstdint>

constexpr int64_t MAX_COMPONENTS = 8;  // arrays of a tile have room for this many

enum class Mode { FORWARD, BACKWARD, COUNT };

enum class Dtype { FLOAT64, FLOAT32, BFLOAT16, FLOAT16 };  // the order of _DTYPES in backends/cpu_kernels.py

enum class Part { MULTIPLY_ADD, SCORES, SOFTMAX, VALUES };  // the order of PARTS in backends/cpu_kernels.py

// GCC knows _Float16 in C++ from version 12 on, for AArch64 from 13.
#if defined(__aarch64__)
#define MGK_FLOAT16 __fp16
#elif defined(__FLT16_MANT_DIG__)
#define MGK_FLOAT16 _Float16
#endif

template <int DIMENSIONS>
using Strides = int64_t[DIMENSIONS];  // in elements

// s_ijr = query_i . keys_jr + query_bias_ir + key_bias_jr. Every tensor is contiguous but for the mask.
#define MGK_ATTENTION_PARAMS(FIELD)                                                                                  \
    FIELD(int64_t, batch_size)                                                                                       \
    FIELD(int64_t, num_heads) /* H */                                                                                \
    FIELD(int64_t, group)     /* G */                                                                                \
    FIELD(int64_t, num_components)                                                                                   \
    FIELD(int64_t, first_row) /* of a part of a call: where its queries and keys are in the whole, for dropout */    \
    FIELD(int64_t, first_key)                                                                                        \
    FIELD(int64_t, num_queries)                                                                                      \
    FIELD(int64_t, num_keys)                                                                                         \
    FIELD(int64_t, num_features)                                                                                     \
    FIELD(int64_t, value_width)                                                                                      \
    FIELD(int64_t, is_shared) /* the components share the product: keys has one component */                         \
    FIELD(int64_t, is_hard)                                                                                          \
    FIELD(int64_t, left)  /* a query sees keys from so many positions before it; -1: all */                          \
    FIELD(int64_t, right) /* to so many after it; -1: all */                                                         \
    FIELD(int64_t, is_double)                                                                                        \
    FIELD(int64_t, num_threads)                                                                                      \
    FIELD(const void*, query)      /* (B, Hq, L, F) */                                                               \
    FIELD(const void*, keys)       /* (B, H, M or 1, S, F) */                                                        \
    FIELD(const void*, query_bias) /* (B, Hq, M, L) when shared, else null */                                        \
    FIELD(const void*, key_bias)   /* (B, H, M, S) */                                                                \
    FIELD(const void*, value)      /* (B, H, S, E) */                                                                \
    FIELD(const void*, mask)       /* (B, Hq, L, S): additive, or bytes, 0 where a pair is excluded; or null */      \
    FIELD(int64_t, mask_is_bool)                                                                                     \
    FIELD(Strides<4>, mask_strides)                                                                                  \
    FIELD(const int64_t*, segment_starts) /* (B, S): where the segment of a position starts; or null */              \
    FIELD(const int64_t*, segment_ends)   /* (B, S) */                                                               \
    FIELD(uint64_t, dropout_seed)                                                                                    \
    FIELD(int64_t, dropout_threshold) /* p times 2^32: a weight is dropped when its 32 random bits are below */      \
    FIELD(void*, out)                 /* (B, Hq, L, E) */                                                            \
    FIELD(void*, row_max)             /* (B, Hq, L), in units of log 2; +inf for a query with no key left */         \
    FIELD(void*, row_sum)             /* (B, Hq, L), the sum of 2^(score - row_max); 1 where no key is left */       \
    FIELD(void*, lse)                 /* (B, Hq, L), the natural logarithm of the sum; -inf where no key is left */  \
    FIELD(const void*, grad)          /* (B, Hq, L, E) */                                                            \
    FIELD(const void*, d_lse)         /* (B, Hq, L) or null */                                                       \
    FIELD(void*, d_query)                                                                                            \
    FIELD(void*, d_keys)                                                                                             \
    FIELD(void*, d_query_bias)                                                                                       \
    FIELD(void*, d_key_bias)                                                                                         \
    FIELD(double*, d_score_affine) /* (2, B, Hq, M, L) or null: of a_ir = 1 and b_ir = 0 in a_ir s_ijr + b_ir */     \
    FIELD(void*, d_value)                                                                                            \
    FIELD(const void*, query_weight) /* (B, L) or null, for the counts */                                            \
    FIELD(void*, counts)             /* (B, H, M, S) */

// The same by its own tensors, with one variance. Rows of query, keys and value are contiguous; other strides are given.
#define MGK_MIXTURE_PARAMS(FIELD)                                                                                    \
    FIELD(int64_t, batch_size)                                                                                       \
    FIELD(int64_t, num_heads) /* H */                                                                                \
    FIELD(int64_t, group)     /* G */                                                                                \
    FIELD(int64_t, num_components)                                                                                   \
    FIELD(int64_t, num_queries)                                                                                      \
    FIELD(int64_t, num_keys)                                                                                         \
    FIELD(int64_t, key_width)                                                                                        \
    FIELD(int64_t, value_width)                                                                                      \
    FIELD(int64_t, is_dot)                                                                                           \
    FIELD(int64_t, is_hard)                                                                                          \
    FIELD(int64_t, left)  /* as above */                                                                             \
    FIELD(int64_t, right) /* as above */                                                                             \
    FIELD(int64_t, dtype) /* of query, keys, shifts, value and their gradients: a Dtype */                           \
    FIELD(int64_t, num_threads)                                                                                      \
    FIELD(double, variance)                                                                                          \
    FIELD(double, near_zero)   /* the squared norm up to which a causal centre is 0 */                               \
    FIELD(const void*, query)  /* (B, Hq, L, D) */                                                                   \
    FIELD(Strides<3>, query_strides)                                                                                 \
    FIELD(const void*, keys)   /* (B, H, M or 1, S, D) */                                                            \
    FIELD(Strides<4>, key_strides)                                                                                   \
    FIELD(const void*, shifts) /* (H, M, D), contiguous; or null, then keys has M components */                      \
    FIELD(const void*, value)  /* (B, H, S, E) */                                                                    \
    FIELD(Strides<3>, value_strides)                                                                                 \
    FIELD(const void*, log_prior) /* (B, H, M, S) or null, at full precision, as mask and what follows */            \
    FIELD(Strides<4>, log_prior_strides)                                                                             \
    FIELD(int64_t, normalises_prior) /* over the components; positions share it */                                   \
    FIELD(const void*, mask)         /* as above */                                                                  \
    FIELD(int64_t, mask_is_bool)                                                                                     \
    FIELD(int64_t, is_key_mask) /* all queries share the mask */                                                     \
    FIELD(Strides<4>, mask_strides)                                                                                  \
    FIELD(const int64_t*, segment_starts)                                                                            \
    FIELD(const int64_t*, segment_ends)                                                                              \
    FIELD(uint64_t, dropout_seed)                                                                                    \
    FIELD(int64_t, dropout_threshold)                                                                                \
    FIELD(void*, out)                                                                                                \
    FIELD(void*, row_max)                                                                                            \
    FIELD(void*, row_sum)                                                                                            \
    FIELD(void*, lse)                                                                                                \
    FIELD(const void*, grad)                                                                                         \
    FIELD(const void*, d_lse)                                                                                        \
    FIELD(void*, d_query)                                                                                            \
    FIELD(void*, d_keys)                                                                                             \
    FIELD(void*, d_shifts)                                                                                           \
    FIELD(void*, d_value)                                                                                            \
    FIELD(void*, d_log_prior) /* (B, H, M, S), (B, H, M, 1) where positions share the prior, or null */

// One query against a long cache. Rows of keys and values are contiguous; every other stride is given.
#define MGK_DECODE_PARAMS(FIELD)                                                                                     \
    FIELD(int64_t, batch_size)                                                                                       \
    FIELD(int64_t, num_heads) /* H */                                                                                \
    FIELD(int64_t, group)     /* G */                                                                                \
    FIELD(int64_t, num_components)                                                                                   \
    FIELD(int64_t, num_keys)                                                                                         \
    FIELD(int64_t, key_width)                                                                                        \
    FIELD(int64_t, value_width)                                                                                      \
    FIELD(int64_t, is_dot)                                                                                           \
    FIELD(int64_t, is_hard)                                                                                          \
    FIELD(int64_t, is_double)                                                                                        \
    FIELD(int64_t, num_threads)                                                                                      \
    FIELD(const void*, query)  /* (B, Hq, 1, D), contiguous */                                                       \
    FIELD(const void*, shifts) /* (H, M, D), contiguous; or null, then keys has M components */                      \
    FIELD(const void*, keys)   /* (B, H, M or 1, S, D) */                                                            \
    FIELD(Strides<4>, key_strides)                                                                                   \
    FIELD(const void*, value) /* (B, H, S, E) */                                                                     \
    FIELD(Strides<3>, value_strides)                                                                                 \
    FIELD(const void*, log_prior) /* (B, H, M, S) or null */                                                         \
    FIELD(Strides<4>, log_prior_strides)                                                                             \
    FIELD(const void*, variance) /* (B, H, M, S) */                                                                  \
    FIELD(Strides<4>, variance_strides)                                                                              \
    FIELD(const void*, mask) /* (B, Hq, S): additive, or bytes that are 0 where a key is excluded; or null */        \
    FIELD(int64_t, mask_is_bool)                                                                                     \
    FIELD(Strides<3>, mask_strides)                                                                                  \
    FIELD(void*, out) /* (B, Hq, 1, E), contiguous */                                                                \
    FIELD(void*, lse) /* (B, Hq, 1), contiguous, or null */

// Dropout of `size` numbers.
#define MGK_DROPOUT_PARAMS(FIELD)                                                                                    \
    FIELD(int64_t, size)                                                                                             \
    FIELD(int64_t, num_threads)                                                                                      \
    FIELD(uint64_t, seed)                                                                                            \
    FIELD(int64_t, threshold) /* p times 2^32 */                                                                     \
    FIELD(const float*, x)                                                                                           \
    FIELD(const float*, residual) /* or null */                                                                      \
    FIELD(float*, out)

#define MGK_DECLARE_FIELD(type, name) type name;

struct AttentionParams {
    MGK_ATTENTION_PARAMS(MGK_DECLARE_FIELD)
};

struct MixtureParams {
    MGK_MIXTURE_PARAMS(MGK_DECLARE_FIELD)
};

struct DecodeParams {
    MGK_DECODE_PARAMS(MGK_DECLARE_FIELD)
};

struct DropoutParams {
    MGK_DROPOUT_PARAMS(MGK_DECLARE_FIELD)
};

#undef MGK_DECLARE_FIELD
