// Attention over latents (MLA): what is stored for a token, and the matrices of each head that are absorbed.

#include "batch.h"
#include "norm.h"
#include "threads.h"
#include "vector.h"
#include "weight.h"

namespace {

struct LatentArguments {
    float* q;              // [tokens, heads, head_dim], of which the last `rope` elements of each head are turned
    const float* latents;  // [tokens, rank + rope], rows `latent_stride` apart
    const float* norm;     // [rank]
    const float *cos, *sin;  // [max_position, rope / 2]
    const Batch* batch;
    bf16* blocks;  // [slots, rank + rope]
    int64_t heads, head_dim, rank, rope, latent_stride;
    float eps;
};

struct HeadsArguments {
    const float* x;      // [tokens, heads, ...] from which `k` elements are multiplied and `tail` more are copied
    const bf16* weight;  // [heads, n, k]
    float* out;          // [tokens, heads, n + tail]
    Rows tokens;
    int64_t heads, n, k, tail, token_stride, head_stride;
};

}  // namespace

EXPORT void membound_latent_rope_and_store(const LatentArguments* arguments, int threads) {
    const LatentArguments& a = *arguments;
    const int64_t tokens = a.batch->tokens, half = a.rope / 2, width = a.rank + a.rope;
    parallel_for(tokens, rows_at_once(tokens, a.heads * a.head_dim), threads, [&](int64_t token, int64_t last) {
        thread_local Scratch scratch;
        float* turned = scratch.floats(width);
        for (; token < last; token++) {
            const float *cos = a.cos + a.batch->positions[token] * half, *sin = a.sin + a.batch->positions[token] * half;
            for (int64_t h = 0; h < a.heads; h++) {
                float* part = a.q + (token * a.heads + h + 1) * a.head_dim - a.rope;
                turn(part, cos, sin, half, turned);
                memcpy(part, turned, a.rope * sizeof(float));
            }
            const float* latent = a.latents + token * a.latent_stride;
            rms_norm<false>(latent, nullptr, a.norm, turned, a.rank, a.eps);
            turn(latent + a.rank, cos, sin, half, turned + a.rank);
            bf16* to = a.blocks + a.batch->slots[token] * width;
            for (int64_t i = 0; i < width; i++) to[i] = to_bf16(turned[i]);
        }
    });
}

EXPORT void membound_heads_linear(const HeadsArguments* arguments, int threads) {
    const HeadsArguments& a = *arguments;
    const int64_t tokens = a.tokens, wide = a.n + a.tail;
    parallel_for(a.heads, 1, threads, [&](int64_t head, int64_t last) {
        thread_local Scratch scratch;
        float *x = scratch.floats(tokens * (a.k + a.n)), *y = x + tokens * a.k;
        for (; head < last; head++) {
            const PackedWeight w{a.weight + head * a.n * a.k, nullptr, nullptr, nullptr, a.n, a.k, 0, 0, BF16};
            auto from = [&](int64_t token) { return a.x + token * a.token_stride + head * a.head_stride; };
            for (int64_t t = 0; t < tokens; t++) memcpy(x + t * a.k, from(t), a.k * sizeof(float));
            linear_rows(w, x, y, tokens, 1);
            for (int64_t t = 0; t < tokens; t++) {
                float* to = a.out + (t * a.heads + head) * wide;
                memcpy(to, y + t * a.n, a.n * sizeof(float));
                memcpy(to + a.n, from(t) + a.k, a.tail * sizeof(float));
            }
        }
    });
}
