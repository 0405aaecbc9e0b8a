// A weight as tiles for the matrix unit of x86 (AMX), which multiplies bfloat16.
//
// A float32 is the sum of three bfloat16, exactly: its high, middle and low term. A weight that
// needs one or two of them (what was stored in 16 bits, and most of what was quantised) is kept so,
// in no more room than before.
//
// A panel has OUTPUTS outputs, or SIDE gates and their ups, and is laid out as
// [steps of 32 inputs][terms][2 tiles][SIDE outputs][32 inputs].
#pragma once

#include "linear_panels.h"

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define HAS_TILES 1

namespace tiles {

using panels::smaller;

constexpr int SIDE = 16;           // outputs and rows of a tile
constexpr int STEP = 32;           // inputs of a tile
constexpr int TILE = 256;          // floats that a whole tile takes
constexpr int OUTPUTS = 2 * SIDE;  // of a panel
constexpr int MAX_TERMS = 2;       // of a weight

// The next term of two vectors, which lose it: a pair of inputs that are LANES apart in each lane.
// It is rounded, so that what is left out of products has either sign and cancels out; a last term
// is exact as it is.
INLINE Vec take_term(Vec& first, Vec& second, bool is_last = false) {
    const __m512i mask = _mm512_set1_epi32(int(0xffff0000));
    const __m512i half = _mm512_set1_epi32(is_last ? 0 : 0x8000);
    __m512i a = _mm512_add_epi32((__m512i)first, half);
    __m512i b = _mm512_add_epi32((__m512i)second, half);
    first -= (Vec)_mm512_and_si512(a, mask);
    second -= (Vec)_mm512_and_si512(b, mask);
    // b where the mask is set, else the upper half of a.
    return (Vec)_mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, mask, 0xd8);
}

// Up to STEP inputs of a row, zeros behind them.
INLINE void load_step(const float* row, int64_t count, Vec& first, Vec& second) {
    if (count >= STEP) {
        first = load(row), second = load(row + LANES);
        return;
    }
    first = load_part(row, int(smaller(count, LANES)));
    second = count > LANES ? load_part(row + LANES, int(count - LANES)) : Vec{};
}

// A weight as tiles.
struct Layout {
    const Weight& weight;
    int terms;

    int64_t num_steps() const { return (weight.num_inputs + STEP - 1) / STEP; }
    int64_t outputs_per_panel() const { return weight.is_gated() ? SIDE : OUTPUTS; }
    int64_t num_panels() const {
        return (weight.num_outputs + outputs_per_panel() - 1) / outputs_per_panel();
    }
    int64_t step_floats() const { return 2 * TILE * terms; }
    int64_t panel_floats() const { return step_floats() * num_steps(); }

    // The row of source that is row i, 0 .. OUTPUTS, of a panel; null behind the last one.
    const float* row(const float* source, int64_t panel, int i) const {
        bool is_up = weight.is_gated() && i >= SIDE;
        int64_t output = panel * outputs_per_panel() + (is_up ? i - SIDE : i);
        if (output >= weight.num_outputs) return nullptr;
        return source + (output + (is_up ? weight.num_outputs : 0)) * weight.num_inputs;
    }

    void pack_panel(const float* source, float* packed, int64_t panel) const {
        for (int i = 0; i < OUTPUTS; ++i) {
            const float* from = row(source, panel, i);
            float* to = packed + panel * panel_floats() + (i / SIDE) * TILE + i % SIDE * LANES;
            for (int64_t k = 0; k < weight.num_inputs; k += STEP) {
                Vec first{}, second{};
                if (from) load_step(from + k, weight.num_inputs - k, first, second);
                for (int term = 0; term < terms; ++term, to += 2 * TILE)
                    store(to, take_term(first, second));
            }
        }
    }
};

// Terms that the numbers need, up to MAX_TERMS + 1 for more than can be kept.
inline int terms_needed(const float* numbers, int64_t count) {
    int needed = 1;
    for (int64_t k = 0; k < count && needed <= MAX_TERMS; k += STEP) {
        Vec first, second;
        load_step(numbers + k, count - k, first, second);
        for (int term = 0; term < needed; ++term) take_term(first, second);
        for (; needed <= MAX_TERMS; ++needed) {
            // Not equal to zero, or not a number.
            IntVec left = (IntVec)(first == Vec{}) & (IntVec)(second == Vec{});
            if (_mm512_cmpneq_epi32_mask((__m512i)left, _mm512_set1_epi32(-1)) == 0) break;
            take_term(first, second);
        }
    }
    return needed;
}

}  // namespace tiles
#endif
