// What the blocks of prefill attention work through, and how the warps of a block tell each other.
//
// A job is some tokens of a request with the query heads of one KV head: as many as fit in ROWS
// lines of shared memory, token by token. Jobs stand in a row by request, tokens from the last to
// the first, and KV head, so that each request ends with its shortest ones. A block takes the job
// of its own number first, and then whatever is next: it claims it by a counter. All of this is
// worked out here from the lengths on the device; the host plans nothing.
#pragma once
#include "ring.cuh"

constexpr int ROWS = 128, KEYS = 128;  // of a job; keys of a tile
constexpr int JOBS = 2;                // under way in a block: the next one is there when one ends
constexpr int READERS = 4;             // of a job: who copies keys, who values, two warpgroups

// Everything the step consists of; the same for all blocks.
struct Step {
    scalar* out;            // [num_tokens, num_kv_heads * ratio, D]
    const int* page_table;  // [rows, max_pages]
    const int* rows;        // [num_reqs] in page_table
    const int* seq_lens;    // [num_reqs] with the new tokens
    const int* starts;      // [num_reqs + 1] the new tokens of each
    int* num_claimed;       // 0 between kernels
    int max_pages, page_size, box_keys;  // a box lies in one page
    int num_reqs, num_kv_heads, ratio, window;
    float scale;            // of scores, times log2(e)
    INLINE int max_tokens() const { return ROWS / ratio; }  // of a job
};

struct Job {
    int num_tokens;   // 0 behind the last job
    int token;        // the first one, of all
    int position;     // of that in its request
    int len;          // keys of the request
    int head;         // of keys and values
    int row;          // in page_table

    INLINE int last_position() const { return position + num_tokens - 1; }
    // Tiles with keys that a token sees.
    INLINE int last_tile() const { return last_position() / KEYS; }
    INLINE int first_tile(int window) const {
        return window < 0 || window >= position ? 0 : (position - window) / KEYS;
    }
    INLINE bool is_masked(int tile, int window) const {
        int key = tile * KEYS;
        return key + KEYS - 1 > position || (window >= 0 && key < last_position() - window);
    }
    // Keys of a tile that the request has.
    INLINE int num_keys(int tile) const { return min(len - tile * KEYS, KEYS); }
};

// The jobs that a block has under way, in shared memory, with their queries. As one who makes or
// reads them sees them.
template <int D>
struct Jobs {
    static constexpr int SLOT = ROWS * LINE * (D / 64);  // pieces

    uint4* slots;
    Job* jobs;
    Arrivals *made, *loaded, *empty;  // of each slot: what is known of the job, its queries
    int at, parity;

    INLINE Jobs(uint4* slots, uint4* rest) : slots(slots), at(0), parity(0) {
        made = reinterpret_cast<Arrivals*>(rest);
        loaded = made + JOBS;
        empty = loaded + JOBS;
        jobs = reinterpret_cast<Job*>(empty + JOBS);
    }
    // One thread, before the block's barrier.
    INLINE void start() const {
        for (int i = 0; i < JOBS; i++) {
            expect_arrivals(made + i, 1);
            expect_arrivals(loaded + i, 1);
            expect_arrivals(empty + i, READERS);
        }
        publish_arrivals();
    }
    INLINE void advance() {
        if (++at < JOBS) return;
        at = 0;
        parity ^= 1;
    }
    INLINE Job read() const {
        wait_for(made + at, parity);
        return jobs[at];
    }
    INLINE uint4* queries() const { return slots + at * SLOT; }
    INLINE void wait_for_queries() const { wait_for(loaded + at, parity); }
    INLINE void release() const { arrive(empty + at); }
    // One thread makes a job, when its slot is empty.
    INLINE void wait_until_empty() const { wait_for(empty + at, parity ^ 1); }
    INLINE void make(const Job& job, const MatrixMap& q, const Step& s) const {
        jobs[at] = job;
        arrive(made + at);
        if (!job.num_tokens) return;
        int lines = s.max_tokens() * s.ratio;
        arrive_and_expect(loaded + at, lines * (D / 64) * 128);
#pragma unroll
        for (int half = 0; half < D / 64; half++)
            load_heads(queries() + half * ROWS * LINE, q, half * 64, job.head * s.ratio, job.token,
                       loaded + at);
    }
};

// Finds jobs by their numbers, which may only grow. Used by a warp, which looks at 32 requests at a
// time: those from `first` on, whose jobs begin with number `before`.
struct Finder {
    int first, before;

    // Returns no tokens behind the last job; then `before` is the number of all jobs.
    INLINE Job find(const Step& s, int number) {
        int lane = threadIdx.x % 32, size = s.max_tokens();
        for (; first < s.num_reqs; first += 32) {
            int req = first + lane, start = 0, num_tokens = 0;
            if (req < s.num_reqs) {
                start = s.starts[req];
                num_tokens = s.starts[req + 1] - start;
            }
            int num_jobs = (num_tokens + size - 1) / size * s.num_kv_heads, end = num_jobs;
            for (int offset = 1; offset < 32; offset <<= 1) {
                int other = __shfl_up_sync(FULL_WARP, end, offset);
                if (lane >= offset) end += other;
            }
            int all = __shfl_sync(FULL_WARP, end, 31), rest = number - before;
            if (rest >= all) {
                before += all;
                continue;
            }
            int which = warp_min(rest < end ? lane : 32);
            rest -= __shfl_sync(FULL_WARP, end - num_jobs, which);
            start = __shfl_sync(FULL_WARP, start, which);
            num_tokens = __shfl_sync(FULL_WARP, num_tokens, which);
            int token = ((num_tokens - 1) / size - rest / s.num_kv_heads) * size;
            int len = s.seq_lens[first + which];
            return Job{min(size, num_tokens - token), start + token, len - num_tokens + token, len,
                       rest % s.num_kv_heads, s.rows[first + which]};
        }
        return Job{};
    }
};

// What one warp does: find jobs and claim them.
template <int D>
INLINE void make_jobs(Jobs<D> jobs, const MatrixMap& q, const Step& s) {
    Finder finder{0, 0};
    int lane = threadIdx.x % 32, number = blockIdx.x, num_before = -1;
    while (true) {
        Job job = finder.find(s, number);
        // Every block that has had a job claims one too many: as many claims as there are jobs.
        bool is_last = !job.num_tokens && num_before == finder.before - 1;
        if (lane == 0) {
            if (is_last) *s.num_claimed = 0;  // for the next kernel
            jobs.wait_until_empty();
            jobs.make(job, q, s);
            if (job.num_tokens) num_before = atomicAdd(s.num_claimed, 1);
        }
        if (!job.num_tokens) return;
        num_before = __shfl_sync(FULL_WARP, num_before, 0);
        number = gridDim.x + num_before;
        jobs.advance();
    }
}
