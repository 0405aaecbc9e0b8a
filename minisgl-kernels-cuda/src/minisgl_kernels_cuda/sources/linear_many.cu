// Many rows times a weight, as in a prefill: what counts is that the tensor cores never wait.
//
// A tile is 128 rows of x and 256 of the weight. Two warpgroups multiply, 64 rows each; one thread
// of a third has the engine copy what they need through a ring in shared memory, 64 inputs a step,
// and runs ahead of them over the ends of tiles. Two blocks make a cluster and take neighbouring
// tiles of the same outputs: each reads half of the weight's rows, for both. There are as many
// clusters as the device has room for; each takes tile after tile.
//
// A tile of a gated product is 128 gates and the ups that belong to them. What is written is
// act(gate) * up, and gates and ups never leave the registers.
#include "activation.cuh"
#include "ring.cuh"

constexpr int THREADS = 384, STAGES = 4;
constexpr int ROWS = 128, OUTPUTS = 256, INPUTS = 64;  // of a tile; inputs of a step
constexpr int X_SLOT = ROWS * LINE, SLOT = X_SLOT + OUTPUTS * LINE;
constexpr int BOX = 64 * LINE, BOXES = 2;  // of a warpgroup, for 64 results of 64 rows
constexpr int RESULTS = 2 * BOXES * BOX;
// Pairs of blocks of rows that are gone through with the same outputs before the next ones: the
// tiles that run at the same time share what they read, in the L2 cache.
constexpr int PAIRS = 8;

typedef float Sums[OUTPUTS / 8][4];

// Each activation has a kernel of its own: a choice at run time would be made for every element, or
// would have all of them converted at once in front of it.
template <Activation KIND>
struct Product {
    static constexpr int WIDTH = KIND ? OUTPUTS / 2 : OUTPUTS;  // outputs of a tile

    const scalar* bias;  // [n] or null
    int m, n, k;         // x is [m, k], the weight [n, k]

    INLINE int num_outputs() const { return KIND ? n / 2 : n; }
    INLINE int num_steps() const { return (k + INPUTS - 1) / INPUTS; }
};

// Where a cluster is: it takes every num_clusters-th tile, or rather pair of tiles.
struct Place {
    int tile, num_tiles, num_pairs, num_columns;

    template <Activation KIND>
    INLINE Place(const Product<KIND>& p) : tile(blockIdx.x / BLOCKS) {
        num_pairs = (p.m + BLOCKS * ROWS - 1) / (BLOCKS * ROWS);
        num_columns = (p.num_outputs() + p.WIDTH - 1) / p.WIDTH;
        num_tiles = num_pairs * num_columns;
    }
    INLINE bool is_there() const { return tile < num_tiles; }
    INLINE void advance() { tile += gridDim.x / BLOCKS; }
    // The first row of this block, and the number of the outputs.
    INLINE void find(int& row, int& column) const {
        int first = tile / (PAIRS * num_columns) * PAIRS, rest = tile - first * num_columns;
        int height = min(PAIRS, num_pairs - first);
        column = rest / height;
        row = ((first + rest % height) * BLOCKS + cluster_rank()) * ROWS;
    }
};

typedef Ring<STAGES, SLOT, 2> Steps;

template <Activation KIND>
INLINE void fill(Steps ring, const MatrixMap& x, const MatrixMap& w, const Product<KIND>& p) {
    int rank = cluster_rank(), num_steps = p.num_steps(), row, column;
    for (Place at(p); at.is_there(); at.advance()) {
        at.find(row, column);
        // This block's half of the weight's rows: gates or ups, or outputs side by side.
        int line = column * p.WIDTH + rank * (KIND ? p.n / 2 : OUTPUTS / BLOCKS);
        for (int i = 0; i < num_steps; i++) {
            Arrivals* full = ring.arrivals();
            uint4* slot = ring.slot();
            ring.wait_until_empty();
            ring.expect();
            load_box(slot, x, i * INPUTS, row, full);
            load_box_for_both(slot + X_SLOT + rank * (OUTPUTS / BLOCKS * LINE), w, i * INPUTS, line,
                              full);
            ring.advance();
        }
    }
    ring.drain();
}

// To the sums of a tile whose first output is `output`.
template <Activation KIND>
INLINE void add_bias(Sums& sums, const Product<KIND>& p, int output) {
    int pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < OUTPUTS / 8; j++) {
        int at = output + j * 8 % p.WIDTH + pair;
        if (at >= p.num_outputs()) continue;  // n is even
        const scalar* bias = p.bias + (j * 8 < p.WIDTH ? at : at + p.n / 2);
        add_bias(sums[j], bias);
    }
}

// Two sums as they are stored: of outputs 8 j and 8 j + 1 and this thread's row, or 8 rows below.
template <Activation KIND>
INLINE u32 stored(const Sums& sums, int j, int half) {
    Floats<2> values = pair_of(sums[j], half);
    if (KIND == NO_ACTIVATION) return as_word(narrow(values));
    return as_word(gated(KIND, rounded(values), rounded(pair_of(sums[j + OUTPUTS / 16], half))));
}

// Write a warpgroup's results, 64 outputs at a time: one box is filled while the other one is read.
// The warpgroup has 64 rows from `row` on.
template <Activation KIND>
INLINE void finish(const Sums& sums, uint4* results, const MatrixMap& out, int row, int output,
                   int num_outputs) {
    static_assert(Product<KIND>::WIDTH / 64 % BOXES == 0, "a tile begins with the first box");
    bool is_first = threadIdx.x % 128 == 0;
    int group = threadIdx.x / 128, line = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
#pragma unroll
    for (int first = 0; first < Product<KIND>::WIDTH; first += 64) {
        uint4* box = results + first / 64 % BOXES * BOX;
        if (is_first) wait_until_read<BOXES - 1>();
        warpgroup_barrier(group);
#pragma unroll
        for (int j = 0; j < LINE; j += 2) {
            // Also keeps the compiler from computing all at the same time, for which this one
            // needs too many registers.
            if (KIND == GELU_TANH && output + first + j * 8 >= num_outputs) break;
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) pairs[i] = stored<KIND>(sums, first / 8 + j + i / 2, i % 2);
            store_matrices(box + swizzled(line, j + threadIdx.x % 32 / 16), pairs);
        }
        publish_operands();
        warpgroup_barrier(group);
        if (is_first) {
            store_box(out, box, output + first, row);
            end_store_group();
        }
    }
}

// What a warpgroup does that multiplies, all its tiles long.
template <Activation KIND>
INLINE void take_tiles(Steps ring, uint4* results, const MatrixMap& out, const Product<KIND>& p) {
    int group = threadIdx.x / 128 - 1, row, column;
    results += group * BOXES * BOX;
    for (Place at(p); at.is_there(); at.advance()) {
        Sums sums = {};
        ring.take(p.num_steps(), [&](Operand slot) {
#pragma unroll
            for (int piece = 0; piece < LINE; piece += 2)  // 16 inputs
                multiply_add<OUTPUTS>(sums, slot + group * 64 * LINE + piece,
                                      slot + X_SLOT + piece);
        });
        at.find(row, column);
        row += group * 64;
        if (p.bias) add_bias(sums, p, column * p.WIDTH);
        finish<KIND>(sums, results, out, row, column * p.WIDTH, p.num_outputs());
    }
    if (threadIdx.x % 128 == 0) wait_for_stores();
}

template <Activation KIND>
INLINE void linear_many(const MatrixMap& x, const MatrixMap& w, const MatrixMap& out,
                        const Product<KIND>& p) {
    SHARED_LINES(shared);
    Steps ring(shared, shared + STAGES * SLOT + RESULTS);
    if (threadIdx.x == 0) ring.start();
    pdl_launch();
    cluster_barrier();
    pdl_wait();
    if (threadIdx.x < 128) {
        give_back_registers<40>();
        if (threadIdx.x == 0) fill(ring, x, w, p);
        __syncwarp();
    } else {
        take_registers<232>();
        take_tiles(ring, shared + STAGES * SLOT, out, p);
    }
    cluster_leave();  // until then the other block may copy to this one, and arrive
}

#define MINISGL_LINEAR_MANY(NAME, KIND)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_many_##NAME(            \
        const __grid_constant__ MatrixMap x, const __grid_constant__ MatrixMap w,           \
        const __grid_constant__ MatrixMap out, const scalar* bias, int m, int n, int k) {   \
        linear_many(x, w, out, Product<KIND>{bias, m, n, k});                               \
    }

MINISGL_LINEAR_MANY(plain, NO_ACTIVATION)
MINISGL_LINEAR_MANY(silu, SILU)
MINISGL_LINEAR_MANY(gelu, GELU)
MINISGL_LINEAR_MANY(gelu_tanh, GELU_TANH)
