// Where the K and V of a token lie in the paged cache, and how their formats are read and written.
//
// The formats are those of kv_formats.py (and of Triton's kernels): plain bf16; fp8 (e4m3) times a scale a head; int8
// times a scale a token and head; int4 times a scale plus a minimum a token and head.

#pragma once

#include "vector.h"

enum KvFormat : int64_t { KV_BF16, KV_FP8, KV_INT8, KV_INT4 };
enum KvPart { KEYS, VALUES };

struct KvBlocks {
    // [blocks, block_size, kv_heads, stored(head_dim)], or with each head in blocks of its own as the strides say.
    void *keys, *values;
    // fp8: fp32 [2, kv_heads]. int8: half [blocks, kv_heads, block_size, 2], of k and of v.
    // int4: [blocks, kv_heads, block_size, 4], scale and minimum of k and of v.
    void* scales;
    int64_t kv_heads, head_dim, block_size, key_block_stride, value_block_stride;  // strides in elements
    int64_t format;
    int64_t token_stride, head_stride;              // elements of K and of V
    int64_t scale_block_stride, scale_head_stride;  // in tokens
    int64_t scaled_heads;                           // fp8: heads that have a scale of their own, or 1 for all

    int64_t stored() const { return format == KV_INT4 ? head_dim / 2 : head_dim; }
    int64_t element_bytes() const { return format == KV_BF16 ? 2 : 1; }
    uint8_t* base(KvPart part) const { return (uint8_t*)(part == KEYS ? keys : values); }
    // Bytes from the base to a token's vector.
    int64_t place(KvPart part, int64_t block, int64_t offset, int64_t head) const {
        const int64_t stride = part == KEYS ? key_block_stride : value_block_stride;
        return (block * stride + offset * token_stride + head * head_stride) * element_bytes();
    }
    // Scales (for int4 scale and minimum) from the first to a token's of its keys.
    int64_t scale_place(int64_t block, int64_t offset, int64_t head) const {
        return (block * scale_block_stride + head * scale_head_stride + offset) * (format == KV_INT4 ? 4 : 2);
    }
    half* token_scales(KvPart part, int64_t scale_place) const {
        return (half*)scales + scale_place + (part == KEYS ? 0 : format == KV_INT4 ? 2 : 1);
    }
    float head_scale(KvPart part, int64_t head) const {
        return ((float*)scales)[(part == KEYS ? 0 : scaled_heads) + (scaled_heads == 1 ? 0 : head)];
    }
};

// The tokens of a tile, `first` to `count`, for one kv head; those before `first` are not to be read.
struct Places {
    static constexpr int TOKENS = 64;
    int64_t at[2][TOKENS];  // bytes from the bases of keys and values
    int64_t scales[TOKENS];
    int64_t head;
    int first, count;

    void find(const KvBlocks& kv, const int32_t* table, int64_t kv_head, int64_t start, int64_t oldest, int64_t end) {
        head = kv_head;
        count = end - start < TOKENS ? end - start : TOKENS;
        first = oldest > start ? (oldest - start < TOKENS ? oldest - start : TOKENS) : 0;
        const int64_t token_bytes = kv.token_stride * kv.element_bytes();
        const int64_t token_scales = kv.format == KV_INT4 ? 4 : 2;
        for (int64_t t = 0, block = start / kv.block_size, offset = start % kv.block_size; t < count;
             block++, offset = 0) {
            int64_t key = kv.place(KEYS, table[block], offset, head);
            int64_t value = kv.place(VALUES, table[block], offset, head);
            int64_t scale = kv.scale_place(table[block], offset, head);
            for (; t < count && offset < kv.block_size; t++, offset++) {
                at[KEYS][t] = key, at[VALUES][t] = value, scales[t] = scale;
                key += token_bytes, value += token_bytes, scale += token_scales;
            }
        }
    }
};

template <class T> INLINE void read_vector(const T* from, int64_t head_dim, int64_t dim, Vec scale, float* to) {
    const int64_t whole = head_dim / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store(to + i, load(from + i) * scale);
    if (whole < dim) store(to + whole, load_partial(from + whole, head_dim - whole) * scale);
}

INLINE IntVec load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (IntVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (IntVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    IntVec v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

// Byte i holds element i (low) and i + head_dim / 2 (high).
INLINE void read_int4(const uint8_t* from, int64_t head_dim, int64_t dim, Vec scale, Vec minimum, float* to) {
    const int64_t half_dim = head_dim / 2;
    if (half_dim % LANES) {
        for (int64_t i = 0; i < half_dim; i++) {
            to[i] = fma(broadcast(from[i] & 15), scale, minimum)[0];
            to[i + half_dim] = fma(broadcast(from[i] >> 4), scale, minimum)[0];
        }
    } else {
        for (int64_t i = 0; i < half_dim; i += LANES) {
            const IntVec codes = load_bytes(from + i);
            store(to + i, fma(__builtin_convertvector(codes & 15, Vec), scale, minimum));
            store(to + i + half_dim, fma(__builtin_convertvector(codes >> 4, Vec), scale, minimum));
        }
    }
    for (int64_t i = head_dim; i < dim; i++) to[i] = 0;
}

template <KvFormat FORMAT>
void convert_from(const KvBlocks& kv, KvPart part, const Places& places, int64_t dim, float* tile, KvPart next_part,
                  const Places& next) {
    const int64_t bytes = kv.stored() * kv.element_bytes(), head_dim = kv.head_dim;
    const uint8_t *base = kv.base(part), *next_base = kv.base(next_part);
    const Vec head_scale = broadcast(FORMAT == KV_FP8 ? E4M3_UNIT * kv.head_scale(part, places.head) : 0);
    for (int t = 0; t < places.count; t++, tile += dim) {
        if (t >= next.first && t < next.count) {
            const uint8_t* ahead = next_base + next.at[next_part][t];
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        }
        if (t < places.first) {
            for (int64_t i = 0; i < dim; i += LANES) store(tile + i, Vec{});
            continue;
        }
        const uint8_t* from = base + places.at[part][t];
        if constexpr (FORMAT == KV_BF16) {
            const bf16* numbers = (const bf16*)from;
            const int64_t whole = head_dim / LANES * LANES;
            for (int64_t i = 0; i < whole; i += LANES) store(tile + i, load(numbers + i));
            if (whole < dim) store(tile + whole, load_partial(numbers + whole, head_dim - whole));
        } else if constexpr (FORMAT == KV_FP8) {
            read_vector((const e4m3*)from, head_dim, dim, head_scale, tile);
        } else {
            const half* scales = kv.token_scales(part, places.scales[t]);
            const Vec scale = broadcast(to_float(scales[0]));
            if constexpr (FORMAT == KV_INT8)
                read_vector((const int8_t*)from, head_dim, dim, scale, tile);
            else
                read_int4(from, head_dim, dim, scale, broadcast(to_float(scales[1])), tile);
        }
    }
}

// The tokens of one kv head to fp32 [count, dim], zeros behind head_dim and before `first`. Meanwhile what is read
// next, scattered over the blocks as it is, is asked for.
inline void convert(const KvBlocks& kv, KvPart part, const Places& places, int64_t dim, float* tile, KvPart next_part,
                    const Places& next) {
    switch (kv.format) {
        case KV_BF16: return convert_from<KV_BF16>(kv, part, places, dim, tile, next_part, next);
        case KV_FP8: return convert_from<KV_FP8>(kv, part, places, dim, tile, next_part, next);
        case KV_INT8: return convert_from<KV_INT8>(kv, part, places, dim, tile, next_part, next);
        case KV_INT4: return convert_from<KV_INT4>(kv, part, places, dim, tile, next_part, next);
    }
}

INLINE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// One token's k or v [head_dim] of one kv head into its slot.
inline void write_vector(const KvBlocks& kv, KvPart part, int64_t slot, int64_t head, const float* x) {
    const int64_t block = slot / kv.block_size, offset = slot % kv.block_size, dim = kv.head_dim;
    uint8_t* to = kv.base(part) + kv.place(part, block, offset, head);
    half* scales = kv.token_scales(part, kv.scale_place(block, offset, head));
    if (kv.format == KV_BF16) {
        for (int64_t i = 0; i < dim; i++) ((bf16*)to)[i] = to_bf16(x[i]);
    } else if (kv.format == KV_FP8) {
        const float scale = kv.head_scale(part, head);
        for (int64_t i = 0; i < dim; i++) to[i] = to_e4m3(x[i] / scale).bits;
    } else if (kv.format == KV_INT8) {
        float largest = 0;
        for (int64_t i = 0; i < dim; i++) largest = __builtin_fabsf(x[i]) > largest ? __builtin_fabsf(x[i]) : largest;
        const half stored = to_half(largest / 127.0f);  // codes are of the scale that attention will read
        scales[0] = stored;
        const float scale = to_float(stored) > 0 ? to_float(stored) : 1.0f;
        for (int64_t i = 0; i < dim; i++)
            to[i] = (uint8_t)(int8_t)clamp(__builtin_rintf(x[i] / scale), -127.0f, 127.0f);
    } else {
        float lowest = x[0], highest = x[0];
        for (int64_t i = 1; i < dim; i++) {
            lowest = x[i] < lowest ? x[i] : lowest;
            highest = x[i] > highest ? x[i] : highest;
        }
        scales[1] = to_half(lowest);
        const float minimum = to_float(scales[1]), range = highest - minimum;
        scales[0] = to_half((range > 0 ? range : 0) / 15.0f);
        const float scale = to_float(scales[0]) > 0 ? to_float(scales[0]) : 1.0f;
        auto code = [&](float value) { return (int)clamp(__builtin_rintf((value - minimum) / scale), 0.0f, 15.0f); };
        for (int64_t i = 0; i < dim / 2; i++) to[i] = code(x[i]) | code(x[i + dim / 2]) << 4;
    }
}
