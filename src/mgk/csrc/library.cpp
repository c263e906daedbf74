// The exported functions, called through ctypes. Sizes and pointers are checked before a tensor is read.
#include "includes.h"

#include <cstddef>
#include <string>

#define MGK_DECLARE_SET(set)                    \
    namespace mgk_##set {                       \
    void run(const AttentionParams&, Mode);     \
    void run_mixture(const MixtureParams&, Mode); \
    void decode(const DecodeParams&);           \
    void drop(const DropoutParams&);            \
    double run_part(Part, int64_t, int64_t, int64_t); \
    }

MGK_DECLARE_SET(portable)
#if defined(__x86_64__)
MGK_DECLARE_SET(avx2)
MGK_DECLARE_SET(avx512)
#endif

namespace {

struct InstructionSet {
    const char* name;
    bool (*is_supported)();
    void (*run)(const AttentionParams&, Mode);
    void (*run_mixture)(const MixtureParams&, Mode);
    void (*decode)(const DecodeParams&);
    void (*drop)(const DropoutParams&);
    double (*run_part)(Part, int64_t rounds, int64_t threads, int64_t width);
};

// The best last.
const InstructionSet INSTRUCTION_SETS[] = {
    {"portable", [] { return true; }, mgk_portable::run, mgk_portable::run_mixture, mgk_portable::decode,
     mgk_portable::drop, mgk_portable::run_part},
#if defined(__x86_64__)
    {"avx2",
     [] {
         return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
     },
     mgk_avx2::run, mgk_avx2::run_mixture, mgk_avx2::decode, mgk_avx2::drop, mgk_avx2::run_part},
    {"avx512",
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
     },
     mgk_avx512::run, mgk_avx512::run_mixture, mgk_avx512::decode, mgk_avx512::drop, mgk_avx512::run_part},
#endif
};

// In the order of _ERRORS in backends/cpu_kernels.py; the last is a MemoryError.
enum Status { OK, BAD_SIZE, MISSING_POINTER, UNSUPPORTED_SET, UNSUPPORTED_OPTIONS, OUT_OF_MEMORY };

bool are_sizes(std::initializer_list<int64_t> sizes) {
    for (int64_t size : sizes)
        if (size < 1 || size > (int64_t(1) << 40)) return false;
    return true;
}

bool are_given(std::initializer_list<const void*> pointers) {
    for (const void* pointer : pointers)
        if (!pointer) return false;
    return true;
}

Status check(const AttentionParams& p, Mode mode) {
    if (!are_sizes({p.batch_size, p.num_heads, p.group, p.num_components, p.num_queries, p.num_keys, p.num_features,
                    p.num_threads}))
        return BAD_SIZE;
    if (p.num_components > MAX_COMPONENTS || p.value_width < 0 || p.num_threads > 4096) return BAD_SIZE;
    if (p.left < -1 || p.right < -1 || (p.segment_starts && p.num_queries > p.num_keys)) return BAD_SIZE;
    if (!are_given({p.query, p.keys, p.key_bias}) || (p.is_shared && !p.query_bias)) return MISSING_POINTER;
    if (!p.segment_starts != !p.segment_ends) return MISSING_POINTER;
    if (mode == Mode::COUNT) return p.counts ? OK : MISSING_POINTER;
    if (!are_given({p.value, p.out, p.row_max, p.row_sum})) return MISSING_POINTER;
    if (mode == Mode::FORWARD) return OK;
    if (!are_given({p.grad, p.d_query, p.d_keys, p.d_key_bias, p.d_value}) || (p.is_shared && !p.d_query_bias))
        return MISSING_POINTER;
    return p.d_score_affine && p.is_hard ? UNSUPPORTED_OPTIONS : OK;
}

Status check(const MixtureParams& p, Mode mode) {
    if (!are_sizes({p.batch_size, p.num_heads, p.group, p.num_components, p.num_queries, p.num_keys, p.key_width,
                    p.num_threads}))
        return BAD_SIZE;
    if (p.num_components > MAX_COMPONENTS || p.value_width < 0 || p.num_threads > 4096 || !(p.variance > 0))
        return BAD_SIZE;
    if (p.left < -1 || p.right < -1 || (p.segment_starts && p.num_queries > p.num_keys)) return BAD_SIZE;
    if (!p.segment_starts != !p.segment_ends) return MISSING_POINTER;
    if (!are_given({p.query, p.keys, p.value, p.out, p.row_max, p.row_sum})) return MISSING_POINTER;
    if (mode == Mode::FORWARD) return OK;
    return are_given({p.grad, p.d_query, p.d_keys, p.d_value}) && (!p.shifts || p.d_shifts) ? OK : MISSING_POINTER;
}

Status check(const DecodeParams& p) {
    if (!are_sizes({p.batch_size, p.num_heads, p.group, p.num_components, p.num_keys, p.key_width, p.value_width,
                    p.num_threads}))
        return BAD_SIZE;
    return are_given({p.query, p.keys, p.value, p.variance, p.out}) ? OK : MISSING_POINTER;
}

Status check(const DropoutParams& p) {
    if (!are_sizes({p.size, p.num_threads}) || p.num_threads > 4096) return BAD_SIZE;
    return are_given({p.x, p.out}) ? OK : MISSING_POINTER;
}

// Checks the parameters and calls function(instruction set).
template <typename Params, typename Function, typename... Checked>
int call(const Params* p, const char* set_name, const Function& function, Checked... mode) {
    if (!p || !set_name) return MISSING_POINTER;
    if (const Status status = check(*p, mode...)) return status;
    for (const InstructionSet& set : INSTRUCTION_SETS) {
        if (std::strcmp(set.name, set_name) != 0 || !set.is_supported()) continue;
        try {
            function(set);
            return OK;
        } catch (const std::bad_alloc&) {
            return OUT_OF_MEMORY;
        }
    }
    return UNSUPPORTED_SET;
}

int run(const AttentionParams* p, const char* set_name, Mode mode) {
    return call(p, set_name, [&](const InstructionSet& set) { set.run(*p, mode); }, mode);
}

int run_mixture(const MixtureParams* p, const char* set_name, Mode mode) {
    return call(p, set_name, [&](const InstructionSet& set) { set.run_mixture(*p, mode); }, mode);
}

std::string supported_sets() {
    std::string names;
    for (const InstructionSet& set : INSTRUCTION_SETS)
        if (set.is_supported()) names += (names.empty() ? "" : " ") + std::string(set.name);
    return names;
}

// A line "struct.field offset size" for each field, and "struct 0 size" for each struct.
std::string struct_layout() {
    std::string text;
    const auto add = [&](const std::string& name, size_t offset, size_t size) {
        text += name + " " + std::to_string(offset) + " " + std::to_string(size) + "\n";
    };
#define MGK_ADD_ATTENTION(type, name) add("AttentionParams." #name, offsetof(AttentionParams, name), sizeof(type));
#define MGK_ADD_MIXTURE(type, name) add("MixtureParams." #name, offsetof(MixtureParams, name), sizeof(type));
#define MGK_ADD_DECODE(type, name) add("DecodeParams." #name, offsetof(DecodeParams, name), sizeof(type));
#define MGK_ADD_DROPOUT(type, name) add("DropoutParams." #name, offsetof(DropoutParams, name), sizeof(type));
    MGK_ATTENTION_PARAMS(MGK_ADD_ATTENTION)
    add("AttentionParams", 0, sizeof(AttentionParams));
    MGK_MIXTURE_PARAMS(MGK_ADD_MIXTURE)
    add("MixtureParams", 0, sizeof(MixtureParams));
    MGK_DECODE_PARAMS(MGK_ADD_DECODE)
    add("DecodeParams", 0, sizeof(DecodeParams));
    MGK_DROPOUT_PARAMS(MGK_ADD_DROPOUT)
    add("DropoutParams", 0, sizeof(DropoutParams));
    return text;
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {
EXPORT int mgk_forward(const AttentionParams* p, const char* set) { return run(p, set, Mode::FORWARD); }
EXPORT int mgk_backward(const AttentionParams* p, const char* set) { return run(p, set, Mode::BACKWARD); }
EXPORT int mgk_count(const AttentionParams* p, const char* set) { return run(p, set, Mode::COUNT); }
EXPORT int mgk_mixture_forward(const MixtureParams* p, const char* set) { return run_mixture(p, set, Mode::FORWARD); }
EXPORT int mgk_mixture_backward(const MixtureParams* p, const char* set) { return run_mixture(p, set, Mode::BACKWARD); }
EXPORT int mgk_decode(const DecodeParams* p, const char* set_name) {
    return call(p, set_name, [&](const InstructionSet& set) { set.decode(*p); });
}

EXPORT int mgk_dropout(const DropoutParams* p, const char* set_name) {
    return call(p, set_name, [&](const InstructionSet& set) { set.drop(*p); });
}

// The number of operations (parts.h); 0 without the instruction set.
EXPORT double mgk_run_part(int64_t part, int64_t rounds, int64_t threads, int64_t width, const char* set_name) {
    for (const InstructionSet& set : INSTRUCTION_SETS)
        if (std::strcmp(set.name, set_name) == 0 && set.is_supported())
            return set.run_part(static_cast<Part>(part), rounds, threads, width);
    return 0;
}

// What the library says about itself: texts that live as long as it does.
EXPORT int64_t mgk_max_components() { return MAX_COMPONENTS; }
EXPORT int64_t mgk_reads_float16() {
#if defined(MGK_FLOAT16)
    return true;
#else
    return false;
#endif
}
EXPORT const char* mgk_supported_sets() {
    static const std::string text = supported_sets();
    return text.c_str();
}
EXPORT const char* mgk_struct_layout() {
    static const std::string text = struct_layout();
    return text.c_str();
}
}
