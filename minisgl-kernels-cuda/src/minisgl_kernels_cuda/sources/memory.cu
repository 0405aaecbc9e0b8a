// Rows that move: embedding look-up and the KV store. Bytes are copied 16 at a time, so one unit
// serves every element type.
#include "device.cuh"

// out[token] = weight[ids[token] - first], or zeros for an id of another rank. A row is
// num_pieces pieces of 16 bytes; blockIdx.x is the token.
extern "C" __global__ void embedding(uint4* out, const int* ids, const uint4* weight,
                                     int vocab_start, int num_rows, int num_pieces) {
    pdl_launch();
    pdl_wait();
    i64 row = i64(ids[blockIdx.x]) - vocab_start;
    bool is_ours = row >= 0 && row < num_rows;
    uint4* to = out + i64(blockIdx.x) * num_pieces;
    for (int i = threadIdx.x; i < num_pieces; i += blockDim.x)
        to[i] = is_ours ? weight[row * num_pieces + i] : make_uint4(0, 0, 0, 0);
}

// k_pool[slots[token]] = k[token], and v likewise; strides of k and v are in pieces.
extern "C" __global__ void store_kv(const uint4* k, const uint4* v, uint4* k_pool, uint4* v_pool,
                                    const i64* slots, i64 k_stride, i64 v_stride, int num_pieces) {
    pdl_launch();
    pdl_wait();
    const uint4* from = blockIdx.y ? v + blockIdx.x * v_stride : k + blockIdx.x * k_stride;
    uint4* to = (blockIdx.y ? v_pool : k_pool) + slots[blockIdx.x] * num_pieces;
    for (int i = threadIdx.x; i < num_pieces; i += blockDim.x) to[i] = from[i];
}
