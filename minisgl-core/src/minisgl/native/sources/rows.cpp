// What happens to the rows of a step between its products, float32: norms, rotation, KV store,
// activations, embedding. Strides and widths are in floats.
#include "activation.h"
#include "parallel.h"
#include "simd.h"

// Elements for which waking another thread pays.
constexpr int64_t GRAIN = 1 << 14;

// Run body(row) for each row, on several threads where there is enough to do.
template <class Body>
static void for_rows(int64_t num_rows, int64_t width, const Body& body) {
    parallel_for(num_rows, (GRAIN + width - 1) / width, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) body(row);
    });
}

// Run body(i, n) for vectors of n lanes that cover width elements; all but the last are whole.
template <class Body>
static INLINE void for_vectors(int64_t width, const Body& body) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) body(i, LANES);
    if (i < width) body(i, int(width - i));
}

// Memory access of n lanes, with the test for a whole vector folded away where n is known.
static INLINE Vec take(const float* p, int n) { return n == LANES ? load(p) : load_part(p, n); }

static INLINE void put(float* p, Vec v, int n) {
    if (n == LANES)
        store(p, v);
    else
        store_part(p, v, n);
}

static INLINE void copy(float* to, const float* from, int64_t width) {
    for_vectors(width, [=](int64_t i, int n) { put(to + i, take(from + i, n), n); });
}

// to = from / rms(from) * weight; the two may be the same row.
static INLINE void norm(float* to, const float* from, const float* weight, int64_t width,
                        float eps) {
    Vec squares{};
    for_vectors(width, [&](int64_t i, int n) {
        Vec x = take(from + i, n);
        squares += x * x;
    });
    Vec scale = splat(1 / std::sqrt(hsum(squares) / float(width) + eps));
    for_vectors(width, [=](int64_t i, int n) {
        put(to + i, take(from + i, n) * scale * take(weight + i, n), n);
    });
}

EXPORT void rms_norm(const float* x, int64_t x_stride, const float* weight, float* out,
                     int64_t num_rows, int64_t width, float eps) {
    for_rows(num_rows, width,
             [=](int64_t row) { norm(out + row * width, x + row * x_stride, weight, width, eps); });
}

// residual += x, then x = the norm of that.
EXPORT void add_rms_norm(float* x, float* residual, const float* weight, int64_t num_rows,
                         int64_t width, float eps) {
    for_rows(num_rows, width, [=](int64_t row) {
        float *to = x + row * width, *sum = residual + row * width;
        for_vectors(width,
                    [=](int64_t i, int n) { put(sum + i, take(sum + i, n) + take(to + i, n), n); });
        norm(to, sum, weight, width, eps);
    });
}

// out[num_rows][width] = act(x[.., :width]) * x[.., width:].
EXPORT void act_and_mul(int64_t kind, const float* x, float* out, int64_t num_rows, int64_t width) {
    for_rows(num_rows, 2 * width, [=](int64_t row) {
        const float* gate = x + row * 2 * width;
        for_vectors(width, [=](int64_t i, int n) {
            Vec up = take(gate + width + i, n);
            put(out + row * width + i, activate(Activation(kind), take(gate + i, n)) * up, n);
        });
    });
}

// Rows of weight[num_ids][width], whose first is that of id `start`; zeros for the ids of others.
EXPORT void embedding(const int32_t* ids, const float* weight, float* out, int64_t num_rows,
                      int64_t width, int64_t start, int64_t num_ids) {
    for_rows(num_rows, width, [=](int64_t row) {
        int64_t id = ids[row] - start;
        float* to = out + row * width;
        if (id >= 0 && id < num_ids)
            copy(to, weight + id * width, width);
        else
            std::memset(to, 0, width * sizeof(float));
    });
}

// Rows of width floats to the slots of both pools.
EXPORT void store_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                     float* k_pool, float* v_pool, const int64_t* slots, int64_t num_rows,
                     int64_t width) {
    for_rows(num_rows, 2 * width, [=](int64_t row) {
        copy(k_pool + slots[row] * width, k + row * k_stride, width);
        copy(v_pool + slots[row] * width, v + row * v_stride, width);
    });
}

// The first rotary_dim elements of a head by cosines and sines; `to` may be `from`.
static INLINE void rotate(float* to, const float* from, const float* cos_sin, int64_t rotary_dim,
                          int64_t head_dim) {
    int64_t half = rotary_dim / 2;
    for_vectors(half, [=](int64_t i, int n) {
        Vec a = take(from + i, n), b = take(from + half + i, n);
        Vec cos = take(cos_sin + i, n), sin = take(cos_sin + half + i, n);
        put(to + i, a * cos - b * sin, n);
        put(to + half + i, b * cos + a * sin, n);
    });
    if (to != from) copy(to + rotary_dim, from + rotary_dim, head_dim - rotary_dim);
}

// Rotate x[num_rows][num_heads][head_dim], rows x_stride apart, where it is.
EXPORT void rope(float* x, int64_t x_stride, const int32_t* positions, const float* cache,
                 int64_t num_rows, int64_t num_heads, int64_t head_dim, int64_t rotary_dim) {
    for_rows(num_rows, num_heads * head_dim, [=](int64_t row) {
        for (int64_t head = 0; head < num_heads; ++head) {
            float* at = x + row * x_stride + head * head_dim;
            rotate(at, at, cache + positions[row] * rotary_dim, rotary_dim, head_dim);
        }
    });
}

// What lies between the q/k/v product and attention: norms of the heads (where there are weights),
// rotation of q where it is, k and v to their slots.
EXPORT void norm_rope_store(float* qkv, int64_t num_rows, int64_t num_q, int64_t num_kv,
                            int64_t head_dim, const float* q_norm, const float* k_norm, float eps,
                            const int32_t* positions, const float* cache, int64_t rotary_dim,
                            float* k_pool, float* v_pool, const int64_t* slots) {
    int64_t width = (num_q + 2 * num_kv) * head_dim, kv_width = num_kv * head_dim;
    for_rows(num_rows, width, [=](int64_t row) {
        float* heads = qkv + row * width;
        float* k_slot = k_pool + slots[row] * kv_width;
        const float* cos_sin = cache + positions[row] * rotary_dim;
        for (int64_t head = 0; head < num_q + num_kv; ++head) {
            float* at = heads + head * head_dim;
            const float* weight = head < num_q ? q_norm : k_norm;
            if (weight) norm(at, at, weight, head_dim, eps);
            rotate(head < num_q ? at : k_slot + (head - num_q) * head_dim, at, cos_sin, rotary_dim,
                   head_dim);
        }
        copy(v_pool + slots[row] * kv_width, heads + (num_q + num_kv) * head_dim, kv_width);
    });
}
