// Vectors of VECTOR_BYTES by the compiler's vector extensions: the same code for SSE2, NEON, AVX2 and AVX-512, but for
// the few operations that the extensions cannot express well.

template <typename T>
struct Simd;

template <>
struct Simd<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint32_t U __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int W = VECTOR_BYTES / 4;
};

template <>
struct Simd<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint64_t U __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int W = VECTOR_BYTES / 8;
};

template <typename T>
using Vec = typename Simd<T>::V;

template <typename T>
inline Vec<T> load(const T* p) {
    Vec<T> v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <typename T>
inline void store(T* p, Vec<T> v) {
    __builtin_memcpy(p, &v, sizeof v);
}

template <typename T>
inline Vec<T> splat(T x) {
    return x - Vec<T>{};  // x itself, in one instruction; -0 + 0 is not, so that a sum would be computed
}

template <typename T>
inline Vec<T> larger(Vec<T> a, Vec<T> b) {
    return a > b ? a : b;
}

// The lanes of a vector, combined by halves.
template <typename T, typename Combine>
inline T fold_lanes(Vec<T> v, Combine combine) {
    T parts[Simd<T>::W];
    store<T>(parts, v);
    for (int half = Simd<T>::W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] = combine(parts[i], parts[i + half]);
    return parts[0];
}

template <typename T>
inline T largest_lane(Vec<T> v) {
    return fold_lanes<T>(v, [](T a, T b) { return a > b ? a : b; });
}

template <typename T>
inline T sum_of_lanes(Vec<T> v) {
    return fold_lanes<T>(v, [](T a, T b) { return a + b; });
}

template <typename T>
inline bool any_above(Vec<T> v, T bound) {
    const auto above = v > splat<T>(bound);
    typename Simd<T>::I any = above;
    for (int i = 0; i < Simd<T>::W; ++i)
        if (any[i]) return true;
    return false;
}

#if defined(MGK_AVX512)
template <>
inline float largest_lane<float>(Vec<float> v) {
    return _mm512_reduce_max_ps((__m512)v);
}

template <>
inline float sum_of_lanes<float>(Vec<float> v) {
    return _mm512_reduce_add_ps((__m512)v);
}

template <>
inline bool any_above<float>(Vec<float> v, float bound) {
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
}
#elif defined(MGK_AVX2)
template <>
inline bool any_above<float>(Vec<float> v, float bound) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(bound), _CMP_GT_OQ)) != 0;
}
#endif

// The sum of products, a sum for each lane: short sums round less.
template <typename T>
inline T dot(const T* a, const T* b, int64_t size) {
    constexpr int W = Simd<T>::W;
    Vec<T> sums = {};
    T rest = 0;
    int64_t d = 0;
    for (; d + W <= size; d += W) sums += load<T>(a + d) * load<T>(b + d);
    for (; d < size; ++d) rest += a[d] * b[d];
    return sum_of_lanes<T>(sums) + rest;
}

// The same, each product and all sums in double.
template <typename T>
inline double dot_in_double(const T* a, const T* b, int64_t size) {
    constexpr int W = Simd<double>::W;
    typedef T Part __attribute__((vector_size(W * sizeof(T))));
    Vec<double> sums = {};
    double rest = 0;
    int64_t d = 0;
    for (; d + W <= size; d += W) {
        Part x, y;
        __builtin_memcpy(&x, a + d, sizeof x);
        __builtin_memcpy(&y, b + d, sizeof y);
        sums += __builtin_convertvector(x, Vec<double>) * __builtin_convertvector(y, Vec<double>);
    }
    for (; d < size; ++d) rest += double(a[d]) * double(b[d]);
    return sum_of_lanes<double>(sums) + rest;
}

// to += factor from
template <typename T>
inline void add_scaled(T* to, const T* from, T factor, int64_t size) {
    constexpr int W = Simd<T>::W;
    int64_t d = 0;
    for (; d + W <= size; d += W) store<T>(to + d, load<T>(to + d) + splat<T>(factor) * load<T>(from + d));
    for (; d < size; ++d) to[d] += factor * from[d];
}

// Of two vectors, in lane i: a_i + a_(i^STEP) where the bit STEP of i is 0, b_i + b_(i^STEP) where it is 1.
template <typename T, int STEP, int... I>
inline Vec<T> sums_of_neighbours(Vec<T> a, Vec<T> b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
    constexpr int W = sizeof...(I);
    return __builtin_shufflevector(a, b, (I & STEP ? I + W : I)...) +
           __builtin_shufflevector(a, b, ((I ^ STEP) + (I & STEP ? W : 0))...);
#else
    return Vec<T>{(I & STEP ? b[I] + b[I ^ STEP] : a[I] + a[I ^ STEP])...};
#endif
}

// to += factor (a + b)
template <typename T>
inline void add_scaled_sum(T* to, const T* a, const T* b, T factor, int64_t size) {
    constexpr int W = Simd<T>::W;
    int64_t d = 0;
    for (; d + W <= size; d += W)
        store<T>(to + d, load<T>(to + d) + splat<T>(factor) * (load<T>(a + d) + load<T>(b + d)));
    for (; d < size; ++d) to[d] += factor * (a[d] + b[d]);
}

// Swaps the blocks of STEP lanes of rows that are STEP apart, then those of twice as many: rows[i][j] and rows[j][i].
template <typename T, int STEP, int... I>
inline void transpose(Vec<T>* rows, std::integer_sequence<int, I...> lanes) {
    constexpr int W = sizeof...(I);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
        if (i & STEP) continue;
        const Vec<T> a = rows[i], b = rows[i + STEP];
#if defined(__clang__) || __GNUC__ >= 12
        rows[i] = __builtin_shufflevector(a, b, (I & STEP ? I - STEP + W : I)...);
        rows[i + STEP] = __builtin_shufflevector(a, b, (I & STEP ? I + W : I + STEP)...);
#else
        rows[i] = Vec<T>{(I & STEP ? b[(I - STEP) & (W - 1)] : a[I])...};
        rows[i + STEP] = Vec<T>{(I & STEP ? b[I] : a[(I + STEP) & (W - 1)])...};
#endif
    }
    if constexpr (2 * STEP < W) transpose<T, 2 * STEP>(rows, lanes);
}

// In lane i the sum of the lanes of rows[i], for as many rows as a vector has lanes.
template <typename T, int STEP = 1>
inline Vec<T> sums_of_lanes(Vec<T>* rows) {
    constexpr int W = Simd<T>::W;
    if constexpr (STEP < W) {
#pragma GCC unroll 16
        for (int i = 0; i < W / STEP; i += 2)
            rows[i / 2] = sums_of_neighbours<T, STEP>(rows[i], rows[i + 1], std::make_integer_sequence<int, W>());
        return sums_of_lanes<T, 2 * STEP>(rows);
    }
    return rows[0];
}

// 2^f for |f| <= 1/2, by the polynomial that meets it at the Chebyshev nodes: off by 2e-9 before rounding.
inline Vec<float> two_to_the(Vec<float> f) {
    Vec<float> p = splat(1.5461444676e-04f);
    p = p * f + 1.3400428177e-03f;
    p = p * f + 9.6180566786e-03f;
    p = p * f + 5.5503272267e-02f;
    p = p * f + 2.4022650922e-01f;
    p = p * f + 6.9314720670e-01f;
    return p * f + 1.0000000000e+00f;
}

// 2^x = 2^n 2^f for x <= 0, with n the nearest integer; 0 where it underflows, NaN for NaN.
inline Vec<float> exp2_of(Vec<float> x) {
#if defined(MGK_AVX512)
    const Vec<float> f = (Vec<float>)_mm512_reduce_ps((__m512)x, 0);  // x - round(x), 0 for -inf
    return (Vec<float>)_mm512_scalef_ps((__m512)two_to_the(f), (__m512)(x - f));
#else
    using I = Simd<float>::I;
    const float round_to_int = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const auto vanishes = x < splat(-126.0f);
    const Vec<float> y = vanishes ? splat(-126.0f) : x;
    const Vec<float> shifted = y + round_to_int;
    Vec<float> p = two_to_the(y - (shifted - round_to_int));
    I bits, exponent;
    __builtin_memcpy(&exponent, &shifted, sizeof exponent);
    __builtin_memcpy(&bits, &p, sizeof bits);
    bits += exponent << 23;  // the high bits of the magic number are shifted out
    __builtin_memcpy(&p, &bits, sizeof p);
    p = x == x ? p : x;  // the exponent's bits would turn a NaN with a payload into a number
    return vanishes ? Vec<float>{} : p;
#endif
}

inline Vec<double> exp2_of(Vec<double> x) {
    Vec<double> y;
    for (int i = 0; i < Simd<double>::W; ++i) y[i] = std::exp2(x[i]);
    return y;
}
