// Activations, sums, rotary embedding and reading: one pass over the activations each.

#include <cmath>

#include "batch.h"
#include "kv.h"
#include "threads.h"
#include "vector.h"

namespace {

enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, SOFTPLUS, CLAMPED };  // as in pointwise.py
constexpr float CLAMPED_SLOPE = 1.702f;

template <Activation KIND> INLINE Vec bend(Vec x) {
    if constexpr (KIND == SILU) return silu(x);
    if constexpr (KIND == SOFTPLUS) return softplus(x);
    if constexpr (KIND == RELU) return x > Vec{} || x != x ? x : Vec{};
    if constexpr (KIND == RELU_SQUARED) return bend<RELU>(x) * bend<RELU>(x);
    if constexpr (KIND == GELU_TANH) {  // (1 + tanh(u)) / 2 is the sigmoid of 2 u
        const Vec u = fma(x * x * x, broadcast(0.044715f), x) * broadcast(1.5957691216f);
        return x / (broadcast(1.0f) + exp(-u));
    }
    if constexpr (KIND == GELU) {
        Vec y;
        for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
        return y;
    }
    return x;
}

template <Activation KIND> INLINE Vec joined(Vec gate, Vec up, float limit) {
    if constexpr (KIND != CLAMPED) return bend<KIND>(gate) * up;
    const Vec most = broadcast(limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up < -most ? -most : up;
    return (up + broadcast(1.0f)) * gate * sigmoid(gate * broadcast(CLAMPED_SLOPE));
}

// out[i] = body(i) for i in [0, width): whole vectors of `load`, the last one padded.
template <class Body> INLINE void each_vector(int64_t width, float* out, const Body& body) {
    const int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        store(out + i, body([&](const float* p) LAMBDA { return load(p + i); }));
    if (whole == width) return;
    const int count = width - whole;
    const Vec v = body([&](const float* p) LAMBDA { return load_partial(p + whole, count); });
    memcpy(out + whole, &v, count * sizeof(float));
}

struct ActivationArguments {
    const float* x;  // [rows, width], or where `gated` [rows, 2 width], gate first
    float* out;      // [rows, width]
    int64_t width;
    Rows rows;
    int64_t kind, gated;
    float limit;
};

template <Activation KIND> void activate(const ActivationArguments& a, int threads) {
    const int64_t rows = a.rows, width = a.width;
    parallel_for(rows, rows_at_once(rows, 4 * width), threads, [&](int64_t row, int64_t last) {
        for (; row < last; row++) {
            float* to = a.out + row * width;
            if (a.gated) {
                const float *gate = a.x + row * 2 * width, *up = gate + width;
                each_vector(width, to, [&](auto at) LAMBDA { return joined<KIND>(at(gate), at(up), a.limit); });
            } else {
                const float* x = a.x + row * width;
                each_vector(width, to, [&](auto at) LAMBDA { return bend<KIND>(at(x)); });
            }
        }
    });
}

}  // namespace

// Reads `nbytes` (whole pages) in eight streams a thread, which is as fast as memory gives them; returns what it read.
EXPORT int64_t membound_read(const uint8_t* data, int64_t nbytes, int threads) {
    constexpr int64_t STREAMS = 8, LINE = 64;
    std::atomic<int64_t> total{0};
    const int64_t pieces = nbytes / (STREAMS * LINE);
    parallel_for(pieces, ceil_div(pieces, threads * 4), threads, [&](int64_t first, int64_t last) {
        const uint8_t* from = data + first * STREAMS * LINE;
        const int64_t length = (last - first) * LINE;
        UintVec sums[STREAMS] = {};
        for (int64_t i = 0; i < length; i += LANES * 4)
            for (int s = 0; s < STREAMS; s++) {
                UintVec v;
                memcpy(&v, from + s * length + i, sizeof v);
                sums[s] ^= v;
            }
        for (int s = 1; s < STREAMS; s++) sums[0] ^= sums[s];
        total += sums[0][0];
    });
    return total;
}

EXPORT int membound_lanes() { return LANES; }

EXPORT void membound_activate(const ActivationArguments* arguments, int threads) {
    switch (arguments->kind) {
        case SILU: return activate<SILU>(*arguments, threads);
        case GELU: return activate<GELU>(*arguments, threads);
        case GELU_TANH: return activate<GELU_TANH>(*arguments, threads);
        case RELU: return activate<RELU>(*arguments, threads);
        case RELU_SQUARED: return activate<RELU_SQUARED>(*arguments, threads);
        case SOFTPLUS: return activate<SOFTPLUS>(*arguments, threads);
        case CLAMPED: return activate<CLAMPED>(*arguments, threads);
    }
}

struct SumArguments {
    const float *x, *y;  // [rows, width], rows as far apart as the strides say; y may be null
    float* out;          // the same, may be x
    int64_t width, x_stride, y_stride, out_stride;
    Rows rows;
    float factor;
};

// factor * x + y
EXPORT void membound_sum(const SumArguments* arguments, int threads) {
    const SumArguments& a = *arguments;
    const int64_t rows = a.rows, width = a.width;
    parallel_for(rows, rows_at_once(rows, width), threads, [&](int64_t row, int64_t last) {
        for (; row < last; row++) {
            const float *x = a.x + row * a.x_stride, *y = a.y ? a.y + row * a.y_stride : nullptr;
            each_vector(width, a.out + row * a.out_stride, [&](auto at) LAMBDA {
                const Vec scaled = at(x) * broadcast(a.factor);
                return y ? scaled + at(y) : scaled;
            });
        }
    });
}

struct GateArguments {
    const float *x, *gate;  // [rows, width]; rows of the gate lie `gate_stride` apart
    float* out;             // [rows, width]
    int64_t width, gate_stride;
    int64_t gate_width;  // 1: one gate a row
    Rows rows;
    int64_t silu;  // times silu(gate) instead of sigmoid(gate)
};

// x * sigmoid(gate)
EXPORT void membound_gate(const GateArguments* arguments, int threads) {
    const GateArguments& a = *arguments;
    const int64_t rows = a.rows, width = a.width;
    parallel_for(rows, rows_at_once(rows, 4 * width), threads, [&](int64_t row, int64_t last) {
        for (; row < last; row++) {
            const float *x = a.x + row * width, *gate = a.gate + row * a.gate_stride;
            auto opened = [&](Vec v) LAMBDA { return a.silu ? silu(v) : sigmoid(v); };
            const Vec whole_row = opened(broadcast(*gate));
            each_vector(width, a.out + row * width, [&](auto at) LAMBDA {
                return at(x) * (a.gate_width == 1 ? whole_row : opened(at(gate)));
            });
        }
    });
}

struct RopeArguments {
    const float* qkv;  // [tokens, (heads + 2 kv_heads) head_dim]
    const float *cos, *sin;  // [max_position, head_dim / 2]
    const Batch* batch;
    float* q;  // [tokens, heads, head_dim]
    KvBlocks kv;
    int64_t heads;
    const int64_t* head_slots;  // [tokens, kv_heads], where each head's k and v go; null: the batch's slots for all
};

EXPORT void membound_rope_and_store(const RopeArguments* arguments, int threads) {
    const RopeArguments& a = *arguments;
    const int64_t dim = a.kv.head_dim, half = dim / 2, width = (a.heads + 2 * a.kv.kv_heads) * dim;
    const int64_t tokens = a.batch->tokens;
    parallel_for(tokens, rows_at_once(tokens, width), threads, [&](int64_t token, int64_t last) {
        thread_local Scratch scratch;
        float* rotated = scratch.floats(dim);
        for (; token < last; token++) {
            const float* x = a.qkv + token * width;
            const float *cos = a.cos + a.batch->positions[token] * half, *sin = a.sin + a.batch->positions[token] * half;
            auto rotate = [&](float* to) {
                turn(x, cos, sin, half, to);
                x += dim;
            };
            auto slot = [&](int64_t h) {
                return a.head_slots ? a.head_slots[token * a.kv.kv_heads + h] : a.batch->slots[token];
            };
            for (int64_t h = 0; h < a.heads; h++) rotate(a.q + (token * a.heads + h) * dim);
            for (int64_t h = 0; h < a.kv.kv_heads; h++) {
                rotate(rotated);
                write_vector(a.kv, KEYS, slot(h), h, rotated);
            }
            for (int64_t h = 0; h < a.kv.kv_heads; h++, x += dim) write_vector(a.kv, VALUES, slot(h), h, x);
        }
    });
}
