// A packed weight [n, k] as linear.py hands it over; base.py says what its parts mean.

#pragma once

#include "vector.h"

enum WeightFormat : int64_t { FP32, BF16, FP8, SPARSE24, INT8, INT4, INT3, INT2, W8A8, W4A8, Q4_K, Q6_K };  // as in linear.py

struct PackedWeight {
    const void* data;    // rows; for integers uint32 [ceil(n / 16), words, 16]
    const void* scale;   // fp32 [n, padded to 16] a row; fp16 [ceil(n / 16), k / group, 16]; null where there is none
    const half* offset;  // like the fp16 scale, or null: codes are about their centre
    const uint8_t* kept;  // sparse24: [n, k / 8]
    int64_t n, k, group;  // group 0: a scale a row
    int64_t words;        // of a row of integers
    int64_t format;
    int64_t bf16_tokens;  // 1: what it is multiplied with may be rounded to bf16
};

// x [m, k] times a weight of integers, transposed, to out [m, n].
void linear_integer(const PackedWeight& weight, const float* x, float* out, int64_t m, int threads);

// x [m, k] times any weight, transposed, to out [m, n].
void linear_rows(const PackedWeight& weight, const float* x, float* out, int64_t m, int threads);

// The same on matrix units, where the processor has such (tile_units.h): of weights that are multiplied as bf16, whose
// sums are in another order than without, and of integers, whose results have the same bits.
void linear_by_tiles(const PackedWeight& weight, const float* x, float* out, int64_t m, int threads);
void linear_integer_by_tiles(const PackedWeight& weight, const float* x, float* out, int64_t m, int threads);
