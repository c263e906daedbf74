#include "memory.h"

#include <cstdint>
#include <memory>
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

// Small blocks of a thread, which gives back first what it took last. The system's allocator takes longer to find them
// than a short call to compute.
class Stack {
  public:
    void* take(std::size_t bytes) {
        bytes = aligned(bytes);
        if (!start_) start_.reset(static_cast<char*>(::operator new[](SIZE, ALIGNMENT, std::nothrow)));
        if (!start_ || bytes > SIZE - used_) return nullptr;
        void* block = start_.get() + used_;
        used_ += bytes;
        return block;
    }

    bool give(void* block) noexcept {
        const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(block);
        const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(start_.get());
        if (!start_ || at < first || at >= first + SIZE) return false;
        used_ = at - first;
        return true;
    }

  private:
    static constexpr std::size_t SIZE = 1 << 20;
    struct Free {
        void operator()(char* start) const { ::operator delete[](start, ALIGNMENT); }
    };
    static std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

    std::unique_ptr<char, Free> start_;
    std::size_t used_ = 0;
};

#if !defined(__SANITIZE_ADDRESS__)  // which watches the ends of blocks
thread_local Stack stack;
void* take_small(std::size_t bytes) { return stack.take(bytes); }
bool give_small(void* block) noexcept { return stack.give(block); }
#else
void* take_small(std::size_t) { return nullptr; }
bool give_small(void*) noexcept { return false; }
#endif

}  // namespace

void* take_memory(std::size_t bytes) {
    if (bytes < LARGE) {
        void* block = take_small(bytes);
        return block ? block : ::operator new[](bytes, ALIGNMENT);
    }
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
    } else if (give_small(block)) {
        return;
    }
    ::operator delete[](block, ALIGNMENT);
}
