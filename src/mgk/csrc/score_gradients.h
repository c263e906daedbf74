// Gradients of the scores of a tile: ds_ijr = P_ijr (dP_ij - delta_i), with dP_ij = g_i . v_j and delta_i = g_i . h_i.
//
// The function of a row puts the gradients in place of its scores, writes the weights sum_r P_ijr, and adds to the
// gradients of the biases. Weights are 2^(s - row_max): g has been divided by row_sum already.

// 2 to the power of less is 0 beside 1, in double too. It stands for -inf, which times 0 is not 0.
constexpr int MIN_EXPONENT = -150;

// Sums over the keys, of each query and component, that the gradient of score_affine is made of:
// ds x, ds, P row_sum x and P row_sum, where x = s - row_max.
constexpr int64_t MOMENTS = 4;

constexpr int64_t ROWS_PER_SUM = 8;  // of gradients of key_bias, before they are added to others

// The scratch of a task of the backward, which goes through a range of key tiles of one head.
template <typename T>
struct BackwardScratch {
    explicit BackwardScratch(const Tiles<T>& t)
        : scores(t.M * QUERIES * KEYS), d_weights(QUERIES * KEYS), weights(QUERIES * KEYS), values_t(t.E * KEYS),
          keys(t.feature_stride == t.F ? 1 : t.products * KEYS * t.feature_stride), d_keys(t.products * KEYS * t.feature_stride),
          d_values(KEYS * t.value_stride), d_key_bias(t.M * KEYS), d_key_bias_of_tile(t.M * KEYS),
          d_key_bias_of_rows(t.M * KEYS) {}

    Buffer<T> scores, d_weights, weights, values_t, keys, d_keys, d_values;
    // Summed in three levels, over some rows, a tile and all: a shared prior's gradient sums the rounding of every key.
    Buffer<T> d_key_bias, d_key_bias_of_tile, d_key_bias_of_rows;
    // What the task adds to the gradients of its head.
    T *d_query, *d_query_bias;
    double* moments;
};

template <bool AFFINE, typename T>
void soft_row(const ScoreTile<T>& x, const Block& strip, BackwardScratch<T>& scratch, int64_t i, T row_max, T delta) {
    using V = Vec<T>;
    const int64_t M = x.t.M;
    T* row = scratch.scores + i * KEYS;
    V moments[AFFINE ? MAX_COMPONENTS : 1][MOMENTS] = {};
    for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) {
        const V d = load<T>(scratch.d_weights + i * KEYS + v) - delta;
        V sum = {};
        for (int64_t r = 0; r < M; ++r) {
            T* s = row + r * QUERIES * KEYS + v;
            const V exponent = load<T>(s) - row_max;
            const V weight = exp2_of(exponent);
            const V ds = weight * d;
            sum += weight;
            store<T>(s, ds);
            if constexpr (AFFINE) {
                const V finite = larger<T>(exponent, splat<T>(MIN_EXPONENT));
                moments[r][0] += ds * finite;
                moments[r][1] += ds;
                moments[r][2] += weight * finite;
                moments[r][3] += weight;
            }
            T* d_key_bias = scratch.d_key_bias_of_rows + r * KEYS + v;
            store<T>(d_key_bias, load<T>(d_key_bias) + ds);
        }
        store<T>(scratch.weights + i * KEYS + v, sum);
    }
    if (x.t.scoring != Scoring::SEPARATE)
        for (int64_t r = 0; r < M; ++r) {
            V sum = {};
            for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) sum += load<T>(row + r * QUERIES * KEYS + v);
            scratch.d_query_bias[r * x.t.L + x.queries.first + i] += sum_of_lanes<T>(sum);
        }
    if constexpr (AFFINE)
        for (int64_t r = 0; r < M; ++r) {
            double* sums = scratch.moments + ((x.queries.first + i) * M + r) * MOMENTS;
            for (int64_t m = 0; m < MOMENTS; ++m) sums[m] += double(sum_of_lanes<T>(moments[r][m]));
        }
}

// P_ijr = e_ij u_ir w_jr. With d_ij = e_ij (dP_ij - delta_i): d base_ij = d_ij (u_i . w_j),
// d query_bias_ir = u_ir sum_j d_ij w_jr, d key_bias_jr = w_jr sum_i d_ij u_ir.
template <typename T>
void factored_row(const ScoreTile<T>& x, const Block& strip, BackwardScratch<T>& scratch, int64_t i, T row_max, T delta) {
    using V = Vec<T>;
    const int64_t M = x.t.M;
    T* row = scratch.scores + i * KEYS;
    const T* u = x.queries.factor + i * M;
    const T* w = x.key_factor;
    V sums[MAX_COMPONENTS] = {};
    for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) {
        V factor = {};
        for (int64_t r = 0; r < M; ++r) factor += splat<T>(u[r]) * load<T>(w + r * KEYS + v);
        const V e = exp2_of(load<T>(row + v) - row_max);
        const V d = e * (load<T>(scratch.d_weights + i * KEYS + v) - delta);
        store<T>(scratch.weights + i * KEYS + v, e * factor);
        store<T>(row + v, d * factor);
        for (int64_t r = 0; r < M; ++r) {
            const V dw = d * load<T>(w + r * KEYS + v);
            sums[r] += dw;
            T* d_key_bias = scratch.d_key_bias_of_rows + r * KEYS + v;
            store<T>(d_key_bias, load<T>(d_key_bias) + dw * u[r]);
        }
    }
    for (int64_t r = 0; r < M; ++r)
        scratch.d_query_bias[r * x.t.L + x.queries.first + i] += u[r] * sum_of_lanes<T>(sums[r]);
}

// The first component that reaches the maximum takes the whole gradient.
template <typename T>
void hard_row(const ScoreTile<T>& x, const Block& strip, BackwardScratch<T>& scratch, int64_t i, T row_max, T delta) {
    using V = Vec<T>;
    const int64_t M = x.t.M;
    T* row = scratch.scores + i * KEYS;
    for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) {
        V best = load<T>(row + v);
        for (int64_t r = 1; r < M; ++r) best = larger<T>(load<T>(row + r * QUERIES * KEYS + v), best);
        const V weight = exp2_of(best - row_max);
        V ds = weight * (load<T>(scratch.d_weights + i * KEYS + v) - delta);
        store<T>(scratch.weights + i * KEYS + v, weight);
        for (int64_t r = 0; r < M; ++r) {
            T* s = row + r * QUERIES * KEYS + v;
            const auto wins = load<T>(s) == best;
            const V taken = wins ? ds : V{};
            ds = wins ? V{} : ds;
            store<T>(s, taken);
            T* d_key_bias = scratch.d_key_bias_of_rows + r * KEYS + v;
            store<T>(d_key_bias, load<T>(d_key_bias) + taken);
        }
    }
}

// The same where the components share the product: the best is that of the largest bias.
template <typename T>
void hard_shared_row(const ScoreTile<T>& x, const Block& strip, BackwardScratch<T>& scratch, int64_t i, T row_max, T delta) {
    using V = Vec<T>;
    const int64_t M = x.t.M;
    T* row = scratch.scores + i * KEYS;
    V sums[MAX_COMPONENTS] = {};
    for (int64_t v = strip.key; v < strip.key + strip.keys; v += Simd<T>::W) {
        const V best = relative_max(x, i, v);
        const V score = load<T>(row + v) + best;
        const V weight = exp2_of(score - row_max);
        V ds = weight * (load<T>(scratch.d_weights + i * KEYS + v) - delta);
        store<T>(scratch.weights + i * KEYS + v, weight);
        store<T>(row + v, ds);
        for (int64_t r = 0; r < M; ++r) {
            const auto wins = relative_bias(x, i, r, v) == best;
            const V taken = wins ? ds : V{};
            ds = wins ? V{} : ds;
            sums[r] += taken;
            T* d_key_bias = scratch.d_key_bias_of_rows + r * KEYS + v;
            store<T>(d_key_bias, load<T>(d_key_bias) + taken);
        }
    }
    for (int64_t r = 0; r < M; ++r) scratch.d_query_bias[r * x.t.L + x.queries.first + i] += sum_of_lanes<T>(sums[r]);
}

// Adds sums of `size` numbers to those of a higher level, and sets them to 0.
template <typename T>
inline void move_sums(T* from, T* to, int64_t size) {
    for (int64_t x = 0; x < size; x += Simd<T>::W) {
        store<T>(to + x, load<T>(to + x) + load<T>(from + x));
        store<T>(from + x, Vec<T>{});
    }
}

// scratch.scores and scratch.weights of a tile from scratch.d_weights = dP; returns the number of components.
template <Scoring SCORING, bool HARD, bool AFFINE, typename T>
int64_t score_gradients(const ScoreTile<T>& x, BackwardScratch<T>& scratch, const T* row_max, const T* delta) {
    const int64_t components = tile_scores<SCORING, T>(x, scratch.scores);
    const bool is_factored = SCORING == Scoring::FACTORED && x.is_factored;
    for (int64_t n = 0; n < x.num_strips; ++n) {
        const Block strip = x.strips[n];
        for (int64_t i = strip.row; i < strip.row + strip.rows; ++i) {
            T factors[KEYS];
            if (x.t.p.dropout_threshold) {
                dropout_factors(x, i, factors);
                multiply_row<T>(scratch.d_weights + i * KEYS, factors);
            }
            if constexpr (SCORING == Scoring::MAXIMUM)
                hard_shared_row(x, strip, scratch, i, row_max[i], delta[i]);
            else if constexpr (HARD)
                hard_row(x, strip, scratch, i, row_max[i], delta[i]);
            else if (is_factored)
                factored_row(x, strip, scratch, i, row_max[i], delta[i]);
            else
                soft_row<AFFINE>(x, strip, scratch, i, row_max[i], delta[i]);
            if (x.t.p.dropout_threshold) multiply_row<T>(scratch.weights + i * KEYS, factors);
            if (i % ROWS_PER_SUM == ROWS_PER_SUM - 1 || i == strip.row + strip.rows - 1)
                move_sums<T>(scratch.d_key_bias_of_rows, scratch.d_key_bias_of_tile, x.t.M * KEYS);
        }
    }
    return components;
}
