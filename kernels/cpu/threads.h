// A loop shared among torch's threads, that gives up on sharing while the machine has no core to spare.

#pragma once

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// GOMP_parallel of the OpenMP runtime that torch has loaded, so that both use one pool; null means one thread.
typedef void (*ParallelRegion)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);
extern ParallelRegion parallel_region;

using Clock = std::chrono::steady_clock;

// A region ends when its last thread does, and a thread that another program has pushed off its core comes back
// after a scheduler's slice of some ms: a hundred times what the loop takes. After such a stall, the next loops run
// on the calling thread alone: FIRST_SOLO of them, twice as many after each stall in a row.
struct Contention {
    static constexpr double STALL_SECONDS = 1e-3;
    static constexpr int64_t FIRST_SOLO = 32, MOST_SOLO = 4096;
    int64_t solo_left = 0, next_solo = FIRST_SOLO;

    bool solo() { return solo_left > 0 && solo_left--; }
    void observe(Clock::time_point start, Clock::time_point done, Clock::time_point end);
};
extern thread_local Contention contention;

typedef void (*Piece)(const void* body, int64_t first, int64_t last);

// The threads of a replay, who stay together from its first operation to its last: a loop begins when its number and
// its pieces are published in `ticket`, and ends when all pieces have, whether or not every thread has noticed it.
class Team {
  public:
    // What the replaying thread does with a loop.
    void share(int64_t count, int64_t grain, Piece piece, const void* body) {
        this->piece = piece, this->body = body, this->count = count, this->grain = grain;
        pieces = (count + grain - 1) / grain;
        finished.store(0, std::memory_order_relaxed);
        ticket.store(++loops << 32 | (uint64_t)pieces, std::memory_order_release);
        const Clock::time_point start = Clock::now();
        while (take()) {}
        const Clock::time_point done = Clock::now();
        for (int64_t spins = 0; finished.load(std::memory_order_acquire) < pieces; spins++) relax(spins);
        contention.observe(start, done, Clock::now());
    }

    // What the other threads do until the replay ends.
    void serve() {
        for (int64_t spins = 0; !ended.load(std::memory_order_acquire); spins = take() ? 0 : spins + 1) relax(spins);
    }

    void end() { ended.store(true, std::memory_order_release); }

  private:
    // The number of a loop above, and below how many of its pieces nobody has taken: as one word, so that a thread
    // that comes late cannot take a piece of one loop for that of the next.
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> finished{0};
    alignas(64) std::atomic<bool> ended{false};
    Piece piece = nullptr;
    const void* body = nullptr;
    int64_t count = 0, grain = 1, pieces = 0;
    uint64_t loops = 0;

    bool take() {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        for (;;) {
            const int64_t left = seen & 0xffffffff;
            if (!left) return false;
            if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
            const int64_t first = (pieces - left) * grain, last = first + grain < count ? first + grain : count;
            piece(body, first, last);
            finished.fetch_add(1, std::memory_order_release);
            return true;
        }
    }

    // Loops follow each other within microseconds, unless somebody lost a core: then it may have this one.
    static constexpr int64_t PATIENCE = 4096;

    static void relax(int64_t spins) {
        if (spins > PATIENCE) {
            sched_yield();
            return;
        }
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
};
extern thread_local Team* team;  // of the replay that this thread runs, if any

// Calls body(first, last) for pieces of [0, count), each at most `grain` long; threads take the next piece when free.
// The pool is asked for all its threads or for none: a team of another size would make libgomp restart threads.
template <class Body> void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
    if (count <= 0) return;
    if (threads <= 1 || count <= grain || !parallel_region || contention.solo()) {
        body(int64_t(0), count);
        return;
    }
    if (team)
        return team->share(
            count, grain, [](const void* body, int64_t first, int64_t last) { (*(const Body*)body)(first, last); },
            &body);
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
    contention.observe(start, loop.done, Clock::now());
}

constexpr int64_t SERIAL_ELEMENTS = 1 << 14;  // some 5 us of work: below it a second thread brings nothing

// Rows that one thread takes at a time; all of them when the whole is too little to share.
inline int64_t rows_at_once(int64_t rows, int64_t width) {
    return rows * width <= SERIAL_ELEMENTS ? rows : 1 + SERIAL_ELEMENTS / 4 / width;
}

// Of a core, for what its thread comes back to.
inline int64_t l2_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
    static const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (bytes > 0) return bytes;
#endif
    return 1 << 20;
}
