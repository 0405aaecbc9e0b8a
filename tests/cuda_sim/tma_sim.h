// The copy engine, and barriers that count arrivals, on the simulator; see tma.cuh.
#pragma once

struct Arrivals {
    int num_bytes;  // that are expected and not there yet; below 0, those that came unexpected
    u32 num_threads : 8, num_missing : 8, parity : 1;
};
static_assert(sizeof(Arrivals) == 8);

namespace sim {

// What the host puts into a MatrixMap: test's own encoding, see simulator.py.
struct Matrix {
    const u16* elements;
    i64 rows, columns, box_rows;
};
inline Matrix matrix_of(const MatrixMap& map) {
    Matrix matrix;
    memcpy(&matrix, &map, sizeof(matrix));
    return matrix;
}

inline void end_phase_if_complete(Arrivals& arrivals) {
    if (arrivals.num_missing || arrivals.num_bytes) return;
    arrivals.num_missing = arrivals.num_threads;
    arrivals.parity ^= 1;
    device.num_events++;
}

// What lies at the same place of shared memory in another block of the cluster, which must not have
// ended.
template <typename T>
inline T* in_block(T* at, int rank) {
    if (!device.blocks[rank].threads.num_alive) {
        fprintf(stderr, "simulator: shared memory of a block that has ended\n");
        abort();
    }
    auto address = reinterpret_cast<uintptr_t>(at);
    return reinterpret_cast<T*>(address + (rank - device.current->block->rank) * SHARED_BYTES);
}

// The place of a piece of a box's line. The engine swizzles by address, so a box may begin at any
// line.
inline uint4* place_in_box(uint4* box, int line, int piece) {
    int first = reinterpret_cast<uintptr_t>(box) / 128 % 8;
    return box + line * LINE + (piece ^ (first + line) % 8);
}

// Visits the pieces of a box: their places in shared memory, and the first elements in the matrix,
// or null outside.
template <typename F>
inline void for_pieces(uint4* box, const MatrixMap& map, int column, int row, F visit) {
    Matrix matrix = matrix_of(map);
    for (int line = 0; line < matrix.box_rows; line++)
        for (int piece = 0; piece < LINE; piece++) {
            i64 at_row = row + line, at_column = column + piece * 8;
            bool is_there = at_row >= 0 && at_row < matrix.rows && at_column < matrix.columns;
            auto* element = matrix.elements + at_row * matrix.columns + at_column;
            visit(place_in_box(box, line, piece), is_there ? const_cast<u16*>(element) : nullptr);
        }
}

// What the host puts into the map of heads of tokens.
struct Heads {
    const u16* elements;
    i64 tokens, token_stride, heads, head_dim, box_tokens, box_heads;
};

inline void load_heads(uint4* to, const MatrixMap& map, int column, int head, int token,
                       Arrivals* arrivals) {
    Heads matrix;
    memcpy(&matrix, &map, sizeof(matrix));
    int num_lines = matrix.box_tokens * matrix.box_heads;
    for (int line = 0; line < num_lines; line++)
        for (int piece = 0; piece < LINE; piece++) {
            i64 t = token + line / matrix.box_heads, h = head + line % matrix.box_heads;
            auto* from = matrix.elements + t * matrix.token_stride + h * matrix.head_dim + column;
            bool is_there = t < matrix.tokens && h < matrix.heads;
            *place_in_box(to, line, piece) =
                is_there ? reinterpret_cast<const uint4*>(from)[piece] : uint4{};
        }
    arrivals->num_bytes -= num_lines * 128;
    end_phase_if_complete(*arrivals);
}

inline void load(uint4* to, const MatrixMap& map, int column, int row, Arrivals* arrivals) {
    for_pieces(to, map, column, row, [](uint4* piece, const u16* from) {
        *piece = from ? *reinterpret_cast<const uint4*>(from) : uint4{};
    });
    arrivals->num_bytes -= matrix_of(map).box_rows * 128;
    end_phase_if_complete(*arrivals);
}

// As copies, loads happen at once or as late as they may, when someone waits for them: two of five
// at once, so that a ring with three in a step sees each of them both ways in all of its places.
inline void start_load(Arrivals* arrivals, std::function<void()> perform) {
    if (device.num_loads++ % 5 < 2) perform();
    else device.loads.push_back({arrivals, perform});
}

inline bool perform_a_load(Arrivals* arrivals) {
    for (auto load = device.loads.begin(); load != device.loads.end(); ++load)
        if (load->barrier == arrivals) {
            auto perform = load->perform;
            device.loads.erase(load);
            perform();
            return true;
        }
    return false;
}

}  // namespace sim

inline void expect_arrivals(Arrivals* arrivals, int num_threads) {
    *arrivals = {0, u32(num_threads), u32(num_threads), 0};
}
inline void publish_arrivals() {}

inline void arrive_and_expect(Arrivals* arrivals, u32 num_bytes) {
    arrivals->num_bytes += num_bytes;
    arrivals->num_missing--;
    sim::end_phase_if_complete(*arrivals);
}
inline void arrive(Arrivals* arrivals) { arrive_and_expect(arrivals, 0); }
inline void arrive_at(Arrivals* arrivals, int rank) {
    arrive_and_expect(sim::in_block(arrivals, rank), 0);
}
inline void wait_for(Arrivals* arrivals, int parity) {
    while (arrivals->parity == parity)
        if (!sim::perform_a_load(arrivals)) sim::yield();
}

inline void load_box(uint4* to, const MatrixMap& from, int column, int row, Arrivals* arrivals) {
    sim::start_load(arrivals, [=] { sim::load(to, from, column, row, arrivals); });
}
inline void load_heads(uint4* to, const MatrixMap& from, int column, int head, int token,
                       Arrivals* arrivals) {
    sim::start_load(arrivals,
                    [=] { sim::load_heads(to, from, column, head, token, arrivals); });
}
inline void load_box_for_both(uint4* to, const MatrixMap& from, int column, int row,
                              Arrivals* arrivals) {
    for (int rank = 0; rank < 2; rank++) {
        auto* there = sim::in_block(to, rank);
        auto* its = sim::in_block(arrivals, rank);
        sim::start_load(its, [=] { sim::load(there, from, column, row, its); });
    }
}

// Every second store happens at once, the others as late as a wait allows: in the meantime the box
// must not change. Those nobody waits for are lost.
inline void store_box(const MatrixMap& to, const uint4* from, int column, int row) {
    auto perform = [=] {
        auto* box = const_cast<uint4*>(from);
        sim::for_pieces(box, to, column, row, [](const uint4* piece, u16* at) {
            if (at) *reinterpret_cast<uint4*>(at) = *piece;
        });
    };
    auto& fiber = *sim::device.current;
    if (fiber.store_groups.empty()) fiber.store_groups.emplace_back();
    if (fiber.num_stores++ % 2 == 0) perform();
    else fiber.store_groups.back().push_back(perform);
}
inline void end_store_group() { sim::device.current->store_groups.emplace_back(); }
template <int N>
inline void wait_until_read() {
    auto& groups = sim::device.current->store_groups;
    while (groups.size() > N + 1) {
        for (auto& store : groups.front()) store();
        groups.pop_front();
    }
}
inline void wait_for_stores() { wait_until_read<0>(); }

inline void store_matrices(uint4* line, const u32 (&pairs)[4]) {
    struct Pairs {
        u32 values[4];
    };
    auto* values = sim::exchange(Pairs{{pairs[0], pairs[1], pairs[2], pairs[3]}});
    int lane = sim::device.current->lane;
    u32* to = reinterpret_cast<u32*>(line);
    for (int i = 0; i < 4; i++)
        to[i] = reinterpret_cast<const Pairs*>(values[lane % 8 * 4 + i])->values[lane / 8];
}

inline void warpgroup_barrier(int number) {
    auto& group = sim::device.current->block->named[number];
    group.num_alive = 128;
    sim::meet(group);
}

inline void wait_for_turn(int number) {
    auto& group = sim::device.current->block->named[number];
    group.num_alive = 256;
    sim::meet(group);
}
inline void pass_turn(int number) {
    auto& group = sim::device.current->block->named[number];
    group.num_alive = 256;
    if (++group.num_waiting == group.num_alive) sim::open(group);
}

template <int N>
inline void give_back_registers() {}
template <int N>
inline void take_registers() {}

inline int cluster_rank() { return sim::device.current->block->rank; }
