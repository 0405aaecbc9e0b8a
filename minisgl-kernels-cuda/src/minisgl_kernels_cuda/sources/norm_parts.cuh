// Parts of a root-mean-square norm: the sum over the threads that share a row, and what becomes of
// a thread's elements.
#pragma once
#include "device.cuh"

constexpr int MAX_WARPS = 32;

// A row is threadIdx.y of a block of one-warp rows, or the whole block. Between two calls there is
// a barrier.
INLINE float row_sum(float value) {
    __shared__ float partial[MAX_WARPS];
    value = warp_sum(value);
    if (blockDim.x == 32) return value;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_sum(lane < int(blockDim.x / 32) ? partial[lane] : 0.f);
}

template <int N>
INLINE Floats<N> sum_of(Floats<N> a, const Floats<N>& b) {
#pragma unroll
    for (int i = 0; i < N; i++) a.v[i] += b.v[i];
    return a;
}

template <int N>
INLINE float squares(const Floats<N>& values) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) sum += values.v[i] * values.v[i];
    return sum;
}

// As the torch op rounds: the quotient before it is multiplied by the weight.
template <int N>
INLINE Pack<N> normed(Floats<N> values, float scale, const Pack<N>& weight) {
#pragma unroll
    for (int i = 0; i < N; i++) values.v[i] *= scale;
    values = rounded(values);
#pragma unroll
    for (int i = 0; i < N; i++) values.v[i] *= widen(weight.v[i]);
    return narrow(values);
}
