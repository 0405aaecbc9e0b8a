// A batch of rows (up to 128) times a weight: the weight is read once, x from the L2 cache.
//
// The weight's outputs are the long side (64) of the tensor core's product and the rows of x the
// short one, so that a small batch wastes no arithmetic. A tile is 64 or 128 outputs, one
// warpgroup for each 64, and all rows. Where a weight has fewer tiles than the device has room
// for, the blocks of a cluster split the inputs of a tile; each then adds up all their sums for
// its share of the rows, always in the same order.
//
// Weight and x go through a ring in shared memory each. Half of the threads copy the weight and
// half copy x. The weight's ring is filled before pdl_wait, while the kernel in front still runs,
// and its copies never wait for those of x.
//
// A tile of a gated product has as many outputs of the first half of the weight as of the second,
// and becomes act(first) * second.
#include "activation.cuh"
#include "hopper.cuh"

constexpr int MAX_SPLITS = 8;

struct Product {
    scalar* out;         // [m, n], or [m, n / 2] of a gated product
    const scalar* x;     // [m, k]
    const scalar* w;     // [n, k]
    const scalar* bias;  // [n] or null
    int m, n, k;
    Activation activation;
    int splits;            // blocks of a cluster
    int w_slots, x_slots;  // of the rings, at least 2 or all steps of a block
};

template <int ROWS_, int GROUPS>
struct Form {
    static constexpr int ROWS = ROWS_;
    static constexpr int OUTPUTS = 64 * GROUPS, THREADS = 128 * GROUPS, COPIERS = THREADS / 2;
    static constexpr int SLABS = 2;  // of 64 inputs, in a step
    static constexpr int INPUTS = 64 * SLABS;
    static constexpr int W_SLOT = OUTPUTS * SLABS * LINE, X_SLOT = ROWS * SLABS * LINE;
    // Floats of a row of sums: the lanes that write together reach every bank once.
    static constexpr int PITCH = OUTPUTS + 4;
};

// The part of a product that a block computes.
struct Part {
    int tile, rank, first_step, num_steps;

    INLINE Part(const Product& p, int inputs) {
        tile = blockIdx.x / p.splits;
        rank = blockIdx.x % p.splits;
        int all = (p.k + inputs - 1) / inputs, most = (all + p.splits - 1) / p.splits;
        first_step = rank * most;
        num_steps = min(max(all - first_step, 0), most);
    }
};

// One side's ring, as a thread that copies it sees it. The thread copies one piece of every line
// whose number it has modulo STRIDE; what differs between lines is kept small, as copies of x are
// what everything waits for.
template <class Form>
struct Ring {
    static constexpr int PIECES = Form::SLABS * LINE, STRIDE = Form::COPIERS / PIECES;

    uint4* slots;
    int num_slots, next_slot;
    const scalar* from;  // in this thread's first line, at the next step
    int input, k;
    i64 jump;       // between the halves of the lines, beside what they lie apart in a matrix
    int low, high;  // ends of the halves
    bool is_x;

    INLINE Ring(const Product& p, const Part& part, uint4* slots, int num_slots, bool is_x)
        : slots(slots), num_slots(num_slots), next_slot(0), k(p.k), jump(0), is_x(is_x) {
        int line = threadIdx.x % Form::COPIERS / PIECES;
        input = part.first_step * Form::INPUTS + threadIdx.x % PIECES * 8;
        low = high = p.m;
        from = p.x;
        if (!is_x) {
            int width = p.activation ? Form::OUTPUTS / 2 : Form::OUTPUTS;
            int outputs = p.activation ? p.n / 2 : p.n;
            low = high = outputs - part.tile * width;
            from = p.w + i64(part.tile) * width * k;
            if (p.activation) {
                high += width;
                jump = i64(outputs - width) * k;
            }
        }
        from += i64(line) * k + input;
    }

    template <int LINES>
    INLINE void copy() const {
        int piece = threadIdx.x % PIECES, first = threadIdx.x % Form::COPIERS / PIECES;
        uint4* to = slots + next_slot * (LINES * PIECES) + piece / LINE * LINES * LINE;
        bool is_input = input < k;
        int low_end = is_input ? low : 0, high_end = is_input ? high : 0;
        const scalar* at = from;
#pragma unroll
        for (int i = 0; i < LINES; i += STRIDE, at += STRIDE * k) {
            if (i == LINES / 2) at += jump;
            if (LINES % STRIDE && first + i >= LINES) break;
            bool is_there = first + i < (i < LINES / 2 ? low_end : high_end);
            copy_async(to + swizzled(first + i, piece % LINE), at, is_there);
        }
    }

    // Start copying the next step of those before input `end`, if there is one.
    INLINE void advance(int end) {
        if (input < end) {
            if (is_x) copy<Form::ROWS>();
            else copy<Form::OUTPUTS>();
        }
        end_copy_group();
        input += Form::INPUTS;
        from += Form::INPUTS;
        next_slot = next_slot + 1 == num_slots ? 0 : next_slot + 1;
    }
};

// The counts are the same for all threads that come here together.
INLINE void wait_until_pending(int num_groups) {
    switch (num_groups) {
        case 0: return copies_pending<0>();
        case 1: return copies_pending<1>();
        case 2: return copies_pending<2>();
        case 3: return copies_pending<3>();
        case 4: return copies_pending<4>();
        case 5: return copies_pending<5>();
        default: return copies_pending<6>();
    }
}

template <class Form>
INLINE void start_step(float (&sums)[Form::ROWS / 8][4], const uint4* w_slot, const uint4* x_slot) {
    Operand w = operand(w_slot + threadIdx.x / 128 * 64 * LINE), x = operand(x_slot);
    start_products();
#pragma unroll
    for (int slab = 0; slab < Form::SLABS; slab++)
#pragma unroll
        for (int piece = 0; piece < LINE; piece += 2)  // 16 inputs
            multiply_add<Form::ROWS>(sums, w + slab * Form::OUTPUTS * LINE + piece,
                                     x + slab * Form::ROWS * LINE + piece);
    submit_products();
}

template <class Form>
INLINE void put_sums(float* to, const float (&sums)[Form::ROWS / 8][4]) {
    int output = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < Form::ROWS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[(row + j * 8 + i % 2) * Form::PITCH + output + i / 2 * 8] = sums[j][i];
}

// Four neighbouring outputs of a row, all parts of the sum added up.
template <int PITCH>
INLINE Floats<4> total(const Product& p, const uint4* sums, int row, int column, int output) {
    const uint4* at = sums + (row * PITCH + column) / 4;
    uint4 parts[MAX_SPLITS];
#pragma unroll
    for (int i = 0; i < MAX_SPLITS; i++)
        if (i < p.splits) parts[i] = p.splits > 1 ? cluster_read(at, i) : *at;
    Floats<4> value;
#pragma unroll
    for (int i = 0; i < 4; i++)
        value.v[i] = p.bias && output + i < p.n ? widen(p.bias[output + i]) : 0.f;
#pragma unroll
    for (int i = 0; i < MAX_SPLITS; i++)
        if (i < p.splits) {
            value.v[0] += __uint_as_float(parts[i].x);
            value.v[1] += __uint_as_float(parts[i].y);
            value.v[2] += __uint_as_float(parts[i].z);
            value.v[3] += __uint_as_float(parts[i].w);
        }
    return value;
}

INLINE void store(scalar* to, const Pack<4>& values, int num_left, bool is_aligned) {
    if (is_aligned && num_left >= 4) {
        *reinterpret_cast<Pack<4>*>(to) = values;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < num_left) to[i] = values.v[i];
}

// Write this block's share of the rows.
template <class Form>
INLINE void finish(const Product& p, const Part& part, const uint4* sums) {
    int n = p.activation ? p.n / 2 : p.n;
    int width = p.activation ? Form::OUTPUTS / 2 : Form::OUTPUTS;  // of a tile
    int share = (p.m + p.splits - 1) / p.splits;
    int first = part.rank * share, end = min(first + share, p.m);
    for (int i = threadIdx.x * 4; i < (end - first) * width; i += Form::THREADS * 4) {
        int row = first + i / width, column = i % width, output = part.tile * width + column;
        if (output >= n) continue;
        Pack<4> values = narrow(total<Form::PITCH>(p, sums, row, column, output));
        if (p.activation) {
            Floats<4> ups = total<Form::PITCH>(p, sums, row, width + column, n + output);
            values = gated(p.activation, widen(values), rounded(ups));
        }
        store(p.out + i64(row) * n + output, values, n - output, n % 4 == 0);
    }
}

template <class Form>
INLINE void linear_batch(const Product& p) {
    SHARED_LINES(shared);
    Part part(p, Form::INPUTS);
    int end = (part.first_step + part.num_steps) * Form::INPUTS;
    uint4 *w_slots = shared, *x_slots = shared + p.w_slots * Form::W_SLOT;
    bool is_x = threadIdx.x >= Form::COPIERS;
    int num_slots = is_x ? p.x_slots : p.w_slots;
    Ring<Form> ring(p, part, is_x ? x_slots : w_slots, num_slots, is_x);

    pdl_launch();
    if (is_x) pdl_wait();
    for (int i = 0; i < num_slots; i++) ring.advance(end);
    if (!is_x) pdl_wait();

    float sums[Form::ROWS / 8][4] = {};
    for (int i = 0, w = 0, x = 0; i < part.num_steps; i++) {
        wait_until_pending(i ? num_slots - 2 : num_slots - 1);
        publish_operands();
        __syncthreads();
        start_step<Form>(sums, w_slots + w * Form::W_SLOT, x_slots + x * Form::X_SLOT);
        if (i) ring.advance(end);  // all warps are done with the step before: its slot is free
        wait_for_products();
        w = w + 1 == p.w_slots ? 0 : w + 1;
        x = x + 1 == p.x_slots ? 0 : x + 1;
    }

    __syncthreads();  // the sums take the place of the rings
    put_sums<Form>(reinterpret_cast<float*>(shared), sums);
    if (p.splits > 1) cluster_barrier();
    else __syncthreads();
    finish<Form>(p, part, shared);
    if (p.splits > 1) cluster_leave();  // others may still read this block's sums
}

#define MINISGL_LINEAR_BATCH(ROWS, GROUPS)                                               \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS)                           \
        linear_batch_##ROWS##_##GROUPS(scalar* out, const scalar* x, const scalar* w,    \
                                       const scalar* bias, int m, int n, int k,          \
                                       int activation, int splits, int w_slots,          \
                                       int x_slots) {                                    \
        linear_batch<Form<ROWS, GROUPS>>({out, x, w, bias, m, n, k,                      \
                                          Activation(activation), splits, w_slots,       \
                                          x_slots});                                     \
    }

// Those that won on an H200; tiles of more outputs, or of 128 for more rows, never did.
MINISGL_LINEAR_BATCH(16, 1)
MINISGL_LINEAR_BATCH(16, 2)
MINISGL_LINEAR_BATCH(32, 1)
MINISGL_LINEAR_BATCH(64, 1)
MINISGL_LINEAR_BATCH(96, 1)
MINISGL_LINEAR_BATCH(128, 1)
