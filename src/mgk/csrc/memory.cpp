#include "memory.h"

#include <mutex>
#include <new>

namespace {

constexpr std::size_t LARGE = 1 << 17;      // what the system's allocator gives back at once
constexpr std::size_t MAX_KEPT = 64 << 20;  // bytes, of all blocks
constexpr int MAX_BLOCKS = 32;
constexpr std::align_val_t ALIGNMENT{64};

struct Block {
    void* data;
    std::size_t bytes;
};

Block kept[MAX_BLOCKS];
int num_kept = 0;
std::size_t bytes_kept = 0;
std::mutex mutex;

// Sizes in steps of an eighth: a block serves calls of similar sizes.
std::size_t rounded(std::size_t bytes) {
    std::size_t step = LARGE / 8;
    while (step * 16 < bytes) step *= 2;
    return (bytes + step - 1) / step * step;
}

}  // namespace

void* take_memory(std::size_t bytes) {
    if (bytes < LARGE) return ::operator new[](bytes, ALIGNMENT);
    bytes = rounded(bytes);
    // where another thread holds the lock, or held it when the process was forked, there is fresh memory
    if (std::unique_lock<std::mutex> lock(mutex, std::try_to_lock); lock)
        for (int i = num_kept - 1; i >= 0; --i)
            if (kept[i].bytes == bytes) {
                void* data = kept[i].data;
                kept[i] = kept[--num_kept];
                bytes_kept -= bytes;
                return data;
            }
    return ::operator new[](bytes, ALIGNMENT);
}

void give_memory(void* block, std::size_t bytes) noexcept {
    if (bytes >= LARGE) {
        bytes = rounded(bytes);
        std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
        if (lock && num_kept < MAX_BLOCKS && bytes_kept + bytes <= MAX_KEPT) {
            kept[num_kept++] = {block, bytes};
            bytes_kept += bytes;
            return;
        }
    }
    ::operator delete[](block, ALIGNMENT);
}
