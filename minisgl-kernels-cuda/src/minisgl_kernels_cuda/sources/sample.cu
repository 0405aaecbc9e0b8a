// One token per row of logits, without sorting a vocabulary.
//
// Two kernels. The first spreads every row over the chip: a warp finds the largest logit of a tile
// of 1024 and the sum of weights relative to it. In the second, a block per row adds the tiles up
// and inverts the cumulative distribution: it chooses a tile, then a token in it. A greedy row
// needs the maxima alone. Where a row has top-k or top-p, the block first finds the smallest
// logit that they keep, by a radix selection with exact integer sums.
//
// A tile's numbers depend on its logits alone, and all sums run in a fixed order or in integers:
// whatever else is in the batch, a row gives the same token, bit for bit.
#include "device.cuh"

constexpr int TILE = 1024;              // logits of a warp
constexpr int TILE_WARPS = 8;           // of a block of the first kernel
constexpr int THREADS = 1024;           // of a block of the second
constexpr int WARPS = THREADS / 32;
constexpr int MAX_TILES = THREADS;      // a thread per tile
constexpr int LOADS = TILE / 32 / PIECE;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float FIXED_ONE = 1099511627776.f;  // 2^40: a sum of 2^20 weights fits 64 bits
constexpr u32 NO_LIMIT = 0x7f800000u;   // the key of a logit of minus infinity

struct Logits {
    const scalar* row;
    int vocab;
    bool is_aligned;
};

// This lane's 32 logits of a tile; minus infinity past the end. All loads are issued before the
// first value is used. Kept as they are in memory: 16-bit logits take half the registers.
struct TileLogits {
    Piece pieces[LOADS];
    INLINE void load(const Logits& logits, int tile) {
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            int at = index(tile, j);
            if (logits.is_aligned && at + PIECE <= logits.vocab) {
                pieces[j] = load_piece(logits.row + at);
            } else {
#pragma unroll
                for (int i = 0; i < PIECE; i++)
                    pieces[j].v[i] = at + i < logits.vocab ? logits.row[at + i] : narrow(-INFINITE);
            }
        }
    }
    static INLINE int index(int tile, int j) {
        return tile * TILE + (j * 32 + int(threadIdx.x % 32)) * PIECE;
    }
    template <typename Visit>
    INLINE void visit(Visit visit) const {
#pragma unroll
        for (int j = 0; j < LOADS; j++)
#pragma unroll
            for (int i = 0; i < PIECE; i++) visit(widen(pieces[j].v[i]));
    }
};

// Call visit(value) for this lane's logits of a tile.
template <typename Visit>
INLINE void visit_tile(const Logits& logits, int tile, Visit visit) {
    TileLogits values;
    values.load(logits, tile);
    values.visit(visit);
}

INLINE Logits row_of(const scalar* logits, i64 stride, int row, int vocab) {
    const scalar* from = logits + row * stride;
    return Logits{from, vocab, reinterpret_cast<u64>(from) % 16 == 0};
}

// How a logit becomes a distance from the largest (0 or more, in units of temperature), and that a
// weight. The same expressions everywhere, so that a token never has two weights.
struct Scale {
    float largest, inverse;
    INLINE float distance(float logit) const { return (largest - logit) * inverse; }
};

INLINE float inverse_temperature(float temperature) {
    // Finite, so that the distance 0 of the likeliest token stays 0.
    return fminf(1.f / temperature, 1e30f);
}

INLINE float weight_of(float distance) {
    // False for NaN too: such a token is never drawn.
    return distance < INFINITE ? exp2_fast(-distance * LOG2_E) : 0.f;
}

extern "C" __global__ void __launch_bounds__(TILE_WARPS * 32, 6)
    sample_tiles(const scalar* logits, i64 stride, int vocab, int num_tiles,
                 const float* temperature, float* tile_max, float* tile_sum) {
    pdl_launch();
    pdl_wait();
    int tile = blockIdx.x * TILE_WARPS + threadIdx.x / 32, row = blockIdx.y;
    if (tile >= num_tiles) return;
    TileLogits values;
    values.load(row_of(logits, stride, row, vocab), tile);
    float largest = -INFINITE;
    values.visit([&](float value) { largest = fmaxf(largest, value); });
    largest = warp_max(largest);
    float sum = 0.f;
    if (temperature && temperature[row] > 0.f) {
        float factor = inverse_temperature(temperature[row]) * LOG2_E;
        // weight_of in fewer instructions: this is what bounds the kernel. The maximum turns NaN
        // into a weight of 0.
        if (fabsf(largest) < INFINITE)
            values.visit([&](float value) {
                sum += exp2_fast(fmaxf((value - largest) * factor, -200.f));
            });
        sum = warp_sum(sum);
    }
    if (threadIdx.x % 32 == 0) {
        tile_max[row * num_tiles + tile] = largest;
        tile_sum[row * num_tiles + tile] = sum;
    }
}

// ---- sums over the block of the second kernel ----

constexpr int NOWHERE = 0x7fffffff;

INLINE int block_min(int value) {
    __shared__ int partial[WARPS];
    value = warp_min(value);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = warp_min(partial[threadIdx.x % 32]);
    __syncthreads();
    return value;
}

INLINE float block_max(float value) {
    __shared__ float partial[WARPS];
    value = warp_max(value);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = warp_max(partial[threadIdx.x % 32]);
    __syncthreads();
    return value;
}

template <typename T>
INLINE T warp_scan(T value) {
    int lane = threadIdx.x % 32;
    for (int offset = 1; offset < 32; offset *= 2) {
        T other = __shfl_up_sync(FULL_WARP, value, offset);
        if (lane >= offset) value += other;
    }
    return value;
}

// The sum of the values of this thread and those before it; total is that of all.
template <typename T>
INLINE T block_scan(T value, T& total) {
    __shared__ T partial[WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_scan(value);
    if (lane == 31) partial[warp] = value;
    __syncthreads();
    T sums = warp_scan(partial[lane]);
    total = __shfl_sync(FULL_WARP, sums, 31);
    T before = __shfl_sync(FULL_WARP, sums, warp ? warp - 1 : 0);
    __syncthreads();
    return warp ? value + before : value;
}

// Choose among up to 1024 weights, one per thread: the first whose cumulative weight exceeds the
// target, or the last with a weight at all, where rounding left the target out of reach. Returns
// NOWHERE if all weights are 0. The target becomes what is left of it inside the choice.
INLINE int choose(double weight, double& target) {
    __shared__ double rest;
    int me = threadIdx.x;
    double total;
    double sum = block_scan(weight, total);
    int chosen = block_min(weight > 0. && sum > target ? me : NOWHERE);
    if (chosen == NOWHERE) chosen = -block_min(weight > 0. ? -me : 1);
    if (chosen < 0) return NOWHERE;
    if (me == chosen) rest = target - (sum - weight);
    __syncthreads();
    target = rest;
    __syncthreads();
    return chosen;
}

// ---- what top-k and top-p keep ----

constexpr int MAX_CANDIDATES = 4096;
constexpr int FEW_CANDIDATES = 384;  // so many are ranked by comparing all with all
constexpr int BINS = 2048;

struct Selection {
    u32 counts[BINS];
    u32 low[BINS], high[BINS];     // fixed-point sums of weights, in two halves
    u32 candidates[MAX_CANDIDATES];
    float maxima[MAX_TILES];
    int num_candidates;
    u32 bin;                       // what a level of the selection found
    u64 count_before, mass_before; // of all keys before it
    u32 bin_count;
};

INLINE u32 key_of(float distance) { return __float_as_uint(distance); }  // ordered: never negative
INLINE u64 fixed_weight(u32 key) {
    return __float2ull_rn(weight_of(__uint_as_float(key)) * FIXED_ONE);
}

struct Row {
    Logits logits;
    Scale scale;
    int num_tiles;
    bool is_listed;  // whether all candidates are in the list
    u32 cut;         // candidates have at most this key
};

// Call visit(key) for every candidate, from the list if they fit it.
template <typename Visit>
INLINE void visit_candidates(const Selection& found, const Row& row, Visit visit) {
    if (row.is_listed) {
        for (int i = threadIdx.x; i < found.num_candidates; i += THREADS) visit(found.candidates[i]);
        return;
    }
    for (int tile = threadIdx.x / 32; tile < row.num_tiles; tile += WARPS) {
        if (key_of(row.scale.distance(found.maxima[tile])) > row.cut) continue;
        visit_tile(row.logits, tile, [&](float logit) {
            u32 key = key_of(row.scale.distance(logit));
            if (key <= row.cut) visit(key);
        });
    }
}

struct Place {
    u32 key;                       // NO_LIMIT: the target lies behind all candidates
    u64 count_before, mass_before; // of smaller keys
};

// Find the key at which the running count (or mass) of candidates, likeliest first, reaches the
// target. 31 bits of key in three levels of 11, 10 and 10.
INLINE Place select(Selection& found, const Row& row, u64 target, bool is_mass) {
    Place place{0, 0, 0};
    u32 prefix = 0;
    for (int shift = 20; shift >= 0; shift -= 10) {
        int num_bins = shift == 20 ? 2048 : 1024;
        for (int i = threadIdx.x; i < BINS; i += THREADS)
            found.counts[i] = found.low[i] = found.high[i] = 0;
        if (threadIdx.x == 0) found.bin = NO_LIMIT;
        __syncthreads();
        visit_candidates(found, row, [&](u32 key) {
            if (shift < 20 && key >> (shift + 10) != prefix) return;
            u32 bin = key >> shift & (num_bins - 1);
            atomicAdd(&found.counts[bin], 1u);
            u64 mass = fixed_weight(key);
            u32 low = u32(mass), old = atomicAdd(&found.low[bin], low);
            u32 high = u32(mass >> 32) + (old + low < low);  // with the carry of this addition
            if (high) atomicAdd(&found.high[bin], high);
        });
        __syncthreads();
        u64 counts[2], masses[2], total;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int bin = 2 * threadIdx.x + i;
            counts[i] = found.counts[bin];
            masses[i] = u64(found.high[bin]) << 32 | found.low[bin];
        }
        u64 count = place.count_before + block_scan(counts[0] + counts[1], total);
        u64 mass = place.mass_before + block_scan(masses[0] + masses[1], total);
#pragma unroll
        for (int i = 1; i >= 0; i--) {
            u64 end = is_mass ? mass : count;
            u64 start = end - (is_mass ? masses[i] : counts[i]);
            count -= counts[i];
            mass -= masses[i];
            if (start < target && target <= end) {
                found.bin = 2 * threadIdx.x + i;
                found.count_before = count;
                found.mass_before = mass;
            }
        }
        __syncthreads();
        u32 bin = found.bin;
        place.count_before = found.count_before;
        place.mass_before = found.mass_before;
        __syncthreads();
        if (bin == NO_LIMIT) return Place{NO_LIMIT, 0, 0};
        prefix = shift == 20 ? bin : prefix << 10 | bin;
    }
    place.key = prefix;
    return place;
}

// A key that all kept tokens are within, so that few have to be looked at.
INLINE u32 bound(Selection& found, const Row& row, int top_k, float top_p, double mass) {
    __shared__ float limit;
    int me = threadIdx.x;
    if (me == 0) limit = -INFINITE;
    __syncthreads();
    if (top_k <= row.num_tiles && me < row.num_tiles) {
        // The k largest tiles hold k logits that are at least the k-th largest of their maxima.
        float mine = found.maxima[me];
        int rank = 0;
        for (int i = 0; i < row.num_tiles; i++)
            rank += found.maxima[i] > mine || (found.maxima[i] == mine && i < me);
        if (rank == top_k - 1) limit = mine;
    }
    __syncthreads();
    u32 cut = key_of(row.scale.distance(limit));
    if (top_k >= row.logits.vocab && top_p < 1.f) {
        // A token is dropped where it and all less likely ones have at most 1 - p of the mass, and
        // they have at most that many times its own. The margin is for rounding.
        float furthest = logf(row.logits.vocab / ((1.f - top_p) * float(mass))) + 0.01f;
        u32 other = furthest > 0.f ? key_of(furthest) : 0;
        cut = other < cut ? other : cut;
    }
    return cut < NO_LIMIT ? cut : NO_LIMIT;
}

INLINE void list_candidates(Selection& found, Row& row) {
    row.is_listed = false;
    if (row.cut == NO_LIMIT && row.logits.vocab > MAX_CANDIDATES) return;
    if (threadIdx.x == 0) found.num_candidates = 0;
    __syncthreads();
    volatile int& count = found.num_candidates;
    visit_candidates(found, row, [&](u32 key) {
        if (count > MAX_CANDIDATES) return;
        int at = atomicAdd(&found.num_candidates, 1);
        if (at < MAX_CANDIDATES) found.candidates[at] = key;
    });
    __syncthreads();
    row.is_listed = found.num_candidates <= MAX_CANDIDATES;
}

// The same as find_limit by comparing all with all: three barriers instead of dozens, and what
// most requests with a filter come to.
INLINE u32 limit_of_few(Selection& found, int vocab, int top_k, float top_p, double mass) {
    __shared__ double kept;
    u64* masses = reinterpret_cast<u64*>(found.low);  // low and high together hold one per bin
    int me = threadIdx.x, num = found.num_candidates;
    u32 mine = me < num ? found.candidates[me] : NO_LIMIT;
    u64 my_mass = fixed_weight(mine), mass_before = 0;
    if (me < num) masses[me] = my_mass;
    if (me == 0) kept = mass * FIXED_ONE;
    __syncthreads();
    int count_before = 0;
    for (int i = 0; me < num && i < num; i++) {
        if (found.candidates[i] >= mine) continue;
        count_before++;
        mass_before += masses[i];
    }
    bool is_kept = me < num && count_before < top_k;
    int limit = -block_min(is_kept ? -int(mine) : NOWHERE);
    if (top_p >= 1.f) return limit;
    if (top_k < vocab && is_kept && int(mine) == limit)  // equal keys write the same
        kept = double(mass_before + u64(top_k - count_before) * my_mass);
    __syncthreads();
    bool is_first = me < num && count_before == 0;
    is_kept = is_kept && (is_first || double(mass_before) < ceil(top_p * kept));
    return -block_min(is_kept ? -int(mine) : NOWHERE);
}

// The largest key that top-k and top-p keep. Of equal logits at a limit all are kept.
INLINE u32 find_limit(Selection& found, Row& row, int top_k, float top_p, double mass) {
    row.cut = bound(found, row, top_k, top_p, mass);
    list_candidates(found, row);
    if (row.is_listed && found.num_candidates > 0 && found.num_candidates <= FEW_CANDIDATES)
        return limit_of_few(found, row.logits.vocab, top_k, top_p, mass);
    u32 limit = NO_LIMIT;
    double kept = mass * FIXED_ONE;
    if (top_k < row.logits.vocab) {
        Place last = select(found, row, top_k, false);
        limit = last.key;
        if (limit == NO_LIMIT) return limit;
        // Exactly k tokens count here, though more may be equal to the last.
        u64 num_equal = top_k - last.count_before;
        kept = double(last.mass_before + num_equal * fixed_weight(limit));
    }
    if (top_p >= 1.f) return limit;
    double goal = ceil(top_p * kept);
    Place last = select(found, row, goal < 1. ? 1 : u64(goal), true);
    return last.key < limit ? last.key : limit;
}

// ---- the token ----

struct Random {
    i64 seed;
    int position;
};

INLINE u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// The numbers of the torch sampler: SplitMix64 of the seed, counted on by the position.
INLINE double uniform(const Random& random) {
    constexpr u64 GAMMA = 0x9e3779b97f4a7c15ull;
    u64 bits = mix(mix(u64(random.seed) + GAMMA) + (u64(random.position) + 1) * GAMMA);
    return double(bits >> 12) * 0x1p-52;
}

// Weight of one token under all filters.
struct Filter {
    Scale scale;
    u32 limit;
    float min_p;
    INLINE float weight(float logit) const {
        float distance = scale.distance(logit);
        float weight = weight_of(distance);
        return key_of(distance) <= limit && weight >= min_p ? weight : 0.f;
    }
};

// Sum the kept weights of every tile anew; thread t gets that of tile t.
INLINE double filtered_sum(const Row& row, const Filter& filter, Selection& found) {
    float* sums = reinterpret_cast<float*>(found.counts);  // the selection is over
    for (int tile = threadIdx.x / 32; tile < row.num_tiles; tile += WARPS) {
        float sum = 0.f;
        if (filter.weight(found.maxima[tile]) > 0.f) {
            visit_tile(row.logits, tile, [&](float logit) { sum += filter.weight(logit); });
            sum = warp_sum(sum);
        }
        if (threadIdx.x % 32 == 0) sums[tile] = sum;
    }
    __syncthreads();
    return int(threadIdx.x) < row.num_tiles ? sums[threadIdx.x] : 0.;
}

INLINE int likeliest(const Row& row, const Selection& found) {
    int me = threadIdx.x;
    float largest = row.scale.largest;
    int tile = block_min(me < row.num_tiles && found.maxima[me] == largest ? me : NOWHERE);
    if (tile == NOWHERE) return 0;  // a row of NaN
    int index = tile * TILE + me;
    bool is_it = index < row.logits.vocab && widen(row.logits.row[index]) == largest;
    index = block_min(is_it ? index : NOWHERE);
    return index == NOWHERE ? 0 : index;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_rows(const scalar* logits, i64 stride, int vocab, int num_tiles,
                const float* temperatures, const int* top_ks, const float* top_ps,
                const float* min_ps, const i64* seeds, const int* positions,
                const float* tile_max, const float* tile_sum, int* tokens) {
    __shared__ Selection found;
    pdl_launch();
    pdl_wait();
    int me = threadIdx.x, at = blockIdx.x;
    float maximum = me < num_tiles ? tile_max[at * num_tiles + me] : -INFINITE;
    found.maxima[me] = maximum;
    float largest = block_max(maximum);
    float temperature = temperatures ? temperatures[at] : 0.f;
    Row row{row_of(logits, stride, at, vocab), Scale{largest, 0.f}, num_tiles, false, NO_LIMIT};
    if (!(temperature > 0.f)) {
        int token = likeliest(row, found);
        if (me == 0) tokens[at] = token;
        return;
    }
    row.scale.inverse = inverse_temperature(temperature);
    Filter filter{row.scale, NO_LIMIT, min_ps[at]};
    double weight = 0.;
    if (me < num_tiles)
        weight = tile_sum[at * num_tiles + me] * double(weight_of(row.scale.distance(maximum)));
    double mass;
    block_scan(weight, mass);
    int top_k = top_ks[at] < 1 ? 1 : top_ks[at];
    float top_p = top_ps[at];
    if (top_k < vocab || top_p < 1.f) filter.limit = find_limit(found, row, top_k, top_p, mass);
    if (filter.limit < NO_LIMIT || filter.min_p > 0.f) {
        weight = filtered_sum(row, filter, found);
        block_scan(weight, mass);
    }
    double target = uniform(Random{seeds[at], positions[at]}) * mass;
    int tile = choose(weight, target);
    int index = NOWHERE;
    if (tile != NOWHERE) {
        index = tile * TILE + me;
        float mine = index < vocab ? filter.weight(widen(row.logits.row[index])) : 0.f;
        int inside = choose(mine, target);
        index = inside == NOWHERE ? NOWHERE : tile * TILE + inside;
    }
    if (index == NOWHERE) index = likeliest(row, found);
    if (me == 0) tokens[at] = index;
}
