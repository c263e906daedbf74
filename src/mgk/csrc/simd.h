// Vectors of one instruction set, by the compiler's vector extensions. Included once for each set, inside its namespace.
//
// WIDTH_BYTES is the size of a vector register. There are no intrinsics: the same text serves AVX2, AVX-512, NEON and SSE2.

template <typename T>
struct Simd;

template <>
struct Simd<float> {
    typedef float V __attribute__((vector_size(WIDTH_BYTES)));
    typedef int32_t I __attribute__((vector_size(WIDTH_BYTES)));
    typedef uint32_t U __attribute__((vector_size(WIDTH_BYTES)));
    static constexpr int W = WIDTH_BYTES / 4;
};

template <>
struct Simd<double> {
    typedef double V __attribute__((vector_size(WIDTH_BYTES)));
    typedef int64_t I __attribute__((vector_size(WIDTH_BYTES)));
    typedef uint64_t U __attribute__((vector_size(WIDTH_BYTES)));
    static constexpr int W = WIDTH_BYTES / 8;
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
    return Vec<T>{} + x;
}

template <typename T>
inline Vec<T> larger(Vec<T> a, Vec<T> b) {
    return a > b ? a : b;
}

template <typename T>
inline T largest_lane(Vec<T> v) {
    T best = v[0];
    for (int i = 1; i < Simd<T>::W; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

template <typename T>
inline T sum_of_lanes(Vec<T> v) {
    T parts[Simd<T>::W];
    store<T>(parts, v);
    for (int half = Simd<T>::W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
    return parts[0];
}

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, the last factor by a polynomial (2 ulp); 0 below the smallest normal number.
inline Vec<float> exponential(Vec<float> x) {
    using I = Simd<float>::I;
    const float round_to_int = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Vec<float> low = splat(-87.0f);
    const Vec<float> high = splat(88.0f);
    const auto vanishes = x < low;
    Vec<float> y = vanishes ? low : x;
    y = y > high ? high : y;
    const Vec<float> shifted = y * 1.44269504088896341f + round_to_int;
    const Vec<float> n = shifted - round_to_int;
    Vec<float> r = y - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Vec<float> p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    I bits, exponent;
    __builtin_memcpy(&exponent, &shifted, sizeof exponent);
    __builtin_memcpy(&bits, &p, sizeof bits);
    bits += exponent << 23;  // the high bits of the magic number are shifted out
    __builtin_memcpy(&p, &bits, sizeof p);
    return vanishes ? Vec<float>{} : p;
}

inline Vec<double> exponential(Vec<double> x) {
    Vec<double> y;
    for (int i = 0; i < Simd<double>::W; ++i) y[i] = std::exp(x[i]);
    return y;
}
