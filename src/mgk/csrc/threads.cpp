#include "threads.h"

#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

void parallel_for(int64_t tasks, int64_t threads, void (*task)(const void*, int64_t), const void* context) {
    if (threads > tasks) threads = tasks;
    std::atomic<int64_t> next{0};
    std::exception_ptr failure;
    std::atomic<bool> failed{false};
    const auto work = [&] {
        try {
            for (int64_t i = next++; i < tasks && !failed; i = next++) task(context, i);
        } catch (...) {  // out of memory; an exception must not leave a thread
            if (!failed.exchange(true)) failure = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    try {
        others.reserve(threads);
        for (int64_t t = 1; t < threads; ++t) others.emplace_back(work);
    } catch (const std::system_error&) {
        // the system gives no more threads: those there are do the work
    }
    work();
    for (auto& other : others) other.join();
    if (failure) std::rethrow_exception(failure);
}
