// Dropout of position weights. The random bits are a hash of seed, query and key: the same in forward and backward.

// 1 / (1 - p) or 0 for the weights of query i and the tile's keys.
template <typename T>
void dropout_factors(const ScoreTile<T>& x, int64_t i, T* factors) {
    const int64_t threshold = x.t.p.dropout_threshold;
    const uint64_t query = static_cast<uint64_t>((x.t.p.first_head + x.queries.head) * x.t.L + x.queries.first + i);
    uint64_t bits = x.t.p.dropout_seed ^ (query * 0x9E3779B97F4A7C15ull);
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    bits ^= bits >> 31;
    const uint32_t low = static_cast<uint32_t>(bits), high = static_cast<uint32_t>(bits >> 32);
    const T scale = T(4294967296.0 / (4294967296.0 - static_cast<double>(threshold)));
    for (int64_t j = 0; j < KEYS; ++j) {
        uint32_t y = (static_cast<uint32_t>(x.tile * KEYS + j) * 0x9E3779B1u) ^ low;
        y = (y ^ (y >> 16)) * 0x85EBCA6Bu;
        y = (y ^ (y >> 13) ^ high) * 0xC2B2AE35u;
        y ^= y >> 16;
        factors[j] = static_cast<int64_t>(y) < threshold ? T(0) : scale;
    }
}

template <typename T>
inline void multiply_row(T* row, const T* factors) {
    for (int64_t v = 0; v < KEYS; v += Simd<T>::W) store<T>(row + v, load<T>(row + v) * load<T>(factors + v));
}
