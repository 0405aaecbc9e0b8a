// Between the q/k/v product and attention: norm the heads of q and k, rotate them, store k and v.
//
// A warp has one head of one token, or a few. Query heads are rotated in place; keys and values go to the
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

// What a lane holds of a head that is rotated whole: SPAN elements of the first half and their
// partners of the second.
template <int SPAN>
struct Halves {
    Pack<SPAN> first, second;
    static constexpr int HALF = 32 * SPAN;
    INLINE void load(const scalar* from) {
        first = *reinterpret_cast<const Pack<SPAN>*>(from);
        second = *reinterpret_cast<const Pack<SPAN>*>(from + HALF);
    }
    INLINE void store(scalar* to) const {
        *reinterpret_cast<Pack<SPAN>*>(to) = first;
        *reinterpret_cast<Pack<SPAN>*>(to + HALF) = second;
    }
};

template <int SPAN>
INLINE void norm_and_rotate(Halves<SPAN>& x, const scalar* norm, float eps, const float* cos,
                            const float* sin) {
    float a[SPAN], b[SPAN];
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
        a[i] = widen(x.first.v[i]);
        b[i] = widen(x.second.v[i]);
    }
    if (norm) {
        Halves<SPAN> scales;
        scales.load(norm);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < SPAN; i++) sum += a[i] * a[i] + b[i] * b[i];
        float scale = rsqrtf(warp_sum(sum) / (2 * x.HALF) + eps);
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            a[i] = rounded(rounded(a[i] * scale) * widen(scales.first.v[i]));
            b[i] = rounded(rounded(b[i] * scale) * widen(scales.second.v[i]));
        }
    }
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
        x.first.v[i] = narrow(a[i] * cos[i] - b[i] * sin[i]);
        x.second.v[i] = narrow(b[i] * cos[i] + a[i] * sin[i]);
    }
}

// A warp takes up to HEADS heads of one token: all are read before the first is used, and the
// angles are read once.
template <int SPAN, int HEADS>
INLINE void whole_heads(const Step& step) {
    struct alignas(4 * SPAN) Angles {
        float v[SPAN];
    };
    int warps_per_token = (num_heads(step) + HEADS - 1) / HEADS;
    i64 warp = warp_index();
    if (warp >= i64(step.num_tokens) * warps_per_token) return;
    int token = warp / warps_per_token, start = warp % warps_per_token * HEADS;
    int at = threadIdx.x % 32 * SPAN;
    Halves<SPAN> x[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; i++)
        if (start + i < num_heads(step)) x[i].load(find_head(step, token, start + i).from + at);
    const float* angles = cos_of(step, token) + at;
    Angles cos = *reinterpret_cast<const Angles*>(angles);
    Angles sin = *reinterpret_cast<const Angles*>(angles + 32 * SPAN);
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        if (start + i >= num_heads(step)) continue;
        Head head = find_head(step, token, start + i);
        const scalar* norm = head.norm ? head.norm + at : nullptr;
        if (!head.is_value) norm_and_rotate<SPAN>(x[i], norm, step.eps, cos.v, sin.v);
        x[i].store(head.to + at);
    }
}

// Any head and any even part of it that is rotated.
INLINE void part_of_head(const Step& step) {
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
        pdl_wait();                                                                               \
        Step step{qkv,   q_norm,     k_norm,     positions,    cos_sin,      k_pool,   v_pool,    \
                  slots, row_stride, num_tokens, num_qo_heads, num_kv_heads, head_dim, rotary_dim,\
                  eps};                                                                           \
        CALL(step);                                                                               \
    }

#define MINISGL_WHOLE(SPAN, HEADS) whole_heads<SPAN, HEADS>
MINISGL_QKV(qkv_64_1, MINISGL_WHOLE(1, 1))
MINISGL_QKV(qkv_64_4, MINISGL_WHOLE(1, 4))
MINISGL_QKV(qkv_128_1, MINISGL_WHOLE(2, 1))
MINISGL_QKV(qkv_128_4, MINISGL_WHOLE(2, 4))
MINISGL_QKV(qkv_256_1, MINISGL_WHOLE(4, 1))
MINISGL_QKV(qkv_256_4, MINISGL_WHOLE(4, 4))
MINISGL_QKV(qkv_any, part_of_head)
