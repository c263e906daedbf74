// Decoding: one query against a long cache, whose keys and values are read once and in place.
//
// Distances are summed directly, sum_d (q_d - b_rd - k_jd)^2, with the M shifted queries in registers or cache.

template <typename T>
struct Decoder {
    using V = Vec<T>;
    static constexpr int W = Simd<T>::W;
    static constexpr int64_t BLOCK = 64;    // keys whose scores are in flight
    static constexpr int64_t CHUNK = 1024;  // keys of a task

    const DecodeParams& p;
    const int64_t D, E, M, chunks;
    Buffer<T> partial;  // [head][chunk]: row_max, row_sum, sums[E]

    explicit Decoder(const DecodeParams& params)
        : p(params), D(p.key_width), E(p.value_width), M(p.num_components), chunks(ceil_div(p.num_keys, CHUNK)),
          partial(p.batch_size * p.num_heads * chunks * (E + 2)) {}

    void run() const {
        const int64_t heads = p.batch_size * p.num_heads;
        for_all(heads * chunks, p.num_threads, [&](int64_t task) { attend(task / chunks, task % chunks); });
        for (int64_t head = 0; head < heads; ++head) combine(head);
    }

    // a sum over d of (x - k)^2 or x k, lane by lane
    template <bool DOT>
    V lane_scores(const T* x, const T* k) const {
        V sums = {};
        for (int64_t d = 0; d + W <= D; d += W) {
            const V a = load<T>(x + d), b = load<T>(k + d);
            sums += DOT ? a * b : (a - b) * (a - b);
        }
        return sums;
    }

    // the features that fill no vector
    template <bool DOT>
    T rest_of_score(const T* x, const T* k) const {
        T sum = 0;
        for (int64_t d = D / W * W; d < D; ++d) sum += DOT ? x[d] * k[d] : (x[d] - k[d]) * (x[d] - k[d]);
        return sum;
    }

    // the scores of `count` rows; W rows at a time, so that their lanes are added up together
    template <bool DOT>
    void row_scores(const T* x, const T* keys, int64_t stride, int64_t count, T* scores) const {
        int64_t j = 0;
        for (; j + W <= count; j += W) {
            V rows[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) rows[i] = lane_scores<DOT>(x, keys + (j + i) * stride);
            store<T>(scores + j, sums_of_lanes<T>(rows));
        }
        for (; j < count; ++j) scores[j] = sum_of_lanes<T>(lane_scores<DOT>(x, keys + j * stride));
        if (D % W)
            for (j = 0; j < count; ++j) scores[j] += rest_of_score<DOT>(x, keys + j * stride);
    }

    T mask_of(int64_t b, int64_t h, int64_t j) const {
        const int64_t where = b * p.mask_strides[0] + h * p.mask_strides[1] + j * p.mask_strides[2];
        if (p.mask_is_bool) return static_cast<const unsigned char*>(p.mask)[where] ? T(0) : NEG_INF<T>;
        return static_cast<const T*>(p.mask)[where];
    }

    static const T* line_of(const void* tensor, const int64_t* strides, int64_t b, int64_t h, int64_t r) {
        return static_cast<const T*>(tensor) + b * strides[0] + h * strides[1] + r * strides[2];
    }

    // s_jr of `count` keys in units of log 2: [M][BLOCK], -inf beyond the last
    void scores_of(int64_t b, int64_t h, const T* queries, int64_t first, int64_t count, T* scores) const {
        for (int64_t r = 0; r < M; ++r) {
            const T* keys = line_of(p.keys, p.key_strides, b, h, p.shifts ? 0 : r) + first * p.key_strides[3];
            const T* x = queries + (p.shifts ? r * D : 0);
            T* s = scores + r * BLOCK;
            if (p.is_dot)
                row_scores<true>(x, keys, p.key_strides[3], count, s);
            else
                row_scores<false>(x, keys, p.key_strides[3], count, s);
            const T* variance = line_of(p.variance, p.variance_strides, b, h, r) + first * p.variance_strides[3];
            const T unit = p.is_dot ? T(LOG2_E) : T(-LOG2_E / 2);
            const bool is_one = p.variance_strides[3] == 0;
            const T scale = unit / variance[0];
            for (int64_t j = 0; j < count; ++j) s[j] *= is_one ? scale : unit / variance[j * p.variance_strides[3]];
            if (p.log_prior) {
                const T* prior = line_of(p.log_prior, p.log_prior_strides, b, h, r) + first * p.log_prior_strides[3];
                for (int64_t j = 0; j < count; ++j) s[j] += prior[j * p.log_prior_strides[3]] * T(LOG2_E);
            }
            if (p.mask)
                for (int64_t j = 0; j < count; ++j) s[j] += mask_of(b, h, first + j) * T(LOG2_E);
            for (int64_t j = count; j < BLOCK; ++j) s[j] = NEG_INF<T>;
        }
    }

    void attend(int64_t head, int64_t chunk) const {
        const int64_t b = head / p.num_heads, h = head % p.num_heads;
        const T* query = static_cast<const T*>(p.query) + head * D;
        Buffer<T> queries(M * D), scores(M * BLOCK);
        if (p.shifts) {
            const T* shifts = static_cast<const T*>(p.shifts) + h * M * D;
            for (int64_t x = 0; x < M * D; ++x) queries[x] = query[x % D] - shifts[x];
        } else {
            std::memcpy(queries, query, D * sizeof(T));
        }
        T* row_max = partial + (head * chunks + chunk) * (E + 2);
        T* row_sum = row_max + 1;
        T* sums = row_max + 2;
        *row_max = NEG_INF<T>, *row_sum = 0;
        for (int64_t e = 0; e < E; ++e) sums[e] = 0;
        const int64_t last = min_of(p.num_keys, (chunk + 1) * CHUNK);
        for (int64_t first = chunk * CHUNK; first < last; first += BLOCK) {
            const int64_t count = min_of(BLOCK, last - first);
            scores_of(b, h, queries, first, count, scores);
            add_values(static_cast<const T*>(p.value) + b * p.value_strides[0] + h * p.value_strides[1] +
                           first * p.value_strides[2],
                       count, scores, *row_max, *row_sum, sums);
        }
    }

    void add_values(const T* values, int64_t count, T* scores, T& row_max, T& row_sum, T* sums) const {
        V high = load<T>(scores);
        for (int64_t x = 0; x < M * BLOCK; x += W) high = larger<T>(load<T>(scores + x), high);
        const T raised = max_of(row_max, largest_lane<T>(high));
        if (raised == NEG_INF<T>) return;
        const T scale = std::exp2(row_max - raised);
        V sum = {};
        for (int64_t v = 0; v < BLOCK; v += W) {
            V weight = exp2_of(load<T>(scores + v) - raised);
            for (int64_t r = 1; r < M; ++r) {
                const V other = exp2_of(load<T>(scores + r * BLOCK + v) - raised);
                weight = p.is_hard ? larger<T>(other, weight) : weight + other;
            }
            sum += weight;
            store<T>(scores + v, weight);
        }
        row_sum = row_sum * scale + sum_of_lanes<T>(sum);
        row_max = raised;
        for (int64_t e = 0; e < E; ++e) sums[e] *= scale;
        int64_t e = 0;
        for (; e + 4 * W <= E; e += 4 * W) add_rows<4>(values + e, count, scores, sums + e);
        for (; e + 2 * W <= E; e += 2 * W) add_rows<2>(values + e, count, scores, sums + e);
        for (; e + W <= E; e += W) add_rows<1>(values + e, count, scores, sums + e);
        for (; e < E; ++e)
            for (int64_t j = 0; j < count; ++j) sums[e] += scores[j] * values[j * p.value_strides[2] + e];
    }

    // sums += sum_j weights_j rows_j, of VECTORS vectors that stay in registers. Even and odd rows have sums of their
    // own, so that no addition waits for the one before it.
    template <int VECTORS>
    void add_rows(const T* rows, int64_t count, const T* weights, T* sums) const {
        V even[VECTORS], odd[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) even[v] = load<T>(sums + v * W), odd[v] = V{};
        int64_t j = 0;
        for (; j + 2 <= count; j += 2) {
            const T* row = rows + j * p.value_strides[2];
            const T* next = row + p.value_strides[2];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                even[v] += splat<T>(weights[j]) * load<T>(row + v * W);
                odd[v] += splat<T>(weights[j + 1]) * load<T>(next + v * W);
            }
        }
        if (j < count)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                even[v] += splat<T>(weights[j]) * load<T>(rows + j * p.value_strides[2] + v * W);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) store<T>(sums + v * W, even[v] + odd[v]);
    }

    void combine(int64_t head) const {
        const T* parts = partial + head * chunks * (E + 2);
        T* out = static_cast<T*>(p.out) + head * E;
        T row_max = NEG_INF<T>, row_sum = 0;
        for (int64_t c = 0; c < chunks; ++c) row_max = max_of(row_max, parts[c * (E + 2)]);
        for (int64_t e = 0; e < E; ++e) out[e] = 0;
        if (row_max == NEG_INF<T>) return;
        for (int64_t c = 0; c < chunks; ++c) {
            const T* part = parts + c * (E + 2);
            const T weight = std::exp2(part[0] - row_max);
            row_sum += weight * part[1];
            for (int64_t e = 0; e < E; ++e) out[e] += weight * part[2 + e];
        }
        for (int64_t e = 0; e < E; ++e) out[e] /= row_sum;
    }
};

void decode(const DecodeParams& p) { p.is_double ? Decoder<double>(p).run() : Decoder<float>(p).run(); }
