#include "includes.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c")
#define MGK_AVX2
namespace mgk_avx2 {
constexpr int VECTOR_BYTES = 32, REGISTER_ROWS = 4, REGISTER_VECTORS = 2;
#include "attention.h"
#include "decode.h"
#include "parts.h"
}  // namespace mgk_avx2
#endif
