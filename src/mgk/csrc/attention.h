// Mixture attention in tiles of queries and keys. Included once for each instruction set, inside its namespace.

#include "simd.h"
#include "gemm.h"
#include "buffers.h"
#include "tiles.h"
#include "mask.h"
#include "scores.h"
#include "softmax.h"
#include "dropout.h"
#include "forward.h"
#include "score_gradients.h"
#include "backward.h"
#include "statistics.h"

// EACH: the scores of every component are wanted. MERGED: one row of scores may stand for all.
template <bool IS_SHARED, bool IS_HARD, typename T>
void run_mode(const AttentionParams& p, Mode mode) {
    constexpr Scoring EACH = IS_SHARED ? Scoring::SHARED : Scoring::SEPARATE;
    constexpr Scoring MERGED = !IS_SHARED ? Scoring::SEPARATE : IS_HARD ? Scoring::MAXIMUM : Scoring::FACTORED;
    if (mode == Mode::FORWARD)
        forward<MERGED, IS_HARD, T>(p);
    else if (mode == Mode::COUNT)
        count<EACH, IS_HARD, T>(p);
    else if (!IS_HARD && p.d_score_affine)
        backward<EACH, false, true, T>(p);
    else
        backward<MERGED, IS_HARD, false, T>(p);
}

// Calls then(std::true_type) or then(std::false_type), so that a mode becomes a template parameter.
template <typename Then>
void static_switch(bool condition, const Then& then) {
    if (condition)
        then(std::true_type{});
    else
        then(std::false_type{});
}

// The modes that are template parameters: dtype, shared or separate products, soft or hard, and the gradient of
// score_affine. Masks, causality and dropout are branches per tile or row, whose cost does not show.
void run(const AttentionParams& p, Mode mode) {
    static_switch(p.is_double, [&](auto is_double) {
        static_switch(p.is_shared, [&](auto is_shared) {
            // with one component soft and hard are the same
            static_switch(p.is_hard && p.num_components > 1, [&](auto is_hard) {
                using T = std::conditional_t<decltype(is_double)::value, double, float>;
                run_mode<decltype(is_shared)::value, decltype(is_hard)::value, T>(p, mode);
            });
        });
    });
}

#include "mixture.h"
