// A little of everything that the units use: where it compiles and loads, they will.
#include "parallel.h"
#include "simd.h"

EXPORT int probe_num_threads() {
    int threads = 0;
    parallel(omp_get_max_threads(), [&](int thread, int num_threads) {
        if (thread == 0) threads = num_threads;
        barrier(num_threads);
    });
    return threads;
}

EXPORT void probe_exp(const float* x, float* y, int64_t n) {
    parallel_for(n, 1, [=](int64_t begin, int64_t end) {
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) store(y + i, exp(load(x + i)));
        if (i < end) store_part(y + i, exp(load_part(x + i, int(end - i))), int(end - i));
    });
}

EXPORT void probe_reduce(const float* x, float* y) {
    y[0] = hsum(load(x));
    y[1] = hmax(load(x));
}
