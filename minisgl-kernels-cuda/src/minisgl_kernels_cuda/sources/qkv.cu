// Between the q/k/v product and attention: norm the heads of q and k, rotate them, store k and v.
//
// Query heads are rotated in place; keys and values go to the pool. The norm rounds where the torch
// op does; rotations are in float32 throughout.
//
// Positions, slots, angles and the weights of norms are read before the kernel in front has ended (see
// pdl_wait).
#include "norm_parts.cuh"

struct Step {
    scalar* qkv;
    const scalar* q_norm;  // null: the model has none
    const scalar* k_norm;
    const int* positions;
    const float* cos_sin;
    scalar* k_pool;
    scalar* v_pool;
    const i64* slots;
    i64 row_stride;
    int num_tokens, num_qo_heads, num_kv_heads, head_dim, rotary_dim;
    float eps;
};

struct Head {
    const scalar* from;
    scalar* to;
    const scalar* norm;
    bool is_value;
};

INLINE int num_heads(const Step& step) { return step.num_qo_heads + 2 * step.num_kv_heads; }

INLINE i64 warp_index() { return i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; }

INLINE const float* cos_of(const Step& step, int token) {
    return step.cos_sin + i64(step.positions[token]) * step.rotary_dim;
}

INLINE Head find_head(const Step& step, int token, int index) {
    Head head;
    head.from = head.to = step.qkv + token * step.row_stride + i64(index) * step.head_dim;
    head.norm = step.q_norm;
    head.is_value = index >= step.num_qo_heads + step.num_kv_heads;
    if (index >= step.num_qo_heads) {
        int kv = index - step.num_qo_heads - (head.is_value ? step.num_kv_heads : 0);
        scalar* pool = head.is_value ? step.v_pool : step.k_pool;
        head.to = pool + (step.slots[token] * step.num_kv_heads + kv) * step.head_dim;
        head.norm = step.k_norm;
    }
    return head;
}

// A head that is rotated whole takes as few lanes as can read it 16 bytes at a time: each has a piece
// of the first half and its partner of the second. So a warp serves several heads, perhaps of two
// tokens; all of its lanes take part in the sums, whatever head they have.
template <int DIM>
INLINE void whole_heads(const Step& step) {
    constexpr int LANES = DIM / (2 * PIECE), HALF = DIM / 2;
    struct alignas(16) Angles {
        float v[PIECE];
    };
    u32 row = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    u32 num_rows = u32(step.num_tokens) * num_heads(step);
    bool is_there = row < num_rows;
    if (!is_there) row = num_rows - 1;
    int token = row / num_heads(step), at = threadIdx.x % LANES * PIECE;
    Head head = find_head(step, token, row % num_heads(step));
    const float* angles = cos_of(step, token) + at;
    Angles cos = *reinterpret_cast<const Angles*>(angles);
    Angles sin = *reinterpret_cast<const Angles*>(angles + HALF);
    Piece first_norm, second_norm;
    if (head.norm) {
        first_norm = load_piece(head.norm + at);
        second_norm = load_piece(head.norm + HALF + at);
    }
    pdl_wait();
    Piece first = load_piece(head.from + at), second = load_piece(head.from + HALF + at);
    Floats<PIECE> a = widen(first), b = widen(second);
    if (step.q_norm) {  // a model norms both q and k, or neither
        float sum = squares(a) + squares(b);
        for (int offset = LANES / 2; offset; offset >>= 1)
            sum += __shfl_xor_sync(FULL_WARP, sum, offset);
        float scale = rsqrtf(sum / DIM + step.eps);
        a = widen(normed(a, scale, first_norm));
        b = widen(normed(b, scale, second_norm));
    }
    if (!head.is_value) {
        Floats<PIECE> x, y;
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            x.v[i] = a.v[i] * cos.v[i] - b.v[i] * sin.v[i];
            y.v[i] = b.v[i] * cos.v[i] + a.v[i] * sin.v[i];
        }
        first = narrow(x);
        second = narrow(y);
    }
    if (!is_there) return;
    store_piece(head.to + at, first);
    store_piece(head.to + HALF + at, second);
}

// Any head and any even part of it that is rotated.
INLINE void part_of_head(const Step& step) {
    pdl_wait();
    i64 warp = warp_index();
    if (warp >= i64(step.num_tokens) * num_heads(step)) return;
    int token = warp / num_heads(step);
    Head head = find_head(step, token, warp % num_heads(step));
    const float* cosines = cos_of(step, token);
    int lane = threadIdx.x % 32, half = step.rotary_dim / 2;
    if (head.is_value) {
        for (int i = lane; i < step.head_dim; i += 32) head.to[i] = head.from[i];
        return;
    }
    float scale = 1.f;
    if (head.norm) {
        float sum = 0.f;
        for (int i = lane; i < step.head_dim; i += 32)
            sum += widen(head.from[i]) * widen(head.from[i]);
        scale = rsqrtf(warp_sum(sum) / step.head_dim + step.eps);
    }
    auto normed = [&](int i) {
        float value = widen(head.from[i]);
        return head.norm ? rounded(rounded(value * scale) * widen(head.norm[i])) : value;
    };
    for (int i = lane; i < half; i += 32) {
        float a = normed(i), b = normed(half + i);
        float cos = cosines[i], sin = cosines[half + i];
        head.to[i] = narrow(a * cos - b * sin);
        head.to[half + i] = narrow(b * cos + a * sin);
    }
    for (int i = step.rotary_dim + lane; i < step.head_dim; i += 32) head.to[i] = narrow(normed(i));
}

#define MINISGL_QKV(NAME, CALL)                                                                   \
    extern "C" __global__ void NAME(                                                              \
        scalar* qkv, const scalar* q_norm, const scalar* k_norm, const int* positions,            \
        const float* cos_sin, scalar* k_pool, scalar* v_pool, const i64* slots, i64 row_stride,   \
        int num_tokens, int num_qo_heads, int num_kv_heads, int head_dim, int rotary_dim,         \
        float eps) {                                                                              \
        pdl_launch();                                                                             \
        Step step{qkv,   q_norm,     k_norm,     positions,    cos_sin,      k_pool,   v_pool,    \
                  slots, row_stride, num_tokens, num_qo_heads, num_kv_heads, head_dim, rotary_dim,\
                  eps};                                                                           \
        CALL(step);                                                                               \
    }

MINISGL_QKV(qkv_64, whole_heads<64>)
MINISGL_QKV(qkv_128, whole_heads<128>)
MINISGL_QKV(qkv_256, whole_heads<256>)
MINISGL_QKV(qkv_any, part_of_head)
