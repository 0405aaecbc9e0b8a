// Attention of any number of query tokens per request over the paged KV pool, for Hopper.
//
// The query heads of a KV head are rows of the same products. A block has two warpgroups that
// multiply, with 64 rows each, and one whose warps have one thing to do each: find the jobs and
// have their queries copied (prefill_jobs.cuh), have keys copied, and values, tile by tile through
// two rings in shared memory. They run ahead over the ends of jobs.
//
// A warpgroup computes the weights of a tile while the tensor cores multiply the values of the tile
// before, and the two warpgroups take turns in handing them work, so that one multiplies while the
// other computes weights (FlashAttention-3, arXiv:2407.08608). Tiles come from the newest keys to
// the oldest; only those at the edges of what a job's tokens see are masked. A job may be a part of
// one; what parts come to is put together in prefill_parts.cuh.
#include "prefill_parts.cuh"

constexpr int THREADS = 384, STAGES = 2;
constexpr int BARRIERS = 1, TURNS = 3;  // numbers of the first of two

template <int D>
using Tiles = Ring<STAGES, KEYS * LINE * (D / 64), 2, 1>;

// Shared memory, in pieces.
template <int D>
struct Layout {
    static constexpr int KEYS_AT = JOBS * Jobs<D>::SLOT, RING = STAGES * KEYS * LINE * (D / 64);
    static constexpr int VALUES_AT = KEYS_AT + RING, RINGS_AT = VALUES_AT + RING;
    static constexpr int JOBS_AT = RINGS_AT + 2 * STAGES;  // two rings of two arrivals per stage
    static_assert(2 * STAGES * 16 + JOBS * (3 * sizeof(Arrivals) + sizeof(Job)) <= 256,
                  "units.py asks for 256 bytes behind the rings' slots");
};

// What a warp does: have the tiles of all jobs copied, of keys or of values. A lane takes a box.
template <int D>
INLINE void fill(Tiles<D> ring, Jobs<D> jobs, const MatrixMap& pool, const Step& s) {
    int lane = threadIdx.x % 32, page_boxes = s.page_size / s.box_keys;
    for (;; jobs.advance()) {
        const Job job = jobs.read();
        __syncwarp();
        if (lane == 0) jobs.release();
        if (!job.num_tokens) return;
        const int* pages = s.page_table + i64(job.row) * s.max_pages;
        auto row_of = [&](int box) {
            int page = box / page_boxes;
            return pages[page] * s.page_size + (box - page * page_boxes) * s.box_keys;
        };
#pragma unroll 1
        for (int tile = job.last_tile; tile >= job.first_tile; tile--) {
            int num_boxes = (job.num_keys(tile) + s.box_keys - 1) / s.box_keys;
            int first = tile * (KEYS / s.box_keys);
            int row = row_of(first + min(lane, num_boxes - 1));
            ring.wait_until_empty();
            if (lane == 0)
                arrive_and_expect(ring.arrivals(), num_boxes * s.box_keys * (D / 64) * 128);
#pragma unroll 1
            for (int box = lane; box < num_boxes; box += 32) {
                if (box != lane) row = row_of(first + box);
                uint4* to = ring.slot() + box * s.box_keys * LINE;
#pragma unroll
                for (int half = 0; half < D / 64; half++)
                    load_box(to + half * KEYS * LINE, pool, job.head * D + half * 64, row,
                             ring.arrivals());
            }
            ring.advance();
        }
    }
}

// What a warpgroup does that multiplies.
template <int D>
INLINE void attend(Tiles<D> keys, Tiles<D> values, Jobs<D> jobs, const Step& s) {
    int group = threadIdx.x / 128 - 1;
    Tokens tokens(s.ratio);
    if (group == 1) pass_turn(TURNS);  // the first turn is the other's
    for (;; jobs.advance()) {
        const Job job = jobs.read();
        if (!job.num_tokens) break;
        const Seen seen(job, tokens, s.window);
        Operand queries = operand(jobs.queries()) + group * 64 * LINE;
        const int last_tile = job.last_tile, first_tile = job.first_tile;
        float sums[D / 8][4] = {};
        Scores scores;
        Weights weights;
        Softmax softmax;
        softmax.clear();

        jobs.wait_for_queries();
        wait_for(keys.arrivals(), keys.parity);
        start_products();
        start_scores<D>(scores, queries, operand(keys.slot()));
        submit_products();
        products_pending<0>();
        settle(scores);
        keys.release(keys.stage);
        keys.advance();
        seen.mask(scores, last_tile, s.window >= 0);
        softmax.add(scores, s.scale);
        if (job.num_keys(last_tile) < KEYS) {
            wait_for(values.arrivals(), values.parity);
            clear_behind<D>(values.slot(), job.num_keys(last_tile), BARRIERS + group);
        }
        // The weights of `tile` are in scores, and the values of the tile before are on their way
        // into the sums. (The wait stands at the loop's beginning, as the compiler would move what
        // can be computed meanwhile to behind it.)
#pragma unroll 1
        for (int tile = last_tile;; tile--) {
            products_pending<0>();
            settle(sums);
            if (tile != last_tile) {
                values.release(values.stage);
                values.advance();
            }
            narrow_weights(weights, scores);
            rescale(sums, softmax.factor);
            if (tile == first_tile) break;
            wait_for(keys.arrivals(), keys.parity);
            wait_for_turn(TURNS + group);
            start_products();
            start_scores<D>(scores, queries, operand(keys.slot()));
            submit_products();
            wait_for(values.arrivals(), values.parity);
            start_products();
            start_values<D>(sums, weights, operand_of_columns(values.slot(), KEYS * LINE));
            submit_products();
            pass_turn(TURNS + 1 - group);
            products_pending<1>();
            settle(scores);
            keys.release(keys.stage);
            keys.advance();
            if (job.is_masked(tile - 1, s.window)) seen.mask(scores, tile - 1, s.window >= 0);
            softmax.add(scores, s.scale);
        }
        if (threadIdx.x % 128 == 0) jobs.release();
        wait_for(values.arrivals(), values.parity);
        start_products();
        start_values<D>(sums, weights, operand_of_columns(values.slot(), KEYS * LINE));
        submit_products();
        softmax.add_columns();
        products_pending<0>();
        settle(sums);
        values.release(values.stage);
        values.advance();
        if (job.num_parts == 1 || merge<D>(s, job, sums, softmax)) {
            softmax.finish();
            rescale(sums, softmax.factor);
            write_out<D>(s, job, tokens, sums);
        }
    }
    if (group == 0) wait_for_turn(TURNS);  // nothing is left at the barrier
}

template <int D>
INLINE void prefill(const MatrixMap& q, const MatrixMap& k, const MatrixMap& v, const Step& s) {
    SHARED_LINES(shared);
    typedef Layout<D> At;
    Tiles<D> keys(shared + At::KEYS_AT, shared + At::RINGS_AT);
    Tiles<D> values(shared + At::VALUES_AT, shared + At::RINGS_AT + STAGES);
    Jobs<D> jobs(shared, shared + At::JOBS_AT);
    if (threadIdx.x == 0) {
        keys.start();
        values.start();
        jobs.start();
    }
    pdl_launch();
    __syncthreads();
    pdl_wait();
    if (threadIdx.x < 128) {
        give_back_registers<40>();
        int warp = threadIdx.x / 32;
        if (warp == 0) make_jobs(jobs, q, s);
        if (warp == 1) fill(keys, jobs, k, s);
        if (warp == 2) fill(values, jobs, v, s);
    } else {
        take_registers<232>();
        attend(keys, values, jobs, s);
    }
}

#define MINISGL_ATTENTION_PREFILL(D)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_prefill_##D(             \
        const __grid_constant__ MatrixMap q, const __grid_constant__ MatrixMap k,               \
        const __grid_constant__ MatrixMap v, scalar* out, const int* page_table,                \
        const int* rows, const int* seq_lens, const int* starts, int* num_claimed,              \
        float4* partials, int* arrived, int max_pages, int page_size, int box_keys,             \
        int num_reqs, int num_kv_heads, int ratio, int window, float scale) {                   \
        prefill<D>(q, k, v,                                                                     \
                   Step{out, page_table, rows, seq_lens, starts, num_claimed, partials,         \
                        arrived, max_pages, page_size, box_keys, num_reqs, num_kv_heads,        \
                        ratio, window, scale});                                                 \
    }

MINISGL_ATTENTION_PREFILL(64)
MINISGL_ATTENTION_PREFILL(128)
