// Few rows times a weight: the weight is read once, at the speed of memory.
//
// A tile is 8 or 16 outputs. The warps of a block split the inputs among them, so that even a
// weight of few outputs has every multiprocessor reading; their sums meet in shared memory. The
// products run on the tensor cores, with the weight as the left matrix and the rows of x as the
// columns of the right one: for up to 8 rows the arithmetic costs the same and is hidden.
//
// An mma wants its 16 inputs spread over the lanes in pairs. The order of inputs in a sum is ours
// to choose, so each lane reads 8 neighbours of weight and x (16 bytes) and calls them the inputs
// of its slots in two mma; no shuffle and no shared memory is needed.
#include "device.cuh"

constexpr int WARPS = 8;
constexpr int SUBSTEPS = 4;             // of 32 inputs: one 16-byte load of each lane of a quad
constexpr int CHUNK = 32 * SUBSTEPS;    // inputs that a warp takes at a time

struct Product {
    scalar* out;        // [m, n]
    const scalar* x;    // [m, k]
    const scalar* w;    // [n, k]
    const scalar* bias; // [n] or null
    int m, n, k;
};

// The weights of one chunk of one tile, 16 bytes per substep and group of 8 outputs.
template <int GROUPS>
INLINE void load_weights(uint4 (&piece)[GROUPS][SUBSTEPS], const Product& p, int tile, int chunk) {
    int lane = threadIdx.x % 32, at = chunk * CHUNK + lane % 4 * 8;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        int row = (tile * GROUPS + group) * 8 + lane / 4;
        const scalar* from = p.w + i64(row < p.n ? row : p.n - 1) * p.k + at;
#pragma unroll
        for (int s = 0; s < SUBSTEPS; s++)
            piece[group][s] = at + 32 * s < p.k ? load_streaming(from + 32 * s)
                                                : make_uint4(0, 0, 0, 0);
    }
}

template <int GROUPS, int COLUMNS>
INLINE void multiply(float (&sum)[GROUPS][COLUMNS][4], const uint4 (&w)[GROUPS][SUBSTEPS],
                     const Product& p, int chunk) {
    int lane = threadIdx.x % 32, at = chunk * CHUNK + lane % 4 * 8;
    uint4 x[COLUMNS][SUBSTEPS];
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        int row = column * 8 + lane / 4;
        const scalar* from = p.x + i64(row) * p.k + at;
#pragma unroll
        for (int s = 0; s < SUBSTEPS; s++)
            x[column][s] = row < p.m && at + 32 * s < p.k
                               ? *reinterpret_cast<const uint4*>(from + 32 * s)
                               : make_uint4(0, 0, 0, 0);
    }
    // Groups of 8 outputs go in pairs as the upper and lower half of the left matrix.
    constexpr int LAST = GROUPS - 1;
#pragma unroll
    for (int s = 0; s < SUBSTEPS; s++) {
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            uint4 upper = w[0][s], lower = GROUPS == 2 ? w[LAST][s] : make_uint4(0, 0, 0, 0);
            uint4 right = x[column][s];
            float (&c)[4] = sum[0][column];
            mma(c, upper.x, lower.x, upper.y, lower.y, right.x, right.y);
            mma(c, upper.z, lower.z, upper.w, lower.w, right.z, right.w);
        }
    }
}

// Add up what the warps have of one tile, and write it.
template <int GROUPS, int COLUMNS>
INLINE void finish(float (&sum)[GROUPS][COLUMNS][4], const Product& p, int tile, int buffer) {
    constexpr int OUTPUTS = 8 * GROUPS, ROWS = 8 * COLUMNS;
    // Two buffers, so that one barrier per tile is enough: a buffer is written again only after
    // the barrier of the tile in between.
    __shared__ float partial[2][WARPS][ROWS][OUTPUTS + 1];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        float (&c)[4] = sum[0][column];
        float (*to)[OUTPUTS + 1] = partial[buffer][warp] + column * 8 + pair;
        to[0][group] = c[0];
        to[1][group] = c[1];
        if (GROUPS == 2) {
            to[0][8 * (GROUPS - 1) + group] = c[2];
            to[1][8 * (GROUPS - 1) + group] = c[3];
        }
        c[0] = c[1] = c[2] = c[3] = 0.f;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < OUTPUTS * ROWS; i += WARPS * 32) {
        int row = i / OUTPUTS, output = tile * OUTPUTS + i % OUTPUTS;
        if (row >= p.m || output >= p.n) continue;
        float total = p.bias ? widen(p.bias[output]) : 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += partial[buffer][w][row][i % OUTPUTS];
        p.out[i64(row) * p.n + output] = narrow(total);
    }
}

// A block takes the tiles blockIdx.x, blockIdx.x + gridDim.x, ...; the weights of the next chunk,
// be it of the next tile, are on their way while this one is multiplied.
template <int GROUPS, int COLUMNS>
INLINE void stream(const Product& p) {
    int warp = threadIdx.x / 32;
    int num_tiles = (p.n + 8 * GROUPS - 1) / (8 * GROUPS);
    int num_chunks = (p.k + CHUNK - 1) / CHUNK;
    int num_steps = (num_chunks + WARPS - 1) / WARPS;  // the same for every warp, for the barrier
    int tile = blockIdx.x, step = 0, buffer = 0;
    uint4 w[GROUPS][SUBSTEPS], next[GROUPS][SUBSTEPS];
    float sum[GROUPS][COLUMNS][4] = {};
    pdl_launch();
    load_weights<GROUPS>(w, p, tile, warp);
    pdl_wait();
    while (tile < num_tiles) {
        int next_step = step + 1, next_tile = tile;
        if (next_step == num_steps) {
            next_step = 0;
            next_tile += gridDim.x;
        }
        if (next_tile < num_tiles) load_weights<GROUPS>(next, p, next_tile, next_step * WARPS + warp);
        multiply<GROUPS, COLUMNS>(sum, w, p, step * WARPS + warp);
        if (next_step == 0) {
            finish<GROUPS, COLUMNS>(sum, p, tile, buffer);
            buffer ^= 1;
        }
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int s = 0; s < SUBSTEPS; s++) w[group][s] = next[group][s];
        tile = next_tile;
        step = next_step;
    }
}

// One tile per block and one chunk per warp: everything is asked for before anything is used, and
// without a second set of registers more blocks fit.
template <int GROUPS, int COLUMNS>
INLINE void shot(const Product& p) {
    uint4 w[GROUPS][SUBSTEPS];
    float sum[GROUPS][COLUMNS][4] = {};
    pdl_launch();
    load_weights<GROUPS>(w, p, blockIdx.x, threadIdx.x / 32);
    pdl_wait();
    multiply<GROUPS, COLUMNS>(sum, w, p, threadIdx.x / 32);
    finish<GROUPS, COLUMNS>(sum, p, blockIdx.x, 0);
}

#define MINISGL_LINEAR(GROUPS, COLUMNS)                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                   \
        linear_stream_##GROUPS##_##COLUMNS(scalar* out, const scalar* x, const scalar* w,      \
                                           const scalar* bias, int m, int n, int k) {          \
        stream<GROUPS, COLUMNS>(Product{out, x, w, bias, m, n, k});                            \
    }                                                                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                   \
        linear_shot_##GROUPS##_##COLUMNS(scalar* out, const scalar* x, const scalar* w,        \
                                         const scalar* bias, int m, int n, int k) {            \
        shot<GROUPS, COLUMNS>(Product{out, x, w, bias, m, n, k});                              \
    }

MINISGL_LINEAR(1, 1)
MINISGL_LINEAR(2, 1)
MINISGL_LINEAR(1, 2)
MINISGL_LINEAR(2, 2)
MINISGL_LINEAR(2, 4)
