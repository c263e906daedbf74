// Dropout. The random bits are a hash of seed, row and column: the same in forward and backward.

// 1 / (1 - p) or 0 for KEYS columns of a row, from `first` on.
template <typename T>
inline void random_factors(uint64_t seed, uint64_t row, uint32_t first, int64_t threshold, T* factors) {
    uint64_t bits = seed ^ (row * 0x9E3779B97F4A7C15ull);
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    bits ^= bits >> 31;
    const uint32_t low = static_cast<uint32_t>(bits), high = static_cast<uint32_t>(bits >> 32);
    const uint32_t limit = static_cast<uint32_t>(min_of<int64_t>(threshold, 0xFFFFFFFF));
    const T scale = T(4294967296.0 / (4294967296.0 - static_cast<double>(threshold)));
    for (int64_t j = 0; j < KEYS; ++j) {
        uint32_t y = ((first + static_cast<uint32_t>(j)) * 0x9E3779B1u) ^ low;
        y = (y ^ (y >> 16)) * 0x85EBCA6Bu;
        y = (y ^ (y >> 13) ^ high) * 0xC2B2AE35u;
        y ^= y >> 16;
        factors[j] = y < limit ? T(0) : scale;
    }
}

// For the weights of query i and the tile's keys.
template <typename T>
void dropout_factors(const ScoreTile<T>& x, int64_t i, T* factors) {
    const uint64_t query = static_cast<uint64_t>(x.t.p.first_row + x.queries.head * x.t.L + x.queries.first + i);
    const AttentionParams& p = x.t.p;
    random_factors(p.dropout_seed, query, static_cast<uint32_t>(p.first_key + x.tile * KEYS), p.dropout_threshold, factors);
}

template <typename T>
inline void multiply_row(T* row, const T* factors) {
    for (int64_t v = 0; v < KEYS; v += Simd<T>::W) store<T>(row + v, load<T>(row + v) * load<T>(factors + v));
}

// out = residual + x m / (1 - p); residual may be null, and each row of the mask m has ROW elements.
void drop(const DropoutParams& p) {
    constexpr int64_t ROW = 4096;
    for_all(ceil_div(p.size, ROW), p.num_threads, [&](int64_t row) {
        float factors[KEYS];
        const int64_t end = min_of((row + 1) * ROW, p.size);
        for (int64_t at = row * ROW; at < end; at += KEYS) {
            random_factors(p.seed, row, static_cast<uint32_t>(at - row * ROW), p.threshold, factors);
            const int64_t count = min_of(KEYS, end - at);
            const float* x = p.x + at;
            float* out = p.out + at;
            if (p.residual)
                for (int64_t j = 0; j < count; ++j) out[j] = p.residual[at + j] + x[j] * factors[j];
            else
                for (int64_t j = 0; j < count; ++j) out[j] = x[j] * factors[j];
        }
    });
}
