// The softmax of a row of scores, tile by tile: its maximum so far, its weights 2^(score - row_max), and the rescaling
// of what has been summed when the maximum rises.

// The largest score of the components, in component 0.
template <typename T>
void max_over_components(T* scores, int64_t rows, int64_t components) {
    for (int64_t x = 0; x < rows * KEYS; x += Simd<T>::W) {
        auto high = load<T>(scores + x);
        for (int64_t r = 1; r < components; ++r) {
            const auto score = load<T>(scores + r * QUERIES * KEYS + x);
            high = score == score ? larger<T>(score, high) : score;  // a NaN stays
        }
        store<T>(scores + x, high);
    }
}

// The largest of each lane, of a strip's keys, as what follows.
template <typename T>
inline Vec<T> lane_max(const Block& strip, const T* row, int64_t components) {
    auto high = load<T>(row + strip.key);
    for (int64_t r = 0; r < components; ++r)
        for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) high = larger<T>(load<T>(row + r * QUERIES * KEYS + v), high);
    return high;
}

// MAXIMUM: adds relative_max() to a row; the largest of each lane comes back.
template <typename T>
inline Vec<T> add_relative_max(const ScoreTile<T>& x, const Block& strip, int64_t i, T* row) {
    auto high = splat<T>(NEG_INF<T>);
    for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) {
        const auto score = load<T>(row + v) + relative_max(x, i, v);
        store<T>(row + v, score);
        high = larger<T>(score, high);
    }
    return high;
}

// Raises a row's running maximum, rounded up to an integer: the sums are rescaled by a power of two, without rounding.
template <typename T>
inline void raise_row_max(Vec<T> high, T& row_max, Vec<T>& row_sum, T* out, int64_t width) {
    if (!any_above<T>(high, row_max)) return;
    const T raised = std::ceil(largest_lane<T>(high)), scale = std::exp2(row_max - raised);
    row_sum *= scale;
    for (int64_t e = 0; e < width; e += Simd<T>::W) store<T>(out + e, load<T>(out + e) * scale);
    row_max = raised;
}

// sum_r 2^(s_r - row_max) in place of s_0; the sum over positions comes back. COMPONENTS = 0: known at run time only.
template <int COMPONENTS, typename T>
inline Vec<T> component_weights(const Block& strip, T* row, T row_max, int64_t components) {
    const int64_t count = COMPONENTS ? COMPONENTS : components;
    Vec<T> sum = {};
    for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) {
        auto weight = exp2_of(load<T>(row + v) - row_max);
        for (int64_t r = 1; r < count; ++r) weight += exp2_of(load<T>(row + r * QUERIES * KEYS + v) - row_max);
        sum += weight;
        store<T>(row + v, weight);
    }
    return sum;
}

// 2^(s - row_max) (u . w) in place of s; the sum over positions comes back.
template <typename T>
inline Vec<T> factored_weights(const ScoreTile<T>& x, const Block& strip, int64_t i, T* row, T row_max) {
    const int64_t M = x.t.M;
    const T* u = x.queries.factor + i * M;
    const T* w = x.key_factor;
    Vec<T> sum = {};
    for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) {
        auto factor = splat<T>(u[0]) * load<T>(w + v);
        for (int64_t r = 1; r < M; ++r) factor += splat<T>(u[r]) * load<T>(w + r * KEYS + v);
        const auto weight = exp2_of(load<T>(row + v) - row_max) * factor;
        sum += weight;
        store<T>(row + v, weight);
    }
    return sum;
}
