// A warp's work on a tile of 16 keys in attention.cu: scores, weights and sums, in registers.
//
// Scores are keys times queries and the result is values (turned) times weights, so that up to 8
// query heads are the 8 columns of an mma. Lane (g, t) = (lane / 4, lane % 4) holds of the scores
// those of keys g and g + 8 for the heads 2t and 2t + 1, and of the sums those of the same heads for
// two dimensions in each 16. How keys and values become matrices is up to the element type.
#pragma once
#include "device.cuh"

constexpr int KEYS = 16;  // of a tile
constexpr int GROUP = 8;  // query heads that are served together

// How a warp copies a tile: neighbouring lanes take neighbouring pieces, whole rows of memory at a
// time. Requests for less than a row each (64 bytes of 8 keys, say) cost a third of the bandwidth.
template <int D>
struct Rows {
    static constexpr int LANES = D / PIECE < 32 ? D / PIECE : 32;  // that share a row
    static constexpr int AT_ONCE = 32 / LANES;
    static constexpr int COUNT = KEYS / AT_ONCE;
    static INLINE int key(int i) { return i * AT_ONCE + threadIdx.x % 32 / LANES; }
    static INLINE int piece() { return threadIdx.x % LANES; }
};

#if MINISGL_DTYPE == MINISGL_F32
#include "attention_operands_32.cuh"
#else
#include "attention_operands_16.cuh"
#endif

// How much greater than the base of a warp's sums a score may be before it becomes their base, as in
// FlashAttention 4: 2^8 times the weight is as exact, and most tiles need no new sums and no word with
// the other lanes.
constexpr float SLACK = 8.f;

template <int D, int WARPS>
struct Shape {
    static constexpr int SLOT = D / PIECE * 32;        // uint4 of a tile: keys, then values
    static constexpr int TILES = D / 16;               // of the sums, 16 dimensions each
    static constexpr int PARTIAL = TILES * 32 + 4;     // float4 of sums in memory
    static constexpr int MINE = TILES > WARPS ? TILES / WARPS : 1;  // a warp's share of a merge
    static constexpr int BLOCKS = 12 / WARPS;          // per multiprocessor, as plans count on
};

// What some keys come to: per head a base (the greatest score, or up to SLACK less), the sum of
// 2^(score - base), and the values times these. TILES of the tiles, from any one on.
template <int TILES>
struct Sums {
    float base[2], sum[2];
    float o[TILES][4];

    INLINE void clear() {
        base[0] = base[1] = -INFINITE;
        sum[0] = sum[1] = 0.f;
#pragma unroll
        for (int j = 0; j < TILES; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
    }

    // Refer to other bases, which are finite and no smaller.
    INLINE void rescale(float first, float second) {
        float scales[2] = {exp2_fast(base[0] - first), exp2_fast(base[1] - second)};
        base[0] = first;
        base[1] = second;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] *= scales[h];
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                o[j][h] *= scales[h];
                o[j][2 + h] *= scales[h];
            }
        }
    }

    // Refer to the greatest of a tile's scores, of which this lane has two of each head, and of those
    // before.
    INLINE void refer_to(const float (&scores)[4]) {
        float both[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            both[h] = fmaxf(scores[h], scores[2 + h]);
#pragma unroll
            for (int offset = 4; offset < 32; offset <<= 1)
                both[h] = fmaxf(both[h], __shfl_xor_sync(FULL_WARP, both[h], offset));
            both[h] = fmaxf(both[h], base[h]);
        }
        rescale(both[0], both[1]);
    }

    // Each lane has summed up the weights of its own keys.
    INLINE void add_lanes() {
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) {
            sum[0] += __shfl_xor_sync(FULL_WARP, sum[0], offset);
            sum[1] += __shfl_xor_sync(FULL_WARP, sum[1], offset);
        }
    }

    // Write to memory that holds ALL tiles; these are those from `first` on.
    template <int ALL>
    INLINE void leave(float4* to, int first) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < TILES; j++)
            to[(first + j) * 32 + lane] = make_float4(o[j][0], o[j][1], o[j][2], o[j][3]);
        if (first == 0 && lane < 4)
            to[ALL * 32 + lane] = make_float4(base[0], base[1], sum[0], sum[1]);
    }

    template <int ALL>
    INLINE void take(const float4* from, int first) {
        int lane = threadIdx.x % 32;
        float4 head = from[ALL * 32 + lane % 4];
        base[0] = head.x;
        base[1] = head.y;
        sum[0] = head.z;
        sum[1] = head.w;
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            float4 part = from[(first + j) * 32 + lane];
            o[j][0] = part.x;
            o[j][1] = part.y;
            o[j][2] = part.z;
            o[j][3] = part.w;
        }
    }

    // Add sums from memory, of any keys or none; there are keys in these already.
    template <int ALL>
    INLINE void add(const float4* from, int first) {
        Sums other;
        other.template take<ALL>(from, first);
        float both[2] = {fmaxf(base[0], other.base[0]), fmaxf(base[1], other.base[1])};
        rescale(both[0], both[1]);
        other.rescale(both[0], both[1]);
#pragma unroll
        for (int h = 0; h < 2; h++) sum[h] += other.sum[h];
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[j][i] += other.o[j][i];
    }

    // Write the results; `to` is head 2t, and num_heads of the group are left from there.
    template <int D>
    INLINE void store(scalar* to, int first, int num_heads) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (h >= num_heads) continue;
            float inverse = divide_fast(1.f, sum[h]);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < TILES; j++)
                    to[h * D + dimension<D>(first + j, i)] = narrow(o[j][2 * i + h] * inverse);
        }
    }
};

// Add a tile of num_keys keys, at least 1.
template <int D>
INLINE void attend(Sums<D / 16>& sums, const Queries<D>& q, const uint4* slot, int num_keys,
                   float scale) {
    float w[4];
    score<D>(w, q, slot);
    Values<D> v(slot);
    bool is_greater = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = threadIdx.x % 32 / 4 + i / 2 * 8 < num_keys ? w[i] * scale : -INFINITE;
        // Not w > base + SLACK: beyond 2^27 that sum is rounded, and the weight may be too large.
        is_greater |= w[i] - sums.base[i % 2] > SLACK;
    }
    if (__any_sync(FULL_WARP, is_greater)) sums.refer_to(w);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = exp2_fast(w[i] - sums.base[i % 2]);
        sums.sum[i % 2] += w[i];
    }
    v.add(sums.o, Weights(w));
    __syncwarp();  // the slot may be filled again
}
