// What every processor of the architecture has: SSE2 on x86-64, NEON on AArch64.
#include "includes.h"

namespace mgk_portable {
constexpr int VECTOR_BYTES = 16, REGISTER_ROWS = 4, REGISTER_VECTORS = 2;
#include "attention.h"
#include "decode.h"
#include "parts.h"
}  // namespace mgk_portable
