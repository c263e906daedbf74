// Decoding: one query against a long cache, whose keys and values are read once, for a whole group, and in place.
//
// Distances are summed directly, sum_d (q_d - k_jd - b_rd)^2: q - k first, which is exact where both are far from 0.
// What a masked key and its value hold is of no effect.

template <typename T>
struct Decoder {
    using V = Vec<T>;
    static constexpr int W = Simd<T>::W;
    static constexpr int64_t BLOCK = 64;    // keys whose scores are in flight
    static constexpr int64_t CHUNK = 1024;  // keys of a task

    const DecodeParams& p;
    const int64_t D, E, M, chunks;
    Buffer<T> partial;  // [query head][chunk]: row_max, row_sum, sums[E]
    Buffer<T> zeros;    // [max(D, E)]: no shift, and the value of a masked key

    explicit Decoder(const DecodeParams& params)
        : p(params), D(p.key_width), E(p.value_width), M(p.num_components), chunks(ceil_div(p.num_keys, CHUNK)),
          partial(p.batch_size * p.num_heads * p.group * chunks * (E + 2)), zeros(max_of(D, E)) {
        set_zero<T>(zeros, max_of(D, E));
    }

    void run() const {
        const int64_t heads = p.batch_size * p.num_heads;
        for_all(heads * chunks, p.num_threads, [&](int64_t task) { attend(task / chunks, task % chunks); });
        for (int64_t head = 0; head < heads * p.group; ++head) combine(head);
    }

    enum class Kernel { DISTANCE, SHIFTED, DOT };

    // of a query x, a key k and a shift b, number or vector
    template <Kernel KERNEL, typename N>
    static N term(N x, N k, N b) {
        if (KERNEL == Kernel::DOT) return x * k;
        const N difference = KERNEL == Kernel::SHIFTED ? x - k - b : x - k;
        return difference * difference;
    }

    // the sum over d of the terms, lane by lane
    template <Kernel KERNEL>
    V lane_scores(const T* x, const T* k, const T* b) const {
        V sums = {};
        for (int64_t d = 0; d + W <= D; d += W)
            sums += term<KERNEL, V>(load<T>(x + d), load<T>(k + d), load<T>(b + d));
        return sums;
    }

    // the features that fill no vector
    template <Kernel KERNEL>
    T rest_of_score(const T* x, const T* k, const T* b) const {
        T sum = 0;
        for (int64_t d = D / W * W; d < D; ++d) sum += term<KERNEL, T>(x[d], k[d], b[d]);
        return sum;
    }

    // the scores of `count` rows; W rows at a time, so that their lanes are added up together
    template <Kernel KERNEL>
    void row_scores(const T* x, const T* keys, const T* b, int64_t stride, int64_t count, T* scores) const {
        int64_t j = 0;
        for (; j + W <= count; j += W) {
            V rows[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) rows[i] = lane_scores<KERNEL>(x, keys + (j + i) * stride, b);
            store<T>(scores + j, sums_of_lanes<T>(rows));
        }
        for (; j < count; ++j) scores[j] = sum_of_lanes<T>(lane_scores<KERNEL>(x, keys + j * stride, b));
        if (D % W)
            for (j = 0; j < count; ++j) scores[j] += rest_of_score<KERNEL>(x, keys + j * stride, b);
    }

    // what the mask adds to the scores of a block: [BLOCK], in units of log 2
    void mask_of(int64_t b, int64_t h, int64_t first, int64_t count, T* added) const {
        set_zero(added, BLOCK);
        if (!p.mask) return;
        const int64_t start = b * p.mask_strides[0] + h * p.mask_strides[1] + first * p.mask_strides[2];
        for (int64_t j = 0; j < count; ++j) {
            const int64_t at = start + j * p.mask_strides[2];
            if (p.mask_is_bool)
                added[j] = static_cast<const unsigned char*>(p.mask)[at] ? T(0) : NEG_INF<T>;
            else
                added[j] = in_base_2(static_cast<const T*>(p.mask)[at]);
        }
    }

    static const T* line_of(const void* tensor, const int64_t* strides, int64_t b, int64_t h, int64_t r) {
        return static_cast<const T*>(tensor) + b * strides[0] + h * strides[1] + r * strides[2];
    }

    // s_jr of `count` keys in units of log 2: [M][BLOCK], -inf beyond the last
    void scores_of(int64_t b, int64_t h, const T* x, int64_t first, int64_t count, const T* added, T* scores) const {
        for (int64_t r = 0; r < M; ++r) {
            const T* keys = line_of(p.keys, p.key_strides, b, h, p.shifts ? 0 : r) + first * p.key_strides[3];
            const T* shift = p.shifts ? static_cast<const T*>(p.shifts) + (h * M + r) * D : zeros;
            T* s = scores + r * BLOCK;
            if (p.is_dot)
                row_scores<Kernel::DOT>(x, keys, shift, p.key_strides[3], count, s);
            else if (p.shifts)
                row_scores<Kernel::SHIFTED>(x, keys, shift, p.key_strides[3], count, s);
            else
                row_scores<Kernel::DISTANCE>(x, keys, shift, p.key_strides[3], count, s);
            const T* variance = line_of(p.variance, p.variance_strides, b, h, r) + first * p.variance_strides[3];
            const T unit = p.is_dot ? T(LOG2_E) : T(-LOG2_E / 2);
            const bool is_one = p.variance_strides[3] == 0;
            const T scale = unit / variance[0];
            for (int64_t j = 0; j < count; ++j) s[j] *= is_one ? scale : unit / variance[j * p.variance_strides[3]];
            if (p.log_prior) {
                const T* prior = line_of(p.log_prior, p.log_prior_strides, b, h, r) + first * p.log_prior_strides[3];
                for (int64_t j = 0; j < count; ++j) s[j] += in_base_2(prior[j * p.log_prior_strides[3]]);
            }
            for (int64_t j = count; j < BLOCK; ++j) s[j] = NEG_INF<T>;
            for (int64_t v = 0; v < BLOCK; v += W) {
                const V addend = load<T>(added + v);
                const V sum = finite_sum<T>(load<T>(s + v), addend);
                store<T>(s + v, addend == splat<T>(NEG_INF<T>) ? addend : sum);
            }
        }
    }

    void attend(int64_t head, int64_t chunk) const {
        const int64_t b = head / p.num_heads, h = head % p.num_heads, width = chunks * (E + 2);
        Buffer<T> scores(M * BLOCK), added(BLOCK);
        T* parts = partial + head * p.group * width + chunk * (E + 2);  // of the first query head
        for (int64_t g = 0; g < p.group; ++g) {
            parts[g * width] = NEG_INF<T>;
            set_zero(parts + g * width + 1, E + 1);
        }
        const int64_t last = min_of(p.num_keys, (chunk + 1) * CHUNK);
        for (int64_t first = chunk * CHUNK; first < last; first += BLOCK) {
            const int64_t count = min_of(BLOCK, last - first);
            const T* values = static_cast<const T*>(p.value) + b * p.value_strides[0] + h * p.value_strides[1] +
                              first * p.value_strides[2];
            for (int64_t g = 0; g < p.group; ++g) {  // the block stays in the cache
                const T* query = static_cast<const T*>(p.query) + (head * p.group + g) * D;
                T* part = parts + g * width;
                mask_of(b, h * p.group + g, first, count, added);
                scores_of(b, h, query, first, count, added, scores);
                const T* rows[BLOCK];
                for (int64_t j = 0; j < count; ++j)
                    rows[j] = added[j] == NEG_INF<T> ? static_cast<const T*>(zeros) : values + j * p.value_strides[2];
                add_values(rows, count, scores, part[0], part[1], part + 2);
            }
        }
    }

    void add_values(const T* const* rows, int64_t count, T* scores, T& row_max, T& row_sum, T* sums) const {
        V high = load<T>(scores);
        for (int64_t x = 0; x < M * BLOCK; x += W) high = larger<T>(load<T>(scores + x), high);
        T raised = max_of(row_max, largest_lane<T>(high));
        if (raised == NEG_INF<T>) {
            bool is_nan = false;  // which no maximum shows
            for (int64_t x = 0; x < M * BLOCK; ++x) is_nan = is_nan || scores[x] != scores[x];
            if (!is_nan) return;
            raised = 0;
        }
        const T scale = std::exp2(row_max - raised);
        V sum = {};
        for (int64_t v = 0; v < BLOCK; v += W) {
            V weight = exp2_of(load<T>(scores + v) - raised);
            for (int64_t r = 1; r < M; ++r) {
                const V other = exp2_of(load<T>(scores + r * BLOCK + v) - raised);
                const V high = other == other ? larger<T>(other, weight) : other;  // a NaN stays
                weight = p.is_hard ? high : weight + other;
            }
            sum += weight;
            store<T>(scores + v, weight);
        }
        row_sum = row_sum * scale + sum_of_lanes<T>(sum);
        row_max = raised;
        for (int64_t e = 0; e < E; ++e) sums[e] *= scale;
        int64_t e = 0;
        for (; e + 4 * W <= E; e += 4 * W) add_rows<4>(rows, e, count, scores, sums + e);
        for (; e + 2 * W <= E; e += 2 * W) add_rows<2>(rows, e, count, scores, sums + e);
        for (; e + W <= E; e += W) add_rows<1>(rows, e, count, scores, sums + e);
        for (; e < E; ++e)
            for (int64_t j = 0; j < count; ++j) sums[e] += scores[j] * rows[j][e];
    }

    // sums += sum_j weights_j rows_j, of VECTORS vectors from element e on, which stay in registers. Even and odd rows
    // have sums of their own, so that no addition waits for the one before it.
    template <int VECTORS>
    void add_rows(const T* const* rows, int64_t e, int64_t count, const T* weights, T* sums) const {
        V even[VECTORS], odd[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) even[v] = load<T>(sums + v * W), odd[v] = V{};
        int64_t j = 0;
        for (; j + 2 <= count; j += 2) {
            const T *row = rows[j] + e, *next = rows[j + 1] + e;
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                even[v] += splat<T>(weights[j]) * load<T>(row + v * W);
                odd[v] += splat<T>(weights[j + 1]) * load<T>(next + v * W);
            }
        }
        if (j < count)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) even[v] += splat<T>(weights[j]) * load<T>(rows[j] + e + v * W);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) store<T>(sums + v * W, even[v] + odd[v]);
    }

    void combine(int64_t head) const {
        const T* parts = partial + head * chunks * (E + 2);
        T* out = static_cast<T*>(p.out) + head * E;
        T row_max = NEG_INF<T>, row_sum = 0;
        for (int64_t c = 0; c < chunks; ++c) row_max = max_of(row_max, parts[c * (E + 2)]);
        for (int64_t e = 0; e < E; ++e) out[e] = 0;
        if (p.lse) static_cast<T*>(p.lse)[head] = NEG_INF<T>;
        if (row_max == NEG_INF<T>) return;
        for (int64_t c = 0; c < chunks; ++c) {
            const T* part = parts + c * (E + 2);
            const T weight = std::exp2(part[0] - row_max);
            row_sum += weight * part[1];
            for (int64_t e = 0; e < E; ++e) out[e] += weight * part[2 + e];
        }
        for (int64_t e = 0; e < E; ++e) out[e] /= row_sum;
        if (p.lse) static_cast<T*>(p.lse)[head] = T(double(row_max) / LOG2_E + std::log(double(row_sum)));
    }
};

void decode(const DecodeParams& p) { p.is_double ? Decoder<double>(p).run() : Decoder<float>(p).run(); }
