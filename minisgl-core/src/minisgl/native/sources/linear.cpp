// y = x W^T + b in float32, and act(gate) * up of two such products.
//
// A row's result does not depend on the other rows nor on the threads: each of its sums is added
// up in an order that the weight's shape and layout fix.
#include "linear_dots.h"
#include "linear_panels.h"

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
