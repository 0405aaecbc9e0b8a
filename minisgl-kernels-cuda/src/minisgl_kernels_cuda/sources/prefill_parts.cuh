// Jobs of prefill attention whose keys are in several parts.
//
// Each warp that multiplies is on its own here, with the 16 rows that it has of every part: it
// leaves what they come to as its lanes have it, and counts itself in. The warp that comes last
// adds up what all have left, in the order of the parts, so that the result does not depend on who
// it is. Nobody waits for anybody.
#pragma once
#include "prefill_tile.cuh"

constexpr int WARPS = ROWS / 16;

// What a warp leaves of a part, as one of its lanes has it.
template <int D>
struct Partial {
    static constexpr int COUNT = D / 8 + 1, SIZE = COUNT * 32;
    float4 pieces[COUNT];  // the sums; then of two rows the greatest scores, and sums of weights

    INLINE void read(const float4* from) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) pieces[j] = from[j * 32 + threadIdx.x % 32];
    }
    INLINE static void write(float4* to, const float (&sums)[D / 8][4], const Softmax& softmax) {
        to += threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            to[j * 32] = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
        to[D / 8 * 32] = make_float4(softmax.greatest[0], softmax.greatest[1], softmax.sum[0],
                                     softmax.sum[1]);
    }
    // What is not there counts for nothing.
    INLINE void add_to(float (&sums)[D / 8][4], Softmax& softmax, float scale,
                       bool is_there) const {
        const float4& rest = pieces[D / 8];
        float greatest[2] = {rest.x, rest.y}, sum[2] = {rest.z, rest.w}, factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float score = is_there ? greatest[h] : -INFINITE;
            float base = softmax.raise(h, fmaxf(softmax.greatest[h], score), scale);
            factor[h] = exp2_fast(score * scale - base);
            softmax.sum[h] = softmax.sum[h] * softmax.factor[h] + sum[h] * factor[h];
        }
        rescale(sums, softmax.factor);
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            sums[j][0] += pieces[j].x * factor[0];
            sums[j][1] += pieces[j].y * factor[0];
            sums[j][2] += pieces[j].z * factor[1];
            sums[j][3] += pieces[j].w * factor[1];
        }
    }
};

// Leaves what a part comes to, and returns whether all parts are there; then it is what they come
// to together.
template <int D>
INLINE bool merge(const Step& s, const Job& job, float (&sums)[D / 8][4], Softmax& softmax) {
    // By the shuffle the compiler sees that all lanes have the same. Else it would give up the
    // registers that a warp shares, and the loop of the products would be a tenth longer.
    int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0) - 4, lane = threadIdx.x % 32;
    if (warp * 16 >= job.num_tokens * s.ratio) return false;  // none of its rows is written
    auto place = [&](int part) {
        return s.partials + (i64(job.place + part) * WARPS + warp) * Partial<D>::SIZE;
    };
    int* arrived = s.arrived + job.place * WARPS + warp;
    Partial<D>::write(place(job.part), sums, softmax);
    __syncwarp();
    int num_before = 0;
    if (lane == 0) num_before = arrive(arrived);
    if (__shfl_sync(FULL_WARP, num_before, 0) != job.num_parts - 1) return false;
    if (lane == 0) *arrived = 0;  // for the next kernel
    __syncwarp();
    softmax.clear();
#pragma unroll
    for (int j = 0; j < D / 8; j++) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.f;
    // Two at a time: most of what it takes is that they arrive.
#pragma unroll 1
    for (int part = 0; part < job.num_parts; part += 2) {
        bool has_other = part + 1 < job.num_parts;
        Partial<D> one, other;
        one.read(place(part));
        other.read(place(part + has_other));
        one.add_to(sums, softmax, s.scale, true);
        other.add_to(sums, softmax, s.scale, has_other);
    }
    return true;
}
