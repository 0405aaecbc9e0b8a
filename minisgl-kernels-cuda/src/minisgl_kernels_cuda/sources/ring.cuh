// A ring of slots in shared memory, each with what one step of a product reads: the copy engine
// fills it, warpgroups read it. Both blocks of a cluster go round theirs together, when each copies
// a part for both.
#pragma once
#include "tma.cuh"

constexpr int BLOCKS = 2;  // of a cluster

// As one who fills or reads it sees it. SLOT counts pieces, READERS the warpgroups of a block,
// SHARED the blocks whose slots are filled together.
template <int STAGES, int SLOT, int READERS, int SHARED = BLOCKS>
struct Ring {
    static constexpr int SLOT_BYTES = SLOT * 16;

    uint4* slots;
    Arrivals *full, *empty;
    int stage, parity;

    INLINE Ring(uint4* slots, uint4* arrivals) : slots(slots), stage(0), parity(0) {
        full = reinterpret_cast<Arrivals*>(arrivals);
        empty = full + STAGES;
    }
    // One thread, before the barrier of all who share it.
    INLINE void start() const {
        for (int i = 0; i < STAGES; i++) {
            expect_arrivals(full + i, 1);
            expect_arrivals(empty + i, SHARED * READERS);
        }
        publish_arrivals();
    }
    INLINE uint4* slot() const { return slots + stage * SLOT; }
    INLINE Arrivals* arrivals() const { return full + stage; }
    INLINE void advance() {
        if (++stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
    // Whoever fills the slot waits until it is empty in all blocks that share it, and says what is
    // to come.
    INLINE void wait_until_empty() const { wait_for(empty + stage, parity ^ 1); }
    INLINE void expect() const { arrive_and_expect(arrivals(), SLOT_BYTES); }
    // Whoever fills it, at its end: returns when the last that may arrive here from the other block
    // has arrived. Until then this block must not end, and its last barrier does not wait for that.
    INLINE void drain() {
        for (int i = 0; i < STAGES; i++) {
            wait_until_empty();
            advance();
        }
    }
    // Called by a whole warpgroup that has read a slot, for all blocks that fill it.
    INLINE void release(int which) const {
        int block = threadIdx.x % 128;
        if constexpr (SHARED == 1) {
            if (block == 0) arrive(empty + which);
        } else if (block < SHARED) arrive_at(empty + which, block);
    }
    // A warpgroup takes so many steps, at least one: `multiply` starts the products of the slot
    // that it is given.
    template <class F>
    INLINE void take(int num_steps, F multiply) {
        int previous = 0;
        for (int i = 0; i < num_steps; i++) {
            wait_for(arrivals(), parity);
            start_products();
            multiply(operand(slot()));
            submit_products();
            products_pending<1>();  // the step before is done while this one runs
            if (i) release(previous);
            previous = stage;
            advance();
        }
        products_pending<0>();
        release(previous);
    }
};
