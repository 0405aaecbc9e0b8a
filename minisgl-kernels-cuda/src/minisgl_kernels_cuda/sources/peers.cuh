// How a kernel reads and writes memory of other GPUs, and waits for what they write in its own.
#pragma once
#include "device.cuh"

#ifdef MINISGL_SIMULATOR
#include "peers_sim.h"
#else

// Everything that the thread has written, or has seen behind a barrier of its block, is seen by
// whoever reads the new value with load_acquire, on any GPU.
INLINE void store_release(u32* to, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}
INLINE u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Past the first-level cache, which knows nothing of the other GPUs' writes.
INLINE uint4 load_shared_by_peers(const uint4* from) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

INLINE u64 device_time_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

INLINE void between_looks() {}
#endif

// A parameter that is indexed at run time stays where the launch has put it.
#if !defined(MINISGL_SIMULATOR)
#define IN_PLACE __grid_constant__
#else
#define IN_PLACE
#endif

constexpr int MAX_RANKS = 8;
constexpr int MAX_BLOCKS = 128;
constexpr int TILE = 1024;  // most pieces that a block sends a rank at a time

// Addresses of the ranks' memories in this process, in order of the ranks. In each lie
//   epochs[MAX_BLOCKS]           how many exchanges each block of this rank has behind it
//   flags[MAX_BLOCKS][MAX_RANKS] the newest exchange for which the block of that rank has sent
//   tiles[MAX_BLOCKS][2][ranks][TILE]  what it has sent, of odd and of even exchanges
struct Peers {
    char* memory[MAX_RANKS];
};
constexpr int FLAGS_AT = MAX_BLOCKS * 4;
constexpr int TILES_AT = 8192;
static_assert(FLAGS_AT + MAX_BLOCKS * MAX_RANKS * 4 <= TILES_AT, "the tiles lie behind the flags");

// When waiting ends without what was waited for. `verdict` lies in the host's memory: [0] is set by
// the host when it has lost a rank, [1] here when the time is up. The host looks at it before it
// believes a result.
struct Patience {
    volatile u32* verdict;
    i64 limit_ns;
};

constexpr int SPINS = 2048;  // about a millisecond between looks at the host's memory

INLINE void wait_for(const u32* flag, u32 epoch, Patience patience) {
    u64 started = 0;
    for (int spins = 1; int(load_acquire(flag) - epoch) < 0; spins++) {
        between_looks();
        if (spins % SPINS) continue;
        if (patience.verdict[0] | patience.verdict[1]) return;
        u64 now = device_time_ns();
        if (!started) started = now;
        if (i64(now - started) > patience.limit_ns) {
            patience.verdict[1] = 1;
            return;
        }
    }
}

// Exchanges between the blocks of one index on all ranks, which run the same kernels in the same
// order. A rank writes what it sends into the others' memories and reads only its own, so it never
// touches the memory of a rank that has finished before it.
//
// Two sets of tiles are enough. A rank sends in exchange e + 2 only after the others' flags of
// e + 1, which they set when they have read everything of e.
template <int RANKS>
struct Exchange {
    const Peers& peers;
    int rank;
    Patience patience;
    u32 epoch;

    // Every thread, after pdl_wait: the kernel in front may have been another exchange.
    INLINE Exchange(const Peers& peers, int rank, Patience patience)
        : peers(peers), rank(rank), patience(patience) {
        epoch = reinterpret_cast<const u32*>(peers.memory[rank])[blockIdx.x] + 1;
    }

    // Where `owner` finds what `source` has sent this block.
    INLINE uint4* tile(int owner, int source) const {
        uint4* tiles = reinterpret_cast<uint4*>(peers.memory[owner] + TILES_AT);
        return tiles + i64((blockIdx.x * 2 + epoch % 2) * RANKS + source) * TILE;
    }

    INLINE void send(int to, int i, const uint4& piece) const { tile(to, rank)[i] = piece; }

    INLINE void send_all(int i, const uint4& piece) const {
#pragma unroll
        for (int to = 0; to < RANKS; to++)
            if (to != rank) send(to, i, piece);
    }

    INLINE uint4 received(int source, int i) const {
        return load_shared_by_peers(tile(rank, source) + i);
    }

    // Every thread: returns when all ranks have sent.
    INLINE void meet() const {
        __syncthreads();  // all of this block is sent, and everything of before is read
        int peer = threadIdx.x;
        if (peer < RANKS && peer != rank) {
            store_release(flag(peer, rank), epoch);
            wait_for(flag(rank, peer), epoch, patience);
        }
        __syncthreads();
    }

    INLINE void next() { epoch++; }

    // Every thread, at the end: there was at least one exchange.
    INLINE void end() const {
        if (threadIdx.x == 0) reinterpret_cast<u32*>(peers.memory[rank])[blockIdx.x] = epoch - 1;
    }

  private:
    INLINE u32* flag(int owner, int source) const {
        u32* flags = reinterpret_cast<u32*>(peers.memory[owner] + FLAGS_AT);
        return flags + blockIdx.x * MAX_RANKS + source;
    }
};
