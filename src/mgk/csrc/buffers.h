// Aligned scratch memory, parallel loops and copies of rows.

template <typename T>
class Buffer {
  public:
    explicit Buffer(int64_t size) : bytes_(size * sizeof(T)), data_(static_cast<T*>(take_memory(bytes_))) {}
    ~Buffer() { give_memory(data_, bytes_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    operator T*() const { return data_; }

  private:
    const std::size_t bytes_;
    T* const data_;
};

template <typename T>
inline T max_of(T a, T b) {
    return a > b ? a : b;
}

template <typename T>
inline T min_of(T a, T b) {
    return a < b ? a : b;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs task(i) for every i on several threads.
template <typename Task>
void for_all(int64_t tasks, int64_t threads, const Task& task) {
    const auto call = [](const void* context, int64_t i) { (*static_cast<const Task*>(context))(i); };
    parallel_for(tasks, threads, call, &task);
}

template <typename T>
inline void set_zero(T* to, int64_t size) {
    std::memset(to, 0, size * sizeof(T));
}

// Rows of `width` elements copied to rows of `stride` elements, the rest 0; rows from `rows` to `all` are 0.
template <typename T>
void copy_rows(const T* from, int64_t rows, int64_t width, T* to, int64_t stride, int64_t all) {
    for (int64_t i = 0; i < all; ++i) {
        T* target = to + i * stride;
        const int64_t filled = i < rows ? width : 0;
        if (filled) std::memcpy(target, from + i * width, filled * sizeof(T));
        set_zero(target + filled, stride - filled);
    }
}

// The first `width` elements of rows of `stride` elements, copied to contiguous rows.
template <typename T>
void copy_unpadded(const T* from, int64_t rows, int64_t stride, int64_t width, T* to) {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * width, from + i * stride, width * sizeof(T));
}

// Rows [rows, width], times a factor, as columns [width, columns]; columns from `rows` on are 0.
template <typename T>
void transpose_rows(const T* from, int64_t rows, int64_t width, T factor, T* to, int64_t columns) {
    constexpr int W = Simd<T>::W;
    const int64_t whole_rows = rows / W * W, whole_width = width / W * W;
    for (int64_t j = 0; j < whole_rows; j += W)
        for (int64_t d = 0; d < whole_width; d += W) {
            Vec<T> block[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) block[i] = load<T>(from + (j + i) * width + d) * factor;
            transpose<T, 1>(block, std::make_integer_sequence<int, W>());
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) store<T>(to + (d + i) * columns + j, block[i]);
        }
    for (int64_t d = 0; d < width; ++d) {
        T* target = to + d * columns;
        for (int64_t j = d < whole_width ? whole_rows : 0; j < rows; ++j) target[j] = from[j * width + d] * factor;
        for (int64_t j = rows; j < columns; ++j) target[j] = 0;
    }
}
