// The gate and up product of a large decode batch, up to 192 rows, with SiLU behind it.
//
// Here reading the weight takes about as long as the arithmetic, and neither may wait for the
// other. A tile is all rows and 72 gates with their ups, an even division of a wide weight over
// the device. Three warpgroups multiply, 64 rows each; one thread of a fourth has the copy engine
// fill the ring. The two blocks of a cluster take neighbouring tiles: each copies its own part of
// the weight, and half of x for both, so that x costs less of the second-level cache's bandwidth
// than the weight. The ring's first weights are copied while the kernel in front still runs.
#include "activation.cuh"
#include "ring.cuh"

constexpr int GROUPS = 3, THREADS = 128 * (GROUPS + 1), STAGES = 5;
constexpr int ROWS = 64 * GROUPS, WIDTH = 72, OUTPUTS = 2 * WIDTH;  // of a tile: gates, and all
constexpr int INPUTS = 64;                                          // of a step
constexpr int X_SLOT = ROWS * LINE, SLOT = X_SLOT + OUTPUTS * LINE;

typedef Ring<STAGES, SLOT, GROUPS> Steps;

typedef float Sums[OUTPUTS / 8][4];

struct Product {
    scalar* out;         // [m, n / 2]
    const scalar* bias;  // [n] or null
    int m, n, k;         // x is [m, k], the weight [n, k]

    INLINE int num_steps() const { return (k + INPUTS - 1) / INPUTS; }
    INLINE int num_pairs() const {  // of tiles
        return (n / 2 + BLOCKS * WIDTH - 1) / (BLOCKS * WIDTH);
    }
};

// The first gate of this block's tile, of the pair of tiles that its cluster takes.
INLINE int first_gate(int pair) { return (pair * BLOCKS + cluster_rank()) * WIDTH; }
INLINE int first_pair() { return blockIdx.x / BLOCKS; }
INLINE int num_clusters() { return gridDim.x / BLOCKS; }

struct Copier {
    Steps ring;
    const MatrixMap &x, &w;
    int up;  // the first of the weight's rows that are ups

    INLINE void copy_weight(int gate, int step) const {
        ring.expect();
        uint4* to = ring.slot() + X_SLOT;
        load_box(to, w, step * INPUTS, gate, ring.arrivals());
        load_box(to + WIDTH * LINE, w, step * INPUTS, up + gate, ring.arrivals());
    }
    INLINE void copy_x(int step) const {
        int line = cluster_rank() * (ROWS / BLOCKS);
        load_box_for_both(ring.slot() + line * LINE, x, step * INPUTS, line, ring.arrivals());
    }
};

INLINE void fill(Copier copier, const Product& p) {
    int num_steps = p.num_steps(), num_early = min(STAGES, num_steps);
    Copier early = copier;
    for (int i = 0; i < num_early; i++) {
        early.copy_weight(first_gate(first_pair()), i);
        early.ring.advance();
    }
    pdl_wait();
    for (int pair = first_pair(); pair < p.num_pairs(); pair += num_clusters())
        for (int i = 0; i < num_steps; i++) {
            if (--num_early < 0) {
                copier.ring.wait_until_empty();
                copier.copy_weight(first_gate(pair), i);
            }
            copier.copy_x(i);
            copier.ring.advance();
        }
    copier.ring.drain();
}

// Write a warpgroup's results of a tile: 64 rows of x, from `row` on.
INLINE void finish(Sums& sums, const Product& p, int row, int gate) {
    row += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    int num_outputs = p.n / 2;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
        int output = gate + j * 8 + threadIdx.x % 4 * 2;
        if (output >= num_outputs) break;
        if (p.bias) {
            add_bias(sums[j], p.bias + output);
            add_bias(sums[j + WIDTH / 8], p.bias + num_outputs + output);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (row + half * 8 < p.m)
                *reinterpret_cast<Pack<2>*>(p.out + i64(row + half * 8) * num_outputs + output) =
                    gated(SILU, rounded(pair_of(sums[j], half)),
                          rounded(pair_of(sums[j + WIDTH / 8], half)));
    }
}

// What a warpgroup does that multiplies, all its tiles long.
INLINE void take_tiles(Steps ring, const Product& p) {
    int row = (threadIdx.x / 128 - 1) * 64;
    for (int pair = first_pair(); pair < p.num_pairs(); pair += num_clusters()) {
        Sums sums = {};
        ring.take(p.num_steps(), [&](Operand slot) {
#pragma unroll
            for (int piece = 0; piece < LINE; piece += 2)  // 16 inputs
                multiply_add<OUTPUTS>(sums, slot + row * LINE + piece, slot + X_SLOT + piece);
        });
        finish(sums, p, row, first_gate(pair));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear_wide(const __grid_constant__ MatrixMap x, const __grid_constant__ MatrixMap w,
                scalar* out, const scalar* bias, int m, int n, int k) {
    SHARED_LINES(shared);
    Product p{out, bias, m, n, k};
    Steps ring(shared, shared + STAGES * SLOT);
    if (threadIdx.x == 0) ring.start();
    pdl_launch();
    cluster_barrier();
    if (threadIdx.x < 128) {
        give_back_registers<40>();
        if (threadIdx.x == 0) fill(Copier{ring, x, w, n / 2}, p);
        else pdl_wait();
        __syncwarp();
    } else {
        take_registers<152>();
        pdl_wait();
        take_tiles(ring, p);
    }
    cluster_leave();  // until then the other block may copy to this one, and arrive
}
