// A loop shared among torch's threads, that gives up on sharing while the machine has no core to spare.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

// GOMP_parallel of the OpenMP runtime that torch has loaded, so that both use one pool; null means one thread.
typedef void (*ParallelRegion)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);
extern ParallelRegion parallel_region;

// A region ends when its last thread does, and a thread that another program has pushed off its core comes back
// after a scheduler's slice of some ms: a hundred times what the loop takes. After such a stall, the next loops run
// on the calling thread alone: FIRST_SOLO of them, twice as many after each stall in a row.
struct Contention {
    static constexpr double STALL_SECONDS = 1e-3;
    static constexpr int64_t FIRST_SOLO = 32, MOST_SOLO = 4096;
    int64_t solo_left = 0, next_solo = FIRST_SOLO;

    bool solo() { return solo_left > 0 && solo_left--; }
    void observe(double work_seconds, double wait_seconds);
};
extern thread_local Contention contention;

// Calls body(first, last) for pieces of [0, count), each at most `grain` long; threads take the next piece when free.
// The pool is asked for all its threads or for none: a team of another size would make libgomp restart threads.
template <class Body> void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
    if (count <= 0) return;
    if (threads <= 1 || count <= grain || !parallel_region || contention.solo()) {
        body(int64_t(0), count);
        return;
    }
    using Clock = std::chrono::steady_clock;
    struct Loop {
        const Body* body;
        int64_t count, grain;
        Contention* caller;
        Clock::time_point done;
        std::atomic<int64_t> next;
    } loop{&body, count, grain, &contention, {}, {0}};
    const Clock::time_point start = Clock::now();
    parallel_region(
        [](void* argument) {
            Loop& loop = *(Loop*)argument;
            for (;;) {
                int64_t first = loop.next.fetch_add(loop.grain, std::memory_order_relaxed);
                if (first >= loop.count) break;
                int64_t last = first + loop.grain < loop.count ? first + loop.grain : loop.count;
                (*loop.body)(first, last);
            }
            if (&contention == loop.caller) loop.done = Clock::now();
        },
        &loop, (unsigned)threads, 0);
    const std::chrono::duration<double> work = loop.done - start, wait = Clock::now() - loop.done;
    contention.observe(work.count(), wait.count());
}
