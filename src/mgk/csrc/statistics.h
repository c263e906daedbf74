// Statistics of the M-step: N_jr = sum_i gamma_ijr (Eq. 11), where gamma_ijr = 2^s_ijr / sum_r 2^s_ijr, or one-hot.

// Adds the weighted responsibilities of a row of scores, of a strip's keys, to the sums [M][KEYS].
template <bool HARD, typename T>
void count_row(const Block& strip, T* row, int64_t M, T weight, T* sums) {
    using V = Vec<T>;
    for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) {
        V best = load<T>(row + v), total = {};
        for (int64_t r = 1; r < M; ++r) best = larger<T>(load<T>(row + r * QUERIES * KEYS + v), best);
        const auto is_excluded = best == splat<T>(NEG_INF<T>);
        best = is_excluded ? V{} : best;
        auto is_open = ~is_excluded;  // no component has taken the pair yet
        for (int64_t r = 0; r < M; ++r) {
            T* x = row + r * QUERIES * KEYS + v;
            V gamma;
            if constexpr (HARD) {
                const auto wins = (load<T>(x) == best) & is_open;
                is_open = is_open & ~wins;
                gamma = wins ? splat<T>(1) : V{};
            } else {
                gamma = exp2_of(load<T>(x) - best);
            }
            total += gamma;
            store<T>(x, gamma);
        }
        const V inverse = total > V{} ? weight / total : V{};
        for (int64_t r = 0; r < M; ++r) {
            T* sum = sums + r * KEYS + v;
            store<T>(sum, load<T>(sum) + load<T>(row + r * QUERIES * KEYS + v) * inverse);
        }
    }
}

template <Scoring SCORING, bool HARD, typename T>
void count_tile(const Tiles<T>& t, int64_t head, int64_t tile) {
    Buffer<T> scores(t.M * QUERIES * KEYS), sums(t.M * KEYS);
    set_zero<T>(sums, t.M * KEYS);
    const T* weights = static_cast<const T*>(t.p.query_weight);
    for (int64_t query_head = head * t.p.group; query_head < (head + 1) * t.p.group; ++query_head)
        for (int64_t q = 0; q < t.query_tiles; ++q) {
            if (!t.is_seen(query_head, q, tile)) continue;
            const QueryTile<T> queries(t, query_head, q);
            const ScoreTile<T> x(t, queries, tile);
            tile_scores<SCORING, T>(x, scores);
            for (int64_t n = 0; n < x.num_strips; ++n)
                for (int64_t i = x.strips[n].row; i < x.strips[n].row + x.strips[n].rows; ++i) {
                    const T weight = weights ? weights[head / t.p.num_heads * t.L + queries.first + i] : T(1);
                    if (weight != 0) count_row<HARD, T>(x.strips[n], scores + i * KEYS, t.M, weight, sums);
                }
        }
    for (int64_t r = 0; r < t.M; ++r)
        std::memcpy(static_cast<T*>(t.p.counts) + (head * t.M + r) * t.S + tile * KEYS, sums + r * KEYS,
                    t.num_keys_of(tile) * sizeof(T));
}

template <Scoring SCORING, bool HARD, typename T>
void count(const AttentionParams& p) {
    const Tiles<T> t(p, Mode::COUNT, SCORING);
    for_all(t.heads * t.key_tiles, p.num_threads,
            [&](int64_t task) { count_tile<SCORING, HARD>(t, task / t.key_tiles, task % t.key_tiles); });
}
