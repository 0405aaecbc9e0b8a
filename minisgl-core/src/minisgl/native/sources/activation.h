// The activations of gated MLPs.
#pragma once

#include "simd.h"

enum Activation : int64_t { NONE, SILU, GELU, GELU_TANH };

INLINE Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

INLINE Vec silu(Vec x) { return x * sigmoid(x); }

inline Vec gelu(Vec x) {
    float lanes[LANES];
    store(lanes, x * splat(0.70710678118654752f));
    for (float& lane : lanes) lane = std::erf(lane);
    return splat(0.5f) * x * (splat(1.0f) + load(lanes));
}

// 0.5 x (1 + tanh y) is x sigmoid(2 y).
INLINE Vec gelu_tanh(Vec x) {
    Vec y = splat(0.79788456080286536f) * (x + splat(0.044715f) * x * x * x);
    return x * sigmoid(y + y);
}

inline Vec activate(Activation kind, Vec x) {
    switch (kind) {
        case SILU: return silu(x);
        case GELU: return gelu(x);
        case GELU_TANH: return gelu_tanh(x);
        default: return x;
    }
}
