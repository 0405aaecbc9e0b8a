// Products with a weight as it is, [outputs][inputs]: vectors run along the inputs.
#pragma once

#include "linear_panels.h"

namespace dots {

// Outputs and rows of a tile.
constexpr int OUTPUTS = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MAX_ROWS = 6;
#else
constexpr int MAX_ROWS = 2;
#endif
constexpr int STEP = 8;  // vectors between two calls of the prefetcher

typedef float Quad __attribute__((vector_size(16)));

// Sums of the lanes of four vectors.
INLINE Quad hsum4(Vec a, Vec b, Vec c, Vec d) {
    interleave(a, c);
    interleave(b, d);
    Vec ac = a + c, bd = b + d;
    interleave(ac, bd);
    Vec mixed = ac + bd;  // a b c d a b c d ...
    Quad quads[LANES / 4], sum;
    std::memcpy(quads, &mixed, sizeof mixed);
    sum = quads[0];
    for (int i = 1; i < LANES / 4; ++i) sum += quads[i];
    return sum;
}

struct Tile {
    const float* x;
    int64_t x_stride;
    const float* w;
    const float* bias;
    float* out;
    int64_t stride;  // of out
    int64_t depth;
    int outputs;  // OUTPUTS or 1
};

// Add up the lanes and store; apart from the loop, whose registers are all taken.
__attribute__((noinline)) inline void finish(const Tile& tile, const Vec (*sums)[OUTPUTS],
                                             int num_rows) {
    for (int r = 0; r < num_rows; ++r) {
        Quad y = hsum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        float* out = tile.out + r * tile.stride;
        if (tile.outputs == OUTPUTS && !tile.bias) {
            std::memcpy(out, &y, sizeof y);
            continue;
        }
        for (int o = 0; o < tile.outputs; ++o) out[o] = y[o] + (tile.bias ? tile.bias[o] : 0.0f);
    }
}

template <int ROWS>
void multiply(const Tile& tile, Ahead& to_come) {
    Vec sums[ROWS][OUTPUTS] = {};
    // Rows are addressed as base + 0, 1 or 2 strides: a pointer for each would not fit.
    const int64_t x_stride = tile.x_stride, w_stride = tile.outputs == OUTPUTS ? tile.depth : 0;
    const float *x = tile.x, *x3 = x + 3 * x_stride, *w = tile.w, *w3 = w + 3 * w_stride;
    auto step = [&](auto load_at) {
        Vec columns[OUTPUTS] = {load_at(w), load_at(w + w_stride), load_at(w + 2 * w_stride),
                                load_at(w3)};
        for (int r = 0; r < ROWS; ++r) {
            Vec xr = load_at((r < 3 ? x : x3) + r % 3 * x_stride);
            for (int o = 0; o < OUTPUTS; ++o) sums[r][o] += xr * columns[o];
        }
        x += LANES, x3 += LANES, w += LANES, w3 += LANES;
    };
    int64_t k = 0, whole = tile.depth / LANES * LANES;
    while (k < whole) {
        to_come.step();
        for (int64_t stop = panels::smaller(k + STEP * LANES, whole); k < stop; k += LANES)
            step([](const float* p) { return load(p); });
    }
    int left = int(tile.depth - whole);
    if (left) step([left](const float* p) { return load_part(p, left); });
    finish(tile, sums, ROWS);
}

using Multiply = void (*)(const Tile&, Ahead&);
const Multiply by_rows[] = {nullptr, multiply<1>, multiply<2>,
#if defined(__AVX512F__) || defined(__aarch64__)
                            multiply<3>, multiply<4>, multiply<5>, multiply<6>
#endif
};

// The outputs of one thread.
inline void run(const Weight& weight, const float* x, int64_t x_stride, float* out,
                int64_t num_rows, Range outputs) {
    constexpr int64_t GROUP = 4 * OUTPUTS;  // while one is multiplied the next is brought in
    int64_t depth = weight.num_inputs, stride = weight.num_outputs;
    Blocks blocks(num_rows, MAX_ROWS);
    const float* end = weight.data + outputs.end * depth;
    for (int64_t group = outputs.begin; group < outputs.end; group += GROUP) {
        int64_t stop = panels::smaller(group + GROUP, outputs.end);
        const float* next = weight.data + stop * depth;
        const float* after = next + GROUP * depth;
        Ahead ahead(next, after < end ? after : end, STEP * OUTPUTS * LANES / LINE_FLOATS,
                    blocks.count);
        // The rows of a block stay in the first-level cache for all outputs of the group.
        for (int64_t block = 0; block < blocks.count; ++block) {
            int64_t row = blocks.begin(block);
            for (int64_t o = group, count; o < stop; o += count) {
                count = stop - o >= OUTPUTS ? OUTPUTS : 1;
                Tile tile{x + row * x_stride,
                          x_stride,
                          weight.data + o * depth,
                          weight.bias ? weight.bias + o : nullptr,
                          out + row * stride + o,
                          stride,
                          depth,
                          int(count)};
                by_rows[blocks.rows(block)](tile, ahead);
            }
        }
    }
}

}  // namespace dots
