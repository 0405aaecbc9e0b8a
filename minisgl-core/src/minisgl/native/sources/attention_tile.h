// The arithmetic of attention: keys laid out by lanes, and softmax over tiles of queries and keys.
#pragma once

#include <cstdint>
#include <utility>

#include "simd.h"

// A tile of TILE_ROWS rows by TILE_VECTORS vectors of results fills the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_VECTORS = 4;
#else
constexpr int TILE_VECTORS = 2;
#endif
constexpr int TILE_ROWS = 6;

// Keep a vector that is used several times in a register; GCC would load it for each use.
#if defined(__x86_64__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define IN_REGISTER(v)
#endif

// c = keep * c + a . b for M rows and N vectors of columns; keep is one number per row.
template <int M, int N>
void product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int depth,
             float* c, int64_t c_stride, const float* keep) {
    Vec sum[M][N];
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j)
            sum[i][j] = keep ? splat(keep[i]) * load(c + i * c_stride + j * LANES) : Vec{};
    for (int d = 0; d < depth; ++d) {
        Vec row[N];
        for (int j = 0; j < N; ++j) {
            row[j] = load(b + d * b_stride + j * LANES);
            IN_REGISTER(row[j]);
        }
        for (int i = 0; i < M; ++i) {
            Vec x = splat(a[i * a_stride + d]);
            for (int j = 0; j < N; ++j) sum[i][j] += x * row[j];
        }
    }
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) store(c + i * c_stride + j * LANES, sum[i][j]);
}

typedef void (*Product)(const float*, int64_t, const float*, int64_t, int, float*, int64_t,
                        const float*);

template <int M, int... N>
constexpr Product products_of(int n, std::integer_sequence<int, N...>) {
    constexpr Product table[] = {product<M, N + 1>...};
    return table[n - 1];
}

template <int... M>
inline Product find_product(int m, int n, std::integer_sequence<int, M...>) {
    Product table[] = {products_of<M + 1>(n, std::make_integer_sequence<int, TILE_VECTORS>())...};
    return table[m - 1];
}

// The product for m rows, at most TILE_ROWS, and any number of vectors.
INLINE void multiply(int m, int vectors, const float* a, int64_t a_stride, const float* b,
                     int64_t b_stride, int depth, float* c, int64_t c_stride, const float* keep) {
    for (int j = 0; j < vectors; j += TILE_VECTORS) {
        int n = vectors - j < TILE_VECTORS ? vectors - j : TILE_VECTORS;
        Product run = find_product(m, n, std::make_integer_sequence<int, TILE_ROWS>());
        run(a, a_stride, b + j * LANES, b_stride, depth, c + j * LANES, c_stride, keep);
    }
}

// exp of numbers up to 0, to 2e-7 of themselves, 0 below -87: half the work of the exact one.
INLINE Vec weight_of(Vec x) {
    const Vec low = splat(-87.0f), magic = splat(12582912.0f);  // see exp
    IntVec is_seen = x > low;
    x = max(x, low);
    Vec shifted = x * splat(1.44269504088896341f) + magic;
    Vec r = x - (shifted - magic) * splat(0.693147180559945f);
    Vec y = splat(8.31253e-3f) * r + splat(4.189011e-2f);
    y = y * r + splat(1.6667114e-1f);
    y = y * r + splat(4.9999232e-1f);
    y = y * r + splat(1.0f);
    y = y * r + splat(1.0f);
    return (Vec)(((IntVec)y + ((IntVec)shifted << 23)) & is_seen);
}
