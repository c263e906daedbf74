// Backward: the gradients of query, keys, biases, values and, where wanted, of an affine map of the scores.
//
// A gradient of the log-sum-exp adds P_ijr dlse_i to ds_ijr: it is subtracted from delta_i.
// The keys of a head are cut into `splits` ranges, each with its own sum of the queries' gradients. No two threads add
// to one place, and the ranges are summed in order: the result does not depend on the order of the threads.

template <typename T>
struct Backward {
    using ScoreGradients = int64_t(const ScoreTile<T>&, BackwardScratch<T>&, const T* row_max, const T* delta);

    const Tiles<T>& t;
    ScoreGradients* const score_gradients;  // of the call's modes
    const AttentionParams& p;
    const int64_t L, M, splits;
    const int64_t biases, moments;    // of a query: numbers to sum for query_bias and for score_affine
    const bool pads;                  // whether features are no whole vectors
    Buffer<T> padded_query;           // [query head][L], where it pads
    Buffer<T> grad, delta;            // [query head][L]: padded rows; divided by row_sum
    Buffer<T> d_query_sums;           // [split][query head][L]: padded rows, if there are splits or padding
    Buffer<T> d_query_bias;           // [split][query head]
    const T* const query;             // in padded rows
    T* const d_query;
    Buffer<double> moment_sums;       // [split][query head][L][M][MOMENTS]

    Backward(const Tiles<T>& tiles, ScoreGradients* score_gradients)
        : t(tiles), score_gradients(score_gradients), p(t.p), L(t.L), M(t.M), splits(num_splits(t)),
          biases(p.is_shared ? M : 0), moments(p.d_score_affine ? M * MOMENTS : 0),
          pads(t.feature_stride != t.F), padded_query(pads ? t.query_heads * L * t.feature_stride : 1),
          grad(t.query_heads * L * t.value_stride), delta(t.query_heads * L),
          d_query_sums(pads || splits > 1 ? splits * t.query_heads * L * t.feature_stride : 1),
          d_query_bias(splits * t.query_heads * biases * L + 1), query(pads ? padded_query : t.query_of(0)),
          d_query(pads || splits > 1 ? d_query_sums : static_cast<T*>(p.d_query)),
          moment_sums(splits * t.query_heads * L * moments + 1) {}

    static int64_t num_splits(const Tiles<T>& t) {
        int64_t splits = 1;
        const int64_t threads = t.p.num_threads;
        while (splits < t.key_tiles && t.heads * splits < 4 * threads && (t.heads * splits) % threads != 0) ++splits;
        return splits;
    }

    void run() const {
        for_all(t.query_heads, p.num_threads, [&](int64_t head) { prepare(head); });
        for_all(t.heads * splits, p.num_threads, [&](int64_t task) { run_range(task / splits, task % splits); });
        for_all(t.query_heads, p.num_threads, [&](int64_t head) { sum_ranges(head); });
    }

    // Pads the queries and gradients of a query head, and takes delta_i = g_i . h_i - dlse_i.
    void prepare(int64_t head) const {
        if (pads)
            copy_rows(t.query_of(head), L, t.F, padded_query + head * L * t.feature_stride, t.feature_stride, L);
        // dP, delta and dv are linear in the gradient: divided by row_sum here, no weight needs to be
        for (int64_t q = head * L; q < (head + 1) * L; ++q) {
            const T inverse = T(1) / static_cast<const T*>(p.row_sum)[q];
            const T* out = static_cast<const T*>(p.out) + q * t.E;
            T* row = grad + q * t.value_stride;
            copy_rows(static_cast<const T*>(p.grad) + q * t.E, 1, t.E, row, t.value_stride, 1);
            for (int64_t e = 0; e < t.value_stride; e += Simd<T>::W) store<T>(row + e, load<T>(row + e) * inverse);
            delta[q] = T(dot_in_double(row, out, t.E) - d_lse_of(q) * double(inverse));
        }
    }

    double d_lse_of(int64_t q) const { return p.d_lse ? double(static_cast<const T*>(p.d_lse)[q]) : 0.0; }

    void run_range(int64_t head, int64_t split) const {
        BackwardScratch<T> scratch(t);
        point_to(scratch, head * p.group, split);
        set_zero(scratch.d_query, p.group * L * t.feature_stride);
        set_zero(scratch.d_query_bias, p.group * biases * L);
        set_zero(scratch.moments, p.group * L * moments);
        for (int64_t tile = t.key_tiles * split / splits; tile < t.key_tiles * (split + 1) / splits; ++tile)
            key_tile(scratch, head, split, tile);
    }

    // The sums that a task adds to for a query head.
    void point_to(BackwardScratch<T>& scratch, int64_t query_head, int64_t split) const {
        const int64_t at = split * t.query_heads + query_head;
        scratch.d_query = d_query + at * L * t.feature_stride;
        scratch.d_query_bias = d_query_bias + at * biases * L;
        scratch.moments = moment_sums + at * L * moments;
    }

    // The gradients of the keys, key biases and values of a tile, from all query heads of the group.
    void key_tile(BackwardScratch<T>& s, int64_t head, int64_t split, int64_t tile) const {
        const int64_t count = t.num_keys_of(tile), stride = t.feature_stride;
        set_zero<T>(s.d_keys, t.products * KEYS * stride);
        set_zero<T>(s.d_values, KEYS * t.value_stride);
        set_zero<T>(s.d_key_bias, M * KEYS);
        set_zero<T>(s.d_key_bias_of_tile, M * KEYS);
        set_zero<T>(s.d_key_bias_of_rows, M * KEYS);
        if (t.is_live[t.index(head, tile)]) {
            transpose_rows<T>(t.value_of(head, tile), count, t.E, 1, s.values_t, KEYS);
            for (int64_t r = 0; pads && r < t.products; ++r)
                copy_rows<T>(t.keys_of(head, r, tile), count, t.F, s.keys + r * KEYS * stride, stride, KEYS);
            for (int64_t query_head = head * p.group; query_head < (head + 1) * p.group; ++query_head) {
                point_to(s, query_head, split);
                for (int64_t q = 0; q < t.query_tiles; ++q) {
                    if (!t.is_seen(query_head, q, tile)) continue;
                    const QueryTile<T> queries(t, query_head, q);
                    score_tile(s, ScoreTile<T>(t, queries, tile));
                    move_sums<T>(s.d_key_bias_of_tile, s.d_key_bias, M * KEYS);
                }
            }
        }
        for (int64_t r = 0; r < t.products; ++r)
            copy_unpadded<T>(s.d_keys + r * KEYS * stride, count, stride, t.F,
                             static_cast<T*>(p.d_keys) + ((head * t.products + r) * t.S + tile * KEYS) * t.F);
        copy_unpadded<T>(s.d_values, count, t.value_stride, t.E,
                         static_cast<T*>(p.d_value) + (head * t.S + tile * KEYS) * t.E);
        for (int64_t r = 0; r < M; ++r)
            std::memcpy(static_cast<T*>(p.d_key_bias) + (head * M + r) * t.S + tile * KEYS, s.d_key_bias + r * KEYS,
                        count * sizeof(T));
    }

    void score_tile(BackwardScratch<T>& s, const ScoreTile<T>& x) const {
        const int64_t rows = x.queries.count, first = x.queries.head * L + x.queries.first, stride = t.feature_stride;
        const T* g = grad + first * t.value_stride;
        const T zeros[KEYS] = {};
        for (int64_t n = 0; n < x.num_strips; ++n) {
            const auto [row, count, key, keys] = x.strips[n];
            product<T>(count, keys, t.E, g + row * t.value_stride, t.value_stride, 1, s.values_t + key, KEYS,
                       s.d_weights + row * KEYS + key, KEYS, zeros);
        }
        const int64_t components = score_gradients(x, s, static_cast<const T*>(p.row_max) + first, delta + first);
        // dv_j = sum_i (sum_r P_ijr) g_i
        for (int64_t n = 0; n < x.num_columns; ++n) {
            const auto [row, count, key, keys] = x.columns[n];
            product<T>(keys, t.value_stride, count, s.weights + row * KEYS + key, 1, KEYS, g + row * t.value_stride,
                       t.value_stride, s.d_values + key * t.value_stride, t.value_stride, nullptr);
        }
        if (p.is_shared && components > 1) sum_components(s.scores, rows, components);
        for (int64_t r = 0; r < t.products; ++r) {
            const T* ds = s.scores + r * QUERIES * KEYS;
            const T* keys = pads ? s.keys + r * KEYS * stride : t.keys_of(x.queries.head / p.group, r, x.tile);
            for (int64_t n = 0; n < x.num_strips; ++n) {
                const Block strip = x.strips[n];
                product<T>(strip.rows, stride, x.num_keys_of(strip), ds + strip.row * KEYS + strip.key, KEYS, 1,
                           keys + strip.key * stride, stride, s.d_query + (x.queries.first + strip.row) * stride,
                           stride, nullptr);
            }
            for (int64_t n = 0; n < x.num_columns; ++n) {
                const auto [row, count, key, width] = x.columns[n];
                product<T>(width, stride, count, ds + row * KEYS + key, 1, KEYS, query + (first + row) * stride, stride,
                           s.d_keys + (r * KEYS + key) * stride, stride, nullptr);
            }
        }
    }

    // Into component 0: a shared product needs one gradient for all.
    void sum_components(T* scores, int64_t rows, int64_t components) const {
        for (int64_t x = 0; x < rows * KEYS; x += Simd<T>::W) {
            Vec<T> sum = load<T>(scores + x);
            for (int64_t r = 1; r < components; ++r) sum += load<T>(scores + r * QUERIES * KEYS + x);
            store<T>(scores + x, sum);
        }
    }

    void sum_ranges(int64_t head) const {
        if (d_query != p.d_query) sum_rows(d_query, t.feature_stride, t.F, head * L, static_cast<T*>(p.d_query));
        if (biases) sum_rows(d_query_bias, biases, biases, head * L, static_cast<T*>(p.d_query_bias));
        if (p.d_score_affine)
            for (int64_t i = 0; i < L; ++i) affine_gradient(head, i);
    }

    // The sums over all ranges of L rows of `width` numbers, from row `first` on.
    void sum_rows(const T* from, int64_t stride, int64_t width, int64_t first, T* to) const {
        copy_unpadded(from + first * stride, L, stride, width, to + first * width);
        for (int64_t split = 1; split < splits; ++split) {
            const T* rows = from + (split * t.query_heads * L + first) * stride;
            for (int64_t i = 0; i < L; ++i) add_scaled(to + (first + i) * width, rows + i * stride, T(1), width);
        }
    }

    // da_ir = sum_j ds_ijr s_ijr and db_ir = sum_j ds_ijr of a_ir s_ijr + b_ir. Rounding, most of it of delta_i, leaves
    // sum_jr ds_ijr = dlse_i + e_i where e_i should be 0, so that P_ijr e_i is subtracted.
    void affine_gradient(int64_t head, int64_t i) const {
        double* d_factor = p.d_score_affine + head * M * L + i;
        double* d_addend = d_factor + t.query_heads * M * L;
        double row_max = static_cast<const T*>(p.row_max)[head * L + i];
        if (row_max == std::numeric_limits<double>::infinity()) {  // no key left
            for (int64_t r = 0; r < M; ++r) d_factor[r * L] = d_addend[r * L] = 0;
            return;
        }
        if (p.is_shared) row_max += largest_query_bias(head, i);  // which the scores of a tile lack
        double sums[MAX_COMPONENTS][MOMENTS] = {}, excess = 0;
        for (int64_t split = 0; split < splits; ++split)
            for (int64_t r = 0; r < M; ++r)
                for (int64_t m = 0; m < MOMENTS; ++m)
                    sums[r][m] += moment_sums[(((split * t.query_heads + head) * L + i) * M + r) * MOMENTS + m];
        for (int64_t r = 0; r < M; ++r) excess += sums[r][1];
        excess = (excess - d_lse_of(head * L + i)) / static_cast<const T*>(p.row_sum)[head * L + i];
        for (int64_t r = 0; r < M; ++r) {
            const double d_scores = sums[r][1] - excess * sums[r][3];
            d_factor[r * L] = (sums[r][0] - excess * sums[r][2] + row_max * d_scores) / LOG2_E;
            d_addend[r * L] = d_scores;
        }
    }

    T largest_query_bias(int64_t head, int64_t i) const {
        T high = NEG_INF<T>;
        for (int64_t r = 0; r < M; ++r) high = max_of(high, in_base_2(t.query_bias_of(head)[r * L + i]));
        return high;
    }
};

template <Scoring SCORING, bool HARD, bool AFFINE, typename T>
void backward(const AttentionParams& p) {
    const Tiles<T> tiles(p, Mode::BACKWARD, SCORING);
    Backward<T>(tiles, score_gradients<SCORING, HARD, AFFINE, T>).run();
}
