// A warp's work on a tile of 16 keys in attention.cu: scores, weights and sums, in registers.
//
// Lane (g, t) = (lane / 4, lane % 4) holds of the scores those of keys g and g + 8 for the heads
// 2t and 2t + 1, and of the sums those of the same heads for the dimensions
//     e / PIECE * 8 PIECE + g PIECE + e % PIECE,    e = j and j + D / 16 for tile j,
// so that a lane's values are whole pieces of memory.
#pragma once
#include "device.cuh"

constexpr int KEYS = 16;      // of a tile
constexpr int GROUP = 8;      // query heads that are served together

template <int D, int WARPS>
struct Shape {
    static constexpr int SLOT = D / PIECE * 32;        // uint4 of a tile: keys, then values
    static constexpr int TILES = D / 16;               // of the sums, 16 dimensions each
    static constexpr int PARTIAL = TILES * 32 + 4;     // float4 of sums in memory
    static constexpr int MINE = TILES > WARPS ? TILES / WARPS : 1;  // a warp's share of a merge
    static constexpr int BLOCKS = 12 / WARPS;          // per multiprocessor, as plans count on
};

#ifndef MINISGL_SIMULATOR
// Transpose 8 x 8 elements of 16 bits, of which a lane has two of row g.
INLINE u32 transpose(u32 pair) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// c[16 x 8] += a[16 x 8] b[8 x 8] for float32 cut to 10 bits of mantissa.
INLINE void mma_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

#if MINISGL_DTYPE == MINISGL_F32
// The two halves of a float32 are multiplied apart; what is left out is 2^-21 of the product.
INLINE u32 high(u32 bits) { return bits & 0xffffe000u; }
INLINE u32 low(u32 bits) {
    return __float_as_uint(__uint_as_float(bits) - __uint_as_float(high(bits)));
}
INLINE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_tf32(c, low(a0), low(a1), low(a2), low(a3), high(b0), high(b1));
    mma_tf32(c, high(a0), high(a1), high(a2), high(a3), low(b0), low(b1));
    mma_tf32(c, high(a0), high(a1), high(a2), high(a3), high(b0), high(b1));
}
#else
INLINE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma(c, a0, a1, a2, a3, b0, b1);
}
#endif

// The keys of a tile that a lane has: rows of the left matrix in the product with the queries, and
// columns of the left matrix in that with the weights.
INLINE int key_of_row(int i) { return threadIdx.x % 32 / 4 + 8 * i; }
INLINE int key_of_column(int i) {
    int t = threadIdx.x % 4;
    return PIECE == 8 ? 2 * t + i % 2 + i / 2 * 8 : t + 4 * i;
}

// Where a piece of a key or value lies in a tile's slot. Pieces of a row change places so that
// lanes that read at the same time meet different banks.
template <int D>
INLINE int key_place(int key, int piece) {
    return key * (D / PIECE) + (piece ^ key % 2 * 4);
}
template <int D>
INLINE int value_place(int key, int piece) {
    int column = PIECE == 8 ? key / 2 % 4 : key % 4;  // lane % 4 of those who read it
    return (KEYS + key) * (D / PIECE) + (piece ^ column * 2);
}

// How a warp copies a tile: neighbouring lanes take neighbouring pieces, whole rows of memory at a
// time. Requests for less than a row each (64 bytes of 8 keys, say) cost a third of the bandwidth.
template <int D>
struct Rows {
    static constexpr int LANES = D / PIECE < 32 ? D / PIECE : 32;  // that share a row
    static constexpr int AT_ONCE = 32 / LANES;
    static constexpr int COUNT = KEYS / AT_ONCE;
    static INLINE int key(int i) { return i * AT_ONCE + threadIdx.x % 32 / LANES; }

    // Start copying this lane's piece of its i-th key and value; `from` counts pieces.
    static INLINE void copy(uint4* slot, int i, const scalar* keys, const scalar* values, u32 from,
                            bool is_there) {
        int piece = threadIdx.x % LANES;
        from += piece;
        copy_async(slot + key_place<D>(key(i), piece), reinterpret_cast<const uint4*>(keys) + from,
                   is_there);
        copy_async(slot + value_place<D>(key(i), piece),
                   reinterpret_cast<const uint4*>(values) + from, is_there);
    }
};

// The right matrix of the scores: a lane has pieces of head g.
template <int D>
struct Queries {
    static constexpr int PIECES = D / PIECE / 4;
    uint4 pieces[PIECES];
    INLINE void load(const scalar* from, int num_heads) {
        int head = threadIdx.x % 32 / 4;
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            pieces[p] = head < num_heads
                            ? *reinterpret_cast<const uint4*>(
                                  from + head * D + (p * 4 + threadIdx.x % 4) * PIECE)
                            : make_uint4(0, 0, 0, 0);
    }
};

// What some keys come to: per head the greatest score, the sum of 2^(score - greatest), and the
// values times these. TILES of the tiles, from any one on.
template <int TILES>
struct Sums {
    float greatest[2], sum[2];
    float o[TILES][4];

    INLINE void clear() {
        greatest[0] = greatest[1] = -INFINITE;
        sum[0] = sum[1] = 0.f;
#pragma unroll
        for (int j = 0; j < TILES; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
    }

    // Refer to other greatest scores, which are finite and no smaller.
    INLINE void rescale(float first, float second) {
        float scales[2] = {exp2_fast(greatest[0] - first), exp2_fast(greatest[1] - second)};
        greatest[0] = first;
        greatest[1] = second;
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
            to[ALL * 32 + lane] = make_float4(greatest[0], greatest[1], sum[0], sum[1]);
    }

    template <int ALL>
    INLINE void take(const float4* from, int first) {
        int lane = threadIdx.x % 32;
        float4 head = from[ALL * 32 + lane % 4];
        greatest[0] = head.x;
        greatest[1] = head.y;
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
        float both[2] = {fmaxf(greatest[0], other.greatest[0]),
                         fmaxf(greatest[1], other.greatest[1])};
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
        int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (h >= num_heads) continue;
            float inverse = divide_fast(1.f, sum[h]);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    int e = first + j + i * (D / 16);
                    to[h * D + e / PIECE * 8 * PIECE + g * PIECE + e % PIECE] =
                        narrow(o[j][2 * i + h] * inverse);
                }
        }
    }
};

// The weights of a tile as the right matrix: a lane has those of head g for its four columns.
struct Weights {
#if MINISGL_DTYPE == MINISGL_F32
    u32 words[4];
    INLINE explicit Weights(const float (&w)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int lane = (key_of_column(i) % 8) * 4 + threadIdx.x % 32 / 8;
            float even = __shfl_sync(FULL_WARP, w[i / 2 * 2], lane);
            float odd = __shfl_sync(FULL_WARP, w[i / 2 * 2 + 1], lane);
            words[i] = __float_as_uint(threadIdx.x / 4 % 2 ? odd : even);
        }
    }
#else
    u32 words[2];
    INLINE explicit Weights(const float (&w)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            words[i] = transpose(u32(narrow(w[2 * i])) | u32(narrow(w[2 * i + 1])) << 16);
    }
#endif
};

// Element e of a lane's values of its keys, as words of the left matrix.
template <int D>
struct Values {
    static constexpr int PIECES = D / PIECE / 8;
    uint4 pieces[4][PIECES];
    INLINE explicit Values(const uint4* slot) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int p = 0; p < PIECES; p++)
                pieces[i][p] = slot[value_place<D>(key_of_column(i), threadIdx.x % 32 / 4 + p * 8)];
    }
    INLINE u32 word(int i, int index) const {
        const uint4& piece = pieces[i][index / 4];
        return index % 4 == 0   ? piece.x
               : index % 4 == 1 ? piece.y
               : index % 4 == 2 ? piece.z
                                : piece.w;
    }
    // Of keys i and i + 1, for elements of 16 bits.
    INLINE u32 pair(int i, int e) const {
        return __byte_perm(word(i, e / 2), word(i + 1, e / 2), e % 2 ? 0x7632 : 0x5410);
    }
};

template <int D>
INLINE void add_values(Sums<D / 16>& sums, const Values<D>& v, const Weights& w) {
    constexpr int TILES = D / 16;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
#if MINISGL_DTYPE == MINISGL_F32
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            multiply(sums.o[j], v.word(i, j), v.word(i, TILES + j), v.word(i + 1, j),
                     v.word(i + 1, TILES + j), w.words[i], w.words[i + 1]);
#else
        multiply(sums.o[j], v.pair(0, j), v.pair(0, TILES + j), v.pair(2, j),
                 v.pair(2, TILES + j), w.words[0], w.words[1]);
#endif
    }
}

// Add a tile of num_keys keys, at least 1.
template <int D>
INLINE void attend(Sums<D / 16>& sums, const Queries<D>& q, const uint4* slot, int num_keys,
                   float scale) {
    int quarter = threadIdx.x % 4;
    float w[4] = {}, rest[4] = {};  // two chains of products, as each waits for the one before
#pragma unroll
    for (int p = 0; p < Queries<D>::PIECES; p++) {
        uint4 upper = slot[key_place<D>(key_of_row(0), p * 4 + quarter)];
        uint4 lower = slot[key_place<D>(key_of_row(1), p * 4 + quarter)];
        multiply(w, upper.x, lower.x, upper.y, lower.y, q.pieces[p].x, q.pieces[p].y);
        multiply(rest, upper.z, lower.z, upper.w, lower.w, q.pieces[p].z, q.pieces[p].w);
    }
    Values<D> v(slot);
    __syncwarp();  // the slot may be filled again
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = key_of_row(i / 2) < num_keys ? (w[i] + rest[i]) * scale : -INFINITE;
    float greatest[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        greatest[h] = fmaxf(w[h], w[2 + h]);
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1)
            greatest[h] = fmaxf(greatest[h], __shfl_xor_sync(FULL_WARP, greatest[h], offset));
        greatest[h] = fmaxf(greatest[h], sums.greatest[h]);
    }
    sums.rescale(greatest[0], greatest[1]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = exp2_fast(w[i] - greatest[i % 2]);
        sums.sum[i % 2] += w[i];
    }
    add_values(sums, v, Weights(w));
}
