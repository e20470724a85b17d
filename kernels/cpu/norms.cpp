// Norms: one pass over the activations each.

#include <cmath>

#include "batch.h"
#include "norm.h"
#include "threads.h"
#include "vector.h"

namespace {

struct NormArguments {
    const float* x;       // rows of `width` elements, `x_stride` apart
    float* residual;      // [rows, width], to which x is added first, or null
    const float* weight;  // [period, width], or null
    const float* bias;    // the same, or null
    float* out;           // rows `out_stride` apart; may be x
    int64_t width, x_stride, out_stride;
    int64_t groups;  // each row is so many, side by side, normed by themselves
    int64_t period;  // group g of a row has the weights g % period
    Rows rows;
    float eps;
};

// x without its mean over its standard deviation, times weight plus bias where there are some.
void layer_norm(const float* x, const float* weight, const float* bias, float* out, int64_t width, float eps) {
    const int64_t whole = width / LANES * LANES;
    Vec sums{}, squares{};
    float rest = 0;
    for (int64_t i = 0; i < whole; i += LANES) sums += load(x + i);
    for (int64_t i = whole; i < width; i++) rest += x[i];
    const float mean = (sum(sums) + rest) / width;
    rest = 0;
    for (int64_t i = 0; i < whole; i += LANES) {
        const Vec v = load(x + i) - broadcast(mean);
        squares = fma(v, v, squares);
    }
    for (int64_t i = whole; i < width; i++) rest += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt((sum(squares) + rest) / width + eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        Vec v = (load(x + i) - broadcast(mean)) * broadcast(factor);
        if (weight) v *= load(weight + i);
        if (bias) v += load(bias + i);
        store(out + i, v);
    }
    for (int64_t i = whole; i < width; i++) {
        out[i] = (x[i] - mean) * factor;
        if (weight) out[i] *= weight[i];
        if (bias) out[i] += bias[i];
    }
}

template <class Norm> void all_rows(const NormArguments& a, int threads, const Norm& norm) {
    const int64_t rows = a.rows, width = a.groups * a.width;
    parallel_for(rows, rows_at_once(rows, width), threads, [&](int64_t row, int64_t last) {
        for (; row < last; row++)
            for (int64_t group = 0; group < a.groups; group++) {
                const int64_t at = group * a.width, of = group % a.period * a.width;
                float* residual = a.residual ? a.residual + row * a.width : nullptr;
                norm(a.x + row * a.x_stride + at, residual, of, a.out + row * a.out_stride + at);
            }
    });
}

}  // namespace

EXPORT void membound_rms_norm(const NormArguments* arguments, int threads) {
    const NormArguments& a = *arguments;
    all_rows(a, threads, [&](const float* x, float* residual, int64_t of, float* out) {
        auto norm = residual ? rms_norm<true> : rms_norm<false>;
        norm(x, residual, a.weight + of, out, a.width, a.eps);
    });
}

EXPORT void membound_layer_norm(const NormArguments* arguments, int threads) {
    const NormArguments& a = *arguments;
    all_rows(a, threads, [&](const float* x, float* residual, int64_t of, float* out) {
        if (residual) {
            for (int64_t i = 0; i < a.width; i++) residual[i] += x[i];
            x = residual;
        }
        layer_norm(x, a.weight ? a.weight + of : nullptr, a.bias ? a.bias + of : nullptr, out, a.width, a.eps);
    });
}
