// What moves boxes of a matrix between global and shared memory by itself, from sm_90 on: matrices
// as its engine knows them, the arrivals that others wait for, and what else a kernel needs whose
// warps have roles of their own.
//
// A box is lines of 128 bytes, as hopper.cuh lays them out: 64 elements of a row each. What of it
// lies outside the matrix is zero when read and is not written.
#pragma once
#include "hopper.cuh"

// Made by the host (cuTensorMapEncodeTiled) and passed to the kernel by value, as __grid_constant__.
struct alignas(64) MatrixMap {
    u64 words[16];
};

#ifdef MINISGL_SIMULATOR
#include "tma_sim.h"
#else

// Counts the threads that arrive and the bytes that are copied. When all of a phase are there the
// next one begins, with the same number of threads. Phases are told apart by parity; the first has
// 0, and whoever waits for parity 1 before it has ended waits for nothing.
typedef u64 Arrivals;

INLINE void expect_arrivals(Arrivals* arrivals, int num_threads) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :
                 : "r"(address_of(arrivals)), "r"(num_threads)
                 : "memory");
}

// Between expect_arrivals and the barrier of the cluster behind it.
INLINE void publish_arrivals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// This thread arrives, and so many bytes are to come.
INLINE void arrive_and_expect(Arrivals* arrivals, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(address_of(arrivals)), "r"(num_bytes)
                 : "memory");
}

INLINE void arrive(Arrivals* arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 :
                 : "r"(address_of(arrivals))
                 : "memory");
}

// This thread arrives at the same place of the block `rank` of the cluster. What it has written
// is not seen there for that (a fence for all of the cluster costs a fifth of a product).
INLINE void arrive_at(Arrivals* arrivals, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(address_of(arrivals)), "r"(rank));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(there) : "memory");
}

INLINE void wait_for(Arrivals* arrivals, int parity) {
    u32 has_ended;
    do asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                    " selp.u32 %0, 1, 0, p; }"
                    : "=r"(has_ended)
                    : "r"(address_of(arrivals)), "r"(parity)
                    : "memory");
    while (!has_ended);
}

// Copies a box to shared memory; its bytes arrive at `arrivals`.
INLINE void load_box(uint4* to, const MatrixMap& from, int column, int row, Arrivals* arrivals) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 :
                 : "r"(address_of(to)), "l"(&from), "r"(column), "r"(row),
                   "r"(address_of(arrivals))
                 : "memory");
}

// The same of a matrix whose rows are heads of tokens: a box has some heads of some tokens, a line
// each, token by token.
INLINE void load_heads(uint4* to, const MatrixMap& from, int column, int head, int token,
                       Arrivals* arrivals) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];"
                 :
                 : "r"(address_of(to)), "l"(&from), "r"(column), "r"(head), "r"(token),
                   "r"(address_of(arrivals))
                 : "memory");
}

// The same to this place of both blocks of a cluster, each with arrivals of its own.
INLINE void load_box_for_both(uint4* to, const MatrixMap& from, int column, int row,
                              Arrivals* arrivals) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 :
                 : "r"(address_of(to)), "l"(&from), "r"(column), "r"(row),
                   "r"(address_of(arrivals)), "h"(u16(3))
                 : "memory");
}

// Copies a box from shared memory, where publish_operands and a barrier have made it visible. The
// thread that stores waits until all but its last N groups are read there, or until all is written.
INLINE void store_box(const MatrixMap& to, const uint4* from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 :
                 : "l"(&to), "r"(column), "r"(row), "r"(address_of(from))
                 : "memory");
}
INLINE void end_store_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
INLINE void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(N) : "memory");
}
INLINE void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four matrices of 8 x 8 elements, put in lines of 16 bytes: lanes 8 i .. 8 i + 7 say where those
// of matrix i go, and lane l has the elements l % 4 * 2 (+ 1) of line l / 4 of each.
INLINE void store_matrices(uint4* line, const u32 (&pairs)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address_of(line)), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
                   "r"(pairs[3])
                 : "memory");
}

// The threads of a warpgroup meet. Number 0 is __syncthreads.
INLINE void warpgroup_barrier(int number) {
    asm volatile("bar.sync %0, 128;" : : "r"(number) : "memory");
}

// Two warpgroups take turns: each waits at a number of its own for the other to pass it on.
INLINE void wait_for_turn(int number) {
    asm volatile("bar.sync %0, 256;" : : "r"(number) : "memory");
}
INLINE void pass_turn(int number) {
    asm volatile("bar.arrive %0, 256;" : : "r"(number) : "memory");
}

// Every thread of a warpgroup changes how many registers it has, from what the launch gave it.
template <int N>
INLINE void give_back_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N));
}
template <int N>
INLINE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N));
}

INLINE int cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
#endif
