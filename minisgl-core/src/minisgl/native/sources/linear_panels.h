// Products with a weight in panels: vectors run along the outputs.
//
// A panel has PANEL outputs and is laid out as [inputs][PANEL]; with a gated activation these are
// LANES gates and the LANES ups that belong to them. Each sum is one chain of fused multiply-adds
// over DEPTH inputs, and the chains are added in order.
#pragma once

#include <cstdlib>

#include "activation.h"
#include "parallel.h"
#include "prefetch.h"
#include "simd.h"

// A weight and its bias (or null), kept by the caller.
struct Weight {
    const float* data;
    const float* bias;  // [num_outputs], or [2][num_outputs] for gates and ups
    int64_t num_outputs, num_inputs;
    Activation activation;  // NONE, or of the gates

    bool is_gated() const { return activation != NONE; }
};

// Rows in blocks of nearly the same size.
struct Blocks {
    int64_t count, size, larger;
    Blocks(int64_t rows, int64_t most)
        : count((rows + most - 1) / most), size(rows / count), larger(rows % count) {}
    int64_t begin(int64_t block) const {
        return block * size + (block < larger ? block : larger);
    }
    int rows(int64_t block) const { return int(size + (block < larger)); }
};

namespace panels {

constexpr int PANEL = 2 * LANES;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MAX_ROWS = 14;  // 28 of 32 registers are sums
#else
constexpr int MAX_ROWS = 6;
#endif
constexpr int64_t DEPTH = 1024;
constexpr int64_t NEAR = 12;  // inputs that the first-level cache is ahead of the sums
constexpr int64_t CACHE_FLOATS = 1 << 17;  // of x, beside the panels in the second-level cache
constexpr int64_t GROUP_FLOATS = 1 << 17;  // of panels

// Memory of a thread that only ever grows.
struct Scratch {
    float* data = nullptr;
    int64_t size = 0;
    ~Scratch() { std::free(data); }
    float* at_least(int64_t count) {
        if (count > size) {
            std::free(data);
            size = (count + 1023) / 1024 * 1024;
            data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
        }
        return data;
    }
};

thread_local Scratch laid_out_rows, own_sums;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// from[num_rows][stride] to [count][width], its columns from num_rows on left alone or, where
// is_filled, up to the next vector zeroed.
template <int MAX_WIDTH>
INLINE void transpose_into(float* to, int64_t width, const float* from, int64_t stride,
                           int num_rows, int64_t count, bool is_filled = false) {
    for (int64_t k = 0; k < count; k += LANES) {
        int part = int(smaller(count - k, LANES));
        for (int first = 0; first < MAX_WIDTH && first < num_rows; first += LANES) {
            Vec rows[LANES];
            for (int i = 0; i < LANES; ++i) {
                const float* row = from + (first + i) * stride + k;
                rows[i] = first + i >= num_rows ? Vec{}
                          : part == LANES       ? load(row)
                                                : load_part(row, part);
            }
            transpose(rows);
            int columns = is_filled ? LANES : int(smaller(num_rows - first, LANES));
            for (int i = 0; i < part; ++i) {
                float* target = to + (k + i) * width + first;
                if (columns == LANES) store(target, rows[i]);
                else store_part(target, rows[i], columns);
            }
        }
    }
}

struct Tile {
    const Weight* weight;
    const float* x;     // [depth][ROWS]
    const float* w;     // [depth][PANEL]
    float* sums;        // [ROWS][PANEL] between parts of the inputs
    float* out;
    int64_t depth;
    int64_t output;     // the first one
    bool is_first, is_last;  // of the parts
};

INLINE void finish(const Tile& tile, int row, Vec first, Vec second) {
    const Weight& weight = *tile.weight;
    int64_t left = weight.num_outputs - tile.output;
    float* out = tile.out + row * weight.num_outputs + tile.output;
    const float* bias = weight.bias ? weight.bias + tile.output : nullptr;
    int columns = int(smaller(left, LANES));
    if (weight.is_gated()) {
        if (bias) {
            first += load_part(bias, columns);
            second += load_part(bias + weight.num_outputs, columns);
        }
        Vec y = activate(weight.activation, first) * second;
        if (columns == LANES) store(out, y);
        else store_part(out, y, columns);
        return;
    }
    if (left >= PANEL) {
        if (bias) first += load(bias), second += load(bias + LANES);
        store(out, first);
        store(out + LANES, second);
        return;
    }
    if (bias) first += load_part(bias, columns);
    store_part(out, first, columns);
    if (left <= LANES) return;
    columns = int(left - LANES);
    if (bias) second += load_part(bias + LANES, columns);
    store_part(out + LANES, second, columns);
}

template <int ROWS>
void multiply(const Tile& tile, Ahead& to_come) {
    Vec sums[ROWS][2] = {};
    const float* x = tile.x;
    const float* w = tile.w;
    Ahead ahead = to_come;
    // Lines that are written later are asked for now, or the stores wait for them.
    for (int r = 0; r < ROWS; ++r) {
        const float* out = tile.out + r * tile.weight->num_outputs + tile.output;
        __builtin_prefetch(out, 1, 2);
        __builtin_prefetch(out + LANES, 1, 2);
    }
    for (int64_t k = 0; k < tile.depth;) {
        ahead.step();
        for (int64_t stop = smaller(k + LANES, tile.depth); k < stop; ++k) {
            fetch_near(w + NEAR * PANEL, PANEL);
            Vec w0 = load(w), w1 = load(w + LANES);
            for (int r = 0; r < ROWS; ++r) {
                Vec xr = splat(x[r]);
                sums[r][0] += xr * w0;
                sums[r][1] += xr * w1;
            }
            x += ROWS, w += PANEL;
        }
    }
    to_come = ahead;
    for (int r = 0; r < ROWS; ++r) {
        float* kept = tile.sums + r * PANEL;
        if (!tile.is_first) {
            sums[r][0] += load(kept);
            sums[r][1] += load(kept + LANES);
        }
        if (tile.is_last) {
            finish(tile, r, sums[r][0], sums[r][1]);
        } else {
            store(kept, sums[r][0]);
            store(kept + LANES, sums[r][1]);
        }
    }
}

using Multiply = void (*)(const Tile&, Ahead&);
template <int... ROWS>
struct Table {
    Multiply by_rows[sizeof...(ROWS) + 1] = {nullptr, multiply<ROWS>...};
};
#if defined(__AVX512F__) || defined(__aarch64__)
const Table<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14> table;
#else
const Table<1, 2, 3, 4, 5, 6> table;
#endif

inline int64_t outputs_per_panel(const Weight& weight) {
    return weight.is_gated() ? LANES : PANEL;
}

inline int64_t num_panels(const Weight& weight) {
    int64_t outputs = outputs_per_panel(weight);
    return (weight.num_outputs + outputs - 1) / outputs;
}

// Lay out source[num_outputs][num_inputs], or [2][num_outputs][num_inputs], as one panel.
inline void pack_panel(const Weight& weight, const float* source, float* panels, int64_t panel) {
    int64_t inputs = weight.num_inputs, outputs = outputs_per_panel(weight);
    int64_t first = panel * outputs;
    int count = int(smaller(weight.num_outputs - first, outputs));
    float* to = panels + panel * PANEL * inputs;
    const float* from = source + first * inputs;
    transpose_into<PANEL>(to, PANEL, from, inputs, count, inputs, true);
    if (weight.is_gated())
        transpose_into<LANES>(to + LANES, PANEL, from + weight.num_outputs * inputs, inputs,
                              count, inputs, true);
}

// One product. Rows of x are laid out as [inputs][rows of a block], so many at once as stay in
// the cache while the panels stream past.
struct Product {
    const Weight& weight;
    const float* x;
    int64_t x_stride;
    float* out;
    int64_t num_rows;

    // Most rows that stay in the cache.
    int64_t rows_at_once() const {
        int64_t fitting = CACHE_FLOATS / weight.num_inputs / MAX_ROWS * MAX_ROWS;
        return fitting < MAX_ROWS ? MAX_ROWS : fitting;
    }

    int64_t num_pieces(int64_t count) const {
        return Blocks(count, MAX_ROWS).count * ((weight.num_inputs + LANES - 1) / LANES);
    }

    void pack_rows(float* to, int64_t first, int64_t count, Range part) const {
        Blocks blocks(count, MAX_ROWS);
        int64_t inputs = weight.num_inputs, pieces = (inputs + LANES - 1) / LANES;
        for (int64_t i = part.begin; i < part.end;) {
            int64_t block = i / pieces, row = blocks.begin(block), k = i % pieces * LANES;
            int64_t stop = smaller(part.end - i + i % pieces, pieces);
            int64_t depth = smaller(stop * LANES, inputs) - k;
            int rows = blocks.rows(block);
            transpose_into<MAX_ROWS>(to + row * inputs + k * rows, rows,
                                     x + (first + row) * x_stride + k, x_stride, rows, depth);
            i = block * pieces + stop;
        }
    }

    // So many panels share the passes over the rows, which then find x and out in the cache; with
    // few rows one by one, because the first group of a thread comes unfetched.
    int64_t panels_at_once(int64_t num_blocks) const {
        int64_t fitting = GROUP_FLOATS / (PANEL * weight.num_inputs);
        return num_blocks <= 2 || fitting < 1 ? 1 : fitting;
    }

    // Multiply the rows first .. first + count by some panels; next_end is where those of this
    // thread end.
    void run_panels(const float* rows, int64_t first, int64_t count, Range group,
                    int64_t next_end) const {
        Blocks blocks(count, MAX_ROWS);
        int64_t inputs = weight.num_inputs, size = PANEL * inputs;
        int64_t next = smaller(group.end + group.end - group.begin, next_end);
        Ahead ahead(weight.data + group.end * size, weight.data + next * size,
                    LANES * PANEL / LINE_FLOATS, blocks.count);
        float* sums = inputs > DEPTH ? own_sums.at_least(MAX_ROWS * PANEL) : nullptr;
        for (int64_t block = 0; block < blocks.count; ++block) {
            int64_t row = blocks.begin(block);
            for (int64_t panel = group.begin; panel < group.end; ++panel) {
                for (int64_t k = 0; k < inputs; k += DEPTH) {
                    int64_t depth = smaller(inputs - k, DEPTH);
                    Tile tile{&weight,
                              rows + row * inputs + k * blocks.rows(block),
                              weight.data + panel * size + k * PANEL,
                              sums,
                              out + (first + row) * weight.num_outputs,
                              depth,
                              panel * outputs_per_panel(weight),
                              k == 0,
                              k + depth == inputs};
                    table.by_rows[blocks.rows(block)](tile, ahead);
                }
            }
        }
    }

    void run_all_panels(const float* rows, int64_t first, int64_t count, Range panels) const {
        int64_t step = panels_at_once(Blocks(count, MAX_ROWS).count);
        for (int64_t panel = panels.begin; panel < panels.end; panel += step) {
            Range group{panel, smaller(panel + step, panels.end)};
            run_panels(rows, first, count, group, panels.end);
        }
    }

    // Threads share the outputs, and lay out the rows together.
    void run_by_outputs(int num_threads) const {
        int64_t at_once = smaller(rows_at_once(), num_rows);
        float* rows = num_rows > 1 ? laid_out_rows.at_least(at_once * weight.num_inputs) : nullptr;
        parallel(num_threads, [&](int thread, int threads) {
            Range mine = part_of(num_panels(weight), thread, threads);
            for (int64_t first = 0; first < num_rows; first += at_once) {
                int64_t count = smaller(num_rows - first, at_once);
                if (first) barrier(threads);
                if (count > 1) {
                    pack_rows(rows, first, count, part_of(num_pieces(count), thread, threads));
                    barrier(threads);
                }
                // A single row is laid out as it is.
                run_all_panels(count > 1 ? rows : x + first * x_stride, first, count, mine);
            }
        });
    }

    // Each thread takes rows of its own until none are left, and never waits for the others.
    void run_by_rows(int num_threads) const {
        int64_t parts = (num_rows + rows_at_once() - 1) / rows_at_once();
        parts = (parts + num_threads - 1) / num_threads * num_threads;
        int64_t at_once = (num_rows + parts - 1) / parts, taken = 0;
        parallel(num_threads, [&](int, int) {
            float* rows = laid_out_rows.at_least(at_once * weight.num_inputs);
            while (true) {
                int64_t first = __atomic_fetch_add(&taken, at_once, __ATOMIC_RELAXED);
                if (first >= num_rows) return;
                int64_t count = smaller(num_rows - first, at_once);
                pack_rows(rows, first, count, {0, num_pieces(count)});
                run_all_panels(rows, first, count, {0, num_panels(weight)});
            }
        });
    }

    void run(int num_threads) const {
        if (num_rows >= num_threads * rows_at_once()) run_by_rows(num_threads);
        else run_by_outputs(num_threads);
    }
};

}  // namespace panels
