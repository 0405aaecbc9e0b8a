// Keys, values and queries of 16-bit elements as the matrices of an mma. Keys and values are loaded
// from a tile's slot as matrices of 8 x 8 elements, values turned.
#pragma once
#include "device.cuh"

#ifndef MINISGL_SIMULATOR
// Transpose 8 x 8 elements of 16 bits, of which a lane has two of row g.
INLINE u32 transpose(u32 pair) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// Four matrices of 8 x 8 elements from shared memory, of which a lane gets two elements of row g
// each, or of column g where they are turned. Lanes 8 i .. 8 i + 7 say where the rows of matrix i
// are.
#define LOAD_MATRICES(NAME, HOW)                                                              \
    INLINE uint4 NAME(Address row) {                                                          \
        uint4 pairs;                                                                          \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" HOW ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                     : "=r"(pairs.x), "=r"(pairs.y), "=r"(pairs.z), "=r"(pairs.w)             \
                     : "r"(row)                                                               \
                     : "memory");                                                             \
        return pairs;                                                                         \
    }
LOAD_MATRICES(load_matrices, "")
LOAD_MATRICES(load_turned_matrices, ".trans")
#endif

// Where a piece of a row lies in a tile's slot: of a key, or behind KEYS keys of a value. Pieces change
// places so that those of a column of a matrix lie in different banks.
template <int D>
INLINE int place_of(int row, int piece) {
    return row * (D / PIECE) + (piece ^ row % 8);
}

// From there to one that is rows and pieces further, which have no bit in common with the first ones:
// slots are aligned to 8 pieces, so that this is a change of the address' bits.
template <int D>
INLINE Address further(Address at, int rows, int pieces) {
    return (at ^ (rows ^ pieces) % 8 * 16) + (rows * (D / PIECE) + pieces / 8 * 8) * 16;
}

// Where this lane's piece of its i-th key goes, and of that key's value.
template <int D>
INLINE Address place_of_key(uint4* slot, int i) {
    int first = place_of<D>(Rows<D>::key(0), Rows<D>::piece());
    return further<D>(address_of(slot + first), i * Rows<D>::AT_ONCE, 0);
}
template <int D>
INLINE Address place_of_value(uint4* slot, int i) {
    return place_of_key<D>(slot, i) + KEYS * D / PIECE * 16;
}

// The dimension of a lane's sums i (+ 2) of a tile of 16, by half of the tile.
template <int D>
INLINE int dimension(int tile, int half) {
    return tile * 16 + half * 8 + threadIdx.x % 32 / 4;
}

// The right matrix of the scores: a lane has elements 2t and 2t + 1 of each piece of head g.
template <int D>
struct Queries {
    static constexpr int PIECES = D / PIECE;
    u32 pairs[PIECES];
    INLINE void load(const scalar* from, int num_heads) {
        int head = threadIdx.x % 32 / 4;
        const u32* first = reinterpret_cast<const u32*>(from + head * D) + threadIdx.x % 4;
#pragma unroll
        for (int p = 0; p < PIECES; p++) pairs[p] = head < num_heads ? first[p * 4] : 0;
    }
};

// Scores of this lane's two keys and two heads.
template <int D>
INLINE void score(float (&w)[4], const Queries<D>& q, const uint4* slot) {
    int lane = threadIdx.x % 32;
    Address row = address_of(slot + place_of<D>(lane % 16, lane / 16));
    float sums[2][4] = {};  // two chains of products, as each waits for the one before
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
        uint4 keys = load_matrices(further<D>(row, 0, 2 * j));
        mma(sums[j % 2], keys.x, keys.y, keys.z, keys.w, q.pairs[2 * j], q.pairs[2 * j + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = sums[0][i] + sums[1][i];
}

// The weights of a tile as the right matrix: a lane has those of head g for four keys.
struct Weights {
    u32 pairs[2];
    INLINE explicit Weights(const float (&w)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) pairs[i] = transpose(narrow_pair(w[2 * i], w[2 * i + 1]));
    }
};

// The values of a tile, turned, as left matrices of 16 dimensions each.
template <int D>
struct Values {
    static constexpr int TILES = D / 16;
    uint4 tiles[TILES];
    INLINE explicit Values(const uint4* slot) {
        int lane = threadIdx.x % 32;
        int key = lane / 16 * 8 + lane % 8;
        Address row = address_of(slot + place_of<D>(KEYS + key, lane / 8 % 2));
#pragma unroll
        for (int j = 0; j < TILES; j++)
            tiles[j] = load_turned_matrices(further<D>(row, 0, 2 * j));
    }
    INLINE void add(float (&sums)[TILES][4], const Weights& w) const {
#pragma unroll
        for (int j = 0; j < TILES; j++)
            mma(sums[j], tiles[j].x, tiles[j].y, tiles[j].z, tiles[j].w, w.pairs[0], w.pairs[1]);
    }
};
