// Between the q/k/v product and attention: norm the heads of q and k, rotate them, store k and v.
//
// One warp has one head of one token. Query heads are rotated in place; keys and values go to the
// pool. The norm rounds where the torch op does; rotations are in float32 throughout.
#include "device.cuh"

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
    const float* cos;
    bool is_value;
};

// Find this warp's head; false where the grid overhangs.
INLINE bool find_head(const Step& step, Head& head) {
    int num_heads = step.num_qo_heads + 2 * step.num_kv_heads;
    i64 warp = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (warp >= i64(step.num_tokens) * num_heads) return false;
    int token = warp / num_heads, index = warp % num_heads;
    scalar* from = step.qkv + token * step.row_stride + i64(index) * step.head_dim;
    head.from = head.to = from;
    head.norm = step.q_norm;
    head.is_value = index >= step.num_qo_heads + step.num_kv_heads;
    if (index >= step.num_qo_heads) {
        int kv = index - step.num_qo_heads - (head.is_value ? step.num_kv_heads : 0);
        scalar* pool = head.is_value ? step.v_pool : step.k_pool;
        head.to = pool + (step.slots[token] * step.num_kv_heads + kv) * step.head_dim;
        head.norm = step.k_norm;
    }
    if (!head.is_value) head.cos = step.cos_sin + i64(step.positions[token]) * step.rotary_dim;
    return true;
}

// The whole head is rotated, and its half is a multiple of the warp: a lane holds SPAN elements
// of the first half and their partners of the second.
template <int SPAN>
INLINE void whole_head(const Step& step) {
    typedef Pack<SPAN> Span;
    constexpr int HALF = 32 * SPAN;
    Head head;
    if (!find_head(step, head)) return;
    int at = threadIdx.x % 32 * SPAN;
    Span first = *reinterpret_cast<const Span*>(head.from + at);
    Span second = *reinterpret_cast<const Span*>(head.from + HALF + at);
    if (!head.is_value) {
        float a[SPAN], b[SPAN], sum = 0.f;
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            a[i] = widen(first.v[i]);
            b[i] = widen(second.v[i]);
            sum += a[i] * a[i] + b[i] * b[i];
        }
        if (head.norm) {
            float scale = rsqrtf(warp_sum(sum) / (2 * HALF) + step.eps);
#pragma unroll
            for (int i = 0; i < SPAN; i++) {
                a[i] = rounded(rounded(a[i] * scale) * widen(head.norm[at + i]));
                b[i] = rounded(rounded(b[i] * scale) * widen(head.norm[HALF + at + i]));
            }
        }
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            float cos = head.cos[at + i], sin = head.cos[HALF + at + i];
            first.v[i] = narrow(a[i] * cos - b[i] * sin);
            second.v[i] = narrow(b[i] * cos + a[i] * sin);
        }
    }
    *reinterpret_cast<Span*>(head.to + at) = first;
    *reinterpret_cast<Span*>(head.to + HALF + at) = second;
}

// Any head and any even part of it that is rotated.
INLINE void part_of_head(const Step& step) {
    Head head;
    if (!find_head(step, head)) return;
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
        float cos = head.cos[i], sin = head.cos[half + i];
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
        pdl_wait();                                                                               \
        Step step{qkv,   q_norm,     k_norm,     positions,    cos_sin,      k_pool,   v_pool,    \
                  slots, row_stride, num_tokens, num_qo_heads, num_kv_heads, head_dim, rotary_dim,\
                  eps};                                                                           \
        CALL(step);                                                                               \
    }

MINISGL_QKV(qkv_64, whole_head<1>)
MINISGL_QKV(qkv_128, whole_head<2>)
MINISGL_QKV(qkv_256, whole_head<4>)
MINISGL_QKV(qkv_any, part_of_head)
