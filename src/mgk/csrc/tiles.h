// A call in tiles of QUERIES x KEYS scores: its sizes, and its keys, biases and values packed.
//
// Scores are in units of log 2: packed keys, biases and masks are multiplied by log2(e), and weights are 2^score.
// Keys are packed transposed, so that a row of scores is a row of vectors. Positions beyond the last key have
// key_bias = -inf, which makes their weights 0.

constexpr int64_t QUERIES = 64;
constexpr int64_t KEYS = 64;
constexpr double LOG2_E = 1.4426950408889634;

template <typename T>
constexpr T NEG_INF = -std::numeric_limits<T>::infinity();

// How the scores of the components are made: a template parameter, picked once per call in attention.h.
enum class Scoring {
    SEPARATE,  // keys of their own: M products
    SHARED,    // one product: s_ijr = base_ij + query_bias_ir + key_bias_jr
    FACTORED,  // one product; the sum over r is a rank-M factor, 2^base_ij (u_i . w_j) (identity 2)
    MAXIMUM,   // one product; the maximum over r of the biases is added to it (hard)
};

template <typename T>
struct Tiles {
    const AttentionParams& p;
    const Scoring scoring;
    const int64_t M, L, S, F, E;  // components, queries, keys, features, value width
    const int64_t heads;          // of all batch entries
    const int64_t products;       // key matrices of a head: M, or 1 when shared
    const int64_t value_stride, feature_stride;  // widths rounded up to whole vectors
    const int64_t key_tiles, query_tiles;

    // [head][key tile]...; index() finds the tile of a head
    Buffer<T> keys_t;               // [products][F][KEYS]
    Buffer<T> key_bias;             // [M][KEYS]; MAXIMUM: from the second component on relative to the first
    Buffer<T> base_bias;            // FACTORED: max_r key_bias, [KEYS]
    Buffer<T> key_factor;           // FACTORED: w_jr = 2^(key_bias_jr - base_bias_j), [M][KEYS]
    Buffer<T> key_bias_range;       // FACTORED: the largest range of key_bias over r
    Buffer<T> values;               // FORWARD: [KEYS][value_stride]
    Buffer<unsigned char> is_live;  // whether any key takes part

    Tiles(const AttentionParams& params, Mode mode, Scoring scoring)
        : p(params), scoring(scoring), M(p.num_components), L(p.num_queries), S(p.num_keys), F(p.num_features),
          E(p.value_width), heads(p.batch_size * p.num_heads), products(p.is_shared ? 1 : M), value_stride(padded(E)),
          feature_stride(padded(F)), key_tiles(ceil_div(S, KEYS)), query_tiles(ceil_div(L, QUERIES)),
          keys_t(heads * key_tiles * products * F * KEYS), key_bias(heads * key_tiles * M * KEYS),
          base_bias(scoring == Scoring::FACTORED ? heads * key_tiles * KEYS : 1),
          key_factor(scoring == Scoring::FACTORED ? heads * key_tiles * M * KEYS : 1),
          key_bias_range(heads * key_tiles),
          values(mode == Mode::FORWARD ? heads * key_tiles * KEYS * value_stride : 1), is_live(heads * key_tiles) {
        for_all(heads * key_tiles, p.num_threads, [&](int64_t task) {
            const int64_t head = task / key_tiles, tile = task % key_tiles;
            pack_keys(head, tile);
            if (mode == Mode::FORWARD)
                copy_rows<T>(value_of(head, tile), num_keys_of(tile), E, values + task * KEYS * value_stride,
                             value_stride, KEYS);
        });
    }

    static int64_t padded(int64_t width) { return ceil_div(width, Simd<T>::W) * Simd<T>::W; }
    int64_t index(int64_t head, int64_t tile) const { return head * key_tiles + tile; }
    int64_t num_keys_of(int64_t tile) const { return min_of(KEYS, S - tile * KEYS); }
    const T* query_of(int64_t head) const { return static_cast<const T*>(p.query) + head * L * F; }
    const T* query_bias_of(int64_t head) const { return static_cast<const T*>(p.query_bias) + head * M * L; }
    const T* keys_of(int64_t head, int64_t r, int64_t tile) const {
        return static_cast<const T*>(p.keys) + ((head * products + r) * S + tile * KEYS) * F;
    }
    const T* value_of(int64_t head, int64_t tile) const {
        return static_cast<const T*>(p.value) + (head * S + tile * KEYS) * E;
    }

  private:
    void pack_keys(int64_t head, int64_t tile) {
        const int64_t at = index(head, tile), count = num_keys_of(tile);
        for (int64_t r = 0; r < products; ++r)
            transpose_rows(keys_of(head, r, tile), count, F, T(LOG2_E), keys_t + (at * products + r) * F * KEYS, KEYS);
        T* biases = key_bias + at * M * KEYS;
        bool any = false;
        for (int64_t r = 0; r < M; ++r) {
            const T* from = static_cast<const T*>(p.key_bias) + (head * M + r) * S + tile * KEYS;
            for (int64_t j = 0; j < KEYS; ++j) {
                const T x = j < count ? from[j] * T(LOG2_E) : NEG_INF<T>;
                biases[r * KEYS + j] = x;
                any = any || x != NEG_INF<T>;
            }
        }
        is_live[at] = any;
        if (scoring == Scoring::FACTORED) pack_factors(at, biases);
        if (scoring == Scoring::MAXIMUM)
            for (int64_t x = KEYS; x < M * KEYS; ++x)
                biases[x] = biases[x % KEYS] == NEG_INF<T> ? T(0) : biases[x] - biases[x % KEYS];
    }

    void pack_factors(int64_t at, const T* biases) {
        T largest_range = 0;
        for (int64_t j = 0; j < KEYS; ++j) {
            T high = NEG_INF<T>, low = -NEG_INF<T>;
            for (int64_t r = 0; r < M; ++r) {
                high = max_of(high, biases[r * KEYS + j]);
                low = min_of(low, biases[r * KEYS + j]);
            }
            base_bias[at * KEYS + j] = high;
            if (high != NEG_INF<T>) largest_range = max_of(largest_range, high - low);
            T* factor = key_factor + at * M * KEYS + j;
            for (int64_t r = 0; r < M; ++r)
                factor[r * KEYS] = high == NEG_INF<T> ? T(0) : std::exp2(biases[r * KEYS + j] - high);
        }
        key_bias_range[at] = largest_range;
    }
};

// A tile of queries and their biases, less what all components have in common: it cancels in the softmax.
template <typename T>
struct QueryTile {
    const int64_t head, first, count;
    const T* query;                          // [count][F]
    T query_bias[QUERIES * MAX_COMPONENTS];  // less the largest of the components or, if hard, the first; [count][M]
    T factor[QUERIES * MAX_COMPONENTS];      // FACTORED: u_ir = 2^query_bias_ir
    T bias_range = 0;                        // FACTORED: the largest range of query_bias over r

    QueryTile(const Tiles<T>& t, int64_t head, int64_t tile)
        : head(head), first(tile * QUERIES), count(min_of(QUERIES, t.L - first)),
          query(t.query_of(head) + first * t.F) {
        if (t.scoring != Scoring::SEPARATE)
            for (int64_t i = 0; i < count; ++i) set_biases(t, i);
    }

  private:
    void set_biases(const Tiles<T>& t, int64_t i) {
        const T* bias = t.query_bias_of(head) + first + i;
        T high = NEG_INF<T>, low = -NEG_INF<T>;
        for (int64_t r = 0; r < t.M; ++r) {
            const T x = bias[r * t.L] * T(LOG2_E);
            high = max_of(high, x);
            low = min_of(low, x);
        }
        const bool is_removed = high == NEG_INF<T>;  // a prior has removed every component
        if (!is_removed) bias_range = max_of(bias_range, high - low);
        const T common = t.p.is_hard ? bias[0] * T(LOG2_E) : high;
        for (int64_t r = 0; r < t.M; ++r) {
            const T x = is_removed ? NEG_INF<T> : bias[r * t.L] * T(LOG2_E) - common;
            query_bias[i * t.M + r] = x;
            if (t.scoring == Scoring::FACTORED) factor[i * t.M + r] = std::exp2(x);
        }
    }
};

// The scores of a tile of queries and a tile of keys.
template <typename T>
struct ScoreTile {
    const Tiles<T>& t;
    const QueryTile<T>& queries;
    const int64_t tile, at;  // the tile of keys: of its head, and of all heads
    const T* key_bias;       // [M][KEYS]
    const T* key_factor;     // FACTORED: [M][KEYS]

    ScoreTile(const Tiles<T>& t, const QueryTile<T>& queries, int64_t tile)
        : t(t), queries(queries), tile(tile), at(t.index(queries.head, tile)), key_bias(t.key_bias + at * t.M * KEYS),
          key_factor(t.key_factor + (t.scoring == Scoring::FACTORED ? at * t.M * KEYS : 0)) {}

    // Whether no query sees a key.
    bool is_skipped() const {
        if (!t.is_live[at]) return true;
        return t.p.is_causal && tile * KEYS > queries.first + queries.count - 1 + t.S - t.L;
    }
};
