// Clusters, and the products of a warpgroup, on the simulator; see hopper.cuh.
#pragma once

#include <cstdint>

namespace sim {

inline float element(Operand matrix, int line, int inner) {
    auto at = uintptr_t(matrix * 16) + line * 128 + inner / 8 * 16;
    at ^= (at >> 7 & 7) << 4;  // the swizzle works on addresses
    u16 bits = reinterpret_cast<const u16*>(at)[inner % 8];
#if MINISGL_DTYPE == MINISGL_BF16
    return bf16_to_float(bits);
#else
    return f16_to_float(bits);
#endif
}

}  // namespace sim

#define SHARED_LINES(NAME) SHARED_BUFFER(NAME)

inline Operand operand(const uint4* at) { return reinterpret_cast<uintptr_t>(at) / 16; }

inline void publish_operands() {}
inline void start_products() {}
inline void submit_products() { sim::device.current->product_groups.emplace_back(); }

namespace sim {

inline void wait_for_products(int num_pending) {
    auto& groups = device.current->product_groups;
    while (int(groups.size()) > num_pending + 1) {
        for (auto& product : groups.front()) product();
        groups.pop_front();
    }
}

}  // namespace sim

inline void wait_for_products() { sim::wait_for_products(0); }
template <int N>
inline void products_pending() {
    sim::wait_for_products(N);
    sim::meet(sim::device.current->block->warpgroups[threadIdx.x / 128]);
}

// As copies, products happen at once in half of the lanes, and at the wait in the others.
template <int ROWS>
inline void multiply_add(float (&c)[ROWS / 8][4], Operand left, Operand right) {
    int thread = threadIdx.x % 128, first = thread / 32 * 16 + thread % 32 / 4;
    auto product = [=, &c] {
        float lines[2][16];
        for (int i = 0; i < 32; i++)
            lines[i / 16][i % 16] = sim::element(left, first + i / 16 * 8, i % 16);
        for (int j = 0; j < ROWS / 8; j++)
            for (int i = 0; i < 2; i++)
                for (int k = 0; k < 16; k++) {
                    float other = sim::element(right, j * 8 + thread % 4 * 2 + i, k);
                    c[j][i] += lines[0][k] * other;
                    c[j][i + 2] += lines[1][k] * other;
                }
    };
    auto& groups = sim::device.current->product_groups;
    if (groups.empty()) groups.emplace_back();
    if (sim::device.current->lane % 2 == 0) product();
    else groups.back().push_back(product);
}

inline void cluster_barrier() { sim::meet(sim::device.cluster); }
inline void cluster_leave() { cluster_barrier(); }
inline uint4 cluster_read(const uint4* at, int rank) {
    return at[(rank - sim::device.current->block->rank) * (sim::SHARED_BYTES / 16)];
}
