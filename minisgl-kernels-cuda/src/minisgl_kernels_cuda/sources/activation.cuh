// Gated activations: act(gate) * up.
#pragma once
#include "device.cuh"

enum Activation { NO_ACTIVATION, SILU, GELU, GELU_TANH };

INLINE float activate(Activation kind, float x) {
    if (kind == SILU) return divide_fast(x, 1.f + exp2_fast(x * -1.4426950408889634f));
    if (kind == GELU) return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
    float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.f + tanhf(inner));
}

// As in torch, the activation is rounded before the product.
INLINE scalar gated(Activation kind, scalar gate, scalar up) {
    return narrow(rounded(activate(kind, widen(gate))) * widen(up));
}
