// A tile of prefill attention as a warpgroup computes it: the scores of 64 rows (heads of tokens)
// and KEYS keys, the weights they become, and the values times these.
//
// Thread t of the warpgroup has two rows, t / 32 * 16 + t % 32 / 4 and 8 below, and of each the
// columns j * 8 + t % 4 * 2 (+ 1): of the scores keys, of the sums elements of the head.
#pragma once
#include "prefill_jobs.cuh"

typedef float Scores[KEYS / 8][4];
typedef u32 Weights[KEYS / 16][4];

// The token of a row of a job. Exact: there are at most ROWS heads, and as many rows.
struct Tokens {
    u32 inverse;
    INLINE explicit Tokens(int ratio) : inverse((65536 + ratio - 1) / ratio) {}
    INLINE int of(int row) const { return int(u32(row) * inverse >> 16); }
};

INLINE int row_of_thread(int which) {
    return (threadIdx.x / 128 - 1) * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 +
           which * 8;
}

// Of this thread's rows: the keys that are seen begin ..< end.
struct Seen {
    int begin[2], end[2];

    INLINE Seen(const Job& job, const Tokens& tokens, int window) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // Rows behind the last token take part, and are not written.
            int position = job.position + min(tokens.of(row_of_thread(h)), job.num_tokens - 1);
            end[h] = position + 1;
            begin[h] = window < 0 ? 0 : position - window;
        }
    }
    INLINE void mask(Scores& scores, int tile, bool has_window) const {
        int first = tile * KEYS + threadIdx.x % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            hide(scores, h, [to = end[h] - first](int key) { return key >= to; });
            if (has_window) hide(scores, h, [from = begin[h] - first](int key) { return key < from; });
        }
    }

   private:
    template <class F>
    INLINE static void hide(Scores& scores, int h, F is_hidden) {
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (is_hidden(j * 8 + i)) scores[j][2 * h + i] = -INFINITE;
    }
};

// What is known of the rows up to some tile: the greatest score, the sum of the weights
// 2^(score - greatest) of this thread's columns, and what earlier sums are to be scaled by.
struct Softmax {
    float greatest[2], sum[2], factor[2];

    INLINE void clear() {
#pragma unroll
        for (int h = 0; h < 2; h++) greatest[h] = -INFINITE, sum[h] = 0.f;
    }
    // Scores, not scaled yet, become weights.
    INLINE void add(Scores& scores, float scale) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = greatest[h];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                most = fmaxf(most, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
            float base = raise(h, most, scale);
            float even = 0.f, odd = 0.f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
                even += scores[j][2 * h] = exp2_fast(scores[j][2 * h] * scale - base);
                odd += scores[j][2 * h + 1] = exp2_fast(scores[j][2 * h + 1] * scale - base);
            }
            sum[h] = sum[h] * factor[h] + (even + odd);
        }
    }
    // Refer to another greatest score, not scaled yet and no smaller; returns what is subtracted
    // from scaled ones. A row may see none of the keys so far.
    INLINE float raise(int h, float most, float scale) {
        float base = most == -INFINITE ? 0.f : most * scale;
        factor[h] = exp2_fast(greatest[h] * scale - base);
        greatest[h] = most;
        return base;
    }
    INLINE void add_columns() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(FULL_WARP, sum[h], 1);
            sum[h] += __shfl_xor_sync(FULL_WARP, sum[h], 2);
        }
    }
    // Behind the last key: what the sums of the values are to be scaled by.
    INLINE void finish() {
#pragma unroll
        for (int h = 0; h < 2; h++) factor[h] = divide_fast(1.f, sum[h]);
    }
};

template <int N>
INLINE void rescale(float (&sums)[N][4], const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[j][i] *= factor[i / 2];
}

// Weights as the left matrix of a product: columns of the scores are its columns.
INLINE void narrow_weights(Weights& weights, const Scores& scores) {
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            weights[j / 2][j % 2 * 2 + h] = narrow_pair(scores[j][2 * h], scores[j][2 * h + 1]);
}

template <int D>
INLINE void start_scores(Scores& scores, Operand queries, Operand keys) {
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        int half = step / 4, piece = step % 4 * 2;
        Operand left = queries + half * ROWS * LINE + piece;
        Operand right = keys + half * KEYS * LINE + piece;
        if (step) multiply_add<KEYS>(scores, left, right);
        else multiply<KEYS>(scores, left, right);
    }
}

template <int D>
INLINE void start_values(float (&sums)[D / 8][4], const Weights& weights, Operand values) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        multiply_add_columns<D>(sums, weights[step], values + step * 16 * LINE);
}

// Values from line num_keys on are whatever was there: with weights of 0 they have to be finite.
// Every warpgroup does it for itself, and so do all of its threads.
template <int D>
INLINE void clear_behind(uint4* values, int num_keys, int barrier) {
    int first = num_keys * LINE;
#pragma unroll 1
    for (int half = 0; half < D / 64; half++)
#pragma unroll 1
        for (int i = first + threadIdx.x % 128; i < KEYS * LINE; i += 128)
            values[half * KEYS * LINE + i] = make_uint4(0, 0, 0, 0);
    publish_operands();
    warpgroup_barrier(barrier);
}

template <int D>
INLINE void write_out(const Step& s, const Job& job, const Tokens& tokens,
                      const float (&sums)[D / 8][4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = row_of_thread(h), token = tokens.of(row), head = row - token * s.ratio;
        if (token >= job.num_tokens) continue;
        i64 line = (i64(job.token + token) * s.num_kv_heads + job.head) * s.ratio + head;
        scalar* to = s.out + line * D + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            *reinterpret_cast<u32*>(to + j * 8) = narrow_pair(sums[j][2 * h], sums[j][2 * h + 1]);
    }
}
