// What attention.cu does with heads as the q/k/v product left them: what qkv.cu does in a kernel of its
// own. Norms round where the torch op does; rotations are in float32 throughout.
#pragma once
#include "attention_tile.cuh"
#include "norm_parts.cuh"

// How heads become queries and keys.
struct Raw {
    const scalar *q_norm, *k_norm;  // [D], or both null: the model has none
    const float* cos_sin;           // [positions, D], cosines first; null: heads are ready
    float eps;
    INLINE bool is_raw() const { return cos_sin; }
};

template <int N>
struct alignas(N * sizeof(float)) Angles {
    float v[N];
};

template <int N>
INLINE Angles<N> load_angles(const float* from) {
    return *reinterpret_cast<const Angles<N>*>(from);
}

template <int N>
INLINE Pack<N> load_pack(const scalar* from) {
    return *reinterpret_cast<const Pack<N>*>(from);
}

// Norm and rotate a request's queries, of which four lanes share each head.
template <int D>
INLINE void make_ready(Queries<D>& q, const Raw& raw, int position) {
    constexpr int N = Queries<D>::RUN, HALF = Queries<D>::RUNS / 2;
    const float* angles = raw.cos_sin + i64(position) * D;
    float scale = 1.f;
    if (raw.q_norm) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * HALF; i++) sum += squares(q.get(i));
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        scale = rsqrtf(sum / D + raw.eps);
    }
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        int at = Queries<D>::start_of(i);
        Floats<N> a = q.get(i), b = q.get(HALF + i), x, y;
        if (raw.q_norm) {
            a = widen(normed(a, scale, load_pack<N>(raw.q_norm + at)));
            b = widen(normed(b, scale, load_pack<N>(raw.q_norm + D / 2 + at)));
        }
        Angles<N> cos = load_angles<N>(angles + at), sin = load_angles<N>(angles + D / 2 + at);
#pragma unroll
        for (int j = 0; j < N; j++) {
            x.v[j] = a.v[j] * cos.v[j] - b.v[j] * sin.v[j];
            y.v[j] = b.v[j] * cos.v[j] + a.v[j] * sin.v[j];
        }
        q.set(i, x);
        q.set(HALF + i, y);
    }
}

// The same for a piece of a key; as many lanes as a key has pieces have one each. All lanes of the
// warp call it.
template <int D>
INLINE Piece make_ready(const Piece& raw_piece, int piece, const Raw& raw, int position) {
    constexpr int PIECES = D / PIECE;
    Floats<PIECE> values = widen(raw_piece);
    if (raw.k_norm) {
        float sum = squares(values);
#pragma unroll
        for (int offset = PIECES / 2; offset; offset >>= 1)
            sum += __shfl_xor_sync(FULL_WARP, sum, offset);
        float scale = rsqrtf(sum / D + raw.eps);
        values = widen(normed(values, scale, load_piece(raw.k_norm + piece * PIECE)));
    }
    const float* angles = raw.cos_sin + i64(position) * D + piece % (PIECES / 2) * PIECE;
    Angles<PIECE> cos = load_angles<PIECE>(angles), sin = load_angles<PIECE>(angles + D / 2);
    bool is_second = piece >= PIECES / 2;
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        float partner = __shfl_xor_sync(FULL_WARP, values.v[i], PIECES / 2);
        values.v[i] = values.v[i] * cos.v[i] + (is_second ? partner : -partner) * sin.v[i];
    }
    return narrow(values);
}
