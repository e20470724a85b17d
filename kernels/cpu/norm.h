// The RMS norm of one row.

#pragma once

#include <cmath>

#include "vector.h"

// x (plus residual, which receives the sum) over its root mean square, times weight.
template <bool ADD>
inline void rms_norm(const float* x, float* residual, const float* weight, float* out, int64_t width, float eps) {
    const int64_t whole = width / LANES * LANES;
    Vec squares{};
    for (int64_t i = 0; i < whole; i += LANES) {
        Vec v = load(x + i);
        if (ADD) {
            v += load(residual + i);
            store(residual + i, v);
        }
        squares = fma(v, v, squares);
    }
    float rest = 0;
    for (int64_t i = whole; i < width; i++) {
        if (ADD) residual[i] += x[i];
        const float v = ADD ? residual[i] : x[i];
        rest += v * v;
    }
    const float factor = 1.0f / std::sqrt((sum(squares) + rest) / width + eps);
    const float* from = ADD ? residual : x;
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, load(from + i) * broadcast(factor) * load(weight + i));
    for (int64_t i = whole; i < width; i++) out[i] = from[i] * factor * weight[i];
}
