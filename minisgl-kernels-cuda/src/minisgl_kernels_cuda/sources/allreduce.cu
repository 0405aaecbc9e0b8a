// Sums over the GPUs of one host for messages that are too small for their latency to be hidden:
// in one exchange, in two, and in one together with the residual add and the norm behind it.
//
// Terms are added in float32 and in order of the ranks, whoever adds them, so every rank gets the
// same bits.
#include "peers.cuh"
#include "norm_parts.cuh"

constexpr int PER_THREAD = 2;  // most pieces of a thread

INLINE Piece as_piece(const uint4& bits) {
    Piece piece;
    *reinterpret_cast<uint4*>(&piece) = bits;
    return piece;
}
INLINE uint4 as_bits(const Piece& piece) { return *reinterpret_cast<const uint4*>(&piece); }

// The ranks' pieces at `i` of a tile, added up; `own` is this rank's, which it has not sent itself.
template <int RANKS>
INLINE Piece sum_of(const Exchange<RANKS>& exchange, int i, const Piece& own) {
    Piece pieces[RANKS];
#pragma unroll
    for (int source = 0; source < RANKS; source++)
        pieces[source] = source == exchange.rank ? own : as_piece(exchange.received(source, i));
    Floats<PIECE> sum = widen(pieces[0]);
#pragma unroll
    for (int source = 1; source < RANKS; source++) sum = sum_of(sum, widen(pieces[source]));
    return narrow(sum);
}

// x[num_pieces] becomes the sum over ranks. Each sends all of its part to all others. A block takes
// `tile` pieces at a time.
template <int RANKS>
INLINE void sum_at_once(scalar* x, const Peers& peers, Patience patience, i64 num_pieces, int tile,
                        int rank) {
    pdl_launch();
    pdl_wait();
    Exchange<RANKS> exchange(peers, rank, patience);
    for (i64 first = i64(blockIdx.x) * tile; first < num_pieces; first += i64(gridDim.x) * tile) {
        Piece own[PER_THREAD];
        auto is_ours = [&](int i) { return i < tile && first + i < num_pieces; };
#pragma unroll
        for (int p = 0; p < PER_THREAD; p++) {
            int i = p * blockDim.x + threadIdx.x;
            if (!is_ours(i)) continue;
            own[p] = load_piece(x + (first + i) * PIECE);
            exchange.send_all(i, as_bits(own[p]));
        }
        exchange.meet();
#pragma unroll
        for (int p = 0; p < PER_THREAD; p++) {
            int i = p * blockDim.x + threadIdx.x;
            if (is_ours(i)) store_piece(x + (first + i) * PIECE, sum_of(exchange, i, own[p]));
        }
        exchange.next();
    }
    exchange.end();
}

// The same in two exchanges: each rank sums a part of every block's stretch of RANKS * tile pieces,
// and sends it to the others.
template <int RANKS>
INLINE void sum_by_parts(scalar* x, const Peers& peers, Patience patience, i64 num_pieces, int tile,
                         int rank) {
    pdl_launch();
    pdl_wait();
    Exchange<RANKS> exchange(peers, rank, patience);
    i64 stretch = i64(tile) * RANKS;
    for (i64 first = blockIdx.x * stretch; first < num_pieces; first += gridDim.x * stretch) {
        auto place = [&](int part, int i) { return first + i64(part) * tile + i; };
        auto is_there = [&](int part, int i) { return i < tile && place(part, i) < num_pieces; };
        for (int i = threadIdx.x; i < tile; i += blockDim.x)
#pragma unroll
            for (int part = 0; part < RANKS; part++)
                if (part != rank && is_there(part, i))
                    exchange.send(part, i, as_bits(load_piece(x + place(part, i) * PIECE)));
        exchange.meet();
        Piece sums[PER_THREAD];
#pragma unroll
        for (int p = 0; p < PER_THREAD; p++) {
            int i = p * blockDim.x + threadIdx.x;
            if (!is_there(rank, i)) continue;
            scalar* own = x + place(rank, i) * PIECE;
            sums[p] = sum_of(exchange, i, load_piece(own));
            store_piece(own, sums[p]);
        }
        exchange.next();
#pragma unroll
        for (int p = 0; p < PER_THREAD; p++) {
            int i = p * blockDim.x + threadIdx.x;
            if (is_there(rank, i)) exchange.send_all(i, as_bits(sums[p]));
        }
        exchange.meet();
        for (int i = threadIdx.x; i < tile; i += blockDim.x)
#pragma unroll
            for (int part = 0; part < RANKS; part++)
                if (part != rank && is_there(part, i))
                    store_piece(x + place(part, i) * PIECE, as_piece(exchange.received(part, i)));
        exchange.next();
    }
    exchange.end();
}

// x[num_rows, n], summed over ranks, becomes the norm of itself and residual, residual their sum;
// both contiguous. A block takes a row at a time. Rounding follows the separate ops: the sum over
// ranks is rounded, then that with the residual, then the quotient.
template <int RANKS>
INLINE void sum_add_norm(scalar* x, scalar* residual, const scalar* weight, const Peers& peers,
                         Patience patience, int rank, int num_rows, int n, float eps) {
    Piece scales[PER_THREAD];
#pragma unroll
    for (int p = 0; p < PER_THREAD; p++) {
        int at = (p * blockDim.x + threadIdx.x) * PIECE;
        if (at < n) scales[p] = load_piece(weight + at);
    }
    pdl_launch();
    pdl_wait();
    Exchange<RANKS> exchange(peers, rank, patience);
    for (int row = blockIdx.x; row < num_rows; row += gridDim.x) {
        scalar* x_row = x + i64(row) * n;
        scalar* residual_row = residual + i64(row) * n;
        Piece own[PER_THREAD], old[PER_THREAD];
#pragma unroll
        for (int p = 0; p < PER_THREAD; p++) {
            int i = p * blockDim.x + threadIdx.x;
            if (i * PIECE >= n) continue;
            own[p] = load_piece(x_row + i * PIECE);
            exchange.send_all(i, as_bits(own[p]));
            old[p] = load_piece(residual_row + i * PIECE);
        }
        exchange.meet();
        float sum = 0.f;
#pragma unroll
        for (int p = 0; p < PER_THREAD; p++) {
            int i = p * blockDim.x + threadIdx.x;
            if (i * PIECE >= n) continue;
            old[p] = narrow(sum_of(widen(sum_of(exchange, i, own[p])), widen(old[p])));
            sum += squares(widen(old[p]));
            store_piece(residual_row + i * PIECE, old[p]);
        }
        float scale = rsqrtf(row_sum(sum) / n + eps);
#pragma unroll
        for (int p = 0; p < PER_THREAD; p++) {
            int i = p * blockDim.x + threadIdx.x;
            if (i * PIECE >= n) continue;
            store_piece(x_row + i * PIECE, normed(widen(old[p]), scale, scales[p]));
        }
        exchange.next();
    }
    exchange.end();
}

#define MINISGL_SUMS(RANKS)                                                                       \
    extern "C" __global__ void sum_at_once_##RANKS(                                               \
        const IN_PLACE Peers peers, const IN_PLACE Patience patience, scalar* x, i64 num_pieces,  \
        int tile, int rank) {                                                                     \
        sum_at_once<RANKS>(x, peers, patience, num_pieces, tile, rank);                           \
    }                                                                                             \
    extern "C" __global__ void sum_by_parts_##RANKS(                                              \
        const IN_PLACE Peers peers, const IN_PLACE Patience patience, scalar* x, i64 num_pieces,  \
        int tile, int rank) {                                                                     \
        sum_by_parts<RANKS>(x, peers, patience, num_pieces, tile, rank);                          \
    }                                                                                             \
    extern "C" __global__ void sum_add_norm_##RANKS(                                              \
        const IN_PLACE Peers peers, const IN_PLACE Patience patience, scalar* x,                  \
        scalar* residual, const scalar* weight, int rank, int num_rows, int n, float eps) {       \
        sum_add_norm<RANKS>(x, residual, weight, peers, patience, rank, num_rows, n, eps);        \
    }

MINISGL_SUMS(2)
MINISGL_SUMS(4)
MINISGL_SUMS(8)
