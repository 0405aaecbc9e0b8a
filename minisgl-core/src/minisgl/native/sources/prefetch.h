// Bringing the next part of a weight into the cache while this one is multiplied.
#pragma once

#include "simd.h"

// A region is fetched in several streams side by side: the memory system follows one stream at
// about two thirds of the speed that it reaches with eight.
class Ahead {
    static constexpr int STREAMS = 8;
    static constexpr int64_t LINE = 64;
    const char* next_;
    const char* stop_;
    int64_t part_, credit_ = 0, gain_, cost_;

  public:
    // Fetch begin .. end during equal passes, each of steps that read lines_per_step lines.
    Ahead(const float* begin, const float* end, int64_t lines_per_step, int64_t passes)
        : next_(reinterpret_cast<const char*>(begin)),
          part_(((end - begin) * int64_t(sizeof(float)) + STREAMS - 1) / STREAMS),
          gain_(lines_per_step),
          cost_(STREAMS * passes) {
        stop_ = next_ + part_;
    }

    INLINE void step() {
        for (credit_ += gain_; credit_ >= cost_ && next_ < stop_; credit_ -= cost_, next_ += LINE)
            for (int i = 0; i < STREAMS; ++i) __builtin_prefetch(next_ + i * part_, 0, 2);
    }
};
