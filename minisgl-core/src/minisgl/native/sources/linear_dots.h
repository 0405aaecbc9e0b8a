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
    int outputs;  // at most OUTPUTS
};

template <int ROWS>
void multiply(const Tile& tile, Ahead& to_come) {
    Vec sums[ROWS][OUTPUTS] = {};
    const float* w[OUTPUTS];
    for (int o = 0; o < OUTPUTS; ++o) w[o] = tile.w + (o < tile.outputs ? o : 0) * tile.depth;
    Ahead ahead = to_come;
    auto step = [&](int64_t k, auto load_at) {
        Vec columns[OUTPUTS];
        for (int o = 0; o < OUTPUTS; ++o) columns[o] = load_at(w[o] + k);
        for (int r = 0; r < ROWS; ++r) {
            Vec xr = load_at(tile.x + r * tile.x_stride + k);
            for (int o = 0; o < OUTPUTS; ++o) sums[r][o] += xr * columns[o];
        }
    };
    int64_t k = 0, whole = tile.depth / LANES * LANES;
    while (k < whole) {
        ahead.step();
        // In a loop of its own, which the prefetcher's registers stay out of.
        for (int64_t stop = panels::smaller(k + STEP * LANES, whole); k < stop; k += LANES)
            step(k, [](const float* p) { return load(p); });
    }
    int left = int(tile.depth - whole);
    if (left) step(k, [left](const float* p) { return load_part(p, left); });
    to_come = ahead;
    Quad bias{};
    size_t bytes = tile.outputs * sizeof(float);
    if (tile.bias) std::memcpy(&bias, tile.bias, bytes);
    for (int r = 0; r < ROWS; ++r) {
        Quad y = hsum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]) + bias;
        float* out = tile.out + r * tile.stride;
        if (tile.outputs == OUTPUTS) std::memcpy(out, &y, sizeof y);
        else std::memcpy(out, &y, bytes);
    }
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
        Ahead ahead(next, after < end ? after : end, STEP * OUTPUTS * LANES / LINE_FLOATS, blocks.count);
        for (int64_t o = group; o < stop; o += OUTPUTS) {
            for (int64_t block = 0; block < blocks.count; ++block) {
                int64_t row = blocks.begin(block);
                Tile tile{x + row * x_stride,
                          x_stride,
                          weight.data + o * depth,
                          weight.bias ? weight.bias + o : nullptr,
                          out + row * stride + o,
                          stride,
                          depth,
                          int(panels::smaller(stop - o, OUTPUTS))};
                by_rows[blocks.rows(block)](tile, ahead);
            }
        }
    }
}

}  // namespace dots
