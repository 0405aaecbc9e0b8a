// Few rows times a weight: the weight is read once, at the speed of memory.
//
// A tile is 8 or 16 outputs. The warps of a block split the inputs among them, so that even a
// weight of few outputs has every multiprocessor reading; their sums meet in shared memory. The
// products run on the tensor cores, with the weight as the left matrix and the rows of x as the
// columns of the right one: for up to 8 rows the arithmetic costs the same and is hidden.
//
// An mma wants its 16 inputs spread over the lanes in pairs. The order of inputs in a sum is ours
// to choose, so each lane reads 8 neighbours of weight and x (16 bytes) and calls them the inputs
// of its slots in two mma, and no shuffle is needed.
//
// Weights go through a queue in shared memory, several steps deep, so that enough of them are on
// their way to fill the memory's pipe. Each thread reads back what it copied itself: the queue
// needs no barrier. It is filled before pdl_wait, while the kernel in front still runs.
//
// A gated product takes 8 outputs of the first half of the weight and the same 8 of the second
// half as the two groups of a tile, and writes act(first) * second.
#include "activation.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int SUBSTEPS = 4;             // of 32 inputs: one 16-byte piece of each lane of a quad
constexpr int CHUNK = 32 * SUBSTEPS;    // inputs that a warp takes in a step
constexpr int DEPTH = 4;                // steps in the queue

struct Product {
    scalar* out;        // [m, n], or [m, n / 2] of a gated product
    const scalar* x;    // [m, k]
    const scalar* w;    // [n, k]
    const scalar* bias; // [n] or null
    int m, n, k;
    Activation activation;

    INLINE int num_outputs() const { return activation ? n / 2 : n; }
    // The first row of the weight in a group.
    INLINE int output(int tile, int group, int groups) const {
        return activation ? tile * 8 + group * (n / 2) : (tile * groups + group) * 8;
    }
    INLINE int num_tiles(int groups) const {
        int outputs = activation ? 8 : 8 * groups;
        return (num_outputs() + outputs - 1) / outputs;
    }
};

// Where a block is: it takes the tiles blockIdx.x, blockIdx.x + gridDim.x, ..., each in steps.
struct Cursor {
    int tile, step;
    INLINE void advance(int num_steps) {
        if (++step < num_steps) return;
        step = 0;
        tile += gridDim.x;
    }
    // First input of this lane in the first substep.
    INLINE int input() const {
        return (step * WARPS + threadIdx.x / 32) * CHUNK + threadIdx.x % 4 * 8;
    }
};

// Start copying the weights of one step: a piece per substep and group of 8 outputs. This thread's
// pieces lie a block apart, which is free of bank conflicts.
template <int GROUPS>
INLINE void enqueue(uint4* slot, const Product& p, const Cursor& at) {
    int input = at.input();
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        int row = p.output(at.tile, group, GROUPS) + threadIdx.x % 32 / 4;
        const scalar* from = p.w + i64(row < p.n ? row : p.n - 1) * p.k + input;
#pragma unroll
        for (int s = 0; s < SUBSTEPS; s++) {
            bool is_input = input + 32 * s < p.k;
            copy_async(slot + (group * SUBSTEPS + s) * THREADS + threadIdx.x,
                       is_input ? from + 32 * s : p.w, is_input);
        }
    }
    end_copy_group();
}

template <int COLUMNS>
INLINE void load_x(uint4 (&x)[COLUMNS][SUBSTEPS], const Product& p, const Cursor& at) {
    int input = at.input();
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        int row = column * 8 + threadIdx.x % 32 / 4;
        const scalar* from = p.x + i64(row) * p.k + input;
#pragma unroll
        for (int s = 0; s < SUBSTEPS; s++)
            x[column][s] = row < p.m && input + 32 * s < p.k
                               ? *reinterpret_cast<const uint4*>(from + 32 * s)
                               : make_uint4(0, 0, 0, 0);
    }
}

// Groups of 8 outputs go in pairs as the upper and lower half of the left matrix.
template <int GROUPS, int COLUMNS>
INLINE void multiply(float (&sum)[COLUMNS][4], const uint4* slot,
                     const uint4 (&x)[COLUMNS][SUBSTEPS]) {
#pragma unroll
    for (int s = 0; s < SUBSTEPS; s++) {
        uint4 upper = slot[s * THREADS + threadIdx.x], lower = make_uint4(0, 0, 0, 0);
        if (GROUPS == 2) lower = slot[(SUBSTEPS + s) * THREADS + threadIdx.x];
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            uint4 right = x[column][s];
            float (&c)[4] = sum[column];
            mma(c, upper.x, lower.x, upper.y, lower.y, right.x, right.y);
            mma(c, upper.z, lower.z, upper.w, lower.w, right.z, right.w);
        }
    }
}

// Add up what the warps have of one tile, and write it.
template <int GROUPS, int COLUMNS>
INLINE void finish(float (&sum)[COLUMNS][4], const Product& p, int tile, int buffer) {
    constexpr int OUTPUTS = 8 * GROUPS, ROWS = 8 * COLUMNS;
    // Two buffers, so that one barrier per tile is enough: a buffer is written again only after
    // the barrier of the tile in between.
    __shared__ float partial[2][WARPS][ROWS][OUTPUTS + 1];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        float (&c)[4] = sum[column];
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
    auto total = [&](int row, int column, int output) {
        float value = p.bias ? widen(p.bias[output]) : 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) value += partial[buffer][w][row][column];
        return value;
    };
    if (GROUPS == 2 && p.activation) {
        int half = p.n / 2;
        for (int i = threadIdx.x; i < 8 * ROWS; i += THREADS) {
            int row = i / 8, output = tile * 8 + i % 8;
            if (row >= p.m || output >= half) continue;
            Floats<1> gate{total(row, i % 8, output)}, up{total(row, 8 + i % 8, half + output)};
            p.out[i64(row) * half + output] = gated(p.activation, rounded(gate), rounded(up)).v[0];
        }
        return;
    }
    for (int i = threadIdx.x; i < OUTPUTS * ROWS; i += THREADS) {
        int row = i / OUTPUTS, output = tile * OUTPUTS + i % OUTPUTS;
        if (row < p.m && output < p.n)
            p.out[i64(row) * p.n + output] = narrow(total(row, i % OUTPUTS, output));
    }
}

template <int GROUPS, int COLUMNS>
INLINE void linear(const Product& p) {
    SHARED_BUFFER(queue);
    constexpr int SLOT = GROUPS * SUBSTEPS * THREADS;
    int num_tiles = p.num_tiles(GROUPS);
    int num_chunks = (p.k + CHUNK - 1) / CHUNK;
    int num_steps = (num_chunks + WARPS - 1) / WARPS;  // the same for every warp, for the barrier
    Cursor now{int(blockIdx.x), 0}, ahead = now;
    pdl_launch();
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        // The launch gives room for the steps that a block has, if these are fewer than DEPTH.
        if (ahead.tile < num_tiles) enqueue<GROUPS>(queue + i * SLOT, p, ahead);
        else end_copy_group();
        ahead.advance(num_steps);
    }
    pdl_wait();
    uint4 x[COLUMNS][SUBSTEPS], next_x[COLUMNS][SUBSTEPS];
    float sum[COLUMNS][4] = {};
    load_x(x, p, now);
    for (int i = 0, buffer = 0; now.tile < num_tiles; i = (i + 1) % DEPTH) {
        Cursor next = now;
        next.advance(num_steps);
        if (next.tile < num_tiles) load_x(next_x, p, next);
        copies_pending<DEPTH - 1>();
        multiply<GROUPS, COLUMNS>(sum, queue + i * SLOT, x);
        if (ahead.tile < num_tiles) enqueue<GROUPS>(queue + i * SLOT, p, ahead);
        else end_copy_group();
        ahead.advance(num_steps);
        if (next.step == 0) {
            finish<GROUPS, COLUMNS>(sum, p, now.tile, buffer);
            buffer ^= 1;
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; column++)
#pragma unroll
            for (int s = 0; s < SUBSTEPS; s++) x[column][s] = next_x[column][s];
        now = next;
    }
}

#define MINISGL_LINEAR(GROUPS, COLUMNS)                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) linear_##GROUPS##_##COLUMNS( \
        scalar* out, const scalar* x, const scalar* w, const scalar* bias, int m,      \
        int n, int k, int activation) {                                                \
        linear<GROUPS, COLUMNS>({out, x, w, bias, m, n, k, Activation(activation)});   \
    }

MINISGL_LINEAR(1, 1)
MINISGL_LINEAR(2, 1)
MINISGL_LINEAR(1, 2)
MINISGL_LINEAR(2, 2)
