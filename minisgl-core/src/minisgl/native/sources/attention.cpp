// Causal attention over a paged pool of keys and values, read in place.
//
// Sources: online softmax over blocks of keys (FlashAttention, arXiv:2205.14135), partial results
// merged by their maxima and sums (FlashDecoding), shared prefixes read once (arXiv:2402.05099).
#include <atomic>
#include <vector>

#include "attention_worker.h"
#include "parallel.h"

template <class Use>
static void for_pieces(const Step& step, int leaf, int row, int head, const Use& use) {
    for (int i = leaf; i >= 0; i = step.plan.units[i].parent) {
        const Unit& unit = step.plan.units[i];
        for (int chunk = 0; chunk < unit.num_chunks; ++chunk)
            use(step.partial(unit, chunk, row - unit.first_row, head));
    }
}

// Add up what the chunks of a leaf and of its parents give for each of its rows.
static void merge(const Step& step, int leaf) {
    int64_t width = step.layer.width();
    const Unit& own = step.plan.units[leaf];
    std::vector<float> sums(width);
    for (int row = own.first_row; row < own.first_row + own.num_rows; ++row)
        for (int head = 0; head < step.layer.num_qo_heads; ++head) {
            float top = LOWEST, total = 0;
            for_pieces(step, leaf, row, head,
                       [&](const float* piece) { top = std::max(top, piece[width]); });
            std::fill(sums.begin(), sums.end(), 0.0f);
            for_pieces(step, leaf, row, head, [&](const float* piece) {
                float weight = std::exp(piece[width] - top);
                total += weight * piece[width + 1];
                for (int64_t d = 0; d < width; ++d) sums[d] += weight * piece[d];
            });
            step.write(step.result(step.plan.rows[row].token, head), sums.data(), 1 / total);
        }
}

static void run(const Step& step, float* work) {
    const PlanHeader& plan = *step.plan.header;
    std::atomic<int> next_item{0}, next_unit{0};
    parallel(plan.num_threads, [&](int thread, int num_threads) {
        float* mine = work + thread * work_floats(plan, step.layer);
        for (int i; (i = next_item++) < plan.num_items;)
            Worker(step, step.plan.items[i], mine).run();
        if (!plan.num_partials) return;
        barrier(num_threads);
        for (int i; (i = next_unit++) < plan.num_units;) {
            const Unit& unit = step.plan.units[i];
            if (unit.is_leaf && unit.first_partial >= 0) merge(step, i);
        }
    });
}

// Plan a step.
//
// Returns how many int32 the plan has; it is written to `plan` where that is at most `capacity`.
// `workspace` is set to the floats that attention_run needs.
EXPORT int64_t attention_plan(const Requests* requests, int32_t* plan, int64_t capacity,
                              int64_t* workspace) {
    Planner planner(*requests);
    Layer layer{};
    layer.num_qo_heads = requests->num_qo_heads;
    layer.num_kv_heads = requests->num_kv_heads;
    layer.head_dim = requests->head_dim;
    const PlanHeader& header = planner.header;
    *workspace = header.num_threads * work_floats(header, layer) +
                 int64_t(header.num_partials) * layer.num_qo_heads * partial_floats(layer);
    int64_t size = (sizeof header + planner.units.size() * sizeof(Unit) +
                    planner.items.size() * sizeof(Item) + planner.rows.size() * sizeof(Row)) /
                   sizeof(int32_t);
    if (size > capacity) return size;
    char* to = reinterpret_cast<char*>(plan);
    auto put = [&to](const void* from, size_t num_bytes) {
        std::memcpy(to, from, num_bytes);
        to += num_bytes;
    };
    put(&header, sizeof header);
    put(planner.units.data(), planner.units.size() * sizeof(Unit));
    put(planner.items.data(), planner.items.size() * sizeof(Item));
    put(planner.rows.data(), planner.rows.size() * sizeof(Row));
    return size;
}

// Attend with q[num_tokens, num_qo_heads, head_dim], rows q_stride floats apart; out is adjacent.
EXPORT void attention_run(const Layer* layer, const int32_t* plan, const float* q, int64_t q_stride,
                          float* out, float* workspace) {
    PlanView view(plan);
    float* partials = workspace + view.header->num_threads * work_floats(*view.header, *layer);
    run({*layer, view, q, q_stride, out, partials}, workspace);
}
