// Scores of a tile, s_ijr = query_i . keys_jr + query_bias_ir + key_bias_jr, as scores[r][i][j].

// base_ij + (key_bias_jr + query_bias_ir)
template <typename T>
void add_biases(const ScoreTile<T>& x, int64_t r, const T* base, T* scores) {
    for (int64_t i = 0; i < x.queries.count; ++i) {
        const auto query_bias = splat<T>(x.queries.query_bias[i * x.t.M + r]);
        for (int64_t v = 0; v < KEYS; v += Simd<T>::W) {
            const auto bias = load<T>(x.key_bias + r * KEYS + v) + query_bias;
            store<T>(scores + i * KEYS + v, load<T>(base + i * KEYS + v) + bias);
        }
    }
}

// Writes the scores of a tile's strips, masks included, and returns their number of components: M, or 1 where one row of scores
// stands for all: base_ij + max_r key_bias_jr (FACTORED), or base_ij + key_bias_j0, without relative_max() (MAXIMUM).
template <Scoring SCORING, typename T>
int64_t tile_scores(const ScoreTile<T>& x, T* scores) {
    const Tiles<T>& t = x.t;
    const bool is_factored = SCORING == Scoring::FACTORED && x.is_factored;
    const bool is_merged = is_factored || SCORING == Scoring::MAXIMUM;
    const bool adds_biases = SCORING != Scoring::SEPARATE && !is_merged;
    const T zeros[KEYS] = {};
    // two partial sums halve the accumulation error, which the gradients of an affine map sum over all keys
    const int64_t half = t.p.d_score_affine ? t.F / 2 : t.F;
    for (int64_t r = 0; r < t.products; ++r) {
        const T* start = is_factored ? t.base_bias + x.at * KEYS : adds_biases ? zeros : x.key_bias + r * KEYS;
        const T* keys = t.keys_t + (x.at * t.products + r) * t.F * KEYS;
        for (int64_t s = 0; s < x.num_strips; ++s) {
            const auto [row, rows, key, count] = x.strips[s];
            const T* query = x.queries.query + row * t.F;
            T* to = scores + (r * QUERIES + row) * KEYS + key;
            product<T>(rows, count, half, query, t.F, 1, keys + key, KEYS, to, KEYS, start + key);
            if (half < t.F)
                product<T>(rows, count, t.F - half, query + half, t.F, 1, keys + half * KEYS + key, KEYS, to, KEYS,
                           nullptr);
        }
    }
    if (adds_biases)
        for (int64_t r = t.M - 1; r >= 0; --r)  // the base, in component 0, is needed until the last
            add_biases(x, r, scores, scores + r * QUERIES * KEYS);
    const int64_t components = is_merged ? 1 : t.M;
    apply_masks(x, scores, components);
    return components;
}

// MAXIMUM: query_bias_ir + key_bias_jr less those of the first component, for the keys from v on.
template <typename T>
inline Vec<T> relative_bias(const ScoreTile<T>& x, int64_t i, int64_t r, int64_t v) {
    if (r == 0) return Vec<T>{};
    return load<T>(x.key_bias + r * KEYS + v) + splat<T>(x.queries.query_bias[i * x.t.M + r]);
}

// MAXIMUM: the largest of the relative biases.
template <typename T>
inline Vec<T> relative_max(const ScoreTile<T>& x, int64_t i, int64_t v) {
    Vec<T> high = {};
    for (int64_t r = 1; r < x.t.M; ++r) high = larger<T>(relative_bias(x, i, r, v), high);
    return high;
}
