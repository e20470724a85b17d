// Norms, rotary embedding and activation: one pass over the activations each.

#include <cmath>

#include "cpu_batch.h"
#include "cpu_kv.h"
#include "cpu_threads.h"
#include "cpu_vector.h"

namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 14;  // some 5 us of work: below it a second thread brings nothing

// Rows that one thread takes at a time; all of them when the whole is too little to share.
int64_t rows_at_once(int64_t rows, int64_t width) {
    return rows * width <= SERIAL_ELEMENTS ? rows : 1 + SERIAL_ELEMENTS / 4 / width;
}

// x (plus residual, which receives the sum) over its root mean square, times weight.
template <bool ADD>
void norm_row(const float* x, float* residual, const float* weight, float* out, int64_t width, float eps) {
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

INLINE Vec silu_times(Vec gate, Vec up) { return gate / (broadcast(1.0f) + exp(-gate)) * up; }

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

struct NormArguments {
    const float* x;  // [rows, width]
    float* residual;  // the same, or null
    const float* weight;  // [width]
    float* out;
    int64_t width;
    Rows rows;
    float eps;
};

EXPORT void membound_rms_norm(const NormArguments* arguments, int threads) {
    const NormArguments& a = *arguments;
    const int64_t rows = a.rows, width = a.width;
    parallel_for(rows, rows_at_once(rows, width), threads, [&](int64_t row, int64_t last) {
        for (; row < last; row++) {
            const float* x = a.x + row * width;
            float* out = a.out + row * width;
            if (a.residual)
                norm_row<true>(x, a.residual + row * width, a.weight, out, width, a.eps);
            else
                norm_row<false>(x, nullptr, a.weight, out, width, a.eps);
        }
    });
}

struct GateArguments {
    const float* gate_up;  // [rows, 2 width]
    float* out;            // [rows, width]
    int64_t width;
    Rows rows;
};

EXPORT void membound_silu_mul(const GateArguments* arguments, int threads) {
    const GateArguments& a = *arguments;
    const int64_t rows = a.rows, width = a.width;
    parallel_for(rows, rows_at_once(rows, 4 * width), threads, [&](int64_t row, int64_t last) {
        for (; row < last; row++) {
            const float *gate = a.gate_up + row * 2 * width, *up = gate + width;
            float* to = a.out + row * width;
            const int64_t whole = width / LANES * LANES;
            for (int64_t i = 0; i < whole; i += LANES) store(to + i, silu_times(load(gate + i), load(up + i)));
            if (whole < width) {
                const int count = width - whole;
                const Vec v = silu_times(load_partial(gate + whole, count), load_partial(up + whole, count));
                memcpy(to + whole, &v, count * sizeof(float));
            }
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
                for (int64_t i = 0; i < half; i++) {
                    to[i] = x[i] * cos[i] - x[i + half] * sin[i];
                    to[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
                }
                x += dim;
            };
            for (int64_t h = 0; h < a.heads; h++) rotate(a.q + (token * a.heads + h) * dim);
            for (int64_t h = 0; h < a.kv.kv_heads; h++) {
                rotate(rotated);
                write_vector(a.kv, KEYS, a.batch->slots[token], h, rotated);
            }
            for (int64_t h = 0; h < a.kv.kv_heads; h++, x += dim) write_vector(a.kv, VALUES, a.batch->slots[token], h, x);
        }
    });
}
