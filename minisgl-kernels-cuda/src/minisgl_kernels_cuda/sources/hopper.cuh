// What only sm_90a has: products of a warpgroup (128 threads) from shared memory. And clusters:
// blocks that run together and read each other's shared memory, from sm_90 on.
//
// A matrix in shared memory is lines of 128 bytes, 64 elements of the inner dimension each. Lines
// come in eights, aligned to 1024 bytes; the 16-byte piece i of line j lies in place i ^ j % 8, so
// that neither rows nor columns of pieces meet in one bank.
#pragma once
#include "device.cuh"

constexpr int LINE = 8;  // pieces

typedef u64 Operand;

INLINE int swizzled(int line, int piece) { return line * LINE + (piece ^ line % 8); }

// To sums of multiply_add: those of two lines and two neighbouring columns, whose biases these are.
INLINE void add_bias(float (&sums)[4], const scalar* bias) {
    float even = widen(bias[0]), odd = widen(bias[1]);
    sums[0] += even;
    sums[1] += odd;
    sums[2] += even;
    sums[3] += odd;
}

// Of such sums, the two columns of the first line, or of the second.
INLINE Floats<2> pair_of(const float (&sums)[4], int line) {
    return Floats<2>{sums[2 * line], sums[2 * line + 1]};
}

INLINE u32 as_word(const Pack<2>& pair) { return *reinterpret_cast<const u32*>(&pair); }

#ifdef MINISGL_SIMULATOR
#include "hopper_sim.h"
#else

// Shared memory whose size is given at the launch, aligned for matrices.
#define SHARED_LINES(NAME) extern __shared__ __align__(1024) uint4 NAME[]

// Makes what this thread has put into shared memory visible to products that start after the next
// barrier.
INLINE void publish_operands() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Products come between the first two and run by themselves until the third returns; their sums
// and operands must not be touched meanwhile.
INLINE void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void submit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
INLINE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// Returns when at most N submissions remain, of the whole warpgroup.
template <int N>
INLINE void products_pending() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

// Address and layout of a matrix: PTX ISA, "Matrix descriptor". Eights of lines are 1024 bytes
// apart, and pieces are swizzled over 128 bytes. The address counts pieces, so that a matrix i
// pieces further has the operand plus i.
INLINE Operand operand(const uint4* at) {
    u64 address = u64(address_of(at));
    return address >> 4 | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// The same of a right matrix whose lines are its rows, 64 columns each, of which the next 64 begin
// `half` pieces further.
INLINE Operand operand_of_columns(const uint4* at, int half) {
    u64 address = u64(address_of(at));
    return address >> 4 | u64(half) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// What was computed is there: the compiler moves no use of it to before this point.
template <int N>
INLINE void settle(float (&c)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++)
        asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}

#if MINISGL_DTYPE == MINISGL_BF16
#define MINISGL_OPERANDS "bf16.bf16"
#else
#define MINISGL_OPERANDS "f16.f16"
#endif
#define SUM_OF(J) "+f"(c[J][0]), "+f"(c[J][1]), "+f"(c[J][2]), "+f"(c[J][3])
#define SUMS_OF(J) SUM_OF(J), SUM_OF(J + 1), SUM_OF(J + 2), SUM_OF(J + 3)
#define MANY_SUMS_OF(J) SUMS_OF(J), SUMS_OF(J + 4), SUMS_OF(J + 8), SUMS_OF(J + 12)
#define PRODUCT_ONTO(SUMS, ROWS, NAMES, A, B, ...)                                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32." MINISGL_OPERANDS    \
                 " {" NAMES "}, " A ", " B ", " SUMS ", 1, 1, 0, 0;"                      \
                 : __VA_ARGS__                                                            \
                 : "l"(left), "l"(right))
#define PRODUCT(...) PRODUCT_ONTO("1", __VA_ARGS__)
// The left matrix in registers, and the right one by columns.
#define PRODUCT_OF_COLUMNS(COLUMNS, NAMES, A, B, ...)                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." MINISGL_OPERANDS \
                 " {" NAMES "}, {" A "}, " B ", 1, 1, 1, 1;"                              \
                 : __VA_ARGS__                                                            \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32                                                                       \
    NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29," \
             " %30, %31"
#define NAMES_48                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45," \
             " %46, %47"
#define NAMES_64                                                                       \
    NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61," \
             " %62, %63"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_128                                                                      \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77," \
             " %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93," \
             " %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107," \
             " %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119," \
             " %120, %121, %122, %123, %124, %125, %126, %127"

// c[64 x ROWS] += left[64 x 16] right[ROWS x 16] transposed, over a warpgroup. Thread t of it has
// c[j][0 .. 3]: lines t / 32 * 16 + t % 32 / 4 (+ 8 for the last two), columns j * 8 + t % 4 * 2
// (+ 1 for odd ones). The operands begin with the first line.
template <int ROWS>
INLINE void multiply_add(float (&c)[ROWS / 8][4], Operand left, Operand right) {
    static_assert(ROWS == 16 || ROWS % 32 == 0 && ROWS <= 128 || ROWS == 144 || ROWS == 256,
                  "no form");
    if constexpr (ROWS == 16) PRODUCT(16, NAMES_8, "%8", "%9", SUM_OF(0), SUM_OF(1));
    if constexpr (ROWS == 32) PRODUCT(32, NAMES_16, "%16", "%17", SUMS_OF(0));
    if constexpr (ROWS == 64) PRODUCT(64, NAMES_32, "%32", "%33", SUMS_OF(0), SUMS_OF(4));
    if constexpr (ROWS == 96)
        PRODUCT(96, NAMES_48, "%48", "%49", SUMS_OF(0), SUMS_OF(4), SUMS_OF(8));
    if constexpr (ROWS == 128)
        PRODUCT(128, NAMES_64, "%64", "%65", MANY_SUMS_OF(0));
    if constexpr (ROWS == 144)
        PRODUCT(144, NAMES_72, "%72", "%73", MANY_SUMS_OF(0), SUM_OF(16), SUM_OF(17));
    if constexpr (ROWS == 256)
        PRODUCT(256, NAMES_128, "%128", "%129", MANY_SUMS_OF(0), MANY_SUMS_OF(16));
}

// The first of several products: what the sums were does not count.
template <int ROWS>
INLINE void multiply(float (&c)[ROWS / 8][4], Operand left, Operand right) {
    static_assert(ROWS == 128, "no form");
    PRODUCT_ONTO("0", 128, NAMES_64, "%64", "%65", MANY_SUMS_OF(0));
}

// c[64 x COLUMNS] += left[64 x 16] right[16 x COLUMNS]. Thread t of the warpgroup has of the left
// matrix, in pairs of neighbouring columns, lines t / 32 * 16 + t % 32 / 4 (+ 8 for odd registers),
// columns t % 4 * 2 (+ 8 for the last two).
template <int COLUMNS>
INLINE void multiply_add_columns(float (&c)[COLUMNS / 8][4], const u32 (&left)[4], Operand right) {
    static_assert(COLUMNS == 64 || COLUMNS == 128, "no form");
    if constexpr (COLUMNS == 64)
        PRODUCT_OF_COLUMNS(64, NAMES_32, "%32, %33, %34, %35", "%36", SUMS_OF(0), SUMS_OF(4));
    if constexpr (COLUMNS == 128)
        PRODUCT_OF_COLUMNS(128, NAMES_64, "%64, %65, %66, %67", "%68", MANY_SUMS_OF(0));
}

// Every thread of every block of the cluster meets here; what was written before is seen after.
INLINE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Waits until every thread of the cluster is done with what it has read. Nothing is made visible,
// which would take as long as the last write to memory.
INLINE void cluster_leave() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// What lies at the same place of shared memory in the block `rank` of the cluster.
INLINE uint4 cluster_read(const uint4* at, int rank) {
    u32 here = address_of(at), there;
    uint4 value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(there)
                 : "memory");
    return value;
}
#endif
