// Several devices for tests: each rank is a thread that runs kernels of its own copy of the library,
// so that only what they point to is shared.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>

inline void store_release(u32* to, u32 value) {
    std::atomic_ref<u32>(*to).store(value, std::memory_order_release);
}
inline u32 load_acquire(const u32* from) {
    return std::atomic_ref<u32>(*const_cast<u32*>(from)).load(std::memory_order_acquire);
}
inline uint4 load_shared_by_peers(const uint4* from) { return *from; }

inline u64 device_time_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Other threads of the block go on, and other ranks; someone who waits for another rank is not
// stuck.
inline void between_looks() {
    sim::device.num_events++;
    sched_yield();
    sim::yield();
}
