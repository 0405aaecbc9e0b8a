// Threads: those of the OpenMP runtime that torch has loaded, called by its functions.
//
// Linking a runtime of our own would give the process a second set of threads that fights torch's
// for the cores. The symbols below stay undefined in a unit and resolve to torch's runtime.
#pragma once

#include <cstdint>

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
void GOMP_barrier();
int omp_get_thread_num();
int omp_get_num_threads();
int omp_get_max_threads();
}

// Run body(thread, num_threads) on each of num_threads threads (at least 1) and wait for all.
// Inside, barrier() waits for the others. Fewer threads may run than were asked for.
template <class Body>
inline void parallel(int num_threads, const Body& body) {
    if (num_threads <= 1) {
        body(0, 1);
        return;
    }
    GOMP_parallel(
        [](void* data) {
            (*static_cast<const Body*>(data))(omp_get_thread_num(), omp_get_num_threads());
        },
        const_cast<Body*>(&body), static_cast<unsigned>(num_threads), 0);
}

inline void barrier(int num_threads) {
    if (num_threads > 1) GOMP_barrier();
}

struct Range {
    int64_t begin, end;
};

// The part of 0..n that a thread does, in whole blocks.
inline Range part_of(int64_t n, int thread, int num_threads, int64_t block = 1) {
    int64_t blocks = (n + block - 1) / block;
    int64_t begin = blocks * thread / num_threads * block;
    int64_t end = blocks * (thread + 1) / num_threads * block;
    return {begin, end < n ? end : n};
}

// Run body(begin, end) on parts of 0..n; on one thread where n is below 2 * grain.
template <class Body>
inline void parallel_for(int64_t n, int64_t grain, const Body& body) {
    int64_t most = grain > 0 ? n / grain : n;
    int num_threads = omp_get_max_threads();
    if (num_threads > most) num_threads = most < 1 ? 1 : static_cast<int>(most);
    parallel(num_threads, [&](int thread, int threads) {
        Range range = part_of(n, thread, threads);
        if (range.begin < range.end) body(range.begin, range.end);
    });
}
