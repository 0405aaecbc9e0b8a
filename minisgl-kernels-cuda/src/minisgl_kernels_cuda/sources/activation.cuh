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
template <int N>
INLINE Pack<N> gated(Activation kind, const Floats<N>& gates, const Floats<N>& ups) {
    Floats<N> values;
#pragma unroll
    for (int i = 0; i < N; i++) values.v[i] = activate(kind, gates.v[i]);
    values = rounded(values);
#pragma unroll
    for (int i = 0; i < N; i++) values.v[i] *= ups.v[i];
    return narrow(values);
}
