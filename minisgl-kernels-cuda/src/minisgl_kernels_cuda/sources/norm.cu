// Root-mean-square norms: a row is read once, kept in registers, and written once.
//
// Rounding follows the torch ops: the sum with the residual is rounded before it is normed, the
// quotient before it is multiplied by the weight.
#include "norm_parts.cuh"

struct Rows {
    i64 outer_stride, inner_stride;
    int num_inner;
    INLINE i64 offset(int row) const {
        return row / num_inner * outer_stride + row % num_inner * inner_stride;
    }
};

// Thread x holds the pieces x, x + blockDim.x, ... of the row.
template <int PIECES, bool HAS_RESIDUAL>
INLINE void norm_row(scalar* out, const scalar* x, scalar* residual, const scalar* weight, int n,
                     float eps, bool is_row) {
    Floats<PIECE> values[PIECES];
    Piece scales[PIECES];
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int at = (p * blockDim.x + threadIdx.x) * PIECE;
        if (at < n) scales[p] = load_piece(weight + at);
    }
    pdl_wait();
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int at = (p * blockDim.x + threadIdx.x) * PIECE;
        if (at >= n || !is_row) continue;
        Piece piece = load_piece(x + at);
        if (HAS_RESIDUAL) {
            piece = narrow(sum_of(widen(piece), widen(load_piece(residual + at))));
            store_piece(residual + at, piece);
        }
        values[p] = widen(piece);
        sum += squares(values[p]);
    }
    float scale = rsqrtf(row_sum(sum) / n + eps);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int at = (p * blockDim.x + threadIdx.x) * PIECE;
        if (at >= n || !is_row) continue;
        store_piece(out + at, normed(values[p], scale, scales[p]));
    }
}

// out[num_rows, n] contiguous; x strided by rows; weight[n].
template <int PIECES>
INLINE void rms_norm(scalar* out, const scalar* x, const scalar* weight, Rows rows, int num_rows,
                     int n, float eps) {
    pdl_launch();
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    bool is_row = row < num_rows;
    norm_row<PIECES, false>(out + i64(row) * n, x + (is_row ? rows.offset(row) : 0), nullptr,
                            weight, n, eps, is_row);
}

// x[num_rows, n] becomes the norm of x + residual, residual that sum; both contiguous.
template <int PIECES>
INLINE void fused_add_rms_norm(scalar* x, scalar* residual, const scalar* weight, int num_rows,
                               int n, float eps) {
    pdl_launch();
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    i64 at = i64(row) * n;
    norm_row<PIECES, true>(x + at, x + at, residual + at, weight, n, eps, row < num_rows);
}

#define MINISGL_NORMS(PIECES)                                                                     \
    extern "C" __global__ void rms_norm_##PIECES(scalar* out, const scalar* x,                    \
                                                 const scalar* weight, i64 outer, i64 inner,      \
                                                 int num_inner, int num_rows, int n, float eps) { \
        rms_norm<PIECES>(out, x, weight, Rows{outer, inner, num_inner}, num_rows, n, eps);        \
    }                                                                                             \
    extern "C" __global__ void fused_add_rms_norm_##PIECES(                                       \
        scalar* x, scalar* residual, const scalar* weight, int num_rows, int n, float eps) {      \
        fused_add_rms_norm<PIECES>(x, residual, weight, num_rows, n, eps);                        \
    }

MINISGL_NORMS(1)
MINISGL_NORMS(2)
MINISGL_NORMS(4)
