// Masks, causality, windows and segments: what they add to the scores of a tile.

// Adds a float mask to `components` scores, or -inf where the bytes of a bool mask are 0.
template <bool IS_BOOL, typename T>
void add_mask(const ScoreTile<T>& x, T* scores, int64_t components) {
    using Element = std::conditional_t<IS_BOOL, unsigned char, T>;
    const AttentionParams& p = x.t.p;
    const int64_t count = x.t.num_keys_of(x.tile), row_stride = p.mask_strides[2], key_stride = p.mask_strides[3];
    T added[KEYS];
    for (int64_t j = count; j < KEYS; ++j) added[j] = 0;
    for (int64_t i = 0; i < x.queries.count; ++i) {
        const Element* from = x.template mask<Element>() + i * row_stride;
        for (int64_t j = 0; j < count; ++j) {
            const Element element = from[j * key_stride];
            added[j] = IS_BOOL ? (element ? T(0) : NEG_INF<T>) : in_base_2(T(element));
        }
        for (int64_t r = 0; r < components; ++r) {
            T* row = scores + (r * QUERIES + i) * KEYS;
            for (int64_t v = 0; v < KEYS; v += Simd<T>::W) {
                const auto score = load<T>(row + v), addend = load<T>(added + v);
                store<T>(row + v, IS_BOOL ? score + addend : finite_sum<T>(score, addend));
            }
        }
    }
}

// -inf for the keys of a strip that are not among those that each query sees.
template <typename T>
void cut_range(const ScoreTile<T>& x, const Block& strip, T* scores, int64_t components) {
    using V = Vec<T>;
    T places[KEYS];
    for (int64_t j = 0; j < KEYS; ++j) places[j] = T(j);
    for (int64_t i = strip.row; i < strip.row + strip.rows; ++i) {
        const KeyRange seen = x.keys_seen(i);
        const V first = splat<T>(T(seen.first)), last = splat<T>(T(seen.last));
        for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) {
            const auto is_seen = (load<T>(places + v) >= first) & (load<T>(places + v) < last);
            for (int64_t r = 0; r < components; ++r) {
                T* row = scores + (r * QUERIES + i) * KEYS + v;
                store<T>(row, is_seen ? load<T>(row) : splat<T>(NEG_INF<T>));
            }
        }
    }
}

template <typename T>
void apply_masks(const ScoreTile<T>& x, T* scores, int64_t components) {
    const AttentionParams& p = x.t.p;
    if (p.mask && p.mask_is_bool) add_mask<true>(x, scores, components);
    if (p.mask && !p.mask_is_bool) add_mask<false>(x, scores, components);
    for (int64_t s = 0; x.is_cut && s < x.num_strips; ++s) cut_range(x, x.strips[s], scores, components);
}
