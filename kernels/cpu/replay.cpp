// A step's operations, one behind the other, without the interpreter between them.

#include "threads.h"
#include "vector.h"

ParallelRegion parallel_region = nullptr;
thread_local Contention contention;
thread_local Team* team = nullptr;

static std::atomic<int64_t> stalls{0};

void Contention::observe(Clock::time_point start, Clock::time_point done, Clock::time_point end) {
    const std::chrono::duration<double> work = done - start, wait = end - done;
    if (wait.count() < STALL_SECONDS || wait < work) {
        next_solo = FIRST_SOLO;
        return;
    }
    stalls++;
    solo_left = next_solo;
    next_solo = next_solo * 2 < MOST_SOLO ? next_solo * 2 : MOST_SOLO;
}

struct Operation {
    void (*run)(const void* arguments, int threads);
    const void* arguments;
};

EXPORT void membound_set_parallel(void* region) { parallel_region = (ParallelRegion)region; }

EXPORT int64_t membound_stalls() { return stalls; }

// Runs `count` operations; `seconds` [count] receives what each took, unless it is null.
EXPORT void membound_replay(const Operation* operations, int64_t count, double* seconds, int threads) {
    struct Replay {
        const Operation* operations;
        int64_t count;
        double* seconds;
        int threads;
        Contention* caller;
        Team team;

        void run() {
            Clock::time_point start = Clock::now();
            for (int64_t i = 0; i < count; i++) {
                operations[i].run(operations[i].arguments, threads);
                if (!seconds) continue;
                const Clock::time_point end = Clock::now();
                seconds[i] = std::chrono::duration<double>(end - start).count();
                start = end;
            }
        }
    } replay{operations, count, seconds, threads, &contention, {}};
    if (threads <= 1 || !parallel_region) return replay.run();
    parallel_region(
        [](void* argument) {
            Replay& replay = *(Replay*)argument;
            if (&contention != replay.caller) return replay.team.serve();
            team = &replay.team;
            replay.run();
            team = nullptr;
            replay.team.end();
        },
        &replay, (unsigned)threads, 0);
}
