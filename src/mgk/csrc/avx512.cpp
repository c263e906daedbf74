#include "includes.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")
#define MGK_AVX512
namespace mgk_avx512 {
constexpr int VECTOR_BYTES = 64, REGISTER_ROWS = 8, REGISTER_VECTORS = 2;
#include "attention.h"
#include "decode.h"
#include "parts.h"
}  // namespace mgk_avx512
#endif
