// Gated activations of rows: out[row, i] = act(x[row, i]) * x[row, n + i].
#include "activation.cuh"

// One thread makes 16 bytes of the result; blockIdx.x is the row.
template <Activation ACT>
INLINE void act_and_mul(scalar* out, const scalar* x, int n) {
    pdl_launch();
    pdl_wait();
    int at = (blockIdx.y * blockDim.x + threadIdx.x) * PIECE;
    if (at >= n) return;
    const scalar* row = x + i64(blockIdx.x) * 2 * n;
    Piece gate = load_piece(row + at), up = load_piece(row + n + at);
    store_piece(out + i64(blockIdx.x) * n + at, gated(ACT, widen(gate), widen(up)));
}

extern "C" __global__ void silu_and_mul(scalar* out, const scalar* x, int n) {
    act_and_mul<SILU>(out, x, n);
}
extern "C" __global__ void gelu_and_mul(scalar* out, const scalar* x, int n) {
    act_and_mul<GELU>(out, x, n);
}
extern "C" __global__ void gelu_tanh_and_mul(scalar* out, const scalar* x, int n) {
    act_and_mul<GELU_TANH>(out, x, n);
}
