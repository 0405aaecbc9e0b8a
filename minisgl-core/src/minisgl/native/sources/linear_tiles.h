// Products in float32 by the matrix unit of x86 (AMX), which multiplies bfloat16.
//
// x is the sum of three terms and the weight of one or two, see tile_layout.h. Of the products of
// terms the ones that matter are added up in float32: the middle of the weight times the low of x
// is below half a unit in the last place of a product.
#pragma once

#include "tile_layout.h"

#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace tiles {

constexpr int X_TERMS = 3;
constexpr int64_t MAX_STEPS = 32;          // of many rows at once
constexpr int64_t CACHE_FLOATS = 1 << 18;  // of x in the second-level cache

// Ask the system for the state that tiles take; false where it refuses.
inline bool permit() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// The shapes of the tiles while it lives: 0 to 3 are sums [outputs][rows], 4 and 5 weights
// [outputs][inputs], 6 and 7 x, [pairs of inputs][rows][2].
class Shapes {
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t num_rows[16] = {};
    };

  public:
    explicit Shapes(int width) {
        Config config;
        for (int i = 0; i < 8; ++i) {
            config.num_rows[i] = SIDE;
            config.row_bytes[i] = uint16_t(i == 4 || i == 5 ? 64 : 4 * width);
        }
        _tile_loadconfig(&config);
    }
    ~Shapes() { _tile_release(); }
    Shapes(const Shapes&) = delete;
};

// Memory that tiles read and write is as the program says: GCC's intrinsics do not tell it.
INLINE void compiler_barrier() { asm volatile("" ::: "memory"); }

// What one or two tiles of rows are multiplied by and added to.
struct Operands {
    const float* w;
    const float *x0, *x1;
    int64_t x_tile;  // floats
    int64_t num_steps;
    float* sums;  // 2 or 4 tiles
    bool is_first;
};

// What a step of the inputs adds to the sums. The order of the terms, fixed for every row, is that
// in which the fewest tiles are loaded.
template <int TERMS, int ROW_TILES>
INLINE void add_step(const float* w, const float* x0, const float* x1, int64_t x_tile,
                     Ahead& ahead) {
    enum Term { HIGH, MIDDLE, LOW };
    auto load_w = [=](Term term) {
        _tile_loadd(4, w + 2 * term * TILE, 64);
        _tile_loadd(5, w + (2 * term + 1) * TILE, 64);
    };
    auto load_x = [=](Term term) {
        _tile_loadd(6, x0 + term * x_tile, x_tile / SIDE * 4);
        if constexpr (ROW_TILES == 2) _tile_loadd(7, x1 + term * x_tile, x_tile / SIDE * 4);
    };
    auto add = [&] {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (ROW_TILES == 2) {
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        ahead.step();
    };
    load_w(HIGH), load_x(LOW), add();
    load_x(MIDDLE), add();
    if constexpr (TERMS == 2) load_w(MIDDLE), add();
    load_x(HIGH), add();
    if constexpr (TERMS == 2) load_w(HIGH), add();
}

template <int TERMS, int ROW_TILES>
void multiply(const Operands& operands, Ahead& to_come) {
    Operands o = operands;
    Ahead ahead = to_come;
    compiler_barrier();
    if (o.is_first) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (ROW_TILES == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, o.sums, 64);
        _tile_loadd(1, o.sums + TILE, 64);
        if constexpr (ROW_TILES == 2) {
            _tile_loadd(2, o.sums + 2 * TILE, 64);
            _tile_loadd(3, o.sums + 3 * TILE, 64);
        }
    }
    for (int64_t step = 0; step < o.num_steps; ++step) {
        add_step<TERMS, ROW_TILES>(o.w, o.x0, o.x1, o.x_tile, ahead);
        o.w += 2 * TERMS * TILE, o.x0 += X_TERMS * o.x_tile, o.x1 += X_TERMS * o.x_tile;
    }
    _tile_stored(0, o.sums, 64);
    _tile_stored(1, o.sums + TILE, 64);
    if constexpr (ROW_TILES == 2) {
        _tile_stored(2, o.sums + 2 * TILE, 64);
        _tile_stored(3, o.sums + 3 * TILE, 64);
    }
    compiler_barrier();
    to_come = ahead;
}

inline thread_local panels::Scratch split_rows, kept_sums;

// One product, by panels of outputs.
template <int TERMS>
struct Product {
    const Weight& weight;
    const float* x;
    int64_t x_stride;
    float* out;
    int64_t num_rows;

    Layout layout() const { return {weight, TERMS}; }
    static int64_t num_tiles(int64_t count) { return (count + SIDE - 1) / SIDE; }
    // Rows of a tile: all tiles have as many, the last one with zeros behind them.
    int width() const { return int(smaller(num_rows, SIDE)); }
    int64_t x_tile() const { return SIDE * width(); }

    // Few rows are multiplied by all inputs at once, many part by part.
    int64_t steps_at_once() const {
        int64_t steps = layout().num_steps(), parts = (steps + MAX_STEPS - 1) / MAX_STEPS;
        return num_rows <= 2 * SIDE ? steps : (steps + parts - 1) / parts;
    }

    // Most rows that stay in the cache.
    int64_t rows_at_once() const {
        int64_t row_tiles = CACHE_FLOATS / (steps_at_once() * X_TERMS * TILE) / 2 * 2;
        return SIDE * (row_tiles < 2 ? 2 : row_tiles);
    }

    // Split rows for some steps; a piece is one step of a tile of rows.
    void split_x(float* to, int64_t first, int64_t count, Range steps, Range pieces) const {
        const int64_t num_steps = steps.end - steps.begin;
        for (int64_t piece = pieces.begin; piece < pieces.end; ++piece) {
            int64_t row = piece / num_steps * SIDE, k = (steps.begin + piece % num_steps) * STEP;
            const float* from = x + (first + row) * x_stride + k;
            float* tile = to + piece * X_TERMS * x_tile();
            if (num_rows == 1) split_row(from, weight.num_inputs - k, tile);
            else split_tile(from, int(smaller(count - row, SIDE)), weight.num_inputs - k, tile);
        }
    }

    static void split_row(const float* from, int64_t num_inputs, float* tile) {
        Vec left, right;
        load_step(from, num_inputs, left, right);
        for (int term = 0; term < X_TERMS; ++term)
            store(tile + term * SIDE, take_term(left, right, term == X_TERMS - 1));
    }

    void split_tile(const float* from, int count, int64_t num_inputs, float* tile) const {
        const int width = this->width();
        Vec terms[X_TERMS][SIDE] = {};
        for (int i = 0; i < count; ++i) {
            Vec left, right;
            load_step(from + i * x_stride, num_inputs, left, right);
            for (int term = 0; term < X_TERMS; ++term)
                terms[term][i] = take_term(left, right, term == X_TERMS - 1);
        }
        for (int term = 0; term < X_TERMS; ++term, tile += x_tile()) {
            transpose(terms[term]);
            for (int i = 0; i < SIDE; ++i) {
                if (width == SIDE) store(tile + i * SIDE, terms[term][i]);
                else store_part(tile + i * width, terms[term][i], width);
            }
        }
    }

    // Turn the sums of a tile of rows round and write them out.
    void finish(const float* sums, int64_t row, int count, int64_t output) const {
        Vec first[SIDE], second[SIDE];
        for (int i = 0; i < SIDE; ++i)
            first[i] = load(sums + i * SIDE), second[i] = load(sums + TILE + i * SIDE);
        transpose(first);
        transpose(second);
        panels::Tile tile{};
        tile.weight = &weight;
        tile.out = out + row * weight.num_outputs;
        tile.output = output;
        for (int i = 0; i < count; ++i) panels::finish(tile, i, first[i], second[i]);
    }

    // Lines that are written later are asked for early, or the stores wait for them.
    void fetch_out(int64_t row, int64_t count, int64_t output) const {
        for (int64_t i = row; i < row + count; ++i) {
            __builtin_prefetch(out + i * weight.num_outputs + output, 1, 2);
            __builtin_prefetch(out + i * weight.num_outputs + output + LANES, 1, 2);
        }
    }

    // Multiply rows by a part of the inputs of a panel; the sums lie between the parts, all rows of
    // the panel one after the other.
    void run_panel(const float* rows, int64_t first, int64_t count, int64_t panel, Range steps,
                   float* sums, bool has_next) const {
        const Layout layout = this->layout();
        const int64_t row_tiles = num_tiles(count), num_steps = steps.end - steps.begin;
        const int64_t tile_floats = num_steps * X_TERMS * x_tile();
        const int64_t output = panel * layout.outputs_per_panel();
        const float* w = weight.data + panel * layout.panel_floats() +
                         steps.begin * layout.step_floats();
        const float* next = w + (has_next ? layout.panel_floats() : 0);
        const bool is_last = steps.end == layout.num_steps();
        Ahead ahead(next, next + (has_next ? num_steps * layout.step_floats() : 0),
                    2 * TILE / LINE_FLOATS * TERMS, (TERMS == 2 ? 5 : 3) * ((row_tiles + 1) / 2));
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
            const float* x0 = rows + tile * tile_floats;
            float* at = sums + tile * 2 * TILE;
            int64_t row = tile * SIDE, here = smaller(count - row, 2 * SIDE);
            if (is_last) fetch_out(first + row, here, output);
            Operands operands{w, x0, x0 + tile_floats, x_tile(), num_steps, at, steps.begin == 0};
            if (here > SIDE) multiply<TERMS, 2>(operands, ahead);
            else multiply<TERMS, 1>(operands, ahead);
            if (!is_last) continue;
            finish(at, first + row, int(smaller(here, SIDE)), output);
            if (here > SIDE) finish(at + 2 * TILE, first + row + SIDE, int(here - SIDE), output);
        }
    }

    // Multiply rows by some panels; split(steps) lays the rows out for a part of the inputs.
    template <class SplitRows>
    void run_panels(const float* rows, int64_t first, int64_t count, Range panels,
                    const SplitRows& split) const {
        const int64_t all = layout().num_steps(), at_once = steps_at_once();
        const int64_t panel_sums = 2 * TILE * num_tiles(count);
        const bool are_kept = at_once < all;
        float* sums =
            kept_sums.at_least(panel_sums * (are_kept ? panels.end - panels.begin : 1));
        for (int64_t begin = 0; begin < all; begin += at_once) {
            Range steps{begin, smaller(begin + at_once, all)};
            split(steps);
            for (int64_t panel = panels.begin; panel < panels.end; ++panel)
                run_panel(rows, first, count, panel, steps,
                          sums + (are_kept ? (panel - panels.begin) * panel_sums : 0),
                          panel + 1 < panels.end);
        }
    }

    float* room_for(int64_t rows) const {
        return split_rows.at_least(num_tiles(rows) * steps_at_once() * X_TERMS * x_tile());
    }

    // Threads share the outputs, and split the rows together; a single one each for itself, which
    // is quicker than to wait.
    void run_by_outputs(int num_threads) const {
        const bool is_single = num_rows == 1;
        int64_t at_once = smaller(rows_at_once(), num_rows);
        float* shared = room_for(at_once);
        parallel(num_threads, [&](int thread, int threads) {
            Shapes shapes(width());
            Range mine = part_of(layout().num_panels(), thread, threads);
            float* rows = is_single ? room_for(1) : shared;
            bool is_used = false;
            for (int64_t first = 0; first < num_rows; first += at_once) {
                int64_t count = smaller(num_rows - first, at_once);
                run_panels(rows, first, count, mine, [&](Range steps) {
                    int64_t pieces = num_tiles(count) * (steps.end - steps.begin);
                    if (is_single) return split_x(rows, first, count, steps, {0, pieces});
                    if (is_used) barrier(threads);
                    is_used = true;
                    split_x(rows, first, count, steps, part_of(pieces, thread, threads));
                    barrier(threads);
                });
            }
        });
    }

    // Each thread takes rows of its own until none are left, and never waits for the others.
    void run_by_rows(int num_threads) const {
        int64_t parts = (num_rows + rows_at_once() - 1) / rows_at_once();
        parts = (parts + num_threads - 1) / num_threads * num_threads;
        int64_t at_once = num_tiles((num_rows + parts - 1) / parts) * SIDE, taken = 0;
        parallel(num_threads, [&](int, int) {
            Shapes shapes(width());
            float* rows = room_for(at_once);
            while (true) {
                int64_t first = __atomic_fetch_add(&taken, at_once, __ATOMIC_RELAXED);
                if (first >= num_rows) return;
                int64_t count = smaller(num_rows - first, at_once);
                run_panels(rows, first, count, {0, layout().num_panels()}, [&](Range steps) {
                    int64_t pieces = num_tiles(count) * (steps.end - steps.begin);
                    split_x(rows, first, count, steps, {0, pieces});
                });
            }
        });
    }

    void run(int num_threads) const {
        if (num_rows >= num_threads * rows_at_once()) run_by_rows(num_threads);
        else run_by_outputs(num_threads);
    }
};

}  // namespace tiles
#endif
