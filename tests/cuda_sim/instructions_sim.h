// A CUDA device for tests, in one header: the kernels' sources run on a CPU, thread by thread.
//
// The threads of a block are fibers that take turns; each runs until it meets a barrier or an
// exchange of its warp, so that a missing barrier shows as a wrong result, in one of two orders of
// warps and lanes. The blocks of a cluster run together, clusters one after another, in two orders
// too. Only what the sources use is here.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // one block at a time: clusters use the launch's shared memory alone

struct uint4 {
    u32 x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace sim {

struct Dim {
    unsigned x, y, z;
};

struct Warp {
    // Two buffers: a lane can be at most one exchange ahead of the slowest reader.
    alignas(16) char values[2][32][64];
    int num_lanes, num_arrived, generation;
};

// Threads that wait for each other.
struct Gathering {
    int num_alive, num_waiting, generation;
};

constexpr int MAX_CLUSTER = 8, SHARED_BYTES = 227 * 1024, MAX_WARPGROUPS = 8;

struct Block {
    Dim index;
    int rank;  // in its cluster
    Gathering threads;
    Gathering warpgroups[MAX_WARPGROUPS], named[16];  // of hopper_sim.h and tma_sim.h
};

struct Copy {
    uint4* to;
    const void* from;  // null for zeros
};

struct Fiber {
    Dim thread;
    Block* block;
    int warp, lane;
    bool has_started, is_done;
    std::deque<std::vector<Copy>> copy_groups;  // the last one is open
    std::deque<std::vector<std::function<void()>>> product_groups;  // of hopper_sim.h, likewise
    std::deque<std::vector<std::function<void()>>> store_groups;    // of tma_sim.h, likewise
    int num_stores;
    jmp_buf state;
    ucontext_t start;
    std::vector<char> stack;
};

// Bytes on their way to shared memory, and the barrier that waits for them; of tma_sim.h.
struct Load {
    void* barrier;
    std::function<void()> perform;
};

struct Device {
    Dim grid, block;
    Block blocks[MAX_CLUSTER];
    Gathering cluster;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::deque<Load> loads;
    u64 num_loads;
    Fiber* current;
    jmp_buf scheduler;
    ucontext_t home;
    u64 num_events;  // grows whenever a thread gets further
    bool is_mixed;   // the order of blocks, warps and lanes
    void (*entry)(const char*);
    const char* arguments;
};
inline Device device;
alignas(1024) inline uint4 shared[MAX_CLUSTER][SHARED_BYTES / 16];

inline void yield() {
    if (!_setjmp(device.current->state)) _longjmp(device.scheduler, 1);
}

inline void open(Gathering& group) {
    group.num_waiting = 0;
    group.generation++;
    device.num_events++;
}

inline void meet(Gathering& group) {
    int generation = group.generation;
    if (++group.num_waiting == group.num_alive) open(group);
    while (group.generation == generation) yield();
}

// The others no longer wait for a thread that has ended.
inline void leave(Gathering& group) {
    if (--group.num_alive && group.num_waiting == group.num_alive) open(group);
}

inline void barrier() { meet(device.current->block->threads); }

// A copy happens between its start and the wait for it. Half of the lanes do it at once and half
// as late as they may, so that a wait that is missing and a slot that is filled too early show.
inline void perform(const Copy& copy) {
    *copy.to = copy.from ? *static_cast<const uint4*>(copy.from) : uint4{};
}

inline void start_copy(const Copy& copy) {
    Fiber& me = *device.current;
    if (me.lane % 2 == 0) return perform(copy);
    if (me.copy_groups.empty()) me.copy_groups.emplace_back();
    me.copy_groups.back().push_back(copy);
}

inline void wait_for_copies(int num_pending) {
    auto& groups = device.current->copy_groups;
    while (int(groups.size()) > num_pending + 1) {
        for (auto& copy : groups.front()) perform(copy);
        groups.pop_front();
    }
}

// Give a value to the warp and see those of all lanes.
template <typename T>
inline const char (*exchange(const T& value))[64] {
    static_assert(sizeof(T) <= 64, "a lane's place is 64 bytes");
    Fiber& me = *device.current;
    Warp& warp = device.warps[me.warp];
    int generation = warp.generation;
    auto* values = warp.values[generation & 1];
    memcpy(values[me.lane], &value, sizeof(T));
    if (++warp.num_arrived == warp.num_lanes) {
        warp.num_arrived = 0;
        warp.generation++;
        device.num_events++;
    }
    while (warp.generation == generation) yield();
    return values;
}

template <typename T>
inline T from_lane(T value, int lane) {
    auto* values = exchange(value);
    if (lane < 0 || lane >= device.warps[device.current->warp].num_lanes) return value;
    T other;
    memcpy(&other, values[lane], sizeof(T));
    return other;
}

inline void run_fiber() {
    device.entry(device.arguments);
    device.current->is_done = true;
    device.num_events++;
    leave(device.current->block->threads);
    leave(device.cluster);
    _longjmp(device.scheduler, 1);
}

inline void resume(Fiber& fiber) {
    device.current = &fiber;
    if (_setjmp(device.scheduler)) return;
    if (fiber.has_started) _longjmp(fiber.state, 1);
    fiber.has_started = true;
    setcontext(&fiber.start);
}

inline void start(Fiber& fiber, Block& owner, int index, int num_threads) {
    Dim block = device.block;
    fiber.thread = {index % block.x, index / block.x % block.y, index / (block.x * block.y)};
    fiber.block = &owner;
    fiber.warp = owner.rank * ((num_threads + 31) / 32) + index / 32;
    fiber.lane = index % 32;
    fiber.has_started = fiber.is_done = false;
    fiber.copy_groups.clear();
    fiber.product_groups.clear();
    fiber.store_groups.clear();
    fiber.num_stores = 0;
    if (fiber.stack.empty()) fiber.stack.resize(64 * 1024);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
    device.warps[fiber.warp].num_lanes++;
}

// Threads get on in turn, a little each, again and again while any of them does: a block is as far
// ahead of the others of its cluster as they let it.
inline void run_threads(Fiber* fibers, int num_threads) {
    u64 before;
    int num_rounds = 0;
    do {
        before = device.num_events;
        for (int i = 0; i < num_threads; i++) {
            Fiber& next = fibers[device.is_mixed ? num_threads - 1 - i : i];
            if (!next.is_done) resume(next);
        }
    } while (device.num_events != before && ++num_rounds < 100);
}

// The warps of a block keep step. Where the order is mixed, each is as far ahead of the others as
// they let it, the last one first.
inline void run_block(Fiber* fibers, int num_threads) {
    int at_once = device.is_mixed ? 32 : num_threads;
    for (int i = (num_threads - 1) / at_once * at_once; i >= 0; i -= at_once)
        run_threads(fibers + i, std::min(at_once, num_threads - i));
}

inline void run_cluster(int num_blocks) {
    int num_threads = device.block.x * device.block.y * device.block.z;
    int num_fibers = num_blocks * num_threads;
    if (int(device.fibers.size()) < num_fibers) device.fibers.resize(num_fibers);
    device.warps.assign(num_blocks * ((num_threads + 31) / 32), Warp{});
    device.loads.clear();
    device.cluster = {num_fibers, 0, 0};
    for (int i = 0; i < num_fibers; i++) {
        Block& owner = device.blocks[i / num_threads];
        owner.threads = {num_threads, 0, 0};
        for (auto& group : owner.warpgroups) group = {128, 0, 0};
        for (auto& group : owner.named) group = {0, 0, 0};
        start(device.fibers[i], owner, i % num_threads, num_threads);
    }
    while (device.cluster.num_alive) {
        u64 before = device.num_events;
        for (int i = 0; i < num_blocks; i++) run_block(&device.fibers[i * num_threads], num_threads);
        if (device.num_events == before) {
            fprintf(stderr, "simulator: the threads of a block wait for each other\n");
            abort();
        }
    }
}

// Arguments lie in a buffer as CUDA's launch takes them: each at its natural alignment.
template <typename... A>
struct Unpacked {
    std::tuple<A...> values;
    explicit Unpacked(const char* from) {
        size_t at = 0;
        std::apply([&](A&... value) { (take(value, from, at), ...); }, values);
    }
    template <typename T>
    static void take(T& value, const char* from, size_t& at) {
        at = (at + alignof(T) - 1) / alignof(T) * alignof(T);
        memcpy(&value, from + at, sizeof(T));
        at += sizeof(T);
    }
};

template <auto KERNEL>
struct Launch;
template <typename... A, void (*KERNEL)(A...)>
struct Launch<KERNEL> {
    static void call(const char* arguments) { std::apply(KERNEL, Unpacked<A...>(arguments).values); }
    static void run(const int* shape, const char* arguments) {
        device.grid = {unsigned(shape[0]), unsigned(shape[1]), 1};
        device.block = {unsigned(shape[2]), unsigned(shape[3]), 1};
        device.is_mixed = shape[5];
        device.entry = call;
        device.arguments = arguments;
        int num_blocks = shape[4];  // of a cluster; they lie side by side
        unsigned clusters_x = device.grid.x / num_blocks, clusters = clusters_x * device.grid.y;
        unsigned evens = (clusters + 1) / 2;
        for (unsigned i = 0; i < clusters; i++) {
            unsigned which = i;
            if (device.is_mixed) {  // the odd ones from the last to the first, and then the others
                which = clusters - 1 - i;
                which = which < evens ? which * 2 : (which - evens) * 2 + 1;
            }
            unsigned x = which % clusters_x * num_blocks, y = which / clusters_x;
            for (int j = 0; j < num_blocks; j++) device.blocks[j] = {{x + j, y, 0}, j};
            run_cluster(num_blocks);
        }
    }
};

inline float from_f16(u16 bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return float(value);
}

}  // namespace sim

#define SIM_EXPORT(NAME)                                             \
    extern "C" void sim_##NAME(const int* shape, const char* args) { \
        sim::Launch<NAME>::run(shape, args);                         \
    }

#define threadIdx (sim::device.current->thread)
#define blockIdx (sim::device.current->block->index)
#define blockDim (sim::device.block)
#define gridDim (sim::device.grid)

inline void __syncthreads() { sim::barrier(); }
inline void __syncwarp() { sim::exchange(0); }
inline bool __any_sync(u32, bool value) {
    auto* values = sim::exchange(value);
    bool any = false;
    for (int lane = 0; lane < 32; lane++) any |= *reinterpret_cast<const bool*>(values[lane]);
    return any;
}

template <typename T>
inline T __shfl_sync(u32, T value, int lane) {
    return sim::from_lane(value, lane);
}
template <typename T>
inline T __shfl_xor_sync(u32, T value, int mask) {
    return sim::from_lane(value, sim::device.current->lane ^ mask);
}
template <typename T>
inline T __shfl_up_sync(u32, T value, int offset) {
    return sim::from_lane(value, sim::device.current->lane - offset);
}

template <typename T>
inline T atomicAdd(T* at, T value) {
    T old = *at;
    *at += value;
    return old;
}

inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline u64 __float2ull_rn(float value) { return u64(std::nearbyint(double(value))); }
template <typename T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
inline float rsqrtf(float value) { return 1.f / std::sqrt(value); }
inline float exp2_fast(float value) { return std::exp2(value); }

// What the kernel in front writes late: not-a-numbers until all threads of a block wait for it.
namespace sim {
struct Late {
    char* to;
    std::vector<char> bytes;
};
inline std::vector<Late> late;
inline bool is_written = true;

inline void write_late() {
    if (is_written) return;
    for (auto& each : late) memcpy(each.to, each.bytes.data(), each.bytes.size());
    is_written = true;
}
}  // namespace sim

extern "C" __attribute__((used)) inline void sim_delay(char* to, u64 num_bytes) {
    sim::late.push_back({to, {to, to + num_bytes}});
    memset(to, 0xff, num_bytes);
    sim::is_written = false;
}
extern "C" __attribute__((used)) inline void sim_end_delay() {
    sim::write_late();
    sim::late.clear();
}

inline void pdl_wait() {
    if (sim::late.empty()) return;
    sim::barrier();
    sim::write_late();
}
inline void pdl_launch() {}
typedef u64 Address;
inline Address address_of(const void* at) { return reinterpret_cast<Address>(at); }
inline void copy_async(uint4* to, const void* from, bool is_there) {
    sim::start_copy({to, is_there ? from : nullptr});
}
inline void copy_async(Address to, const void* from, bool is_there) {
    copy_async(reinterpret_cast<uint4*>(to), from, is_there);
}
inline void end_copy_group() {
    auto& groups = sim::device.current->copy_groups;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}
template <int N>
inline void copies_pending() {
    sim::wait_for_copies(N);
}
#define SHARED_BUFFER(NAME) uint4* NAME = sim::shared[sim::device.current->block->rank]
inline float divide_fast(float a, float b) { return a / b; }

inline float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }
inline u16 float_to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // nearest, ties to even
}
inline float f16_to_float(u16 bits) { return sim::from_f16(bits); }
inline u16 float_to_f16(float value) {
    _Float16 half = _Float16(value);
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
}

#if MINISGL_DTYPE == MINISGL_BF16
inline u32 narrow_pair(float first, float second) {
    return float_to_bf16(first) | u32(float_to_bf16(second)) << 16;
}
#else
inline u32 narrow_pair(float first, float second) {
    return float_to_f16(first) | u32(float_to_f16(second)) << 16;
}
#endif

// The layout of m16n8k16: PTX ISA, "Matrix fragments for mma.m16n8k16", 16-bit types.
inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    struct Operands {
        u32 a[4], b[2];
    };
    auto* values = sim::exchange(Operands{{a0, a1, a2, a3}, {b0, b1}});
    auto part = [](u32 pair, int i) {
        u16 bits = u16(pair >> 16 * i);
#if MINISGL_DTYPE == MINISGL_BF16
        return bf16_to_float(bits);
#else
        return f16_to_float(bits);
#endif
    };
    int lane = sim::device.current->lane;
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            int quad = k % 8 / 2;
            auto& left = *reinterpret_cast<const Operands*>(values[row % 8 * 4 + quad]);
            auto& right = *reinterpret_cast<const Operands*>(values[column * 4 + quad]);
            float a = part(left.a[row / 8 + k / 8 * 2], k % 2);
            c[i] += a * part(right.b[k / 8], k % 2);
        }
    }
}

// The layout of m16n8k8 for tf32, which has 10 bits of mantissa.
inline void mma_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    struct Operands {
        u32 a[4], b[2];
    };
    auto* values = sim::exchange(Operands{{a0, a1, a2, a3}, {b0, b1}});
    auto cut = [](u32 bits) { return __uint_as_float(bits & 0xffffe000u); };
    int lane = sim::device.current->lane;
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 8; k++) {
            auto& left = *reinterpret_cast<const Operands*>(values[row % 8 * 4 + k % 4]);
            auto& right = *reinterpret_cast<const Operands*>(values[column * 4 + k % 4]);
            c[i] += cut(left.a[row / 8 + k / 4 * 2]) * cut(right.b[k / 4]);
        }
    }
}

// The layout of movmatrix: lane (g, t) has the elements 2t and 2t + 1 of row g.
inline u32 transpose(u32 pair) {
    auto* values = sim::exchange(pair);
    int row = sim::device.current->lane / 4, column = sim::device.current->lane % 4 * 2;
    auto element = [&](int i) {
        u32 other;
        memcpy(&other, values[i * 4 + row / 2], sizeof(other));
        return other >> 16 * (row % 2) & 0xffffu;
    };
    return element(column) | element(column + 1) << 16;
}

// The layout of ldmatrix: lane 8 i + r says where row r of matrix i is, and lane (g, t) gets the
// elements 2t and 2t + 1 of row g of each matrix, or of its column g.
inline uint4 load_matrices(Address row, bool is_turned = false) {
    auto* rows = sim::exchange(row);
    int g = sim::device.current->lane / 4, t = sim::device.current->lane % 4;
    auto element = [&](int matrix, int line, int column) -> u32 {
        Address from;
        memcpy(&from, rows[matrix * 8 + line], sizeof(from));
        if (from % 16) abort();
        return reinterpret_cast<const u16*>(from)[column];
    };
    u32 pairs[4];
    for (int i = 0; i < 4; i++) {
        int first = 2 * t, second = 2 * t + 1;
        pairs[i] = is_turned ? element(i, first, g) | element(i, second, g) << 16
                             : element(i, g, first) | element(i, g, second) << 16;
    }
    return uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}
inline uint4 load_turned_matrices(Address row) { return load_matrices(row, true); }

inline int arrive(int* count) { return (*count)++; }
