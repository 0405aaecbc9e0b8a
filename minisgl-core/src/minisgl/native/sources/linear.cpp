// y = x W^T + b in float32, and act(gate) * up of two such products.
//
// A row's result does not depend on the other rows nor on the threads: each of its sums is added
// up in an order that the weight's shape and layout fix.
#include "linear_dots.h"
#include "linear_panels.h"
#include "linear_tiles.h"

static int threads_for(const Weight& weight, int64_t num_rows) {
    constexpr double SMALL = 1 << 15;  // products that take less than waking a thread
    double work = double(num_rows) * double(weight.num_outputs) * double(weight.num_inputs);
    return work < SMALL ? 1 : omp_get_max_threads();
}

// Floats that pack_weight writes.
EXPORT int64_t packed_size(const Weight* weight) {
    return panels::num_panels(*weight) * panels::PANEL * weight->num_inputs;
}

// source[num_outputs][num_inputs], or [2][num_outputs][num_inputs], to the layout of panels.
EXPORT void pack_weight(const Weight* weight, const float* source, float* packed) {
    parallel_for(panels::num_panels(*weight), 1, [=](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel)
            panels::pack_panel(*weight, source, packed, panel);
    });
}

// out[num_rows][num_outputs] of x[num_rows][num_inputs] and a weight in the layout of panels.
EXPORT void linear_packed(const Weight* weight, const float* x, int64_t x_stride, float* out,
                          int64_t num_rows) {
    panels::Product{*weight, x, x_stride, out, num_rows}.run(threads_for(*weight, num_rows));
}

// The same for a weight as it is, [num_outputs][num_inputs].
EXPORT void linear_dots(const Weight* weight, const float* x, int64_t x_stride, float* out,
                        int64_t num_rows) {
    parallel(threads_for(*weight, num_rows), [=](int thread, int threads) {
        Range outputs = part_of(weight->num_outputs, thread, threads, dots::OUTPUTS);
        dots::run(*weight, x, x_stride, out, num_rows, outputs);
    });
}

#ifdef HAS_TILES

// Whether the system lets this process use the matrix unit.
EXPORT int64_t has_tiles() { return tiles::permit(); }

// Terms of bfloat16 that a weight needs, or more than linear_tiles takes.
EXPORT int64_t terms_needed(const Weight* weight, const float* source) {
    int64_t count = weight->num_outputs * weight->num_inputs * (weight->is_gated() ? 2 : 1);
    int needed = 1;
    parallel_for(count, 1 << 16, [&](int64_t begin, int64_t end) {
        int mine = tiles::terms_needed(source + begin, end - begin);
        int seen = __atomic_load_n(&needed, __ATOMIC_RELAXED);
        while (seen < mine && !__atomic_compare_exchange_n(&needed, &seen, mine, false,
                                                           __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
    });
    return needed;
}

// Floats that pack_tiles writes.
EXPORT int64_t tiles_size(const Weight* weight, int64_t terms) {
    tiles::Layout layout{*weight, int(terms)};
    return layout.num_panels() * layout.panel_floats();
}

// source[num_outputs][num_inputs], or [2][num_outputs][num_inputs], to the layout of tiles.
EXPORT void pack_tiles(const Weight* weight, int64_t terms, const float* source, float* packed) {
    tiles::Layout layout{*weight, int(terms)};
    parallel_for(layout.num_panels(), 1, [=](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) layout.pack_panel(source, packed, panel);
    });
}

// The same as linear_packed for a weight of one or of two terms in the layout of tiles.
EXPORT void linear_one_term(const Weight* weight, const float* x, int64_t x_stride, float* out,
                            int64_t num_rows) {
    tiles::Product<1>{*weight, x, x_stride, out, num_rows}.run(threads_for(*weight, num_rows));
}

EXPORT void linear_two_terms(const Weight* weight, const float* x, int64_t x_stride, float* out,
                             int64_t num_rows) {
    tiles::Product<2>{*weight, x, x_stride, out, num_rows}.run(threads_for(*weight, num_rows));
}

#else

EXPORT int64_t has_tiles() { return 0; }

#endif
