#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// The OpenMP runtime that PyTorch has loaded, if any. Its idle threads spin for a while after each of PyTorch's
// operators, so that other threads would have to share the cores with them.
using TeamRun = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

TeamRun find_team() { return reinterpret_cast<TeamRun>(dlsym(RTLD_DEFAULT, "GOMP_parallel")); }

// A forked child has none of its parent's threads, and the runtime does not know.
bool is_forked = false;
const int handler = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

struct Work {
    void (*task)(const void*, int64_t);
    const void* context;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr failure;

    void run() {
        try {
            for (int64_t i = next++; i < tasks && !failed; i = next++) task(context, i);
        } catch (...) {  // out of memory; an exception must not leave a thread
            if (!failed.exchange(true)) failure = std::current_exception();
        }
    }
};

// Threads that live as long as the call.
void run_with_own_threads(Work& work, int64_t threads) {
    std::vector<std::thread> others;
    try {
        others.reserve(threads);
        for (int64_t t = 1; t < threads; ++t) others.emplace_back([&] { work.run(); });
    } catch (const std::system_error&) {
        // the system gives no more threads: those there are do the work
    }
    work.run();
    for (auto& other : others) other.join();
}

}  // namespace

void parallel_for(int64_t tasks, int64_t threads, void (*task)(const void*, int64_t), const void* context) {
    static const TeamRun team = find_team();
    Work work{task, context, tasks, {}, {}, {}};
    if (threads > tasks) threads = tasks;
    if (threads <= 1)
        work.run();
    else if (team && !is_forked)
        team([](void* data) { static_cast<Work*>(data)->run(); }, &work, static_cast<unsigned>(threads), 0);
    else
        run_with_own_threads(work, threads);
    if (work.failure) std::rethrow_exception(work.failure);
}
