// What every kernel shares: the element type of the unit, 16-byte pieces, warp sums, and the few
// instructions that have no name in C++.
//
// A unit is compiled once per element type, chosen by MINISGL_DTYPE. No header of the toolkit is
// included, so that NVRTC needs no include folder and a unit compiles in a tenth of a second.
// Without a CUDA compiler the same sources are built against a simulator, which defines
// MINISGL_SIMULATOR and gives its own version of the instructions.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define MINISGL_BF16 1
#define MINISGL_F16 2
#define MINISGL_F32 3

#define INLINE __device__ __forceinline__

#ifdef MINISGL_SIMULATOR
#include "instructions_sim.h"
#else

// Programmatic dependent launch: a kernel may start while the one before it still runs, and that one
// while the one before it does. Until pdl_wait returns, a kernel may write nothing, and read only what
// was there before the last kernel, copy or graph in front that does not call pdl_launch: weights and
// the step's inputs. Every thread calls it, so that the end of this kernel implies the end of the one
// before.
INLINE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as all blocks of this one run.
INLINE void pdl_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Count a block or a warp in, after a barrier, and return how many came before. What its threads
// wrote before the barrier is seen by all threads of one that comes later, behind its barrier.
INLINE int arrive(int* count) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}

// Where something is in shared memory, as instructions take it: in bytes, to be computed with.
typedef u32 Address;
INLINE Address address_of(const void* at) { return u32(__cvta_generic_to_shared(at)); }

// A copy of 16 bytes to shared memory that goes on while the thread does; zeros where there is
// nothing to copy. copies_pending returns when at most N groups of this thread's copies remain.
INLINE void copy_async(Address to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}
INLINE void copy_async(uint4* to, const void* from, bool is_there) {
    copy_async(address_of(to), from, is_there);
}
INLINE void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
INLINE void copies_pending() {
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

// Shared memory whose size is given at the launch. It begins with a line of 128 bytes: rows that are
// copied to the middle of lines take more requests each, which cost decode attention a tenth.
#define SHARED_BUFFER(NAME) extern __shared__ __align__(128) uint4 NAME[]

INLINE float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

INLINE u16 float_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

INLINE float f16_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

INLINE u16 float_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Two numbers as neighbouring elements of 16 bits, the first in the lower half.
INLINE u32 narrow_pair(float first, float second) {
    u32 pair;
#if MINISGL_DTYPE == MINISGL_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

INLINE float exp2_fast(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

INLINE float divide_fast(float a, float b) { return __fdividef(a, b); }

// c[16 x 8] += a[16 x 16] b[16 x 8] over a warp, for 16-bit elements and float32 sums.
INLINE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if MINISGL_DTYPE == MINISGL_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}
#endif

#if MINISGL_DTYPE == MINISGL_F32
typedef float scalar;
INLINE float widen(scalar value) { return value; }
INLINE scalar narrow(float value) { return value; }
#elif MINISGL_DTYPE == MINISGL_F16
typedef u16 scalar;
INLINE float widen(scalar value) { return f16_to_float(value); }
INLINE scalar narrow(float value) { return float_to_f16(value); }
#else
typedef u16 scalar;
INLINE float widen(scalar value) { return bf16_to_float(value); }
INLINE scalar narrow(float value) { return float_to_bf16(value); }
#endif

constexpr int PIECE = 16 / sizeof(scalar);  // elements of a 16-byte access
constexpr u32 FULL_WARP = 0xffffffffu;
#define INFINITE __uint_as_float(0x7f800000u)

template <int N>
struct alignas(N * sizeof(scalar)) Pack {
    scalar v[N];
};
typedef Pack<PIECE> Piece;

INLINE Piece load_piece(const scalar* from) { return *reinterpret_cast<const Piece*>(from); }
INLINE void store_piece(scalar* to, const Piece& piece) { *reinterpret_cast<Piece*>(to) = piece; }

// The same elements as float32.
template <int N>
struct Floats {
    float v[N];
};

template <int N>
INLINE Floats<N> widen(const Pack<N>& pack) {
    Floats<N> values;
#pragma unroll
    for (int i = 0; i < N; i++) values.v[i] = widen(pack.v[i]);
    return values;
}

// Converts two at a time: a multiprocessor does four times as many of those.
template <int N>
INLINE Pack<N> narrow(const Floats<N>& values) {
    Pack<N> pack;
#if MINISGL_DTYPE == MINISGL_F32
#pragma unroll
    for (int i = 0; i < N; i++) pack.v[i] = values.v[i];
#else
#pragma unroll
    for (int i = 0; i + 1 < N; i += 2) {
        u32 pair = narrow_pair(values.v[i], values.v[i + 1]);
        pack.v[i] = u16(pair);
        pack.v[i + 1] = u16(pair >> 16);
    }
    if (N % 2) pack.v[N - 1] = narrow(values.v[N - 1]);
#endif
    return pack;
}

// What values become when they are stored and read again: the torch ops round where they store.
INLINE float rounded(float value) { return widen(narrow(value)); }
template <int N>
INLINE Floats<N> rounded(const Floats<N>& values) { return widen(narrow(values)); }

template <class T>
INLINE T warp_sum(T value) {
    for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

INLINE float warp_max(float value) {
    for (int offset = 16; offset; offset >>= 1)
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
    return value;
}

INLINE int warp_min(int value) {
    for (int offset = 16; offset; offset >>= 1) {
        int other = __shfl_xor_sync(FULL_WARP, value, offset);
        value = other < value ? other : value;
    }
    return value;
}
