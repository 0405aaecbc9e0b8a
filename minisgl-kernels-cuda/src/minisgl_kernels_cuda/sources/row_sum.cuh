// The sum over the threads that share a row.
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
