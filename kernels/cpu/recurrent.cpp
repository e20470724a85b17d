// The recurrences of layers with a state, token after token; recurrent.py says what they mean.
//
// A sequence's state lies at its seat and stays in a cache while its tokens pass: a head of Mamba-2 has some 32 kB.

#include <cmath>

#include "batch.h"
#include "threads.h"
#include "vector.h"

namespace {

constexpr int64_t CHANNELS_AT_ONCE = 256;
constexpr int MOST_WIDTH = 16;

// One sequence's tokens in the batch.
struct Span {
    int64_t first, last, seat;
    bool fresh;

    Span(const Batch& batch, int64_t sequence)
        : first(batch.query_start[sequence]), last(batch.query_start[sequence + 1]),
          seat(batch.seats ? batch.seats[sequence] : sequence), fresh(first < last && !batch.positions[first]) {}
    bool empty() const { return first == last; }
};

// body(sequence, piece) for all sequences and pieces.
template <class Body> void each_piece(const Batch& batch, int64_t pieces, int threads, const Body& body) {
    parallel_for(batch.sequences * pieces, 1, threads, [&](int64_t i, int64_t last) {
        for (; i < last; i++) {
            const Span span(batch, i / pieces);
            if (!span.empty()) body(span, i % pieces);
        }
    });
}

struct ConvolutionArguments {
    float* state;    // [seats, width - 1, channels]
    const float* x;  // [tokens, channels], rows `x_stride` apart
    const float *weight, *bias;  // [channels, width]; [channels] or null
    float* out;      // [tokens, channels]
    const Batch* batch;
    int64_t channels, width, x_stride;
};

void convolve(const ConvolutionArguments& a, const Span& span, int64_t channel, int count) {
    alignas(64) float weights[MOST_WIDTH][LANES] = {};
    Vec seen[MOST_WIDTH];
    for (int64_t i = 0; i < a.width; i++)
        for (int lane = 0; lane < count; lane++) weights[i][lane] = a.weight[(channel + lane) * a.width + i];
    float* state = a.state + span.seat * (a.width - 1) * a.channels + channel;
    for (int64_t i = 0; i + 1 < a.width; i++) seen[i] = span.fresh ? Vec{} : load_partial(state + i * a.channels, count);
    const Vec bias = a.bias ? load_partial(a.bias + channel, count) : Vec{};
    for (int64_t token = span.first; token < span.last; token++) {
        seen[a.width - 1] = load_partial(a.x + token * a.x_stride + channel, count);
        Vec y = seen[0] * load(weights[0]);
        for (int64_t i = 1; i < a.width; i++) y += seen[i] * load(weights[i]);
        if (a.bias) y += bias;
        y = silu(y);
        memcpy(a.out + token * a.channels + channel, &y, count * sizeof(float));
        for (int64_t i = 0; i + 1 < a.width; i++) seen[i] = seen[i + 1];
    }
    for (int64_t i = 0; i + 1 < a.width; i++) memcpy(state + i * a.channels, &seen[i], count * sizeof(float));
}

struct Mamba2Arguments {
    float* state;  // [seats, heads, dim, d_state]
    const float *x, *dt, *b, *c, *z;  // rows of the batch, as far apart as the strides say
    const float *dt_bias, *a, *d;  // [heads]
    float* out;  // [tokens, heads, dim]
    const Batch* batch;
    int64_t heads, dim, d_state, groups;
    int64_t x_stride, dt_stride, b_stride, c_stride, z_stride;
};

// One row of the state [d_state] takes x * b in and gives its product with c.
INLINE float advance(float* h, float kept, float x, const float* b, const float* c, int64_t d_state) {
    const Vec decay = broadcast(kept), input = broadcast(x);
    const int64_t whole = d_state / LANES * LANES;
    Vec sums{};
    for (int64_t i = 0; i < whole; i += LANES) {
        const Vec next = fma(load(h + i), decay, input * load(b + i));
        store(h + i, next);
        sums = fma(next, load(c + i), sums);
    }
    float total = sum(sums);
    for (int64_t i = whole; i < d_state; i++) {
        h[i] = h[i] * kept + x * b[i];
        total += h[i] * c[i];
    }
    return total;
}

void mamba2_head(const Mamba2Arguments& a, const Span& span, int64_t head) {
    float* state = a.state + (span.seat * a.heads + head) * a.dim * a.d_state;
    if (span.fresh) memset(state, 0, a.dim * a.d_state * sizeof(float));
    const int64_t group = head / (a.heads / a.groups) * a.d_state;
    for (int64_t token = span.first; token < span.last; token++) {
        const float step = softplus(broadcast(a.dt[token * a.dt_stride + head] + a.dt_bias[head]))[0];
        const float kept = std::exp(step * a.a[head]);
        const float *x = a.x + token * a.x_stride + head * a.dim, *z = a.z + token * a.z_stride + head * a.dim;
        const float *b = a.b + token * a.b_stride + group, *c = a.c + token * a.c_stride + group;
        float* out = a.out + (token * a.heads + head) * a.dim;
        for (int64_t p = 0; p < a.dim; p++)
            out[p] = advance(state + p * a.d_state, kept, step * x[p], b, c, a.d_state) + x[p] * a.d[head];
        for (int64_t p = 0; p < a.dim; p += LANES) {
            const int count = a.dim - p < LANES ? a.dim - p : LANES;
            const Vec y = load_partial(out + p, count) * silu(load_partial(z + p, count));
            memcpy(out + p, &y, count * sizeof(float));
        }
    }
}

struct Mamba1Arguments {
    float* state;  // [seats, d_inner, d_state]
    const float *x, *dt, *b, *c, *z;  // rows of the batch, as far apart as the strides say; dt is positive
    const float *a, *d;  // [d_inner, d_state], [d_inner]
    float* out;  // [tokens, d_inner]
    const Batch* batch;
    int64_t d_inner, d_state;
    int64_t x_stride, dt_stride, b_stride, c_stride, z_stride;
};

void mamba1_channel(const Mamba1Arguments& a, const Span& span, int64_t channel) {
    float* h = a.state + (span.seat * a.d_inner + channel) * a.d_state;
    const float* rates = a.a + channel * a.d_state;
    if (span.fresh) memset(h, 0, a.d_state * sizeof(float));
    for (int64_t token = span.first; token < span.last; token++) {
        const float x = a.x[token * a.x_stride + channel], dt = a.dt[token * a.dt_stride + channel];
        const float *b = a.b + token * a.b_stride, *c = a.c + token * a.c_stride;
        float y = x * a.d[channel];
        for (int64_t i = 0; i < a.d_state; i += LANES) {
            const int count = a.d_state - i < LANES ? a.d_state - i : LANES;
            const Vec kept = exp(load_partial(rates + i, count) * broadcast(dt));
            const Vec next = fma(load_partial(h + i, count), kept, load_partial(b + i, count) * broadcast(dt * x));
            memcpy(h + i, &next, count * sizeof(float));
            y += sum(next * load_partial(c + i, count));
        }
        a.out[token * a.d_inner + channel] = y * silu(broadcast(a.z[token * a.z_stride + channel]))[0];
    }
}

struct GatedDeltaArguments {
    float* state;        // [seats, heads, key, value]
    const float* mixed;  // [tokens, ...]: q and k of the key heads, then v of all heads
    const float* ba;     // [tokens, 2 heads]
    const float *a, *dt_bias;  // [heads]
    float* out;          // [tokens, heads, value]
    const Batch* batch;
    int64_t heads, key_heads, key, value;
};

constexpr float LENGTH_EPS = 1e-6f;  // as in recurrent.py

// x [count] brought to the length `length`.
void of_length(const float* x, int64_t count, float length, float* to) {
    float squares = 0;
    for (int64_t i = 0; i < count; i++) squares += x[i] * x[i];
    const float factor = length / std::sqrt(squares + LENGTH_EPS);
    for (int64_t i = 0; i < count; i++) to[i] = x[i] * factor;
}

void gated_delta_head(const GatedDeltaArguments& a, const Span& span, int64_t head) {
    thread_local Scratch scratch;
    const int64_t key = a.key, value = a.value, keys = a.key_heads * key, width = 2 * keys + a.heads * value;
    float *q = scratch.floats(2 * key), *k = q + key;
    float* state = a.state + (span.seat * a.heads + head) * key * value;
    if (span.fresh) memset(state, 0, key * value * sizeof(float));
    for (int64_t token = span.first; token < span.last; token++) {
        const float* from = a.mixed + token * width + head / (a.heads / a.key_heads) * key;
        of_length(from, key, 1.0f / std::sqrt((float)key), q);
        of_length(from + keys, key, 1.0f, k);
        const float *v = a.mixed + token * width + 2 * keys + head * value, *ba = a.ba + token * 2 * a.heads + head;
        const Vec beta = sigmoid(broadcast(ba[0]));
        const Vec kept = exp(broadcast(a.a[head]) * softplus(broadcast(ba[a.heads] + a.dt_bias[head])));
        float* out = a.out + (token * a.heads + head) * value;
        for (int64_t j = 0; j < value; j += LANES) {
            const int count = value - j < LANES ? value - j : LANES;
            float* s = state + j;
            Vec found{}, y{};
            for (int64_t i = 0; i < key; i++) found = fma(load_partial(s + i * value, count), broadcast(k[i]), found);
            const Vec added = beta * (load_partial(v + j, count) - kept * found);
            for (int64_t i = 0; i < key; i++) {
                const Vec next = fma(load_partial(s + i * value, count), kept, added * broadcast(k[i]));
                memcpy(s + i * value, &next, count * sizeof(float));
                y = fma(next, broadcast(q[i]), y);
            }
            memcpy(out + j, &y, count * sizeof(float));
        }
    }
}

struct DeltaArguments {
    float* state;  // [seats, heads, key, value]
    const float *r, *w, *k, *v;  // [tokens, heads, key], v [tokens, heads, value]
    const float *a, *b;  // [tokens, heads, key]; null in RWKV-6
    const float* u;      // [heads, key]; null with the delta rule
    float* out;          // [tokens, heads, value]
    const Batch* batch;
    int64_t heads, key, value;
};

// S = diag(w) S + b^T (a S) + k^T v, y = r S; or y = r (S + u k^T v) with S as it was before.
void delta_head(const DeltaArguments& a, const Span& span, int64_t head) {
    thread_local Scratch scratch;
    const int64_t value = a.value;
    float* found = scratch.floats(round_up(value, LANES));
    float* state = a.state + (span.seat * a.heads + head) * a.key * value;
    if (span.fresh) memset(state, 0, a.key * value * sizeof(float));
    for (int64_t token = span.first; token < span.last; token++) {
        const int64_t row = token * a.heads + head, keys = row * a.key;
        const float* v = a.v + row * value;
        float* out = a.out + row * value;
        memset(out, 0, value * sizeof(float));
        if (a.a) {
            memset(found, 0, value * sizeof(float));
            for (int64_t i = 0; i < a.key; i++)
                for (int64_t j = 0; j < value; j++) found[j] += a.a[keys + i] * state[i * value + j];
        }
        for (int64_t i = 0; i < a.key; i++) {
            const float r = a.r[keys + i], w = a.w[keys + i], k = a.k[keys + i];
            float* s = state + i * value;
            if (a.a) {
                const float b = a.b[keys + i];
                for (int64_t j = 0; j < value; j++) {
                    s[j] = w * s[j] + b * found[j] + k * v[j];
                    out[j] += r * s[j];
                }
            } else {
                const float u = a.u[head * a.key + i];
                for (int64_t j = 0; j < value; j++) {
                    const float added = k * v[j];
                    out[j] += r * (u * added + s[j]);
                    s[j] = w * s[j] + added;
                }
            }
        }
    }
}

}  // namespace

EXPORT void membound_convolution(const ConvolutionArguments* arguments, int threads) {
    const ConvolutionArguments& a = *arguments;
    each_piece(*a.batch, ceil_div(a.channels, CHANNELS_AT_ONCE), threads, [&](const Span& span, int64_t piece) {
        const int64_t first = piece * CHANNELS_AT_ONCE;
        const int64_t end = first + CHANNELS_AT_ONCE < a.channels ? first + CHANNELS_AT_ONCE : a.channels;
        for (int64_t channel = first; channel < end; channel += LANES)
            convolve(a, span, channel, end - channel < LANES ? end - channel : LANES);
    });
}

EXPORT void membound_mamba2(const Mamba2Arguments* arguments, int threads) {
    const Mamba2Arguments& a = *arguments;
    each_piece(*a.batch, a.heads, threads, [&](const Span& span, int64_t head) { mamba2_head(a, span, head); });
}

EXPORT void membound_delta(const DeltaArguments* arguments, int threads) {
    const DeltaArguments& a = *arguments;
    each_piece(*a.batch, a.heads, threads, [&](const Span& span, int64_t head) { delta_head(a, span, head); });
}

EXPORT void membound_mamba1(const Mamba1Arguments* arguments, int threads) {
    const Mamba1Arguments& a = *arguments;
    each_piece(*a.batch, ceil_div(a.d_inner, CHANNELS_AT_ONCE), threads, [&](const Span& span, int64_t piece) {
        const int64_t first = piece * CHANNELS_AT_ONCE;
        const int64_t end = first + CHANNELS_AT_ONCE < a.d_inner ? first + CHANNELS_AT_ONCE : a.d_inner;
        for (int64_t channel = first; channel < end; channel++) mamba1_channel(a, span, channel);
    });
}

EXPORT void membound_gated_delta(const GatedDeltaArguments* arguments, int threads) {
    const GatedDeltaArguments& a = *arguments;
    each_piece(*a.batch, a.heads, threads, [&](const Span& span, int64_t head) { gated_delta_head(a, span, head); });
}
