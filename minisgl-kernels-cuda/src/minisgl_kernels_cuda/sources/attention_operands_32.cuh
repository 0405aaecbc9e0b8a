// Keys, values and queries of float32 as the matrices of mmas that take 10 bits of mantissa: every
// number is multiplied in two parts. A lane reads 16 bytes of a key and calls them the inputs of its
// slots.
#pragma once
#include "device.cuh"

#ifndef MINISGL_SIMULATOR
// c[16 x 8] += a[16 x 8] b[8 x 8] for float32 cut to 10 bits of mantissa.
INLINE void mma_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

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

// Where a piece of a key or value lies in a tile's slot. Pieces of a row change places so that
// lanes that read at the same time meet different banks.
template <int D>
INLINE int key_place(int key, int piece) {
    return key * (D / PIECE) + (piece ^ key % 2 * 4);
}
template <int D>
INLINE int value_place(int key, int piece) {
    return (KEYS + key) * (D / PIECE) + (piece ^ key % 4 * 2);
}

// Where this lane's piece of its i-th key goes, and of that key's value.
template <int D>
INLINE uint4* place_of_key(uint4* slot, int i) {
    return slot + key_place<D>(Rows<D>::key(i), Rows<D>::piece());
}
template <int D>
INLINE uint4* place_of_value(uint4* slot, int i) {
    return slot + value_place<D>(Rows<D>::key(i), Rows<D>::piece());
}

// The dimension of a lane's sums i (+ 2) of a tile of 16, by half of the tile: a lane has whole
// pieces.
template <int D>
INLINE int dimension(int tile, int half) {
    int e = tile + half * (D / 16);
    return (e / PIECE * 8 + threadIdx.x % 32 / 4) * PIECE + e % PIECE;
}

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

// Scores of this lane's two keys and two heads.
template <int D>
INLINE void score(float (&w)[4], const Queries<D>& q, const uint4* slot) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float rest[4] = {};  // two chains of products, as each waits for the one before
    w[0] = w[1] = w[2] = w[3] = 0.f;
#pragma unroll
    for (int p = 0; p < Queries<D>::PIECES; p++) {
        uint4 upper = slot[key_place<D>(g, p * 4 + t)];
        uint4 lower = slot[key_place<D>(g + 8, p * 4 + t)];
        multiply(w, upper.x, lower.x, upper.y, lower.y, q.pieces[p].x, q.pieces[p].y);
        multiply(rest, upper.z, lower.z, upper.w, lower.w, q.pieces[p].z, q.pieces[p].w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] += rest[i];
}

// The weights of a tile as the right matrix: a lane has those of head g for keys t + 4 i.
struct Weights {
    u32 words[4];
    INLINE explicit Weights(const float (&w)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int lane = ((threadIdx.x % 4 + 4 * i) % 8) * 4 + threadIdx.x % 32 / 8;
            float even = __shfl_sync(FULL_WARP, w[i / 2 * 2], lane);
            float odd = __shfl_sync(FULL_WARP, w[i / 2 * 2 + 1], lane);
            words[i] = __float_as_uint(threadIdx.x / 4 % 2 ? odd : even);
        }
    }
};

// The values of keys t + 4 i, as columns of the left matrix. They stay in the slot until they are
// needed: there are not as many registers.
template <int D>
struct Values {
    static constexpr int TILES = D / 16, PIECES = D / PIECE / 8;
    const uint4* slot;
    INLINE explicit Values(const uint4* slot) : slot(slot) {}
    INLINE void add(float (&sums)[TILES][4], const Weights& w) const {
        uint4 pieces[4][PIECES];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int p = 0; p < PIECES; p++)
                pieces[i][p] =
                    slot[value_place<D>(threadIdx.x % 4 + 4 * i, threadIdx.x % 32 / 4 + p * 8)];
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                multiply(sums[j], word(pieces[i], j), word(pieces[i], TILES + j),
                         word(pieces[i + 1], j), word(pieces[i + 1], TILES + j), w.words[i],
                         w.words[i + 1]);
    }
    static INLINE u32 word(const uint4 (&pieces)[PIECES], int index) {
        const uint4& piece = pieces[index / 4];
        return index % 4 == 0   ? piece.x
               : index % 4 == 1 ? piece.y
               : index % 4 == 2 ? piece.z
                                : piece.w;
    }
};
