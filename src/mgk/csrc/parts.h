// Parts of a forward by themselves, on tiles in the cache: what `mgk bench roofline` accounts for. Included once for
// each instruction set, inside its namespace.

// Sums in registers that do not wait for each other: more than a unit has under way, fewer than there are registers.
constexpr int NUM_CHAINS = 12;

inline void multiply_add(int64_t rounds) {
    volatile float unknown = 0.5f;  // to the compiler, which would compute the sums itself
    const Vec<float> x = splat<float>(unknown);
    Vec<float> sums[NUM_CHAINS];
#pragma GCC unroll 16
    for (int i = 0; i < NUM_CHAINS; ++i) sums[i] = x * float(i);
    for (int64_t k = rounds; k > 0; --k)
#pragma GCC unroll 16
        for (int i = 0; i < NUM_CHAINS; ++i) sums[i] = sums[i] * x + x;
#pragma GCC unroll 16
    for (int i = 0; i < NUM_CHAINS; ++i) unknown = sum_of_lanes<float>(sums[i]);
}

// `rounds` times one part on each thread, keys and values of `width` features. Returns the number of floating-point
// operations, of the softmax that of scores.
double run_part(Part part, int64_t rounds, int64_t threads, int64_t width) {
    const int64_t stride = ceil_div(width, Simd<float>::W) * Simd<float>::W;
    for_all(threads, threads, [&](int64_t) {
        if (part == Part::MULTIPLY_ADD) return multiply_add(rounds);
        Buffer<float> rows(QUERIES * stride), columns(KEYS * stride), scores(QUERIES * KEYS);
        for (int64_t x = 0; x < QUERIES * stride; ++x) rows[x] = 0;
        for (int64_t x = 0; x < KEYS * stride; ++x) columns[x] = 1;
        for (int64_t x = 0; x < QUERIES * KEYS; ++x) scores[x] = 0;
        const float zeros[KEYS] = {};
        const Block all{0, QUERIES, 0, KEYS};
        float row_max[QUERIES];
        Vec<float> row_sum[QUERIES] = {};
        for (int64_t k = 0; k < rounds; ++k) {
            if (part == Part::SCORES)
                product<float>(QUERIES, KEYS, width, rows, stride, 1, columns, KEYS, scores, KEYS, zeros);
            else if (part == Part::VALUES)
                product<float>(QUERIES, stride, KEYS, scores, KEYS, 1, columns, stride, rows, stride, nullptr);
            else
                for (int64_t i = 0; i < QUERIES; ++i) {
                    float* row = scores + i * KEYS;
                    row_max[i] = largest_lane<float>(lane_max<float>(all, row, 1));
                    row_sum[i] += component_weights<1>(all, row, row_max[i], 1);
                }
        }
    });
    const double tiles = double(rounds) * double(threads);
    if (part == Part::MULTIPLY_ADD) return tiles * 2 * NUM_CHAINS * Simd<float>::W;
    return tiles * QUERIES * KEYS * (part == Part::SOFTMAX ? 1 : 2 * width);
}
