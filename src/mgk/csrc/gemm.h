// Matrix products of a tile: C = start + A B, where start is a row added to every row, or C += A B if it is null.
// The product is summed before it is added: the rounding of a small sum is small. A has any strides; rows of B and C
// are vectors.

template <typename T, int ROWS, int VECTORS>
inline void block_product(int64_t depth, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t ldb, T* c,
                          int64_t ldc, const T* start) {
    constexpr int W = Simd<T>::W;
    Vec<T> sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[i][v] = Vec<T>{};
    for (int64_t k = 0; k < depth; ++k) {
        Vec<T> row[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) row[v] = load<T>(b + k * ldb + v * W);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            const Vec<T> x = splat<T>(a[i * a_row + k * a_step]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[i][v] += x * row[v];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            T* to = c + i * ldc + v * W;
            store<T>(to, load<T>(start ? start + v * W : to) + sums[i][v]);
        }
}

template <typename T, int VECTORS>
inline void column_of_blocks(int64_t rows, int64_t depth, const T* a, int64_t a_row, int64_t a_step, const T* b,
                             int64_t ldb, T* c, int64_t ldc, const T* start) {
    constexpr int ROWS = REGISTER_ROWS;
    int64_t i = 0;
    for (; i + ROWS <= rows; i += ROWS)
        block_product<T, ROWS, VECTORS>(depth, a + i * a_row, a_row, a_step, b, ldb, c + i * ldc, ldc, start);
    for (; i < rows; ++i)
        block_product<T, 1, VECTORS>(depth, a + i * a_row, a_row, a_step, b, ldb, c + i * ldc, ldc, start);
}

// columns is a multiple of the vector's width.
template <typename T>
inline void product(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t a_row, int64_t a_step,
                    const T* b, int64_t ldb, T* c, int64_t ldc, const T* start) {
    constexpr int W = Simd<T>::W;
    int64_t j = 0;
    for (; j + REGISTER_VECTORS * W <= columns; j += REGISTER_VECTORS * W)
        column_of_blocks<T, REGISTER_VECTORS>(rows, depth, a, a_row, a_step, b + j, ldb, c + j, ldc,
                                              start ? start + j : nullptr);
    for (; j < columns; j += W)
        column_of_blocks<T, 1>(rows, depth, a, a_row, a_step, b + j, ldb, c + j, ldc, start ? start + j : nullptr);
}
