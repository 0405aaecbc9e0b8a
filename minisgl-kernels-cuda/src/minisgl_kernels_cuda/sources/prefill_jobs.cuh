// What the blocks of prefill attention work through, and how the warps of a block tell each other.
//
// A job is some tokens of a request with the query heads of one KV head: as many as fit in ROWS
// lines of shared memory, token by token. Jobs stand in a row by request, tokens from the last to
// the first, and KV head, so that each request ends with its shortest ones. A block takes the job
// of its own number first, and then whatever is next: it claims it by a counter.
//
// A job that has more keys than a block has to take on average, twice as many or more, comes in
// parts, each with some of its keys and a number of its own: a few tokens behind a long prefix fill
// the device too. Jobs that keep it busy anyway are not split.
//
// All of this is worked out here from the lengths on the device; the host plans nothing.
#pragma once
#include "ring.cuh"

constexpr int ROWS = 128, KEYS = 128;  // of a job; keys of a tile
constexpr int JOBS = 2;                // under way in a block: the next one is there when one ends
constexpr int READERS = 4;             // of a job: who copies keys, who values, two warpgroups
// Tiles of a part, and parts of a job: what to merge them costs is worth about a tile each.
constexpr int MIN_TILES = 3, MAX_PARTS = 32;

// Everything the step consists of; the same for all blocks.
struct Step {
    scalar* out;            // [num_tokens, num_kv_heads * ratio, D]
    const int* page_table;  // [rows, max_pages]
    const int* rows;        // [num_reqs] in page_table
    const int* seq_lens;    // [num_reqs] with the new tokens
    const int* starts;      // [num_reqs + 1] the new tokens of each
    int* num_claimed;       // 0 between kernels
    float4* partials;       // of as many parts as there are blocks; see prefill_parts.cuh
    int* arrived;           // by part and warp: 0 between kernels
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
    int first_tile, last_tile;  // of those with keys that a token sees, or this part of them
    int part, num_parts;
    int place;        // of the first part in what parts leave, if there are several

    INLINE int last_position() const { return position + num_tokens - 1; }
    INLINE int num_tiles() const { return last_tile - first_tile + 1; }
    INLINE void take_part(int which, int count, int first_place) {
        int all = num_tiles();
        last_tile = first_tile + all * (which + 1) / count - 1;
        first_tile += all * which / count;
        part = which;
        num_parts = count;
        place = first_place;
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

// The new tokens of a request; none behind the last request.
struct Request {
    int start, num_tokens, len;

    INLINE Request(const Step& s, int req) : start(0), num_tokens(0), len(0) {
        if (req >= s.num_reqs) return;
        start = s.starts[req];
        num_tokens = s.starts[req + 1] - start;
        len = s.seq_lens[req];
    }
    // Of one KV head.
    INLINE int num_jobs(const Step& s) const {
        return (num_tokens + s.max_tokens() - 1) / s.max_tokens();
    }
    // All keys of some tokens, counted from the first; whose head and row are not known here.
    INLINE Job job(const Step& s, int which) const {
        int token = which * s.max_tokens(), position = len - num_tokens + token;
        Job job{min(s.max_tokens(), num_tokens - token), start + token, position, len};
        job.first_tile = s.window < 0 || s.window >= position ? 0 : (position - s.window) / KEYS;
        job.last_tile = job.last_position() / KEYS;
        return job;
    }
    // All jobs of a request come in as many parts as the first, which has the fewest keys. (Others
    // have up to two tiles less where there is a window, which leaves one to each part.) All parts
    // together are no more than blocks.
    INLINE int num_parts(const Step& s, int twice_all_tiles) const {
        if (!num_tokens) return 1;
        int tiles = job(s, 0).num_tiles(), num_blocks = gridDim.x;
        int most = min(tiles / MIN_TILES, MAX_PARTS);
        return max(1, min(most, tiles * 2 * num_blocks / twice_all_tiles));
    }
};

INLINE int sum_of_lanes_so_far(int value) {
    for (int offset = 1; offset < 32; offset <<= 1) {
        int other = __shfl_up_sync(FULL_WARP, value, offset);
        if (threadIdx.x % 32 >= offset) value += other;
    }
    return value;
}

// Finds jobs, or parts of jobs, by their numbers, which may only grow. Used by a warp, which looks
// at 32 requests at a time: those from `first` on, whose jobs begin with number `before`, and those
// of them that are parts with `places`.
struct Finder {
    int twice_all_tiles;  // of all jobs; those of a request are taken to grow evenly
    int first, before, places;

    INLINE explicit Finder(const Step& s) : first(0), before(0), places(0) {
        i64 twice = 0;
        for (int req = threadIdx.x % 32; req < s.num_reqs; req += 32) {
            Request request(s, req);
            int num_jobs = request.num_jobs(s);
            if (!num_jobs) continue;
            int fewest = request.job(s, 0).num_tiles();
            int most = max(fewest, request.job(s, num_jobs - 1).num_tiles());
            twice += i64(num_jobs) * s.num_kv_heads * (fewest + most);
        }
        twice_all_tiles = min(warp_sum(twice), i64(1) << 30);
    }
    // Returns no tokens behind the last job; then `before` is the number of all jobs.
    INLINE Job find(const Step& s, int number) {
        int lane = threadIdx.x % 32;
        for (; first < s.num_reqs; first += 32) {
            Request request(s, first + lane);
            int parts = request.num_parts(s, twice_all_tiles);
            int count = request.num_jobs(s) * s.num_kv_heads * parts;
            int num_places = parts > 1 ? count : 0;
            int end = sum_of_lanes_so_far(count), places_end = sum_of_lanes_so_far(num_places);
            int all = __shfl_sync(FULL_WARP, end, 31), rest = number - before;
            if (rest >= all) {
                before += all;
                places += __shfl_sync(FULL_WARP, places_end, 31);
                continue;
            }
            int which = warp_min(rest < end ? lane : 32);
            rest -= __shfl_sync(FULL_WARP, end - count, which);
            parts = __shfl_sync(FULL_WARP, parts, which);
            int part = rest % parts;
            int place = places + __shfl_sync(FULL_WARP, places_end - num_places, which);
            place += rest - part;
            rest /= parts;
            request.start = __shfl_sync(FULL_WARP, request.start, which);
            request.num_tokens = __shfl_sync(FULL_WARP, request.num_tokens, which);
            request.len = __shfl_sync(FULL_WARP, request.len, which);
            Job job = request.job(s, request.num_jobs(s) - 1 - rest / s.num_kv_heads);
            job.head = rest % s.num_kv_heads;
            job.row = s.rows[first + which];
            job.take_part(part, parts, place);
            return job;
        }
        return Job{};
    }
};

// What one warp does: find jobs and claim them.
template <int D>
INLINE void make_jobs(Jobs<D> jobs, const MatrixMap& q, const Step& s) {
    Finder finder(s);
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
