// A call in tiles of QUERIES x KEYS scores: its sizes, and its keys, biases and values packed.
//
// Scores are in units of log 2: packed keys, biases and masks are multiplied by log2(e), and weights are 2^score.
// Keys are packed transposed, so that a row of scores is a row of vectors. Positions beyond the last key have
// key_bias = -inf, which makes their weights 0.

constexpr int64_t QUERIES = 64;
constexpr int64_t KEYS = 64;
constexpr int64_t GRAIN = 32;  // of the blocks of a tile of which queries see a part: a multiple of all vectors
constexpr double LOG2_E = 1.4426950408889634;

// A rank-M factor above exp(-60) leaves float32 all its digits; beyond, exponents are added instead.
constexpr double MAX_FACTOR_RANGE = 60.0 * LOG2_E;
constexpr double LARGE_NUMBER = 1e18;  // which rounds scores away, in double too

template <typename T>
constexpr T NEG_INF = -std::numeric_limits<T>::infinity();

// x log2(e). Beyond half of the largest number the slope is 1/2: every finite number stays finite, and all in order.
template <typename T>
inline T in_base_2(T x) {
    constexpr T HALF = std::numeric_limits<T>::max() / 2, REST = HALF * T(LOG2_E - 0.5);
    return x < -HALF ? x / 2 - REST : x > HALF ? x / 2 + REST : x * T(LOG2_E);
}

// Whether scores vanish beside x, a finite number.
template <typename T>
inline bool is_large_number(T x) {
    return (std::fabs(x) > T(LARGE_NUMBER)) & (x != NEG_INF<T>);
}

// a + b, finite where both are finite: only -inf excludes.
template <typename T>
inline Vec<T> finite_sum(Vec<T> a, Vec<T> b) {
    const Vec<T> high = splat<T>(std::numeric_limits<T>::max()), low = -high, sum = a + b;
    const Vec<T> clipped = sum < low ? low : sum > high ? high : sum;
    return (a >= low) & (a <= high) & (b >= low) & (b <= high) ? clipped : sum;
}

// How the scores of the components are made: a template parameter, picked once per call in attention.h.
enum class Scoring {
    SEPARATE,  // keys of their own: M products
    SHARED,    // one product: s_ijr = base_ij + query_bias_ir + key_bias_jr
    FACTORED,  // one product; the sum over r is a rank-M factor, 2^base_ij (u_i . w_j) (identity 2)
    MAXIMUM,   // one product; the maximum over r of the biases is added to it (hard)
};

// Keys from first to last, exclusive.
struct KeyRange {
    int64_t first, last;
};

// Some rows and some keys of a tile.
struct Block {
    int64_t row, rows, key, keys;
};

template <typename T>
struct Tiles {
    const AttentionParams& p;
    const Scoring scoring;
    const int64_t M, L, S, F, E;  // components, queries, keys, features, value width
    const int64_t heads, query_heads;  // of all batch entries; query head h reads key head h / group
    const int64_t products;       // key matrices of a head: M, or 1 when shared
    const int64_t value_stride, feature_stride;  // widths rounded up to whole vectors
    const int64_t key_tiles, query_tiles;

    // [head][key tile]...; index() finds the tile of a head
    Buffer<T> keys_t;               // [products][F][KEYS]
    Buffer<T> key_bias;             // [M][KEYS]; MAXIMUM: from the second component on relative to the first
    Buffer<T> base_bias;            // FACTORED: max_r key_bias, [KEYS]
    Buffer<T> key_factor;           // FACTORED: w_jr = 2^(key_bias_jr - base_bias_j), [M][KEYS]
    Buffer<T> key_bias_range;       // FACTORED: the largest range of key_bias over r
    Buffer<T> padded_values;        // FORWARD, where rows are no whole vectors: [KEYS][value_stride]
    Buffer<unsigned char> is_live;  // whether any key takes part
    Buffer<unsigned char> is_large;  // FACTORED: whether any key_bias is large

    Tiles(const AttentionParams& params, Mode mode, Scoring scoring)
        : p(params), scoring(scoring), M(p.num_components), L(p.num_queries), S(p.num_keys), F(p.num_features),
          E(p.value_width), heads(p.batch_size * p.num_heads), query_heads(heads * p.group), products(p.is_shared ? 1 : M), value_stride(padded(E)),
          feature_stride(padded(F)), key_tiles(ceil_div(S, KEYS)), query_tiles(ceil_div(L, QUERIES)),
          keys_t(heads * key_tiles * products * F * KEYS), key_bias(heads * key_tiles * M * KEYS),
          base_bias(scoring == Scoring::FACTORED ? heads * key_tiles * KEYS : 1),
          key_factor(scoring == Scoring::FACTORED ? heads * key_tiles * M * KEYS : 1),
          key_bias_range(heads * key_tiles),
          padded_values(pads_values(mode) ? heads * key_tiles * KEYS * value_stride : 1), is_live(heads * key_tiles),
          is_large(heads * key_tiles) {
        for_all(heads * key_tiles, p.num_threads, [&](int64_t task) {
            const int64_t head = task / key_tiles, tile = task % key_tiles;
            pack_keys(head, tile);
            if (pads_values(mode))
                copy_rows<T>(value_of(head, tile), num_keys_of(tile), E, padded_values + task * KEYS * value_stride,
                             value_stride, KEYS);
        });
    }

    static int64_t padded(int64_t width) { return ceil_div(width, Simd<T>::W) * Simd<T>::W; }
    int64_t index(int64_t head, int64_t tile) const { return head * key_tiles + tile; }
    int64_t num_keys_of(int64_t tile) const { return min_of(KEYS, S - tile * KEYS); }
    // What causality, window and segments leave to query i; neither end falls as i grows.
    KeyRange keys_seen(int64_t query_head, int64_t i) const {
        const int64_t position = i + S - L;
        KeyRange range{p.left < 0 ? 0 : max_of<int64_t>(0, position - p.left),
                       p.right < 0 ? S : min_of(S, position + p.right + 1)};
        if (p.segment_starts) {
            const int64_t at = query_head / (p.num_heads * p.group) * S + position;
            range = {max_of(range.first, p.segment_starts[at]), min_of(range.last, p.segment_ends[at])};
        }
        return range;
    }
    // The keys that a query of the tile sees.
    KeyRange keys_of_tile(int64_t query_head, int64_t query_tile) const {
        const int64_t first = query_tile * QUERIES, last = min_of(first + QUERIES, L) - 1;
        return {keys_seen(query_head, first).first, keys_seen(query_head, last).last};
    }
    // Whether a query of one tile sees a key of the other.
    bool is_seen(int64_t query_head, int64_t query_tile, int64_t tile) const {
        if (!is_live[index(query_head / p.group, tile)]) return false;
        const KeyRange range = keys_of_tile(query_head, query_tile);
        return tile * KEYS < range.last && (tile + 1) * KEYS > range.first;
    }
    const T* query_of(int64_t head) const { return static_cast<const T*>(p.query) + head * L * F; }
    const T* query_bias_of(int64_t head) const { return static_cast<const T*>(p.query_bias) + head * M * L; }
    const T* keys_of(int64_t head, int64_t r, int64_t tile) const {
        return static_cast<const T*>(p.keys) + ((head * products + r) * S + tile * KEYS) * F;
    }
    const T* value_of(int64_t head, int64_t tile) const {
        return static_cast<const T*>(p.value) + (head * S + tile * KEYS) * E;
    }
    // The same in rows of value_stride, as many as the tile has keys (FORWARD).
    const T* padded_value_of(int64_t head, int64_t tile) const {
        return value_stride == E ? value_of(head, tile) : padded_values + index(head, tile) * KEYS * value_stride;
    }

  private:
    bool pads_values(Mode mode) const { return mode == Mode::FORWARD && value_stride != E; }

    void pack_keys(int64_t head, int64_t tile) {
        const int64_t at = index(head, tile), count = num_keys_of(tile);
        for (int64_t r = 0; r < products; ++r)
            transpose_rows(keys_of(head, r, tile), count, F, T(LOG2_E), keys_t + (at * products + r) * F * KEYS, KEYS);
        T* biases = key_bias + at * M * KEYS;
        bool any = false;
        for (int64_t r = 0; r < M; ++r) {
            const T* from = static_cast<const T*>(p.key_bias) + (head * M + r) * S + tile * KEYS;
            for (int64_t j = 0; j < KEYS; ++j) {
                const T x = j < count ? in_base_2(from[j]) : NEG_INF<T>;
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
        using V = Vec<T>;
        const V none = splat<T>(NEG_INF<T>);
        V range = {};
        is_large[at] = std::any_of(biases, biases + M * KEYS, is_large_number<T>);
        for (int64_t v = 0; v < KEYS; v += Simd<T>::W) {
            V high = load<T>(biases + v), low = high;
            for (int64_t r = 1; r < M; ++r) {
                const V bias = load<T>(biases + r * KEYS + v);
                high = larger<T>(bias, high);
                low = bias < low ? bias : low;
            }
            store<T>(base_bias + at * KEYS + v, high);
            const auto is_dead = high == none;
            range = larger<T>(is_dead ? V{} : high - low, range);
            for (int64_t r = 0; r < M; ++r) {
                const V factor = exp2_of(load<T>(biases + r * KEYS + v) - high);
                store<T>(key_factor + (at * M + r) * KEYS + v, is_dead ? V{} : factor);
            }
        }
        const T largest_range = largest_lane<T>(range);
        key_bias_range[at] = largest_range;
    }
};

// A tile of queries and their biases, less what all components have in common: it cancels in the softmax.
template <typename T>
struct QueryTile {
    const int64_t head, tile, first, count;  // the head of queries
    const T* query;                          // [count][F]
    T query_bias[QUERIES * MAX_COMPONENTS];  // less the largest of the components or, if hard, the first; [count][M]
    T factor[QUERIES * MAX_COMPONENTS];      // FACTORED: u_ir = 2^query_bias_ir
    T bias_range = 0;                        // FACTORED: the largest range of query_bias over r
    T common_bias[QUERIES];                  // what query_bias is less; 0 if SEPARATE

    QueryTile(const Tiles<T>& t, int64_t head, int64_t tile)
        : head(head), tile(tile), first(tile * QUERIES), count(min_of(QUERIES, t.L - first)),
          query(t.query_of(head) + first * t.F) {
        for (int64_t i = 0; i < count; ++i) common_bias[i] = 0;
        if (t.scoring == Scoring::SEPARATE) return;
        for (int64_t v = 0; v < count; v += Simd<T>::W) set_biases(t, v);
    }

  private:
    // Of the queries from v on that fill a vector.
    void set_biases(const Tiles<T>& t, int64_t v) {
        using V = Vec<T>;
        constexpr int W = Simd<T>::W;
        const int64_t filled = min_of<int64_t>(W, count - v);
        V biases[MAX_COMPONENTS], high = splat<T>(NEG_INF<T>), low = -high;
        for (int64_t r = 0; r < t.M; ++r) {
            const T* from = t.query_bias_of(head) + r * t.L + first + v;
            T bias[W] = {};
            for (int64_t i = 0; i < filled; ++i) bias[i] = in_base_2(from[i]);
            biases[r] = load<T>(bias);
            high = larger<T>(biases[r], high);
            low = biases[r] < low ? biases[r] : low;
        }
        const auto is_removed = high == splat<T>(NEG_INF<T>);  // a prior has removed every component
        bias_range = max_of(bias_range, largest_lane<T>(is_removed ? V{} : high - low));
        const V common = t.p.is_hard ? biases[0] : high;
        T less[W], factors[W];
        store<T>(less, common);
        for (int64_t i = 0; i < filled; ++i) common_bias[v + i] = less[i];
        for (int64_t r = 0; r < t.M; ++r) {
            const V x = is_removed ? splat<T>(NEG_INF<T>) : biases[r] - common;
            store<T>(less, x);
            for (int64_t i = 0; i < filled; ++i) query_bias[(v + i) * t.M + r] = less[i];
            if (t.scoring != Scoring::FACTORED) continue;
            store<T>(factors, exp2_of(x));
            for (int64_t i = 0; i < filled; ++i) factor[(v + i) * t.M + r] = factors[i];
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
    const bool is_factored;  // whether the sum over components is taken by the rank-M factor
    bool is_cut;             // whether a query does not see a key; nothing is computed beyond the strips
    int64_t num_strips = 0, num_columns = 0;
    Block strips[QUERIES / GRAIN];  // rows, and the keys that any of them sees
    Block columns[KEYS / GRAIN];    // keys, and the rows of the strips that have them

    ScoreTile(const Tiles<T>& t, const QueryTile<T>& queries, int64_t tile)
        : t(t), queries(queries), tile(tile), at(t.index(queries.head / t.p.group, tile)),
          key_bias(t.key_bias + at * t.M * KEYS),
          key_factor(t.key_factor + (t.scoring == Scoring::FACTORED ? at * t.M * KEYS : 0)),
          is_factored(t.scoring == Scoring::FACTORED && !is_skipped() && !may_vanish() && !has_large_mask()) {
        set_blocks();
    }

    // Whether no query sees a key.
    bool is_skipped() const { return !t.is_seen(queries.head, queries.tile, tile); }

    // The mask of the first query and key of the tile.
    template <typename Element>
    const Element* mask() const {
        const int64_t* strides = t.p.mask_strides;
        const int64_t heads = t.p.num_heads * t.p.group, b = queries.head / heads, h = queries.head % heads;
        return static_cast<const Element*>(t.p.mask) + b * strides[0] + h * strides[1] + queries.first * strides[2] +
               tile * KEYS * strides[3];
    }

    // Row i's keys, counted from the tile's first.
    KeyRange keys_seen(int64_t i) const {
        const KeyRange seen = t.keys_seen(queries.head, queries.first + i);
        const int64_t from = tile * KEYS;
        return {min_of(KEYS, max_of<int64_t>(0, seen.first - from)), min_of(KEYS, max_of<int64_t>(0, seen.last - from))};
    }

    // The keys of a strip that there are.
    int64_t num_keys_of(const Block& strip) const { return min_of(strip.keys, t.num_keys_of(tile) - strip.key); }

  private:
    void set_blocks() {
        const int64_t count = queries.count;
        // both ends grow with i: the last query has the last first key
        is_cut = keys_seen(count - 1).first > 0 || keys_seen(0).last < t.num_keys_of(tile);
        for (int64_t row = 0, rows = is_cut ? GRAIN : count; row < count; row += rows) {
            rows = min_of(rows, count - row);
            const int64_t first = is_cut ? keys_seen(row).first / GRAIN * GRAIN : 0;
            const int64_t last = is_cut ? ceil_div(keys_seen(row + rows - 1).last, GRAIN) * GRAIN : KEYS;
            if (first < last) strips[num_strips++] = {row, rows, first, last - first};
        }
        for (int64_t key = 0, keys = is_cut ? GRAIN : KEYS; key < KEYS; key += keys) {
            Block column{count, 0, key, keys};
            for (int64_t s = 0; s < num_strips; ++s)
                if (strips[s].key <= key && key < strips[s].key + strips[s].keys)
                    column.row = min_of(column.row, strips[s].row), column.rows += strips[s].rows;
            if (column.rows > 0) columns[num_columns++] = column;
        }
    }

    // Whether the factors of queries and of keys may both underflow.
    bool may_vanish() const {
        return queries.bias_range > MAX_FACTOR_RANGE && t.key_bias_range[at] > MAX_FACTOR_RANGE;
    }

    // Whether a key bias or a mask has numbers beside which scores vanish: the factor, which multiplies, would not.
    bool has_large_mask() const {
        if (t.is_large[at]) return true;
        if (!t.p.mask || t.p.mask_is_bool) return false;
        const int64_t count = t.num_keys_of(tile), key_stride = t.p.mask_strides[3];
        int large = 0;
        for (int64_t i = 0; i < queries.count; ++i) {
            const T* from = mask<T>() + i * t.p.mask_strides[2];
            if (key_stride == 1)  // which the compiler makes vectors of
                for (int64_t j = 0; j < count; ++j) large |= is_large_number(from[j]);
            else
                for (int64_t j = 0; j < count; ++j) large |= is_large_number(from[j * key_stride]);
        }
        return large;
    }
};
