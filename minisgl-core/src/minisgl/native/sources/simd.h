// Vectors of float as wide as the machine's registers: AVX-512, AVX, NEON and SSE alike.
//
// +, -, * and / work on Vec as they are; a * b + c becomes one fused instruction where there is
// one. Only what the compiler's vector extension lacks is here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#include <immintrin.h>
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(VECTOR_BYTES)));
constexpr int LANES = VECTOR_BYTES / 4;

INLINE Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

INLINE Vec splat(float x) { return x - Vec{}; }

// The first n lanes (0..LANES), zeros behind them; nothing behind them is read.
INLINE Vec load_part(const float* p, int n) {
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    float lanes[LANES] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
#endif
}

INLINE void store_part(float* p, Vec v, int n) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
    for (int i = 0; i < n; ++i) p[i] = v[i];
#endif
}

// Lanes of a and b in turn: a0 b0 a1 b1 ..., the first and the second half of that.
INLINE void interleave(Vec& a, Vec& b) {
    IntVec first, second;
    for (int i = 0; i < LANES; ++i) {
        first[i] = i / 2 + (i % 2) * LANES;
        second[i] = first[i] + LANES / 2;
    }
#if defined(__clang__)
    Vec low, high;
    for (int i = 0; i < LANES; ++i) {
        low[i] = i % 2 ? b[i / 2] : a[i / 2];
        high[i] = i % 2 ? b[(i + LANES) / 2] : a[(i + LANES) / 2];
    }
#else
    Vec low = __builtin_shuffle(a, b, first), high = __builtin_shuffle(a, b, second);
#endif
    a = low, b = high;
}

// Rows and columns change places.
INLINE void transpose(Vec (&rows)[LANES]) {
    for (int width = LANES; width > 1; width /= 2) {
        Vec next[LANES];
        for (int i = 0; i < LANES / 2; ++i) {
            next[2 * i] = rows[i], next[2 * i + 1] = rows[i + LANES / 2];
            interleave(next[2 * i], next[2 * i + 1]);
        }
        for (int i = 0; i < LANES; ++i) rows[i] = next[i];
    }
}

// One instruction on x86, which GCC does not make of a choice that minds NaN.
#if defined(__AVX512F__)
INLINE Vec max(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Vec min(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
INLINE Vec max(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Vec min(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
#endif

// The lanes turned round: lane 0 holds what lane WIDTH held.
template <int WIDTH>
INLINE Vec turned(Vec v) {
#if defined(__clang__)
    Vec turned = v;
    for (int i = 0; i < LANES; ++i) turned[i] = v[(i + WIDTH) % LANES];
    return turned;
#else
    IntVec from;
    for (int i = 0; i < LANES; ++i) from[i] = (i + WIDTH) % LANES;
    return __builtin_shuffle(v, from);
#endif
}

// Sum and maximum of all lanes, in an order that depends on the width alone.
template <int WIDTH = LANES / 2>
INLINE float hsum(Vec v) {
    if constexpr (WIDTH == 0)
        return v[0];
    else
        return hsum<WIDTH / 2>(v + turned<WIDTH>(v));
}

template <int WIDTH = LANES / 2>
INLINE float hmax(Vec v) {
    if constexpr (WIDTH == 0)
        return v[0];
    else
        return hmax<WIDTH / 2>(max(v, turned<WIDTH>(v)));
}

// exp to 2 units in the last place; 0 below -87.3 (-inf included), infinity-free above 88.
INLINE Vec exp(Vec x) {
    const Vec low = splat(-87.336544f), high = splat(88.3762626647949f);
    IntVec is_zero = x < low;
    x = min(max(x, low), high);
    // x = n ln 2 + r, |r| <= ln 2 / 2; adding and taking off 1.5 * 2^23 rounds to an integer.
    const Vec magic = splat(12582912.0f);
    Vec shifted = x * splat(1.44269504088896341f) + magic;
    Vec n = shifted - magic;
    Vec r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    Vec y = splat(1.9875691500e-4f);
    y = y * r + splat(1.3981999507e-3f);
    y = y * r + splat(8.3334519073e-3f);
    y = y * r + splat(4.1665795894e-2f);
    y = y * r + splat(1.6666665459e-1f);
    y = y * r + splat(5.0000001201e-1f);
    y = y * r * r + r + splat(1.0f);
    IntVec bits = (IntVec)shifted << 23;  // the low bits of shifted are n
    Vec scaled = (Vec)((IntVec)y + bits);
    return (Vec)((IntVec)scaled & ~is_zero);
}
