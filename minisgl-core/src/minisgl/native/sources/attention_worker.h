// The work of one item: some queries against some keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "attention_tile.h"

// Less than any score, and finite so that differences of two are numbers.
constexpr float LOWEST = -1e30f;
constexpr int LINE_FLOATS = 16;  // of a cache line
constexpr int64_t SUM_LANES = LANES;
constexpr int TILE_LANES = (TILE_ROWS + LANES - 1) / LANES * LANES;

INLINE IntVec lane_numbers() {
    IntVec v;
    for (int i = 0; i < LANES; ++i) v[i] = i;
    return v;
}

// What does not change between steps. Its members are those of minisgl.attention.native_backend.
struct Layer {
    const float* k;  // [num_pages, page_size, num_kv_heads, head_dim]
    const float* v;
    const int32_t* page_table;  // [rows, table_stride]
    int32_t table_stride, page_size, num_qo_heads, num_kv_heads, head_dim;
    float sm_scale;

    int group() const { return num_qo_heads / num_kv_heads; }
    // Columns of values and results, in whole vectors.
    int64_t width() const { return (head_dim + LANES - 1) / LANES * LANES; }
};

// Floats that the work of one item takes; every part a multiple of a vector.
static int64_t work_floats(const PlanHeader& plan, const Layer& layer) {
    int64_t queries = int64_t(plan.max_unit_rows) * plan.heads_per_item * layer.group();
    int64_t per_query = 2 * layer.width() + SUM_LANES + 1;
    int64_t tile = KEY_BLOCK * 2 * layer.width() + TILE_ROWS * KEY_BLOCK;
    return (queries * per_query + tile + LANES - 1) / LANES * LANES;
}

static int64_t partial_floats(const Layer& layer) { return layer.width() + 2; }

// One call: a layer, and where its queries, results and partial results are.
struct Step {
    const Layer& layer;
    const PlanView& plan;
    const float* q;
    int64_t q_stride;
    float* out;
    float* partials;  // per row, chunk and head: sums [width], maximum, sum of weights

    float* partial(const Unit& unit, int chunk, int row, int head) const {
        int64_t index = unit.first_partial + int64_t(chunk) * unit.num_rows + row;
        return partials + (index * layer.num_qo_heads + head) * partial_floats(layer);
    }

    float* result(int token, int head) const {
        return out + (int64_t(token) * layer.num_qo_heads + head) * layer.head_dim;
    }

    void write(float* to, const float* from, float scale) const {
        for (int d = 0; d < layer.head_dim; d += LANES) {
            int n = std::min(LANES, layer.head_dim - d);
            store_part(to + d, load(from + d) * splat(scale), n);
        }
    }
};

// One item: the queries of a unit and some KV heads against a chunk of the keys.
struct Worker {
    const Step& step;
    const Layer& layer;
    const Item& item;
    const Unit& unit;
    const Row* rows;
    int64_t width;
    int group, num_heads, num_queries;     // num_queries: of one KV head
    float *queries, *sums, *lanes, *tops;  // per query: q, result, sum by lanes, maximum
    float *keys, *values, *scores;         // of one block
    int64_t first_slots[KEY_BLOCK], second_slots[KEY_BLOCK];
    int64_t *slots = first_slots, *ahead = second_slots;  // of this block and of the next one
    int num_ahead = 0;
    int lowest_limit = INT32_MAX, highest_start = 0;  // keys that all rows see lie between

    Worker(const Step& step, const Item& item, float* work)
        : step(step),
          layer(step.layer),
          item(item),
          unit(step.plan.units[item.unit]),
          rows(step.plan.rows + unit.first_row) {
        width = layer.width();
        group = layer.group();
        num_heads = step.plan.header->heads_per_item;
        num_queries = unit.num_rows * group;
        int64_t total = int64_t(num_queries) * num_heads;
        keys = work;
        values = keys + KEY_BLOCK * width;
        scores = values + KEY_BLOCK * width;
        queries = scores + TILE_ROWS * KEY_BLOCK;
        sums = queries + total * width;
        lanes = sums + total * width;
        tops = lanes + total * SUM_LANES;
        for (int i = 0; i < unit.num_rows; ++i) {
            lowest_limit = std::min(lowest_limit, rows[i].limit);
            highest_start = std::max(highest_start, start_of(rows[i].limit));
        }
    }

    void run() {
        take_queries();
        int begin = unit.key_begin + item.chunk * unit.chunk_keys;
        int end = std::min(begin + unit.chunk_keys, unit.key_end);
        find_slots(slots, begin, std::min(KEY_BLOCK, end - begin));
        for (int key = begin; key < end; key += KEY_BLOCK) {
            int n = std::min(KEY_BLOCK, end - key);
            num_ahead = std::min(KEY_BLOCK, end - key - n);
            find_slots(ahead, key + n, num_ahead);
            for (int head = 0; head < num_heads; ++head) {
                lay_out(item.head + head, n);
                int first = head * num_queries, last = first + num_queries;
                for (int i = first; i < last; i += TILE_ROWS)
                    attend(i, std::min(TILE_ROWS, last - i), first, key, n);
            }
            std::swap(slots, ahead);
        }
        finish();
    }

    void take_queries() {
        for (int head = 0; head < num_heads; ++head)
            for (int i = 0; i < num_queries; ++i) {
                int64_t query = int64_t(head) * num_queries + i;
                const float* from = step.q + rows[i / group].token * step.q_stride +
                                    ((item.head + head) * group + i % group) * layer.head_dim;
                float* to = queries + query * width;
                for (int d = 0; d < layer.head_dim; d += LANES)
                    store(to + d, load_part(from + d, std::min(LANES, layer.head_dim - d)) *
                                      splat(layer.sm_scale));
                for (int64_t d = 0; d < width; d += LANES) store(sums + query * width + d, Vec{});
                store(lanes + query * SUM_LANES, Vec{});
                tops[query] = LOWEST;
            }
    }

    void find_slots(int64_t* to, int key, int n) const {
        const int32_t* pages = layer.page_table + int64_t(unit.table_row) * layer.table_stride;
        int64_t stride = int64_t(layer.num_kv_heads) * layer.head_dim;
        int page = key / layer.page_size, offset = key % layer.page_size;
        for (int i = 0; i < n; ++i) {
            to[i] = (int64_t(pages[page]) * layer.page_size + offset) * stride;
            if (++offset == layer.page_size) offset = 0, ++page;
        }
    }

    // Keys of a block as [head_dim, KEY_BLOCK], values as [KEY_BLOCK, width]; zeros behind both.
    void lay_out(int head, int n) {
        int head_dim = layer.head_dim;
        const float* k = layer.k + int64_t(head) * head_dim;
        const float* v = layer.v + int64_t(head) * head_dim;
        for (int i = 0; i < n; i += LANES)
            for (int d = 0; d < head_dim; d += LANES) {
                Vec block[LANES];
                int num_dims = std::min(LANES, head_dim - d);
                if (num_dims == LANES && i + LANES <= n)
                    for (int j = 0; j < LANES; ++j) block[j] = load(k + slots[i + j] + d);
                else
                    for (int j = 0; j < LANES; ++j)
                        block[j] = i + j < n ? load_part(k + slots[i + j] + d, num_dims) : Vec{};
                transpose(block);
                if (num_dims == LANES)
                    for (int j = 0; j < LANES; ++j) store(keys + (d + j) * KEY_BLOCK + i, block[j]);
                else
                    for (int j = 0; j < num_dims; ++j)
                        store(keys + (d + j) * KEY_BLOCK + i, block[j]);
            }
        for (int i = 0; i < num_ahead; ++i)
            for (int d = 0; d < head_dim; d += LINE_FLOATS) {
                __builtin_prefetch(k + ahead[i] + d, 0, 2);
                __builtin_prefetch(v + ahead[i] + d, 0, 2);
            }
        for (int i = 0; i < n; ++i)
            for (int d = 0; d < head_dim; d += LANES)
                store(values + i * width + d,
                      load_part(v + slots[i] + d, std::min(LANES, head_dim - d)));
    }

    // Queries begin ..< begin + count of the KV head whose first is `first`, against the keys
    // key ..< key + n. A row of `scores` has room for all of them.
    void attend(int begin, int count, int first, int key, int n) {
        int high = n;
        bool is_open = key + n <= lowest_limit && highest_start <= key;
        int lows[TILE_ROWS], highs[TILE_ROWS];
        if (!is_open) {
            int low = n;
            high = 0;
            for (int i = 0; i < count; ++i) {
                int limit = rows[(begin + i - first) / group].limit;
                lows[i] = std::max(0, start_of(limit) - key), highs[i] = std::min(limit - key, n);
                low = std::min(low, lows[i]), high = std::max(high, highs[i]);
            }
            if (low >= high) return;
        }
        int vectors = (high + LANES - 1) / LANES;
        multiply(count, vectors, queries + begin * width, width, keys, KEY_BLOCK, layer.head_dim,
                 scores, KEY_BLOCK, nullptr);
        if (!is_open)
            hide(count, vectors, lows, highs);
        else if (n % LANES)
            hide_end(count, n);
        float keep[TILE_LANES] = {};  // all of it: denormal numbers would take long
        soften(begin, count, vectors, keep);
        multiply(count, int(width / LANES), scores, KEY_BLOCK, values, width, high,
                 sums + begin * width, width, keep);
    }

    int start_of(int limit) const {
        int window = step.plan.header->window_left;
        return window < 0 ? 0 : limit - 1 - window;
    }

    void hide(int count, int vectors, const int* lows, const int* highs) {
        for (int i = 0; i < count; ++i)
            for (int j = 0; j < vectors; ++j) {
                IntVec at = lane_numbers() + j * LANES;
                float* s = scores + i * KEY_BLOCK + j * LANES;
                store(s, (at >= lows[i]) & (at < highs[i]) ? load(s) : splat(-INFINITY));
            }
    }

    void hide_end(int count, int n) {
        int j = n / LANES * LANES;
        for (int i = 0; i < count; ++i) {
            float* s = scores + i * KEY_BLOCK + j;
            store(s, lane_numbers() < n - j ? load(s) : splat(-INFINITY));
        }
    }

    // Turn scores into weights; keep[i] is what the earlier sums of query i are to be scaled by.
    void soften(int begin, int count, int vectors, float* keep) {
        float* top = tops + begin;
        for (int i = 0; i < count; ++i) {
            Vec most = load(scores + i * KEY_BLOCK);
            for (int j = 1; j < vectors; ++j)
                most = max(most, load(scores + i * KEY_BLOCK + j * LANES));
            float old = top[i];
            top[i] = std::max(old, hmax(most));
            keep[i] = old - top[i];
        }
        for (int i = 0; i < count; i += LANES) store(keep + i, weight_of(load(keep + i)));
        for (int i = 0; i < count; ++i) {
            float* sum = lanes + (begin + i) * SUM_LANES;
            Vec total = load(sum) * splat(keep[i]);
            for (int j = 0; j < vectors; ++j) {
                float* s = scores + i * KEY_BLOCK + j * LANES;
                Vec weight = weight_of(load(s) - splat(top[i]));
                store(s, weight);
                total += weight;
            }
            store(sum, total);
        }
    }

    void finish() {
        for (int head = 0; head < num_heads; ++head)
            for (int i = 0; i < num_queries; ++i) {
                int query = head * num_queries + i, row = i / group;
                int qo_head = (item.head + head) * group + i % group;
                float total = hsum(load(lanes + query * SUM_LANES));
                const float* sum = sums + query * width;
                if (unit.first_partial < 0) {
                    step.write(step.result(rows[row].token, qo_head), sum, 1 / total);
                    continue;
                }
                float* to = step.partial(unit, item.chunk, row, qo_head);
                std::copy(sum, sum + width, to);
                to[width] = tops[query];
                to[width + 1] = total;
            }
    }
};
