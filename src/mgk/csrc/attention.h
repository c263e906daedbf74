// Mixture attention in tiles of queries and keys. Included once for each instruction set, inside its namespace.
//
// Scores are in units of log 2: packed keys, columns, rows and masks come multiplied by log2(e), and weights are 2^score.
//
// A tile holds QUERIES x KEYS scores for each component. Keys come packed and transposed, so that a row of scores is a
// row of vectors; positions beyond the last key have column = -inf, which makes their weights 0.

constexpr int64_t QUERIES = 64;
constexpr int64_t KEYS = 64;
constexpr int64_t LINES = 8;  // of scores, whose gradients are summed up before they are added to others
// exp(-60): a rank-M factor this small still leaves float32 all its digits; beyond, exponents are added instead.
constexpr double LARGEST_SPREAD = 60.0 * 1.4426950408889634;
constexpr double LOG2_E = 1.4426950408889634;
// 2 to less is nothing beside 1, in double too; it stands for -inf, which times 0 is not 0.
constexpr int SMALLEST_EXPONENT = -150;

template <typename T>
struct Buffer {
    explicit Buffer(int64_t size) : data(static_cast<T*>(::operator new[](size * sizeof(T), std::align_val_t(64)))) {}
    ~Buffer() { ::operator delete[](data, std::align_val_t(64)); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    T* data;
};

template <typename T>
inline T max_of(T a, T b) {
    return a > b ? a : b;
}

template <typename T>
inline T min_of(T a, T b) {
    return a < b ? a : b;
}

// Runs task(i) for every i on several threads.
template <typename Task>
void for_all(int64_t tasks, int64_t threads, const Task& task) {
    parallel_for(tasks, threads, [](const void* context, int64_t i) { (*static_cast<const Task*>(context))(i); }, &task);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename T>
inline int64_t padded(int64_t n) {
    return ceil_div(n, Simd<T>::W) * Simd<T>::W;
}

// Rows of `width` elements copied to rows of `stride` elements, the rest 0; rows from `rows` to `all` are 0.
template <typename T>
void copy_rows(const T* from, int64_t rows, int64_t width, T* to, int64_t stride, int64_t all) {
    for (int64_t i = 0; i < all; ++i) {
        T* target = to + i * stride;
        const int64_t filled = i < rows ? width : 0;
        if (filled) std::memcpy(target, from + i * width, filled * sizeof(T));
        std::memset(target + filled, 0, (stride - filled) * sizeof(T));
    }
}

// Rows [rows, width], times a factor, as columns [width, KEYS]; columns from `rows` on are 0.
template <typename T>
void transpose_rows(const T* from, int64_t rows, int64_t width, T factor, T* to) {
    for (int64_t d = 0; d < width; ++d) {
        T* target = to + d * KEYS;
        for (int64_t j = 0; j < rows; ++j) target[j] = from[j * width + d] * factor;
        for (int64_t j = rows; j < KEYS; ++j) target[j] = 0;
    }
}

template <typename T>
struct Kernel {
    using V = Vec<T>;
    static constexpr int W = Simd<T>::W;
    static constexpr int64_t VECTORS = KEYS / W;
    static constexpr T NONE = -std::numeric_limits<T>::infinity();

    const Problem& p;
    const int64_t M, L, S, F, E;
    const int64_t sources;      // key matrices: M, or 1 when shared
    const int64_t value_stride, feature_stride;
    const int64_t key_tiles, query_tiles, pairs;  // pairs: (batch, head)
    const bool counts;          // every component's scores are wanted
    const bool factored;        // one product and a rank-M factor (identity 2)

    // packed for all heads: [pair][tile]...
    Buffer<T> keys_t;    // [sources][F][KEYS]
    Buffer<T> columns;   // [M][KEYS]
    Buffer<T> values;    // [KEYS][value_stride]
    Buffer<T> bases;     // factored: max_r column [KEYS]
    Buffer<T> factors;   // factored: w_r = exp(column_r - base) [M][KEYS]
    Buffer<T> spreads;   // factored: the largest spread of column over r in a tile
    Buffer<unsigned char> alive;  // whether a tile has any key that takes part

    Kernel(const Problem& problem, int what)
        : p(problem), M(p.mixtures), L(p.num_queries), S(p.num_keys), F(p.width), E(p.value_width),
          sources(p.shared ? 1 : M), value_stride(padded<T>(E)), feature_stride(padded<T>(F)),
          key_tiles(ceil_div(S, KEYS)), query_tiles(ceil_div(L, QUERIES)), pairs(p.batch * p.heads),
          counts(what == COUNT), factored(p.shared && !p.hard && M > 1 && !counts && !p.d_affine),
          keys_t(pairs * key_tiles * sources * F * KEYS), columns(pairs * key_tiles * M * KEYS),
          values(pairs * key_tiles * KEYS * value_stride), bases(factored ? pairs * key_tiles * KEYS : 1),
          factors(factored ? pairs * key_tiles * M * KEYS : 1), spreads(pairs * key_tiles), alive(pairs * key_tiles) {
        for_all(pairs * key_tiles, p.threads, [&](int64_t task) { pack(task / key_tiles, task % key_tiles); });
    }

    const T* query_of(int64_t pair) const { return static_cast<const T*>(p.query) + pair * L * F; }
    const T* row_of(int64_t pair) const { return static_cast<const T*>(p.row) + pair * M * L; }
    int64_t index(int64_t pair, int64_t tile) const { return pair * key_tiles + tile; }

    void pack(int64_t pair, int64_t tile) {
        const int64_t at = index(pair, tile), first = tile * KEYS, count = min_of(KEYS, S - first);
        for (int64_t r = 0; r < sources; ++r)
            transpose_rows(static_cast<const T*>(p.keys) + ((pair * sources + r) * S + first) * F, count, F,
                           T(LOG2_E), keys_t.data + (at * sources + r) * F * KEYS);
        if (!counts)
            copy_rows(static_cast<const T*>(p.value) + (pair * S + first) * E, count, E,
                      values.data + at * KEYS * value_stride, value_stride, KEYS);
        bool any = false;
        for (int64_t r = 0; r < M; ++r) {
            const T* from = static_cast<const T*>(p.column) + (pair * M + r) * S + first;
            T* to = columns.data + (at * M + r) * KEYS;
            for (int64_t j = 0; j < KEYS; ++j) {
                to[j] = j < count ? from[j] * T(LOG2_E) : NONE;
                any = any || to[j] != NONE;
            }
        }
        alive.data[at] = any;
        if (factored) pack_factors(at);
        if (p.shared && p.hard && !counts)  // columns relative to the first, which goes into the base
            for (int64_t x = KEYS; x < M * KEYS; ++x) {
                const T first_column = columns.data[at * M * KEYS + x % KEYS];
                columns.data[at * M * KEYS + x] = first_column == NONE ? T(0) : columns.data[at * M * KEYS + x] - first_column;
            }
    }

    void pack_factors(int64_t at) {
        T spread = 0;
        for (int64_t j = 0; j < KEYS; ++j) {
            T high = NONE, low = -NONE;
            for (int64_t r = 0; r < M; ++r) {
                const T c = columns.data[(at * M + r) * KEYS + j];
                high = max_of(high, c);
                low = min_of(low, c);
            }
            bases.data[at * KEYS + j] = high;
            if (high == NONE) {
                for (int64_t r = 0; r < M; ++r) factors.data[(at * M + r) * KEYS + j] = 0;
                continue;
            }
            spread = max_of(spread, high - low);
            for (int64_t r = 0; r < M; ++r)
                factors.data[(at * M + r) * KEYS + j] = std::exp2(columns.data[(at * M + r) * KEYS + j] - high);
        }
        spreads.data[at] = spread;
    }

    // ---------------------------------------------------------------------------------------------- scores

    struct Rows {  // a tile of queries
        int64_t pair, first, count;
        const T* query;  // [count][F]
        T factor[QUERIES * 8];  // factored: u_r = exp(row_r - max_r row), [count][M] for M <= 8
        T shift[QUERIES * 8];   // shared: row_r less what all components have in common
        T spread;
    };

    // Up to 8 components have room in Rows; Python sends calls with more elsewhere.
    Rows rows_of(int64_t pair, int64_t tile) const {
        Rows rows;
        rows.pair = pair;
        rows.first = tile * QUERIES;
        rows.count = min_of(QUERIES, L - rows.first);
        rows.query = query_of(pair) + rows.first * F;
        rows.spread = 0;
        if (!p.shared) return rows;
        for (int64_t i = 0; i < rows.count; ++i) {
            T high = NONE, low = -NONE;
            for (int64_t r = 0; r < M; ++r) {
                const T x = row_of(pair)[r * L + rows.first + i] * T(LOG2_E);
                high = max_of(high, x);
                low = min_of(low, x);
            }
            if (high == NONE) {  // a prior has removed every component
                for (int64_t r = 0; r < M; ++r) rows.shift[i * M + r] = NONE, rows.factor[i * M + r] = 0;
                continue;
            }
            rows.spread = max_of(rows.spread, high - low);
            // what all components have in common cancels: the largest is taken out, or, where they compete, the first
            const T common = p.hard ? row_of(pair)[rows.first + i] * T(LOG2_E) : high;
            for (int64_t r = 0; r < M; ++r) {
                const T x = row_of(pair)[r * L + rows.first + i] * T(LOG2_E) - common;
                rows.shift[i * M + r] = x;
                rows.factor[i * M + r] = std::exp2(x);
            }
        }
        return rows;
    }

    bool skips(const Rows& rows, int64_t tile) const {
        if (!alive.data[index(rows.pair, tile)]) return true;
        return p.causal && tile * KEYS > rows.first + rows.count - 1 + S - L;
    }

    bool uses_factor(const Rows& rows, int64_t tile) const {
        return factored && !(rows.spread > LARGEST_SPREAD && spreads.data[index(rows.pair, tile)] > LARGEST_SPREAD);
    }

    // Whether the components of a shared key are merged: their scores are base_ij plus something of (i, r) and (j, r).
    bool merges(const Rows& rows, int64_t tile) const { return uses_factor(rows, tile) || (p.shared && p.hard && !counts); }

    // scores[r][i][j]; merged there is one component, base_ij + max_r column_jr (factored) or
    // base_ij + max_r (row_ir + column_jr) (hard), or without its maximum where the caller adds it line by line.
    // Returns the number of components written.
    int64_t scores_of(const Rows& rows, int64_t tile, T* scores, bool with_best = true) const {
        const int64_t at = index(rows.pair, tile);
        const bool by_factor = uses_factor(rows, tile), merged = merges(rows, tile);
        const T zeros[KEYS] = {};
        for (int64_t r = 0; r < sources; ++r) {
            const T* start = columns.data + (at * M + r) * KEYS;
            if (p.shared && !(merged && p.hard)) start = by_factor ? bases.data + at * KEYS : zeros;
            const T* key = keys_t.data + (at * sources + r) * F * KEYS;
            T* to = scores + r * QUERIES * KEYS;
            // the gradients of an affine map add up what the sums over features err, and shorter sums err less
            const int64_t half = p.d_affine ? F / 2 : F;
            product<T>(rows.count, KEYS, half, rows.query, F, 1, key, KEYS, to, KEYS, start);
            if (half < F)
                product<T>(rows.count, KEYS, F - half, rows.query + half, F, 1, key + half * KEYS, KEYS, to, KEYS, nullptr);
        }
        if (merged && p.hard && with_best)
            for (int64_t i = 0; i < rows.count; ++i) add_best(rows, at, i, scores + i * KEYS);
        if (p.shared && !merged)
            for (int64_t r = M - 1; r >= 0; --r)  // the base, in place 0, is needed until the last
                add_column(rows, columns.data + (at * M + r) * KEYS, rows.shift, r, scores, scores + r * QUERIES * KEYS);
        const int64_t components = merged ? 1 : M;
        if (p.mask) add_mask(rows, tile, scores, components);
        if (p.causal && tile * KEYS + KEYS - 1 > rows.first + S - L) cut_causal(rows, tile, scores, components);
        return components;
    }

    // row_ir + column_jr relative to the first component
    V part_of(const Rows& rows, int64_t at, int64_t i, int64_t r, int64_t v) const {
        if (r == 0) return V{};
        return load<T>(columns.data + (at * M + r) * KEYS + v * W) + splat<T>(rows.shift[i * M + r]);
    }

    V best_of(const Rows& rows, int64_t at, int64_t i, int64_t v) const {
        V best = {};
        for (int64_t r = 1; r < M; ++r) best = larger<T>(part_of(rows, at, i, r, v), best);
        return best;
    }

    // The line of scores with the best component's part added; the largest of each lane comes back.
    V add_best(const Rows& rows, int64_t at, int64_t i, T* s) const {
        V high = splat<T>(NONE);
        for (int64_t v = 0; v < VECTORS; ++v) {
            const V score = load<T>(s + v * W) + best_of(rows, at, i, v);
            store<T>(s + v * W, score);
            high = larger<T>(score, high);
        }
        return high;
    }

    void add_column(const Rows& rows, const T* column, const T* shift, int64_t r, const T* from, T* to) const {
        for (int64_t i = 0; i < rows.count; ++i) {
            const V x = splat<T>(shift[i * M + r]);
            for (int64_t v = 0; v < VECTORS; ++v)
                store<T>(to + i * KEYS + v * W, load<T>(from + i * KEYS + v * W) + (load<T>(column + v * W) + x));
        }
    }

    void add_mask(const Rows& rows, int64_t tile, T* scores, int64_t components) const {
        const int64_t b = rows.pair / p.heads, h = rows.pair % p.heads, first = tile * KEYS;
        const int64_t count = min_of(KEYS, S - first);
        const int64_t start = b * p.mask_strides[0] + h * p.mask_strides[1];
        T line[KEYS];
        for (int64_t j = count; j < KEYS; ++j) line[j] = 0;
        for (int64_t i = 0; i < rows.count; ++i) {
            const int64_t at = start + (rows.first + i) * p.mask_strides[2] + first * p.mask_strides[3];
            if (p.mask_is_bool) {
                const unsigned char* from = static_cast<const unsigned char*>(p.mask) + at;
                for (int64_t j = 0; j < count; ++j) line[j] = from[j * p.mask_strides[3]] ? T(0) : NONE;
            } else {
                const T* from = static_cast<const T*>(p.mask) + at;
                for (int64_t j = 0; j < count; ++j) line[j] = from[j * p.mask_strides[3]] * T(LOG2_E);
            }
            for (int64_t r = 0; r < components; ++r) {
                T* to = scores + (r * QUERIES + i) * KEYS;
                for (int64_t v = 0; v < VECTORS; ++v) store<T>(to + v * W, load<T>(to + v * W) + load<T>(line + v * W));
            }
        }
    }

    void cut_causal(const Rows& rows, int64_t tile, T* scores, int64_t components) const {
        for (int64_t i = 0; i < rows.count; ++i) {
            const int64_t seen = max_of<int64_t>(0, rows.first + i + S - L + 1 - tile * KEYS);
            for (int64_t r = 0; r < components; ++r)
                for (int64_t j = seen; j < KEYS; ++j) scores[(r * QUERIES + i) * KEYS + j] = NONE;
        }
    }

    // max_r of the scores into component 0
    void take_largest(const Rows& rows, T* scores, int64_t components) const {
        for (int64_t i = 0; i < rows.count; ++i)
            for (int64_t v = 0; v < VECTORS; ++v) {
                T* to = scores + i * KEYS + v * W;
                V best = load<T>(to);
                for (int64_t r = 1; r < components; ++r) best = larger<T>(load<T>(to + r * QUERIES * KEYS), best);
                store<T>(to, best);
            }
    }

    // ---------------------------------------------------------------------------------------------- dropout

    // 1 / (1 - p) or 0 for the weights of one query and a tile of keys, from a counter: the same whenever it is asked for.
    void kept_line(const Rows& rows, int64_t tile, int64_t i, T* line) const {
        uint64_t x = p.seed ^ (static_cast<uint64_t>(rows.pair * L + rows.first + i) * 0x9E3779B97F4A7C15ull);
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
        x ^= x >> 31;
        const uint32_t key = static_cast<uint32_t>(x), other = static_cast<uint32_t>(x >> 32);
        const T scale = T(4294967296.0 / (4294967296.0 - static_cast<double>(p.drop_below)));
        for (int64_t j = 0; j < KEYS; ++j) {
            uint32_t y = (static_cast<uint32_t>(tile * KEYS + j) * 0x9E3779B1u) ^ key;
            y = (y ^ (y >> 16)) * 0x85EBCA6Bu;
            y = (y ^ (y >> 13) ^ other) * 0xC2B2AE35u;
            y ^= y >> 16;
            line[j] = static_cast<int64_t>(y) < p.drop_below ? T(0) : scale;
        }
    }

    // ---------------------------------------------------------------------------------------------- forward

    void forward() const {
        for_all(pairs * query_tiles, p.threads, [&](int64_t task) {
            // heads one after another, so that the threads share the packed keys of a head in the cache
            forward_tile(rows_of(task / query_tiles, task % query_tiles));
        });
    }

    void forward_tile(const Rows& rows) const {
        Buffer<T> scores(M * QUERIES * KEYS), sums(QUERIES * value_stride);
        T peak[QUERIES], line[KEYS];
        V total[QUERIES];
        for (int64_t i = 0; i < rows.count; ++i) peak[i] = NONE, total[i] = V{};
        std::memset(sums.data, 0, QUERIES * value_stride * sizeof(T));
        for (int64_t tile = 0; tile < key_tiles; ++tile) {
            if (skips(rows, tile)) continue;
            const int64_t at = index(rows.pair, tile);
            const bool by_factor = uses_factor(rows, tile);
            int64_t components = scores_of(rows, tile, scores.data, false);
            if (p.hard && components > 1) take_largest(rows, scores.data, components), components = 1;
            for (int64_t i = 0; i < rows.count; ++i) {
                T* s = scores.data + i * KEYS;
                const V high = p.hard && p.shared ? add_best(rows, at, i, s) : largest_of(s, components);
                raise_peak(high, peak[i], total[i], sums.data + i * value_stride);
                const T now = peak[i] == NONE ? T(0) : peak[i];  // -inf - 0: nothing seen yet has weight 0
                if (by_factor)
                    total[i] += factored_weights(rows, at, i, s, now);
                else if (components == 2)
                    total[i] += weights<2>(s, now, components);
                else
                    total[i] += weights<0>(s, now, components);
                if (p.drop_below) {
                    kept_line(rows, tile, i, line);
                    for (int64_t v = 0; v < VECTORS; ++v) store<T>(s + v * W, load<T>(s + v * W) * load<T>(line + v * W));
                }
            }
            product<T>(rows.count, value_stride, KEYS, scores.data, KEYS, 1, values.data + at * KEYS * value_stride,
                       value_stride, sums.data, value_stride, nullptr);
        }
        for (int64_t i = 0; i < rows.count; ++i) {
            const int64_t q = rows.pair * L + rows.first + i;
            const T all = sum_of_lanes<T>(total[i]), inverse = all > 0 ? T(1) / all : T(0);
            for (int64_t e = 0; e < E; ++e)
                static_cast<T*>(p.out)[q * E + e] = sums.data[i * value_stride + e] * inverse;
            // +inf makes every weight 0 in the backward of a query with no key left
            static_cast<T*>(p.peak)[q] = all > 0 ? peak[i] : -NONE;
            static_cast<T*>(p.total)[q] = all > 0 ? all : T(1);
        }
    }

    V largest_of(const T* s, int64_t components) const {
        V high = load<T>(s);
        for (int64_t r = 0; r < components; ++r)
            for (int64_t v = 0; v < VECTORS; ++v) high = larger<T>(load<T>(s + r * QUERIES * KEYS + v * W), high);
        return high;
    }

    // The running maximum of a query, rounded up to an integer: what has been summed so far shrinks when it rises, by a
    // power of two and so without rounding.
    void raise_peak(V high, T& peak, V& total, T* sums) const {
        if (!any_above<T>(high, peak)) return;
        const T now = std::ceil(largest_lane<T>(high)), decay = std::exp2(peak - now);
        total *= decay;
        for (int64_t e = 0; e < value_stride; e += W) store<T>(sums + e, load<T>(sums + e) * decay);
        peak = now;
    }

    // sum_r 2^(s_r - now) in place of s_0; the sum over positions comes back. COMPONENTS = 0: as many as there are.
    template <int COMPONENTS>
    V weights(T* s, T now, int64_t components) const {
        const int64_t count = COMPONENTS ? COMPONENTS : components;
        V sum = {};
        for (int64_t v = 0; v < VECTORS; ++v) {
            V weight = exp2_of(load<T>(s + v * W) - now);
            for (int64_t r = 1; r < count; ++r) weight += exp2_of(load<T>(s + r * QUERIES * KEYS + v * W) - now);
            sum += weight;
            store<T>(s + v * W, weight);
        }
        return sum;
    }

    // 2^(s - now) (u . w) in place of s; the sum over positions comes back.
    V factored_weights(const Rows& rows, int64_t at, int64_t i, T* s, T now) const {
        const T* u = rows.factor + i * M;
        const T* w = factors.data + at * M * KEYS;
        V sum = {};
        for (int64_t v = 0; v < VECTORS; ++v) {
            V f = splat<T>(u[0]) * load<T>(w + v * W);
            for (int64_t r = 1; r < M; ++r) f += splat<T>(u[r]) * load<T>(w + r * KEYS + v * W);
            const V weight = exp2_of(load<T>(s + v * W) - now) * f;
            sum += weight;
            store<T>(s + v * W, weight);
        }
        return sum;
    }

    // ---------------------------------------------------------------------------------------------- backward

    // The keys of a head are cut into `splits` ranges, each with gradients of the queries of its own: no two threads add to
    // one place, and the ranges are added up in order, so that the bits do not depend on who was first.
    void backward() const {
        int64_t splits = 1;
        while (splits < key_tiles && pairs * splits < 4 * p.threads && (pairs * splits) % p.threads != 0) ++splits;
        Buffer<T> query(pairs * L * feature_stride), grad(pairs * L * value_stride), delta(pairs * L);
        for_all(pairs, p.threads, [&](int64_t pair) {
            copy_rows(query_of(pair), L, F, query.data + pair * L * feature_stride, feature_stride, L);
            const T* g = static_cast<const T*>(p.grad) + pair * L * E;
            const T* o = static_cast<const T*>(p.out) + pair * L * E;
            copy_rows(g, L, E, grad.data + pair * L * value_stride, value_stride, L);
            // dP, delta and dv are linear in the gradient: divided by the total here, no weight needs to be
            for (int64_t i = 0; i < L; ++i) {
                T* row = grad.data + (pair * L + i) * value_stride;
                const T inverse = T(1) / static_cast<const T*>(p.total)[pair * L + i];
                double sum = 0;
                for (int64_t e = 0; e < E; ++e) {
                    row[e] *= inverse;
                    sum += double(row[e]) * double(o[i * E + e]);
                }
                delta.data[pair * L + i] = T(sum);
            }
        });
        const int64_t shifts = p.shared ? M : 0;
        const int64_t moments = p.d_affine ? MOMENTS * M : 0;
        Buffer<T> d_query(splits * pairs * L * feature_stride), d_row(splits * pairs * shifts * L + 1);
        Buffer<double> sums(splits * pairs * L * moments + 1);
        for_all(pairs * splits, p.threads, [&](int64_t task) {
            const int64_t pair = task / splits, split = task % splits;
            T* dq = d_query.data + (split * pairs + pair) * L * feature_stride;
            T* dr = d_row.data + (split * pairs + pair) * shifts * L;
            double* of_range = sums.data + (split * pairs + pair) * L * moments;
            std::memset(dq, 0, L * feature_stride * sizeof(T));
            std::memset(dr, 0, shifts * L * sizeof(T));
            std::memset(of_range, 0, L * moments * sizeof(double));
            backward_range(pair, key_tiles * split / splits, key_tiles * (split + 1) / splits,
                           query.data + pair * L * feature_stride, grad.data + pair * L * value_stride,
                           delta.data + pair * L, dq, dr, moments ? of_range : nullptr);
        });
        for_all(pairs, p.threads, [&](int64_t pair) {
            for (int64_t i = 0; i < L; ++i)
                for (int64_t d = 0; d < F; ++d) {
                    T sum = 0;
                    for (int64_t split = 0; split < splits; ++split)
                        sum += d_query.data[((split * pairs + pair) * L + i) * feature_stride + d];
                    static_cast<T*>(p.d_query)[(pair * L + i) * F + d] = sum;
                }
            for (int64_t i = 0; i < shifts * L; ++i) {
                T sum = 0;
                for (int64_t split = 0; split < splits; ++split) sum += d_row.data[(split * pairs + pair) * shifts * L + i];
                static_cast<T*>(p.d_row)[pair * shifts * L + i] = sum;
            }
            if (moments) affine_gradient(pair, splits, sums.data);
        });
    }

    // Of a query and a component, over the keys: ds x, ds, l P x and l P, where x = s - peak.
    static constexpr int64_t MOMENTS = 4;

    // da_ir = sum_j ds_ijr s_ijr and db_ir = sum_j ds_ijr of a_ir s_ijr + b_ir. Rounding leaves sum_jr ds_ijr = e_i where it
    // should be 0, most of it from delta_i, so that P_ijr e_i is taken off.
    void affine_gradient(int64_t pair, int64_t splits, const double* sums) const {
        double* d_factor = p.d_affine + pair * M * L;
        double* d_addend = d_factor + pairs * M * L;
        for (int64_t i = 0; i < L; ++i) {
            double peak = static_cast<const T*>(p.peak)[pair * L + i];
            if (peak == std::numeric_limits<double>::infinity()) {  // no key left
                for (int64_t r = 0; r < M; ++r) d_factor[r * L + i] = d_addend[r * L + i] = 0;
                continue;
            }
            if (p.shared) peak += largest_row(pair, i);  // which the scores of a tile are without
            double of_row[8][MOMENTS] = {}, excess = 0;
            for (int64_t split = 0; split < splits; ++split)
                for (int64_t r = 0; r < M; ++r)
                    for (int64_t m = 0; m < MOMENTS; ++m)
                        of_row[r][m] += sums[(((split * pairs + pair) * L + i) * M + r) * MOMENTS + m];
            for (int64_t r = 0; r < M; ++r) excess += of_row[r][1];
            excess /= static_cast<const T*>(p.total)[pair * L + i];
            for (int64_t r = 0; r < M; ++r) {
                const double of_scores = of_row[r][1] - excess * of_row[r][3];
                d_factor[r * L + i] = (of_row[r][0] - excess * of_row[r][2] + peak * of_scores) / LOG2_E;
                d_addend[r * L + i] = of_scores;
            }
        }
    }

    T largest_row(int64_t pair, int64_t i) const {
        T high = NONE;
        for (int64_t r = 0; r < M; ++r) high = max_of(high, row_of(pair)[r * L + i] * T(LOG2_E));
        return high;
    }

    struct Tile {  // scratch of a backward range
        Tile(const Kernel& k)
            : scores(k.M * QUERIES * KEYS), d_weights(QUERIES * KEYS), weights(QUERIES * KEYS), values_t(k.E * KEYS),
              keys(k.sources * KEYS * k.feature_stride), d_keys(k.sources * KEYS * k.feature_stride),
              d_values(KEYS * k.value_stride), d_columns(k.M * KEYS), d_columns_of_tile(k.M * KEYS),
              d_columns_of_lines(k.M * KEYS) {}
        Buffer<T> scores, d_weights, weights, values_t, keys, d_keys, d_values;
        // Sums of sums of short sums: a shared prior's gradient adds up the rounding of every column.
        Buffer<T> d_columns, d_columns_of_tile, d_columns_of_lines;
    };

    void backward_range(int64_t pair, int64_t first_tile, int64_t last_tile, const T* query, const T* grad,
                        const T* delta, T* d_query, T* d_row, double* moments) const {
        Tile t(*this);
        for (int64_t tile = first_tile; tile < last_tile; ++tile) {
            const int64_t first = tile * KEYS, count = min_of(KEYS, S - first);
            std::memset(t.d_keys.data, 0, sources * KEYS * feature_stride * sizeof(T));
            std::memset(t.d_values.data, 0, KEYS * value_stride * sizeof(T));
            for (const auto* sums : {&t.d_columns, &t.d_columns_of_tile, &t.d_columns_of_lines})
                std::memset(sums->data, 0, M * KEYS * sizeof(T));
            if (alive.data[index(pair, tile)]) {
                transpose_rows(static_cast<const T*>(p.value) + (pair * S + first) * E, count, E, T(1), t.values_t.data);
                for (int64_t r = 0; r < sources; ++r)
                    copy_rows(static_cast<const T*>(p.keys) + ((pair * sources + r) * S + first) * F, count, F,
                              t.keys.data + r * KEYS * feature_stride, feature_stride, KEYS);
                for (int64_t q = 0; q < query_tiles; ++q) {
                    const Rows rows = rows_of(pair, q);
                    if (skips(rows, tile)) continue;
                    backward_tile(t, rows, tile, query, grad, delta, d_query, d_row, moments);
                    move_sums(t.d_columns_of_tile.data, t.d_columns.data);
                }
            }
            for (int64_t r = 0; r < sources; ++r)
                for (int64_t j = 0; j < count; ++j)
                    std::memcpy(static_cast<T*>(p.d_keys) + ((pair * sources + r) * S + first + j) * F,
                                t.d_keys.data + (r * KEYS + j) * feature_stride, F * sizeof(T));
            for (int64_t j = 0; j < count; ++j)
                std::memcpy(static_cast<T*>(p.d_value) + (pair * S + first + j) * E,
                            t.d_values.data + j * value_stride, E * sizeof(T));
            for (int64_t r = 0; r < M; ++r)
                std::memcpy(static_cast<T*>(p.d_column) + (pair * M + r) * S + first, t.d_columns.data + r * KEYS,
                            count * sizeof(T));
        }
    }

    // Adds the sums over columns to those of a higher level, and begins anew.
    void move_sums(T* from, T* to) const {
        for (int64_t x = 0; x < M * KEYS; x += W) {
            store<T>(to + x, load<T>(to + x) + load<T>(from + x));
            store<T>(from + x, V{});
        }
    }

    void backward_tile(Tile& t, const Rows& rows, int64_t tile, const T* query, const T* grad, const T* delta,
                       T* d_query, T* d_row, double* moments) const {
        const int64_t at = index(rows.pair, tile);
        const bool by_factor = uses_factor(rows, tile);
        const int64_t components = scores_of(rows, tile, t.scores.data);
        const T* g = grad + rows.first * value_stride;
        // dP_ij = g_i . v_j
        const T zeros[KEYS] = {};
        product<T>(rows.count, KEYS, E, g, value_stride, 1, t.values_t.data, KEYS, t.d_weights.data, KEYS, zeros);
        const T* peak = static_cast<const T*>(p.peak) + rows.pair * L + rows.first;
        for (int64_t i = 0; i < rows.count; ++i) {
            T* dp = t.d_weights.data + i * KEYS;
            T* w = t.weights.data + i * KEYS;
            T kept[KEYS];
            if (p.drop_below) {
                kept_line(rows, tile, i, kept);
                for (int64_t v = 0; v < VECTORS; ++v) store<T>(dp + v * W, load<T>(dp + v * W) * load<T>(kept + v * W));
            }
            if (by_factor)
                factored_line(t, rows, at, i, peak[i], delta[rows.first + i], d_row);
            else if (p.hard && p.shared)
                hard_shared_line(t, rows, at, i, peak[i], delta[rows.first + i], d_row);
            else if (p.hard && components > 1)
                hard_line(t, i, components, peak[i], delta[rows.first + i]);
            else if (moments)
                soft_line<true>(t, rows, i, components, peak[i], delta[rows.first + i], d_row, moments);
            else
                soft_line<false>(t, rows, i, components, peak[i], delta[rows.first + i], d_row, nullptr);
            if (p.drop_below)
                for (int64_t v = 0; v < VECTORS; ++v) store<T>(w + v * W, load<T>(w + v * W) * load<T>(kept + v * W));
            if (i % LINES == LINES - 1 || i == rows.count - 1) move_sums(t.d_columns_of_lines.data, t.d_columns_of_tile.data);
        }
        // dv_j = sum_i (sum_r P_ijr) g_i
        product<T>(KEYS, value_stride, rows.count, t.weights.data, 1, KEYS, g, value_stride, t.d_values.data,
                   value_stride, nullptr);
        if (p.shared && components > 1)  // one product for all components
            for (int64_t i = 0; i < rows.count; ++i)
                for (int64_t v = 0; v < VECTORS; ++v) {
                    T* to = t.scores.data + i * KEYS + v * W;
                    V sum = load<T>(to);
                    for (int64_t r = 1; r < components; ++r) sum += load<T>(to + r * QUERIES * KEYS);
                    store<T>(to, sum);
                }
        for (int64_t r = 0; r < sources; ++r) {
            const T* ds = t.scores.data + r * QUERIES * KEYS;
            product<T>(rows.count, feature_stride, KEYS, ds, KEYS, 1, t.keys.data + r * KEYS * feature_stride,
                       feature_stride, d_query + rows.first * feature_stride, feature_stride, nullptr);
            product<T>(KEYS, feature_stride, rows.count, ds, 1, KEYS, query + rows.first * feature_stride,
                       feature_stride, t.d_keys.data + r * KEYS * feature_stride, feature_stride, nullptr);
        }
    }

    // Weights are 2^(s_ijr - peak_i), to be divided by the total that the gradient has been divided by; ds_ijr = P_ijr (dP_ij - delta_i)
    template <bool WITH_MOMENTS>
    void soft_line(Tile& t, const Rows& rows, int64_t i, int64_t components, T peak, T delta, T* d_row,
                   double* moments) const {
        T* s = t.scores.data + i * KEYS;
        V sums[WITH_MOMENTS ? 8 : 1][MOMENTS] = {};
        for (int64_t v = 0; v < VECTORS; ++v) {
            const V d = load<T>(t.d_weights.data + i * KEYS + v * W) - delta;
            V all = {};
            for (int64_t r = 0; r < components; ++r) {
                T* x = s + r * QUERIES * KEYS + v * W;
                const V exponent = load<T>(x) - peak;
                const V weight = exp2_of(exponent);
                const V ds = weight * d;
                all += weight;
                store<T>(x, ds);
                if (WITH_MOMENTS) {
                    const V finite = larger<T>(exponent, splat<T>(SMALLEST_EXPONENT));
                    sums[r][0] += ds * finite;
                    sums[r][1] += ds;
                    sums[r][2] += weight * finite;
                    sums[r][3] += weight;
                }
                T* column = t.d_columns_of_lines.data + r * KEYS + v * W;
                store<T>(column, load<T>(column) + ds);
            }
            store<T>(t.weights.data + i * KEYS + v * W, all);
        }
        if (p.shared) add_row_gradients(s, rows, i, components, d_row);
        if (WITH_MOMENTS)
            for (int64_t r = 0; r < components; ++r)
                for (int64_t m = 0; m < MOMENTS; ++m)
                    moments[((rows.first + i) * M + r) * MOMENTS + m] += double(sum_of_lanes<T>(sums[r][m]));
    }

    void hard_line(Tile& t, int64_t i, int64_t components, T peak, T delta) const {
        T* s = t.scores.data + i * KEYS;
        for (int64_t v = 0; v < VECTORS; ++v) {
            V best = load<T>(s + v * W);
            for (int64_t r = 1; r < components; ++r) best = larger<T>(load<T>(s + r * QUERIES * KEYS + v * W), best);
            const V weight = exp2_of(best - peak);
            V ds = weight * (load<T>(t.d_weights.data + i * KEYS + v * W) - delta);
            store<T>(t.weights.data + i * KEYS + v * W, weight);
            for (int64_t r = 0; r < components; ++r) {  // the first that reaches the maximum takes all
                T* x = s + r * QUERIES * KEYS + v * W;
                const auto wins = load<T>(x) == best;
                const V mine = wins ? ds : V{};
                ds = wins ? V{} : ds;
                store<T>(x, mine);
                T* column = t.d_columns_of_lines.data + r * KEYS + v * W;
                store<T>(column, load<T>(column) + mine);
            }
        }
    }

    void hard_shared_line(Tile& t, const Rows& rows, int64_t at, int64_t i, T peak, T delta, T* d_row) const {
        T* s = t.scores.data + i * KEYS;
        V row_sums[8] = {};
        for (int64_t v = 0; v < VECTORS; ++v) {
            const V best = best_of(rows, at, i, v);
            const V weight = exp2_of(load<T>(s + v * W) - peak);
            V ds = weight * (load<T>(t.d_weights.data + i * KEYS + v * W) - delta);
            store<T>(t.weights.data + i * KEYS + v * W, weight);
            store<T>(s + v * W, ds);
            for (int64_t r = 0; r < M; ++r) {
                const auto wins = part_of(rows, at, i, r, v) == best;
                const V mine = wins ? ds : V{};
                ds = wins ? V{} : ds;
                row_sums[r] += mine;
                T* column = t.d_columns_of_lines.data + r * KEYS + v * W;
                store<T>(column, load<T>(column) + mine);
            }
        }
        for (int64_t r = 0; r < M; ++r) d_row[r * L + rows.first + i] += sum_of_lanes<T>(row_sums[r]);
    }

    void add_row_gradients(const T* s, const Rows& rows, int64_t i, int64_t components, T* d_row) const {
        for (int64_t r = 0; r < components; ++r) {
            V sum = {};
            for (int64_t v = 0; v < VECTORS; ++v) sum += load<T>(s + r * QUERIES * KEYS + v * W);
            d_row[r * L + rows.first + i] += sum_of_lanes<T>(sum);
        }
    }

    // P_ijr = e_ij u_ir w_jr; with t_ij = e_ij (dP_ij - delta_i): dbase = t (u.w), drow_r = u_r sum_j t w_jr, dcolumn_r = w_jr sum_i t u_r
    void factored_line(Tile& t, const Rows& rows, int64_t at, int64_t i, T peak, T delta, T* d_row) const {
        T* s = t.scores.data + i * KEYS;
        const T* u = rows.factor + i * M;
        const T* w = factors.data + at * M * KEYS;
        V row_sums[8] = {};
        for (int64_t v = 0; v < VECTORS; ++v) {
            V f = {};
            for (int64_t r = 0; r < M; ++r) f += splat<T>(u[r]) * load<T>(w + r * KEYS + v * W);
            const V e = exp2_of(load<T>(s + v * W) - peak);
            const V d = e * (load<T>(t.d_weights.data + i * KEYS + v * W) - delta);
            store<T>(t.weights.data + i * KEYS + v * W, e * f);
            store<T>(s + v * W, d * f);
            for (int64_t r = 0; r < M; ++r) {
                const V dw = d * load<T>(w + r * KEYS + v * W);
                row_sums[r] += dw;
                T* column = t.d_columns_of_lines.data + r * KEYS + v * W;
                store<T>(column, load<T>(column) + dw * u[r]);
            }
        }
        for (int64_t r = 0; r < M; ++r) d_row[r * L + rows.first + i] += u[r] * sum_of_lanes<T>(row_sums[r]);
    }

    // ---------------------------------------------------------------------------------------------- counts

    // N_jr = sum_i gamma_ijr (Eq. 11)
    void count() const {
        for_all(pairs * key_tiles, p.threads, [&](int64_t task) { count_tile(task / key_tiles, task % key_tiles); });
    }

    void count_tile(int64_t pair, int64_t tile) const {
        Buffer<T> scores(M * QUERIES * KEYS), sums(M * KEYS);
        std::memset(sums.data, 0, M * KEYS * sizeof(T));
        for (int64_t q = 0; q < query_tiles && alive.data[index(pair, tile)]; ++q) {
            const Rows rows = rows_of(pair, q);
            if (skips(rows, tile)) continue;
            scores_of(rows, tile, scores.data);
            for (int64_t i = 0; i < rows.count; ++i) {
                T weight = 1;
                if (p.query_weight) weight = static_cast<const T*>(p.query_weight)[pair / p.heads * L + rows.first + i];
                if (weight != 0) count_line(scores.data + i * KEYS, weight, sums.data);
            }
        }
        const int64_t first = tile * KEYS, filled = min_of(KEYS, S - first);
        for (int64_t r = 0; r < M; ++r)
            std::memcpy(static_cast<T*>(p.counts) + (pair * M + r) * S + first, sums.data + r * KEYS, filled * sizeof(T));
    }

    void count_line(T* s, T weight, T* sums) const {
        for (int64_t v = 0; v < VECTORS; ++v) {
            V best = load<T>(s + v * W), total = {};
            for (int64_t r = 1; r < M; ++r) best = larger<T>(load<T>(s + r * QUERIES * KEYS + v * W), best);
            const auto excluded = best == splat<T>(NONE);
            best = excluded ? V{} : best;
            auto open = ~excluded;
            for (int64_t r = 0; r < M; ++r) {
                T* x = s + r * QUERIES * KEYS + v * W;
                V gamma;
                if (p.hard) {
                    const auto wins = (load<T>(x) == best) & open;
                    open = open & ~wins;
                    gamma = wins ? splat<T>(1) : V{};
                } else {
                    gamma = exp2_of(load<T>(x) - best);
                }
                total += gamma;
                store<T>(x, gamma);
            }
            const V inverse = total > V{} ? weight / total : V{};
            for (int64_t r = 0; r < M; ++r) {
                T* sum = sums + r * KEYS + v * W;
                store<T>(sum, load<T>(sum) + load<T>(s + r * QUERIES * KEYS + v * W) * inverse);
            }
        }
    }
};

template <typename T>
void run(const Problem& p, int what) {
    const Kernel<T> kernel(p, what);
    if (what == FORWARD) kernel.forward();
    if (what == BACKWARD) kernel.backward();
    if (what == COUNT) kernel.count();
}

void entry(const Problem& p, int what) { p.is_double ? run<double>(p, what) : run<float>(p, what); }
