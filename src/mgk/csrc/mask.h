// Masks and causality: what they add to the scores of a tile.

// Adds a float mask to `components` scores, or -inf where the bytes of a bool mask are 0.
template <bool IS_BOOL, typename T>
void add_mask(const ScoreTile<T>& x, T* scores, int64_t components) {
    using Element = std::conditional_t<IS_BOOL, unsigned char, T>;
    const AttentionParams& p = x.t.p;
    const int64_t count = x.t.num_keys_of(x.tile), row_stride = p.mask_strides[2], key_stride = p.mask_strides[3];
    const int64_t b = x.queries.head / p.num_heads, h = x.queries.head % p.num_heads;
    const Element* start = static_cast<const Element*>(p.mask) + b * p.mask_strides[0] + h * p.mask_strides[1] +
                           x.queries.first * row_stride + x.tile * KEYS * key_stride;
    T added[KEYS];
    for (int64_t j = count; j < KEYS; ++j) added[j] = 0;
    for (int64_t i = 0; i < x.queries.count; ++i) {
        const Element* from = start + i * row_stride;
        for (int64_t j = 0; j < count; ++j) {
            const Element element = from[j * key_stride];
            added[j] = IS_BOOL ? (element ? T(0) : NEG_INF<T>) : element * T(LOG2_E);
        }
        for (int64_t r = 0; r < components; ++r) {
            T* row = scores + (r * QUERIES + i) * KEYS;
            for (int64_t v = 0; v < KEYS; v += Simd<T>::W) store<T>(row + v, load<T>(row + v) + load<T>(added + v));
        }
    }
}

template <typename T>
void cut_causal(const ScoreTile<T>& x, T* scores, int64_t components) {
    for (int64_t i = 0; i < x.queries.count; ++i) {
        const int64_t num_seen = max_of<int64_t>(0, x.queries.first + i + x.t.S - x.t.L + 1 - x.tile * KEYS);
        for (int64_t r = 0; r < components; ++r)
            for (int64_t j = num_seen; j < KEYS; ++j) scores[(r * QUERIES + i) * KEYS + j] = NEG_INF<T>;
    }
}

template <typename T>
void apply_masks(const ScoreTile<T>& x, T* scores, int64_t components) {
    const AttentionParams& p = x.t.p;
    if (p.mask && p.mask_is_bool) add_mask<true>(x, scores, components);
    if (p.mask && !p.mask_is_bool) add_mask<false>(x, scores, components);
    const bool crosses_diagonal = x.tile * KEYS + KEYS - 1 > x.queries.first + x.t.S - x.t.L;
    if (p.is_causal && crosses_diagonal) cut_causal(x, scores, components);
}
