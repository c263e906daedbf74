// Forward: h_i = sum_j A_ij v_j (Eq. 10), with the maximum and the sum of each query's softmax for the backward.

template <Scoring SCORING, bool HARD, typename T>
void forward_tile(const Tiles<T>& t, const QueryTile<T>& queries) {
    using V = Vec<T>;
    Buffer<T> scores(t.M * QUERIES * KEYS), out(QUERIES * t.value_stride);
    T row_max[QUERIES], factors[KEYS];
    V row_sum[QUERIES];
    for (int64_t i = 0; i < queries.count; ++i) row_max[i] = NEG_INF<T>, row_sum[i] = V{};
    set_zero<T>(out, QUERIES * t.value_stride);
    const KeyRange keys = t.keys_of_tile(queries.head, queries.tile);
    for (int64_t tile = keys.first / KEYS; tile < ceil_div(keys.last, KEYS); ++tile) {
        const ScoreTile<T> x(t, queries, tile);
        if (x.is_skipped()) continue;
        const bool is_factored = SCORING == Scoring::FACTORED && x.is_factored;
        int64_t components = tile_scores<SCORING, T>(x, scores);
        if (HARD && components > 1) max_over_components<T>(scores, queries.count, components), components = 1;
        for (int64_t n = 0; n < x.num_strips; ++n) {
            const Block strip = x.strips[n];
            for (int64_t i = strip.row; i < strip.row + strip.rows; ++i) {
                T* row = scores + i * KEYS;
                const V high = SCORING == Scoring::MAXIMUM ? add_relative_max(x, strip, i, row)
                                                           : lane_max(strip, row, components);
                raise_row_max<T>(high, row_max[i], row_sum[i], out + i * t.value_stride, t.value_stride);
                const T finite_max = row_max[i] == NEG_INF<T> ? T(0) : row_max[i];  // no key yet: weights 2^(-inf - 0)
                if (is_factored)
                    row_sum[i] += factored_weights(x, strip, i, row, finite_max);
                else if (components == 2)
                    row_sum[i] += component_weights<2>(strip, row, finite_max, components);
                else
                    row_sum[i] += component_weights<0>(strip, row, finite_max, components);
                if (t.p.dropout_threshold) {
                    dropout_factors(x, i, factors);
                    multiply_row(row, factors);
                }
            }
            product<T>(strip.rows, t.value_stride, x.num_keys_of(strip), scores + strip.row * KEYS + strip.key, KEYS, 1,
                       t.padded_value_of(queries.head / t.p.group, tile) + strip.key * t.value_stride, t.value_stride,
                       out + strip.row * t.value_stride, t.value_stride, nullptr);
        }
    }
    for (int64_t i = 0; i < queries.count; ++i) {
        const int64_t q = queries.head * t.L + queries.first + i;
        const T sum = sum_of_lanes<T>(row_sum[i]), inverse = sum > 0 ? T(1) / sum : T(0);
        for (int64_t e = 0; e < t.E; ++e) static_cast<T*>(t.p.out)[q * t.E + e] = out[i * t.value_stride + e] * inverse;
        // +inf makes every weight 0 in the backward of a query with no key left
        static_cast<T*>(t.p.row_max)[q] = sum > 0 ? row_max[i] : -NEG_INF<T>;
        static_cast<T*>(t.p.row_sum)[q] = sum > 0 ? sum : T(1);
        const double level = (double(row_max[i]) + double(queries.common_bias[i])) / LOG2_E;
        if (t.p.lse) static_cast<T*>(t.p.lse)[q] = sum > 0 ? T(level + std::log(double(sum))) : NEG_INF<T>;
    }
}

template <Scoring SCORING, bool HARD, typename T>
void forward(const AttentionParams& p) {
    const Tiles<T> t(p, Mode::FORWARD, SCORING);
    // heads one after another, so that the threads share the packed keys of a head in the cache
    for_all(t.query_heads * t.query_tiles, p.num_threads, [&](int64_t task) {
        forward_tile<SCORING, HARD>(t, QueryTile<T>(t, task / t.query_tiles, task % t.query_tiles));
    });
}
