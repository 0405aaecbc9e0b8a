// Attention of one query token per request over the paged KV pool.
//
// Keys are cut into chunks of a few dozen. The chunks of a step stand in a row, by request, KV head
// and place, and every block takes an equal part of that row, so that the device is full and evenly
// loaded whatever the lengths are: one request is spread over all of it, and a long one among many
// is not waited for. Where a block has many chunks, the end of a (request, head) stands in the row
// too, since it takes about as long as a chunk. All of this is worked out here from the lengths on
// the device; the host plans nothing, and a captured step fits any lengths.
//
// A block walks along its part. Its warps take a tile of 16 keys each, on their own, through a
// queue in shared memory that is always two tiles deep, across the ends of requests too. At the
// end of a (request, head) the warps' sums are merged. If other blocks have parts of it, the block
// leaves its sums in global memory, and the last one to arrive merges them all.
#include "attention_tile.cuh"

constexpr int DEPTH = 2;  // of a warp's queue, in tiles

// Everything the step consists of; the same for all blocks.
struct Step {
    scalar* out;             // [num_reqs, num_kv_heads * ratio, D]
    const scalar* q;         // the same, tokens q_stride apart
    const scalar* k;         // [slots, num_kv_heads, D]
    const scalar* v;
    const int* page_table;   // [rows, max_pages]
    const int* rows;         // [num_reqs] in page_table
    const int* seq_lens;     // [num_reqs] with the newest token
    float4* partials;        // two of each block
    int* arrived;            // of each block: 0 between kernels
    i64 q_stride;
    int max_pages, page_size, page_shift;  // log2(page_size), or -1 if that is no integer
    int num_reqs, num_kv_heads, ratio, window;
    int ends;                // 1 where ends stand in the row of chunks, or 0
    float scale;             // of scores, times log2(e)
    // Up to 8 query heads of a KV head are served together.
    INLINE int groups() const { return (ratio + GROUP - 1) / GROUP; }
    INLINE int heads() const { return num_kv_heads * groups(); }
};

// The batch, in shared memory.
struct Table {
    int *ends;  // [num_reqs] places in the row of one head, up to the end of each request
    int *lens, *rows;
    INLINE int num_places(int req) const { return ends[req] - start(req); }
    INLINE int start(int req) const { return req ? ends[req - 1] : 0; }
};

INLINE int first_key(const Step& s, int len) {
    return s.window < 0 || s.window >= len - 1 ? 0 : len - 1 - s.window;
}

// A chunk: its place in the row, and where that is.
struct Place {
    int at, req, head, group, chunk, num_chunks;
    int first, len;    // the request's first key that counts, and its keys
    const int* pages;  // of the request
    INLINE int segment_start() const { return at - chunk; }
    INLINE int segment_end() const { return at - chunk + num_chunks; }
    INLINE int first_query(const Step& s) const { return head * s.ratio + group * GROUP; }
    INLINE int num_queries(const Step& s) const { return min(s.ratio - group * GROUP, GROUP); }
    // The next chunk; behind the last one only `at` counts.
    INLINE void advance(const Step& s, const Table& table) {
        at++;
        if (++chunk < num_chunks) return;
        at += s.ends;
        chunk = 0;
        if (++group < s.groups()) return;
        group = 0;
        if (++head < s.num_kv_heads) return;
        head = 0;
        if (++req < s.num_reqs) enter(s, table);
    }
    // What a request's places have in common.
    INLINE void enter(const Step& s, const Table& table) {
        num_chunks = table.num_places(req) - s.ends;
        len = table.lens[req];
        first = first_key(s, len);
        pages = s.page_table + i64(table.rows[req]) * s.max_pages;
    }
};

// What a block takes: the places begin ..< end, of which at least one is a chunk's. The first
// `extra` blocks take one more.
struct Part {
    int size, extra, begin, end;
    INLINE Part(int total, int num_blocks) : size(total / num_blocks), extra(total % num_blocks) {
        begin = start(blockIdx.x);
        end = start(blockIdx.x + 1);
    }
    INLINE int start(int block) const { return block * size + min(block, extra); }
    INLINE int block_of(int at) const {
        int rest = at - extra * (size + 1);
        return rest < 0 ? at / (size + 1) : extra + rest / size;
    }
};

// Read lengths and rows, and number the places.
template <int WARPS>
INLINE void read_batch(const Step& s, const Table& table) {
    for (int i = threadIdx.x; i < s.num_reqs; i += WARPS * 32) {
        int len = max(s.seq_lens[i], 1);  // a row of padding may have none
        table.lens[i] = len;
        table.rows[i] = s.rows[i];
        table.ends[i] = (len - first_key(s, len) + WARPS * KEYS - 1) / (WARPS * KEYS) + s.ends;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int count = (s.num_reqs + 31) / 32, begin = threadIdx.x * count, sum = 0;
        int end = min(begin + count, s.num_reqs);
        for (int i = begin; i < end; i++) sum += table.ends[i];
        int before = sum;
        for (int offset = 1; offset < 32; offset <<= 1) {
            int other = __shfl_up_sync(FULL_WARP, before, offset);
            if (threadIdx.x >= offset) before += other;
        }
        before -= sum;
        for (int i = begin; i < end; i++) table.ends[i] = before += table.ends[i];
    }
    __syncthreads();
}

// The chunk of a place, or the next one where that is an end's.
INLINE Place find(const Step& s, const Table& table, int at) {
    int low = 0, high = s.num_reqs - 1;  // the first request that ends behind `at`
    while (low < high) {
        int middle = (low + high) / 2;
        if (table.ends[middle] * s.heads() > at) high = middle;
        else low = middle + 1;
    }
    int num_places = table.num_places(low), rest = at - table.start(low) * s.heads();
    int head = rest / num_places, chunk = rest - head * num_places;
    bool is_end = chunk == num_places - s.ends;
    Place place{at - is_end, low, head / s.groups(), head % s.groups(), chunk - is_end};
    place.enter(s, table);
    if (is_end) place.advance(s, table);
    return place;
}

// The keys of a warp's tile: first ..< first + KEYS of a request of `len`.
struct Tile {
    int first, len;
    INLINE bool has_keys() const { return first < len; }
    INLINE bool has_newest() const { return first < len && len <= first + KEYS; }
};

template <int WARPS>
INLINE Tile tile_of(const Place& p) {
    return Tile{p.first + (p.chunk * WARPS + int(threadIdx.x / 32)) * KEYS, p.len};
}

// Where the key of this lane (lane % KEYS of the tile) is. Looked up a tile ahead of its use.
struct Lookup {
    int page, offset;
};

template <int WARPS>
INLINE Lookup look_up(const Step& s, const Place& p) {
    Tile tile = tile_of<WARPS>(p);
    int key = min(tile.first + int(threadIdx.x % KEYS), tile.len - 1);
    int page = s.page_shift < 0 ? key / s.page_size : key >> s.page_shift;
    return Lookup{p.pages[page], key - page * s.page_size};
}

// The newest key of a request is written by the kernel in front of this one, the others by
// earlier steps.
enum Keys { ALL, OLD, NEWEST };

// Start copying a lane's share of a tile. Where keys of the tile lie behind the request's end, which
// do not count, there will be the newest key, or zeros while that is missing. The tile may lie behind
// the end altogether.
template <int D, int WARPS, Keys WHICH>
INLINE void enqueue(uint4* slot, const Step& s, const Place& p, const Lookup& found) {
    Tile tile = tile_of<WARPS>(p);
    if (!tile.has_keys()) return;
    constexpr u32 ROW = D / PIECE;  // pieces of a head
    u32 place = ((found.page * s.page_size + found.offset) * s.num_kv_heads + p.head) * ROW;
#pragma unroll
    for (int i = 0; i < Rows<D>::COUNT; i++) {
        u32 from = __shfl_sync(FULL_WARP, place, Rows<D>::key(i)) + Rows<D>::piece();
        int key = tile.first + Rows<D>::key(i);
        if (WHICH != ALL && (key == tile.len - 1) != (WHICH == NEWEST)) continue;
        bool is_there = WHICH != OLD || key < tile.len;
        copy_async(place_of_key<D>(slot, i), reinterpret_cast<const uint4*>(s.k) + from, is_there);
        copy_async(place_of_value<D>(slot, i), reinterpret_cast<const uint4*>(s.v) + from,
                   is_there);
    }
}

template <int D>
INLINE void load_queries(Queries<D>& q, const Step& s, const Place& p) {
    q.load(s.q + p.req * s.q_stride + p.first_query(s) * D, p.num_queries(s));
}

template <int D, int MINE>
INLINE void write_out(const Step& s, const Place& p, const Sums<MINE>& sums, int first_tile) {
    int pair = threadIdx.x % 4 * 2;
    i64 row = i64(p.req) * s.num_kv_heads * s.ratio + p.first_query(s) + pair;
    sums.template store<D>(s.out + row * D, first_tile, p.num_queries(s) - pair);
}

// Leave the sums of a (request, head) that other blocks have parts of; the last block to come
// merges them.
template <int D, int WARPS>
INLINE void share(const Step& s, const Place& p, const Part& part,
                  Sums<Shape<D, WARPS>::MINE>& sums) {
    typedef Shape<D, WARPS> Of;
    int first = part.block_of(p.segment_start()), last = part.block_of(p.segment_end() - 1);
    int first_tile = threadIdx.x / 32 * Of::MINE;
    // A block has two places: for what began in front of it, and for what it began.
    auto place = [&](int block) {
        return s.partials + (i64(block) * 2 + (block == first)) * Of::PARTIAL;
    };
    if (first_tile < Of::TILES && threadIdx.x % 4 * 2 < p.num_queries(s))
        sums.template leave<Of::TILES>(place(blockIdx.x), first_tile);
    __syncthreads();
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        is_last = arrive(s.arrived + first) == last - first;
        if (is_last) s.arrived[first] = 0;  // for the next kernel
    }
    __syncthreads();
    if (!is_last || first_tile >= Of::TILES) return;
    sums.template take<Of::TILES>(place(first), first_tile);
    for (int block = first + 1; block <= last; block++)
        sums.template add<Of::TILES>(place(block), first_tile);
    write_out<D>(s, p, sums, first_tile);
}

// The end of a (request, head), or of this block's part of it. `slot` is where this warp's tile
// was, `stage` that of the block's first warp: they hold the warps' sums while these are merged.
template <int D, int WARPS>
INLINE void finish(const Step& s, const Place& p, const Part& part, uint4* stage,
                   Sums<Shape<D, WARPS>::TILES>& own) {
    typedef Shape<D, WARPS> Of;
    int first_tile = threadIdx.x / 32 * Of::MINE;
    own.add_lanes();
    own.template leave<Of::TILES>(
        reinterpret_cast<float4*>(stage + threadIdx.x / 32 * Of::SLOT), 0);
    __syncthreads();
    Sums<Of::MINE> sums;
    if (first_tile < Of::TILES) {
        sums.template take<Of::TILES>(reinterpret_cast<float4*>(stage), first_tile);
#pragma unroll
        for (int w = 1; w < WARPS; w++)
            sums.template add<Of::TILES>(reinterpret_cast<float4*>(stage + w * Of::SLOT),
                                         first_tile);
    }
    bool is_whole = p.segment_start() >= part.begin && p.segment_end() <= part.end;
    if (!is_whole) share<D, WARPS>(s, p, part, sums);
    else if (first_tile < Of::TILES) write_out<D>(s, p, sums, first_tile);
    __syncthreads();  // the queue goes on
    own.clear();
}

// Fill the queue before the kernel in front has ended, as far as that is safe: lengths, page table
// and the keys of earlier steps are not written by the kernels of this step. Returns whether a
// newest key is missing.
template <int D, int WARPS>
INLINE bool fill_queue(uint4* queue, const Step& s, const Table& table, const Part& part,
                       Place& ahead) {
    bool has_newest = false;
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) {
        if (ahead.at < part.end) {
            enqueue<D, WARPS, OLD>(queue + i * WARPS * Shape<D, WARPS>::SLOT, s, ahead,
                                   look_up<WARPS>(s, ahead));
            has_newest |= tile_of<WARPS>(ahead).has_newest();
        }
        end_copy_group();
        ahead.advance(s, table);
    }
    return has_newest;
}

// Add the newest keys to what fill_queue has copied, and wait for all of it.
template <int D, int WARPS>
INLINE void complete_queue(uint4* queue, const Step& s, const Table& table, const Part& part,
                           Place p) {
#pragma unroll 1
    for (int i = 0; i < DEPTH && p.at < part.end; i++) {
        if (tile_of<WARPS>(p).has_newest())
            enqueue<D, WARPS, NEWEST>(queue + i * WARPS * Shape<D, WARPS>::SLOT, s, p,
                                      look_up<WARPS>(s, p));
        p.advance(s, table);
    }
    end_copy_group();
    copies_pending<0>();
    __syncwarp();
}

template <int D, int WARPS>
INLINE void walk(uint4* queue, const Step& s, const Table& table, const Part& part) {
    typedef Shape<D, WARPS> Of;
    int warp = threadIdx.x / 32;
    uint4* mine = queue + warp * Of::SLOT;
    Place now = find(s, table, part.begin), ahead = now;
    bool has_newest = fill_queue<D, WARPS>(mine, s, table, part, ahead);
    Lookup upcoming{0, 0};
    if (ahead.at < part.end) upcoming = look_up<WARPS>(s, ahead);
    pdl_wait();
    Queries<D> q;
    load_queries(q, s, now);
    if (has_newest) complete_queue<D, WARPS>(mine, s, table, part, now);
    Sums<Of::TILES> sums;
    sums.clear();
#pragma unroll 1
    for (int i = 0; now.at < part.end; i = (i + 1) % DEPTH) {
        uint4* stage = queue + i * WARPS * Of::SLOT;
        uint4* slot = stage + warp * Of::SLOT;
        Tile tile = tile_of<WARPS>(now);
        copies_pending<DEPTH - 1>();
        __syncwarp();  // lanes read what others have copied
        if (tile.has_keys()) attend<D>(sums, q, slot, tile.len - tile.first, s.scale);
        bool is_end = now.chunk + 1 == now.num_chunks || now.at + 1 == part.end;
        if (is_end) finish<D, WARPS>(s, now, part, stage, sums);
        if (ahead.at < part.end) enqueue<D, WARPS, ALL>(slot, s, ahead, upcoming);
        end_copy_group();
        ahead.advance(s, table);
        if (ahead.at < part.end) upcoming = look_up<WARPS>(s, ahead);
        now.advance(s, table);
        if (is_end && now.at < part.end) load_queries(q, s, now);
    }
}

template <int D, int WARPS>
INLINE void decode(const Step& s) {
    SHARED_BUFFER(buffer);
    pdl_launch();
    int* words = reinterpret_cast<int*>(buffer + DEPTH * WARPS * Shape<D, WARPS>::SLOT);
    Table table{words, words + s.num_reqs, words + 2 * s.num_reqs};
    read_batch<WARPS>(s, table);
    int total = table.ends[s.num_reqs - 1] * s.heads();
    int num_blocks = min(total / (1 + s.ends), int(gridDim.x));
    // Blocks without work may end before the kernel in front does: others wait for it.
    if (blockIdx.x < num_blocks) walk<D, WARPS>(buffer, s, table, Part(total, num_blocks));
}

#define MINISGL_ATTENTION(D, WARPS)                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, (Shape<D, WARPS>::BLOCKS))         \
    attention_##D##_##WARPS(                                                                   \
        scalar* out, const scalar* q, const scalar* k, const scalar* v, const int* page_table, \
        const int* rows, const int* seq_lens, float4* partials, int* arrived, i64 q_stride,    \
        int max_pages, int page_size, int page_shift, int num_reqs, int num_kv_heads,          \
        int ratio, int window, int ends, float scale) {                                        \
        decode<D, WARPS>(Step{out, q, k, v, page_table, rows, seq_lens, partials, arrived,     \
                              q_stride, max_pages, page_size, page_shift, num_reqs,            \
                              num_kv_heads, ratio, window, ends, scale});                      \
    }

MINISGL_ATTENTION(64, 4)
MINISGL_ATTENTION(64, 8)
MINISGL_ATTENTION(128, 4)
MINISGL_ATTENTION(128, 8)
