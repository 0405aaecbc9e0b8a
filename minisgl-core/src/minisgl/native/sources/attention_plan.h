// Who reads which keys for which queries: the plan of one step, made once and used by every layer.
//
// A unit is a run of query rows and the keys that all of them look at: the rows of one block of a
// prompt, one decoding request, or several decoding requests and a prefix of pages that they share.
// Units of shared prefixes form a tree; what a row sees is its leaf's keys and those of all
// parents. The keys of a unit are cut into chunks so that every thread has work; a unit that is
// whole and has no parent writes final results, all others write partial ones that are merged.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

constexpr int KEY_BLOCK = 64;          // keys that are laid out and multiplied at a time
constexpr int MAX_UNIT_QUERIES = 192;  // query rows times heads of a group, in one unit
constexpr int MIN_SHARED_KEYS = 128;   // keys less to read that pay for a unit of their own
constexpr int ITEMS_PER_THREAD = 4;
constexpr int64_t MIN_PARALLEL_COST = 1 << 18;  // products below which one thread is as quick

struct Unit {
    int32_t first_row, num_rows;  // rows of the plan
    int32_t table_row;            // row of the page table to read from
    int32_t key_begin, key_end;
    int32_t parent;  // -1 for none
    int32_t is_leaf;
    int32_t num_chunks, chunk_keys;
    int32_t first_partial;  // in rows of partial results; -1: its results are final
};

struct Item {
    int32_t unit, chunk, head;  // head: the first of heads_per_item KV heads
};

struct Row {
    int32_t token;  // row of q
    int32_t limit;  // it sees the keys before this position
};

struct PlanHeader {
    int32_t num_units, num_items, num_rows, num_threads;
    int32_t heads_per_item, max_unit_rows, num_partials, window_left;
};

struct PlanView {
    const PlanHeader* header;
    const Unit* units;
    const Item* items;
    const Row* rows;

    explicit PlanView(const int32_t* data) {
        header = reinterpret_cast<const PlanHeader*>(data);
        units = reinterpret_cast<const Unit*>(header + 1);
        items = reinterpret_cast<const Item*>(units + header->num_units);
        rows = reinterpret_cast<const Row*>(items + header->num_items);
    }
};

// The requests of a step. Its members are those of minisgl.attention.native_backend.
struct Requests {
    const int32_t* page_table;    // [rows, table_stride]
    const int32_t* table_idx;     // [num_reqs] rows of the page table
    const int32_t* seq_lens;      // [num_reqs] tokens, those of this step included
    const int32_t* cu_seqlens_q;  // [num_reqs + 1] where the queries of each begin
    int32_t table_stride, num_reqs, page_size, window_left;
    int32_t num_qo_heads, num_kv_heads, head_dim, num_threads;

    int num_queries(int req) const { return cu_seqlens_q[req + 1] - cu_seqlens_q[req]; }
    const int32_t* pages(int req) const {
        return page_table + int64_t(table_idx[req]) * table_stride;
    }
};

class Planner {
  public:
    PlanHeader header{};
    std::vector<Unit> units;
    std::vector<Item> items;
    std::vector<Row> rows;

    explicit Planner(const Requests& requests) : reqs(requests) {
        group = reqs.num_qo_heads / reqs.num_kv_heads;
        std::vector<int> singles;
        for (int req = 0; req < reqs.num_reqs; ++req) {
            if (reqs.num_queries(req) == 1)
                singles.push_back(req);
            else
                add_prompt(req);
        }
        add_singles(singles);
        int64_t products = total_cost() * reqs.num_kv_heads * reqs.head_dim;
        header.num_threads = products < MIN_PARALLEL_COST ? 1 : reqs.num_threads;
        cut();
        header.num_units = int32_t(units.size());
        header.num_items = int32_t(items.size());
        header.num_rows = int32_t(rows.size());
        header.window_left = reqs.window_left;
        for (const Unit& unit : units)
            header.max_unit_rows = std::max(header.max_unit_rows, unit.num_rows);
    }

  private:
    const Requests& reqs;
    int group;
    std::vector<int> order;   // requests of one query each, those that share pages side by side
    std::vector<int> common;  // pages that each has in common with the one before it

    int first_key(int limit) const {
        return reqs.window_left < 0 ? 0 : std::max(0, limit - 1 - reqs.window_left);
    }

    // Full pages that are not the request's own: the newest token's page always is.
    int num_shareable(int req) const { return (reqs.seq_lens[req] - 1) / reqs.page_size; }

    int add_unit(int first_row, int num_rows, int req, int key_begin, int key_end, int parent) {
        units.push_back(
            {first_row, num_rows, reqs.table_idx[req], key_begin, key_end, parent, 1, 1, 0, -1});
        return int(units.size()) - 1;
    }

    void add_prompt(int req) {
        int count = reqs.num_queries(req), first = reqs.seq_lens[req] - count;
        int size = std::max(1, MAX_UNIT_QUERIES / group);
        while (size > 8 && (count / size) * reqs.num_kv_heads < ITEMS_PER_THREAD * reqs.num_threads)
            size /= 2;
        for (int start = 0; start < count; start += size) {
            int end = std::min(start + size, count), first_row = int(rows.size());
            for (int i = start; i < end; ++i)
                rows.push_back({reqs.cu_seqlens_q[req] + i, first + i + 1});
            add_unit(first_row, end - start, req, first_key(first + start + 1), first + end, -1);
        }
    }

    void add_singles(const std::vector<int>& singles) {
        order = singles;
        bool is_sharing = can_share();
        if (is_sharing) {
            std::sort(order.begin(), order.end(), [this](int a, int b) {
                const int32_t *p = reqs.pages(a), *q = reqs.pages(b);
                return std::lexicographical_compare(p, p + num_shareable(a), q,
                                                    q + num_shareable(b));
            });
        }
        int first_row = int(rows.size());
        for (int req : order) rows.push_back({reqs.cu_seqlens_q[req], reqs.seq_lens[req]});
        find_common(is_sharing);
        int size = std::max(1, MAX_UNIT_QUERIES / group), count = int(order.size());
        for (int start = 0; start < count; start += size)
            add_tree(first_row, start, std::min(start + size, count), 0, 0, -1);
    }

    // Whether two requests begin with the same page, and no window hides it.
    bool can_share() const {
        std::vector<int32_t> first_pages;
        for (int req : order) {
            if (first_key(reqs.seq_lens[req]) > 0) return false;
            if (num_shareable(req) > 0) first_pages.push_back(reqs.pages(req)[0]);
        }
        std::sort(first_pages.begin(), first_pages.end());
        return std::adjacent_find(first_pages.begin(), first_pages.end()) != first_pages.end();
    }

    void find_common(bool is_sharing) {
        common.assign(order.size(), 0);
        for (size_t i = 1; is_sharing && i < order.size(); ++i) {
            const int32_t *p = reqs.pages(order[i - 1]), *q = reqs.pages(order[i]);
            int most = std::min(num_shareable(order[i - 1]), num_shareable(order[i]));
            common[i] = int(std::mismatch(p, p + most, q).first - p);
        }
    }

    // Cover the requests begin..end, which have `level` pages in common and whose first `covered`
    // pages are those of `parent` and its parents.
    void add_tree(int first_row, int begin, int end, int level, int covered, int parent) {
        while (begin < end) {
            int stop = begin + 1, least = INT32_MAX;
            for (; stop < end && common[stop] > level; ++stop)
                least = std::min(least, common[stop]);
            int req = order[begin], num_rows = stop - begin, row = first_row + begin;
            if (num_rows == 1) {
                int start = std::max(covered * reqs.page_size, first_key(reqs.seq_lens[req]));
                add_unit(row, 1, req, start, reqs.seq_lens[req], parent);
            } else if ((least - covered) * reqs.page_size * (num_rows - 1) >= MIN_SHARED_KEYS) {
                int unit = add_unit(row, num_rows, req, covered * reqs.page_size,
                                    least * reqs.page_size, parent);
                units[unit].is_leaf = 0;
                add_tree(first_row, begin, stop, least, least, unit);
            } else {
                add_tree(first_row, begin, stop, least, covered, parent);
            }
            begin = stop;
        }
    }

    // Products of queries and keys for one KV head; laying a key out costs about four of them.
    int64_t cost(const Unit& unit) const {
        return int64_t(unit.key_end - unit.key_begin) * (unit.num_rows * group + 4);
    }

    int64_t total_cost() const {
        int64_t total = 0;
        for (const Unit& unit : units) total += cost(unit);
        return total;
    }

    // Cut units into chunks and make the items, the longest first.
    void cut() {
        int wanted = ITEMS_PER_THREAD * header.num_threads;
        // One item for all heads reads whole pages; one per head is more items.
        bool is_decode = int(order.size()) == reqs.num_reqs;
        header.heads_per_item =
            is_decode && (header.num_threads == 1 || int(units.size()) >= wanted)
                ? reqs.num_kv_heads
                : 1;
        int64_t most = std::max<int64_t>(1, total_cost() * reqs.num_kv_heads / wanted);
        for (Unit& unit : units) cut_unit(unit, header.num_threads == 1 ? INT64_MAX : most);
        std::vector<int> by_cost(units.size());
        std::iota(by_cost.begin(), by_cost.end(), 0);
        std::stable_sort(by_cost.begin(), by_cost.end(), [this](int a, int b) {
            return cost(units[a]) / units[a].num_chunks > cost(units[b]) / units[b].num_chunks;
        });
        for (int unit : by_cost)
            for (int chunk = 0; chunk < units[unit].num_chunks; ++chunk)
                for (int head = 0; head < reqs.num_kv_heads; head += header.heads_per_item)
                    items.push_back({unit, chunk, head});
    }

    void cut_unit(Unit& unit, int64_t most) {
        int blocks = (unit.key_end - unit.key_begin + KEY_BLOCK - 1) / KEY_BLOCK;
        int64_t pieces = cost(unit) * header.heads_per_item / most;
        pieces = std::max<int64_t>(1, std::min<int64_t>(pieces, blocks / 2));
        int chunk_blocks = int((blocks + pieces - 1) / pieces);
        unit.chunk_keys = chunk_blocks * KEY_BLOCK;
        unit.num_chunks = (blocks + chunk_blocks - 1) / chunk_blocks;
        if (unit.num_chunks > 1 || unit.parent >= 0 || !unit.is_leaf) {
            unit.first_partial = header.num_partials;
            header.num_partials += unit.num_chunks * unit.num_rows;
        }
    }
};
