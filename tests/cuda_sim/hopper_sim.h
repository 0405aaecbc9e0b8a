// Clusters, and the products of a warpgroup, on the simulator; see hopper.cuh.
#pragma once

#include <cstdint>

namespace sim {

inline float number(u16 bits) {
#if MINISGL_DTYPE == MINISGL_BF16
    return bf16_to_float(bits);
#else
    static const std::vector<float> all = [] {  // the CPU may have no instruction for it
        std::vector<float> numbers(1 << 16);
        for (int i = 0; i < 1 << 16; i++) numbers[i] = f16_to_float(u16(i));
        return numbers;
    }();
    return all[bits];
#endif
}

// Two neighbours, of which the first has an even place.
inline void read_pair(float (&pair)[2], uintptr_t at) {
    at ^= (at >> 7 & 7) << 4;  // the swizzle works on addresses
    auto* bits = reinterpret_cast<const u16*>(at);
    pair[0] = number(bits[0]);
    pair[1] = number(bits[1]);
}

inline void read_line(float (&numbers)[16], Operand matrix, int line) {
    for (int i = 0; i < 16; i += 8) {
        auto at = uintptr_t(matrix * 16) + line * 128 + i * 2;
        at ^= (at >> 7 & 7) << 4;
        for (int j = 0; j < 8; j++) numbers[i + j] = number(reinterpret_cast<const u16*>(at)[j]);
    }
}

inline float dot(const float (&a)[16], const float (&b)[16]) {
    float sums[4] = {};
    for (int k = 0; k < 16; k++) sums[k % 4] += a[k] * b[k];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
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

// A matrix of columns has the place of its next 64 columns in the upper half.
constexpr int HALF_AT = 48;
inline Operand operand_of_columns(const uint4* at, int half) {
    return operand(at) | Operand(half) << HALF_AT;
}
template <int N>
inline void settle(float (&)[N][4]) {}

namespace sim {

// As copies, products happen at once in half of the lanes, and at the wait in the others.
template <class F>
inline void start_product(F product) {
    auto& groups = device.current->product_groups;
    if (groups.empty()) groups.emplace_back();
    if (device.current->lane % 2 == 0) product();
    else groups.back().push_back(product);
}

template <int ROWS>
inline void start_product(float (&c)[ROWS / 8][4], Operand left, Operand right, bool is_first) {
    int thread = threadIdx.x % 128, first = thread / 32 * 16 + thread % 32 / 4;
    start_product([=, &c] {
        float lines[2][16], other[16];
        for (int i = 0; i < 2; i++) read_line(lines[i], left, first + i * 8);
        for (int j = 0; j < ROWS / 8; j++)
            for (int i = 0; i < 2; i++) {
                read_line(other, right, j * 8 + thread % 4 * 2 + i);
                for (int h = 0; h < 2; h++) {
                    float& sum = c[j][i + 2 * h];
                    sum = (is_first ? 0.f : sum) + dot(lines[h], other);
                }
            }
    });
}

}  // namespace sim

template <int ROWS>
inline void multiply_add(float (&c)[ROWS / 8][4], Operand left, Operand right) {
    sim::start_product<ROWS>(c, left, right, false);
}
template <int ROWS>
inline void multiply(float (&c)[ROWS / 8][4], Operand left, Operand right) {
    sim::start_product<ROWS>(c, left, right, true);
}

// A quad of lanes has its lines of the left matrix together. Each reads what the others have where
// it lies, when its product runs: registers that are changed too early show.
template <int COLUMNS>
inline void multiply_add_columns(float (&c)[COLUMNS / 8][4], const u32 (&left)[4], Operand right) {
    auto* all = sim::exchange(&left[0]);
    int lane = sim::device.current->lane, quad = lane / 4 * 4;
    const u32* of_lane[4];
    for (int i = 0; i < 4; i++) memcpy(&of_lane[i], all[quad + i], sizeof(const u32*));
    auto begin = uintptr_t((right & ((Operand(1) << HALF_AT) - 1)) * 16);
    auto half = uintptr_t(right >> HALF_AT) * 16;
    sim::start_product([=, &c] {
        for (int k = 0; k < 16; k++) {
            float weights[2], pair[2];
            for (int h = 0; h < 2; h++)
                weights[h] = sim::number(u16(of_lane[k % 8 / 2][k / 8 * 2 + h] >> k % 2 * 16));
            for (int j = 0; j < COLUMNS / 8; j++) {
                sim::read_pair(pair, begin + j / 8 * half + k * 128 + j % 8 * 16 + lane % 4 * 4);
                for (int i = 0; i < 4; i++) c[j][i] += weights[i / 2] * pair[i % 2];
            }
        }
    });
}

inline void cluster_barrier() { sim::meet(sim::device.cluster); }
inline void cluster_leave() { cluster_barrier(); }
inline uint4 cluster_read(const uint4* at, int rank) {
    return at[(rank - sim::device.current->block->rank) * (sim::SHARED_BYTES / 16)];
}
