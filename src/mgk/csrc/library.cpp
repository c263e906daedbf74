// The doors of the library, called through ctypes: 0, or a code for what is wrong. Sizes are checked before a pointer is touched.
#include "includes.h"

namespace mgk_plain {
void entry(const Problem&, int);
void decode_entry(const Decode&);
}
#if defined(__x86_64__)
namespace mgk_avx2 {
void entry(const Problem&, int);
void decode_entry(const Decode&);
}
namespace mgk_avx512 {
void entry(const Problem&, int);
void decode_entry(const Decode&);
}
#endif

namespace {

enum Set { PLAIN, AVX2, AVX512 };  // in the order of INSTRUCTION_SETS in functional/kernels.py
enum Code { OK, BAD_SIZE, MISSING_POINTER, UNKNOWN_SET, OUT_OF_MEMORY };

bool supports(int set) {
    if (set == PLAIN) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (set == AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (set == AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
    return false;
}

int check(const Problem& p, int what) {
    const int64_t sizes[] = {p.batch, p.heads, p.mixtures, p.num_queries, p.num_keys, p.width, p.threads};
    for (int64_t size : sizes)
        if (size < 1 || size > (int64_t(1) << 40)) return BAD_SIZE;
    if (p.mixtures > 8 || p.value_width < 0 || p.threads > 4096) return BAD_SIZE;
    if (!p.query || !p.keys || !p.column || (p.shared && !p.row)) return MISSING_POINTER;
    if (what != COUNT && (!p.value || !p.out || !p.peak || !p.total)) return MISSING_POINTER;
    if (what == COUNT && !p.counts) return MISSING_POINTER;
    if (what == BACKWARD && (!p.grad || !p.d_query || !p.d_keys || !p.d_column || !p.d_value || (p.shared && !p.d_row)))
        return MISSING_POINTER;
    if (p.d_affine && p.hard) return BAD_SIZE;
    return OK;
}

int check(const Decode& p) {
    const int64_t sizes[] = {p.batch, p.heads, p.mixtures, p.num_keys, p.width, p.value_width, p.threads};
    for (int64_t size : sizes)
        if (size < 1 || size > (int64_t(1) << 40)) return BAD_SIZE;
    return p.query && p.keys && p.value && p.variance && p.out ? OK : MISSING_POINTER;
}

// Calls the version of the instruction set; what it throws becomes a code.
template <typename Plain, typename Avx2, typename Avx512>
int dispatch(int set, const Plain& plain, const Avx2& avx2, const Avx512& avx512) {
    if (!supports(set)) return UNKNOWN_SET;
    try {
        set == AVX512 ? avx512() : set == AVX2 ? avx2() : plain();
        return OK;
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    }
}

#if defined(__x86_64__)
#define EACH_SET(call) [&] { mgk_plain::call; }, [&] { mgk_avx2::call; }, [&] { mgk_avx512::call; }
#else
#define EACH_SET(call) [&] { mgk_plain::call; }, [&] { mgk_plain::call; }, [&] { mgk_plain::call; }
#endif

int serve(const Problem* p, int set, int what) {
    if (!p) return MISSING_POINTER;
    const int code = check(*p, what);
    return code != OK ? code : dispatch(set, EACH_SET(entry(*p, what)));
}

int serve(const Decode* p, int set) {
    if (!p) return MISSING_POINTER;
    const int code = check(*p);
    return code != OK ? code : dispatch(set, EACH_SET(decode_entry(*p)));
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {
EXPORT int mgk_supports(int set) { return supports(set); }
EXPORT int mgk_forward(const Problem* p, int set) { return serve(p, set, FORWARD); }
EXPORT int mgk_backward(const Problem* p, int set) { return serve(p, set, BACKWARD); }
EXPORT int mgk_count(const Problem* p, int set) { return serve(p, set, COUNT); }
EXPORT int mgk_decode(const Decode* p, int set) { return serve(p, set); }
EXPORT int64_t mgk_struct_sizes() { return sizeof(Problem) * 1000 + sizeof(Decode); }
}
