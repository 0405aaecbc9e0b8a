// Bringing what is read next into the caches while something else is computed.
#pragma once

#include "simd.h"

constexpr int64_t LINE_FLOATS = 16;  // of a cache line

// Bring count floats that the second-level cache has into the first.
INLINE void fetch_near(const float* p, int64_t count) {
    for (int64_t i = 0; i < count; i += LINE_FLOATS) __builtin_prefetch(p + i, 0, 3);
}

// A region is fetched in several streams side by side: the memory system follows one stream at
// about two thirds of the speed that it reaches with eight.
class Ahead {
    static constexpr int STREAMS = 8;
    const float* next_;
    const float* stop_;
    int64_t part_, credit_ = 0, gain_, cost_;

  public:
    // Fetch begin .. end during equal passes, each of steps that read lines_per_step lines.
    Ahead(const float* begin, const float* end, int64_t lines_per_step, int64_t passes)
        : next_(begin),
          part_((end - begin + STREAMS - 1) / STREAMS),
          gain_(lines_per_step),
          cost_(STREAMS * passes) {
        stop_ = next_ + part_;
    }

    INLINE void step() {
        credit_ += gain_;
        while (credit_ >= cost_ && next_ < stop_) {
            for (int i = 0; i < STREAMS; ++i) __builtin_prefetch(next_ + i * part_, 0, 2);
            credit_ -= cost_;
            next_ += LINE_FLOATS;
        }
    }
};
