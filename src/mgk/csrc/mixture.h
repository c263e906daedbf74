// A call by its own tensors: the features (mixture/features.py) are made from query, keys and shifts where they lie, and
// the gradients go back to them. For one variance of all; half precision is widened as it is read, gradients rounded.

struct BFloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void narrow(float x, float& to) { to = x; }
inline void narrow(double x, double& to) { to = x; }
inline void narrow(float x, BFloat16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    to.bits = is_nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
}
#if defined(MGK_FLOAT16)
inline float widen(MGK_FLOAT16 x) { return x; }
inline void narrow(float x, MGK_FLOAT16& to) { to = MGK_FLOAT16(x); }
#endif

constexpr int64_t MEDIAN_SAMPLE = 64;  // keys: enough for a centre, which need not be exact

// a + b, finite where both are: only -inf excludes a key.
template <typename T>
inline T finite_sum(T a, T b) {
    const T sum = a + b;
    return sum == NEG_INF<T> && a != sum && b != sum ? std::numeric_limits<T>::lowest() : sum;
}

// A part of a call: heads from `first_head` on, or of one that head one segment.
struct Piece {
    int64_t first_head, heads, start, length;  // positions from `start` on; all: length = num_keys
};

// `heads` key heads of all batch entries, from `first_head` on; a `head` is counted from it. G query heads read each.
template <typename E>
struct Mixture {
    using T = std::conditional_t<std::is_same<E, double>::value, double, float>;

    const MixtureParams& p;
    const bool is_segment, copies_value;
    const int64_t first_head, heads, start, threads, G, M, L, S, D, products;
    const T inverse;                      // 1 / sigma^2
    Buffer<T> query, keys, value;         // [head][G][L][D], [head][products][S][D], [head][S][E] if copied
    Buffer<T> biases_of_query, key_bias;  // [head][G][M][L] if shifted, [head][M][S]
    Buffer<T> shifts;                     // [head][M][D], less their mean

    Mixture(const MixtureParams& params, const Piece& piece, int64_t threads)
        : p(params), is_segment(piece.length < p.num_keys), copies_value(!reads_value(params)), first_head(piece.first_head), heads(piece.heads),
          start(piece.start), threads(threads), G(p.group), M(p.num_components),
          L(is_segment ? piece.length : p.num_queries), S(piece.length), D(p.key_width), products(p.shifts ? 1 : M), inverse(T(1 / p.variance)),
          query(heads * G * L * D),
          keys(heads * products * S * D), value(copies_value ? heads * S * p.value_width : 1),
          biases_of_query(p.shifts ? heads * G * M * L : 1), key_bias(heads * M * S), shifts(p.shifts ? heads * M * D : 1) {
        for_all(heads, threads, [&](int64_t head) { set_features(head); });
    }

    AttentionParams features() const {
        AttentionParams a = {};
        a.batch_size = heads == 1 ? 1 : p.batch_size, a.num_heads = heads == 1 ? 1 : p.num_heads;
        a.group = G, a.first_row = first_row(), a.first_key = start, a.num_components = M, a.num_queries = L;
        a.num_keys = S, a.num_features = D, a.value_width = p.value_width, a.num_threads = threads;
        a.is_shared = p.shifts != nullptr, a.is_hard = p.is_hard, a.left = p.left, a.right = p.right;
        if (p.segment_starts && !is_segment) {
            a.segment_starts = p.segment_starts + batch_of(0) * S;
            a.segment_ends = p.segment_ends + batch_of(0) * S;
        }
        a.is_double = std::is_same<T, double>::value;
        a.query = query, a.keys = keys, a.key_bias = key_bias, a.value = value;
        if (!copies_value) a.value = static_cast<const E*>(p.value) + first_key() * p.value_width;
        if (p.shifts) a.query_bias = biases_of_query;
        if (p.mask && !p.is_key_mask) {
            const int64_t at = batch_of(0) * p.mask_strides[0] + head_of(0) * G * p.mask_strides[1] +
                               start * (p.mask_strides[2] + p.mask_strides[3]);
            a.mask = static_cast<const char*>(p.mask) + at * (p.mask_is_bool ? 1 : sizeof(T));
            a.mask_is_bool = p.mask_is_bool;
            std::memcpy(a.mask_strides, p.mask_strides, sizeof a.mask_strides);
        }
        a.dropout_seed = p.dropout_seed, a.dropout_threshold = p.dropout_threshold;
        a.out = static_cast<T*>(p.out) + first_row() * p.value_width;
        a.row_max = static_cast<T*>(p.row_max) + first_row();
        a.row_sum = static_cast<T*>(p.row_sum) + first_row();
        if (p.lse) a.lse = static_cast<T*>(p.lse) + first_row();
        if (p.d_lse) a.d_lse = static_cast<const T*>(p.d_lse) + first_row();
        return a;
    }

    void forward() const {
        const AttentionParams a = features();
        run(a, Mode::FORWARD);
        if (a.lse && !p.is_dot)
            for_all(heads * G, threads, [&](int64_t head) { subtract_norms(head, static_cast<T*>(a.lse) + head * L); });
    }

    // d_shifts [head][M][D] and d_prior [head][M], where positions share it, are for the caller to sum.
    void backward(double* d_shifts, double* d_prior) const {
        const int64_t E_ = p.value_width;
        // a segment's keys are in one place where there is one component
        Result d_query(p.d_query, first_row() * D, heads * G * L * D);
        Result d_keys(p.d_keys, first_key() * products * D, heads * products * S * D, !is_segment || products == 1);
        Result d_value(p.d_value, first_key() * E_, heads * S * E_);
        Buffer<T> d_key_bias(heads * M * S), d_biases_of_query(p.shifts ? heads * G * M * L : 1);
        AttentionParams a = features();
        a.grad = static_cast<const T*>(p.grad) + first_row() * E_;
        a.d_query = d_query.data, a.d_keys = d_keys.data, a.d_key_bias = d_key_bias, a.d_value = d_value.data;
        if (p.shifts) a.d_query_bias = d_biases_of_query;
        run(a, Mode::BACKWARD);
        for_all(heads, threads, [&](int64_t head) {
            T* dq = d_query.data + head * G * L * D;
            T* dk = d_keys.data + head * products * S * D;
            const T* d_bias = d_key_bias + head * M * S;
            const T* d_query_bias = d_biases_of_query + (p.shifts ? head * G * M * L : 0);
            if (p.shifts) {
                through_shifts(head, dq, dk, d_query_bias, d_bias, d_shifts + head * M * D);
            } else if (!p.is_dot) {
                for (int64_t j = 0; j < M * S; ++j) add_scaled(dk + j * D, keys_of(head) + j * D, -d_bias[j] * inverse, D);
            }
            for (int64_t x = 0; x < G * L * D; ++x) dq[x] *= inverse;
            if (a.d_lse && !p.is_dot) through_norms(head, a, dq);
            const int64_t first = (first_head + head) * products;
            if (!d_query.is_direct) round(dq, G * L * D, p.d_query, (first_row() + head * G * L) * D);
            for (int64_t r = 0; !d_keys.is_direct && r < products; ++r)
                round(dk + r * S * D, S * D, p.d_keys, ((first + r) * p.num_keys + start) * D);
            if (!d_value.is_direct)
                round<T>(d_value.data + head * S * E_, S * E_, p.d_value, first_key() * E_ + head * S * E_);
            if (p.d_log_prior) prior_gradient(head, d_query_bias, d_bias, d_prior + head * M);
        });
    }

  private:
    // A gradient: in its place, or in a buffer where it is to be rounded or moved.
    struct Result {
        const bool is_direct;
        const Buffer<T> buffer;
        T* const data;

        Result(void* to, int64_t first, int64_t size, bool is_whole = true)
            : is_direct(is_whole && std::is_same<E, T>::value), buffer(is_direct ? 1 : size),
              data(is_direct ? static_cast<T*>(to) + first : buffer) {}
    };

    // Whether the values can be read where they lie: contiguous, and none of a dead key.
    static bool reads_value(const MixtureParams& p) {
        const int64_t* strides = p.value_strides;
        const bool may_be_dead = (p.mask && p.is_key_mask) || (p.log_prior && p.log_prior_strides[3] != 0);
        return std::is_same<E, T>::value && !may_be_dead && strides[2] == p.value_width &&
               strides[1] == p.num_keys * strides[2] && strides[0] == p.num_heads * strides[1];
    }

    int64_t batch_of(int64_t head) const { return (first_head + head) / p.num_heads; }
    int64_t head_of(int64_t head) const { return (first_head + head) % p.num_heads; }
    int64_t first_row() const { return first_head * G * p.num_queries + start; }  // of the queries of all heads
    int64_t first_key() const { return first_head * p.num_keys + start; }         // of the keys of all heads
    T* keys_of(int64_t head) const { return keys + head * products * S * D; }

    template <int N>
    static const E* row_of(const void* tensor, const Strides<N>& strides, int64_t b, int64_t h) {
        return static_cast<const E*>(tensor) + b * strides[0] + h * strides[1];
    }

    // The scores lack -|q|^2 / (2 sigma^2), which cancels in the weights: with x = q / sigma^2 it is -|x|^2 sigma^2 / 2.
    void subtract_norms(int64_t query_head, T* lse) const {
        for (int64_t i = 0; i < L; ++i) {
            const T* x = query + (query_head * L + i) * D;
            double norm = 0;
            for (int64_t d = 0; d < D; ++d) norm += double(x[d]) * double(x[d]);
            lse[i] -= T(norm * p.variance / 2);
        }
    }

    // dq -= x dlse, but for queries with no key left
    void through_norms(int64_t head, const AttentionParams& a, T* dq) const {
        for (int64_t q = 0; q < G * L; ++q) {
            const int64_t at = head * G * L + q;
            if (static_cast<const T*>(a.row_max)[at] == -NEG_INF<T>) continue;
            add_scaled(dq + q * D, query + at * D, -static_cast<const T*>(a.d_lse)[at], D);
        }
    }

    void set_features(int64_t head) {
        Buffer<T> centre(D), mean_shift(D);
        set_zero<T>(mean_shift, D);
        set_key_biases(head);
        set_centre(head, centre);
        if (p.shifts) centre_shifts(head, mean_shift);
        set_keys(head, centre);
        set_queries(head, centre, mean_shift);
    }

    // b_r less the mean over r, which goes to the queries: a common part of the shifts cancels in q - k_jr.
    void centre_shifts(int64_t head, T* mean) {
        const E* from = static_cast<const E*>(p.shifts) + head_of(head) * M * D;
        T* to = shifts + head * M * D;
        set_zero(mean, D);
        for (int64_t x = 0; x < M * D; ++x) mean[x % D] += widen(from[x]) / M;
        for (int64_t x = 0; x < M * D; ++x) to[x] = widen(from[x]) - mean[x % D];
    }

    // log pi_jr, normalised over r where asked for
    T prior_of(int64_t b, int64_t h, int64_t r, int64_t j) const {
        const int64_t* strides = p.log_prior_strides;
        return static_cast<const T*>(p.log_prior)[b * strides[0] + h * strides[1] + r * strides[2] + (start + j) * strides[3]];
    }

    T prior_normaliser(int64_t b, int64_t h) const {
        if (!p.normalises_prior) return 0;
        T high = NEG_INF<T>, sum = 0;
        for (int64_t r = 0; r < M; ++r) high = max_of(high, prior_of(b, h, r, 0));
        if (high == NEG_INF<T>) return 0;
        for (int64_t r = 0; r < M; ++r) sum += std::exp(prior_of(b, h, r, 0) - high);
        return high + std::log(sum);
    }

    bool has_query_prior() const { return p.shifts && p.log_prior && p.log_prior_strides[3] == 0 && !p.is_hard; }

    // What a prior and a key mask add to the scores of a key; the norms follow in set_keys.
    void set_key_biases(int64_t head) {
        const int64_t b = batch_of(head), h = head_of(head);
        T* bias = key_bias + head * M * S;
        const bool has_prior = p.log_prior && !has_query_prior();
        const T normaliser = has_prior ? prior_normaliser(b, h) : T(0);
        for (int64_t r = 0; r < M; ++r)
            for (int64_t j = 0; j < S; ++j) bias[r * S + j] = has_prior ? prior_of(b, h, r, j) - normaliser : T(0);
        if (!p.mask || !p.is_key_mask) return;
        const int64_t first = b * p.mask_strides[0] + h * p.mask_strides[1] + start * p.mask_strides[3];
        for (int64_t j = 0; j < S; ++j) {
            const int64_t at = first + j * p.mask_strides[3];
            const T added = !p.mask_is_bool ? static_cast<const T*>(p.mask)[at]
                            : static_cast<const unsigned char*>(p.mask)[at] ? T(0) : NEG_INF<T>;
            for (int64_t r = 0; r < M; ++r) bias[r * S + j] = finite_sum(bias[r * S + j], added);
        }
    }

    bool is_live(const T* bias, int64_t j) const {
        for (int64_t r = 0; r < M; ++r)
            if (bias[r * S + j] != NEG_INF<T>) return true;
        return false;
    }

    // Any centre gives the same scores: the mean live key or, if causal, the first, unless it is near 0. In a window or
    // in segments it is a median: no key is seen by every query.
    void set_centre(int64_t head, T* centre) const {
        const E* from = row_of<4>(p.keys, p.key_strides, batch_of(head), head_of(head)) + start * p.key_strides[3];
        const T* bias = key_bias + head * M * S;
        const bool is_causal = p.right == 0;
        set_zero(centre, D);
        if (p.is_dot) return;
        if (p.left >= 0 || p.right > 0 || (p.segment_starts && !is_segment)) return set_median(from, bias, centre);
        int64_t count = 0;
        for (int64_t j = 0; j < S && !(is_causal && count); ++j) {
            if (!is_live(bias, j)) continue;
            ++count;
            for (int64_t r = 0; r < products; ++r)
                for (int64_t d = 0; d < D; ++d) centre[d] += widen(from[r * p.key_strides[2] + j * p.key_strides[3] + d]);
        }
        T norm = 0;
        for (int64_t d = 0; d < D; ++d) {
            centre[d] /= T(max_of<int64_t>(count * products, 1));
            norm += centre[d] * centre[d];
        }
        if (!(norm <= std::numeric_limits<T>::max()) || (is_causal && norm <= p.near_zero)) set_zero(centre, D);
    }

    // The median of some live keys of the first component, by coordinate; 0 where it is not finite.
    void set_median(const E* from, const T* bias, T* centre) const {
        const int64_t step = max_of<int64_t>(1, S / MEDIAN_SAMPLE);
        Buffer<T> sample(ceil_div(S, step));
        std::vector<int64_t> live;
        for (int64_t j = 0; j < S; j += step)
            if (is_live(bias, j)) live.push_back(j);
        for (int64_t d = 0; d < D; ++d) {
            int64_t count = 0;
            for (const int64_t j : live) {
                const T x = widen(from[j * p.key_strides[3] + d]);
                if (std::isfinite(x)) sample[count++] = x;
            }
            if (count == 0) continue;
            std::nth_element(sample + 0, sample + (count - 1) / 2, sample + count);
            centre[d] = sample[(count - 1) / 2];
        }
    }

    void set_keys(int64_t head, const T* centre) {
        const int64_t b = batch_of(head), h = head_of(head), E_ = p.value_width;
        const E* from = row_of<4>(p.keys, p.key_strides, b, h) + start * p.key_strides[3];
        const E* values = row_of<3>(p.value, p.value_strides, b, h) + start * p.value_strides[2];
        T* bias = key_bias + head * M * S;
        T half_shift[MAX_COMPONENTS] = {};
        const T* shift = shifts + (p.shifts ? head * M * D : 0);
        if (p.shifts)
            for (int64_t r = 0; r < M; ++r) half_shift[r] = dot(shift + r * D, shift + r * D, D) / 2;
        for (int64_t j = 0; j < S; ++j) {
            const bool live = is_live(bias, j);  // what a dead key and its value hold is not read
            if (copies_value)
                copy_row(values + j * p.value_strides[2], live ? E_ : 0, E_, value + (head * S + j) * E_);
            for (int64_t r = 0; r < products; ++r) {
                T* y = keys_of(head) + (r * S + j) * D;
                copy_row(from + r * p.key_strides[2] + j * p.key_strides[3], live ? D : 0, D, y);
                if (live) add_scaled(y, centre, T(-1), D);
                if (p.is_dot) continue;
                const T half_norm = dot(y, y, D) / 2;
                if (!p.shifts) bias[r * S + j] = finite_sum(bias[r * S + j], -half_norm * inverse);
                for (int64_t c = 0; p.shifts && c < M; ++c)
                    bias[c * S + j] = finite_sum(
                        bias[c * S + j], -(half_norm + half_shift[c] + dot(y, shift + c * D, D)) * inverse);
            }
        }
    }

    // The first `filled` elements of a row of `width`, the rest 0.
    static void copy_row(const E* from, int64_t filled, int64_t width, T* to) {
        for (int64_t d = 0; d < filled; ++d) to[d] = widen(from[d]);
        for (int64_t d = filled; d < width; ++d) to[d] = 0;
    }

    void set_queries(int64_t head, const T* centre, const T* mean_shift) {
        const int64_t b = batch_of(head), h = head_of(head);
        const T normaliser = has_query_prior() ? prior_normaliser(b, h) : T(0);
        for (int64_t q = 0; q < G * L; ++q) {
            const int64_t g = q / L, i = q % L;
            const E* from = row_of<3>(p.query, p.query_strides, b, h * G + g) + (start + i) * p.query_strides[2];
            T* x = query + (head * G * L + q) * D;
            copy_row(from, D, D, x);
            add_scaled(x, centre, T(-1), D);
            add_scaled(x, mean_shift, T(-1), D);
            for (int64_t d = 0; d < D; ++d) x[d] *= inverse;
            for (int64_t r = 0; p.shifts && r < M; ++r) {
                const T prior = has_query_prior() ? prior_of(b, h, r, 0) - normaliser : T(0);
                biases_of_query[((head * G + g) * M + r) * L + i] = dot(x, shifts + (head * M + r) * D, D) + prior;
            }
        }
    }

    // Through query_bias_ir = x_i . b_r and key_bias_jr = -|y_j + b_r|^2 / (2 sigma^2). A shift's gradient is summed over
    // some rows, then in double.
    void through_shifts(int64_t head, T* dq, T* dk, const T* d_query_bias, const T* d_bias, double* d_shift) const {
        Buffer<T> sums(M * D);
        set_zero(sums + 0, M * D);
        for (int64_t x = 0; x < M * D; ++x) d_shift[x] = 0;
        const T* b = shifts + head * M * D;
        for (int64_t q = 0; q < G * L; ++q) {
            for (int64_t r = 0; r < M; ++r) {
                const T g = d_query_bias[(q / L * M + r) * L + q % L];
                const T* x = query + (head * G * L + q) * D;
                add_scaled(dq + q * D, b + r * D, g, D);
                add_scaled(sums + r * D, x, g, D);
            }
            if (q % ROWS_PER_SUM == ROWS_PER_SUM - 1 || q == G * L - 1) move_to_double(sums, d_shift);
        }
        for (int64_t j = 0; j < S; ++j) {
            const T* y = keys_of(head) + j * D;
            for (int64_t r = 0; r < M; ++r) {
                const T g = -d_bias[r * S + j] * inverse;
                add_scaled_sum(dk + j * D, y, b + r * D, g, D);
                add_scaled_sum(sums + r * D, y, b + r * D, g, D);
            }
            if (j % ROWS_PER_SUM == ROWS_PER_SUM - 1 || j == S - 1) move_to_double(sums, d_shift);
        }
    }

    void move_to_double(T* from, double* to) const {
        for (int64_t x = 0; x < M * D; ++x) to[x] += double(from[x]);
        set_zero(from, M * D);
    }

    template <typename From>
    void round(const From* from, int64_t size, void* to, int64_t first) const {
        E* target = static_cast<E*>(to) + first;
        for (int64_t x = 0; x < size; ++x) narrow(from[x], target[x]);
    }

    // To [head][M][S], or to `sums` [M] where positions share the prior.
    void prior_gradient(int64_t head, const T* d_query_bias, const T* d_bias, double* sums) const {
        for (int64_t r = 0; r < M; ++r) {
            T* to = static_cast<T*>(p.d_log_prior) + ((first_head + head) * M + r) * p.num_keys + start;
            if (p.log_prior_strides[3] != 0) {
                std::memcpy(to, d_bias + r * S, S * sizeof(T));
                continue;
            }
            sums[r] = 0;
            for (int64_t q = 0; has_query_prior() && q < G * L; ++q)
                sums[r] += double(d_query_bias[(q / L * M + r) * L + q % L]);
            for (int64_t j = 0; !has_query_prior() && j < S; ++j) sums[r] += double(d_bias[r * S + j]);
        }
        if (!p.normalises_prior || p.log_prior_strides[3] != 0) return;
        const int64_t b = batch_of(head), h = head_of(head);
        const T normaliser = prior_normaliser(b, h);
        double total = 0;
        for (int64_t r = 0; r < M; ++r) total += sums[r];
        for (int64_t r = 0; r < M; ++r) sums[r] -= std::exp(double(prior_of(b, h, r, 0) - normaliser)) * total;
    }
};

// Many short heads, as many heads for each thread, or segments of some length are calls of their own, each of one thread;
// otherwise the threads share each head.
inline std::vector<Piece> pieces_of(const MixtureParams& p) {
    constexpr int64_t SHORT = 1 << 16;  // elements of a piece's keys
    constexpr int64_t FILLING = 32;     // positions: tiles of shorter segments would be empty for the most part
    const int64_t heads = p.batch_size * p.num_heads, S = p.num_keys, longest = SHORT / (p.num_components * p.key_width);
    std::vector<Piece> pieces;
    if (p.segment_starts && p.group == 1 && p.num_queries == S) {
        bool are_short = true;
        for (int64_t head = 0; head < heads && are_short; ++head)
            for (int64_t start = 0, end; start < S && are_short; start = end) {
                end = min_of(S, max_of(start + 1, p.segment_ends[head / p.num_heads * S + start]));
                pieces.push_back({head, 1, start, end - start});
                are_short = end - start <= longest;
            }
        const int64_t count = pieces.size();
        if (are_short && count >= 2 * p.num_threads && count * FILLING <= heads * S) {
            // the longest first: the threads end together
            const auto is_longer = [](const Piece& a, const Piece& b) { return a.length > b.length; };
            std::stable_sort(pieces.begin(), pieces.end(), is_longer);
            return pieces;
        }
        pieces.clear();
    }
    // whole heads for each thread: its scratch is small, and no thread waits for another
    const bool is_even = heads % p.num_threads == 0;
    if (!is_even && (S > longest || heads < 2 * p.num_threads)) return {{0, heads, 0, S}};
    for (int64_t head = 0; head < heads; ++head) pieces.push_back({head, 1, 0, S});
    return pieces;
}

template <typename E>
void run_mixture(const MixtureParams& p, Mode mode) {
    using T = typename Mixture<E>::T;
    const std::vector<Piece> pieces = pieces_of(p);
    const int64_t heads = p.batch_size * p.num_heads, M = p.num_components, tasks = pieces.size();
    const int64_t threads = tasks > 1 ? 1 : p.num_threads, size = p.shifts ? M * p.key_width : 0;
    const int64_t parts = mode == Mode::BACKWARD ? max_of(heads, tasks) : 0;
    Buffer<double> d_shifts(parts * size + 1), d_prior(parts * M + 1);
    for_all(tasks, tasks > 1 ? p.num_threads : 1, [&](int64_t task) {
        const Mixture<E> mixture(p, pieces[task], threads);
        mode == Mode::FORWARD ? mixture.forward() : mixture.backward(d_shifts + task * size, d_prior + task * M);
    });
    if (mode == Mode::FORWARD) return;
    const bool has_shared_prior = p.d_log_prior && p.log_prior_strides[3] == 0;
    // the sums of the parts in order: the threads do not change the result
    std::vector<double> shift_sums(p.num_heads * size), prior_sums(heads * M);
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t head = tasks > 1 ? pieces[part].first_head : part;
        for (int64_t x = 0; x < size; ++x) shift_sums[head % p.num_heads * size + x] += d_shifts[part * size + x];
        for (int64_t r = 0; has_shared_prior && r < M; ++r) prior_sums[head * M + r] += d_prior[part * M + r];
    }
    for (int64_t x = 0; x < p.num_heads * size; ++x) narrow(T(shift_sums[x]), static_cast<E*>(p.d_shifts)[x]);
    for (int64_t x = 0; has_shared_prior && x < heads * M; ++x) static_cast<T*>(p.d_log_prior)[x] = T(prior_sums[x]);
}

void run_mixture(const MixtureParams& p, Mode mode) {
    switch (static_cast<Dtype>(p.dtype)) {
        case Dtype::FLOAT64: return run_mixture<double>(p, mode);
        case Dtype::BFLOAT16: return run_mixture<BFloat16>(p, mode);
#if defined(MGK_FLOAT16)
        case Dtype::FLOAT16: return run_mixture<MGK_FLOAT16>(p, mode);
#endif
        default: return run_mixture<float>(p, mode);
    }
}
