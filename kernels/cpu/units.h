// What multiplies a row of weights with tokens, and what it makes of the formats that weights are stored in.
//
// Units take STEP elements of a weight row and of a token at a time, and add their products to LANES sums. `weights`
// loads them from a pointer: const float*, const bf16*, const e4m3* or Sparse24.

#pragma once

#include "vector.h"

// Two of each four numbers, in bf16, and a bit for each of the four that says which.
struct Sparse24 {
    const bf16* values;
    const uint8_t* kept;
    int64_t at = 0;  // the element that it points at, a multiple of LANES

    Sparse24 operator+(int64_t elements) const { return {values, kept, at + elements}; }
};

struct Fp32Units {
    using Element = float;
    using Vector = Vec;
    static constexpr int STEP = LANES;
    static constexpr int DIRECT_TOKENS = 8;
    static constexpr int TOKENS_AHEAD = 6;  // steps that tokens are asked for early, who come from L2

    INLINE static Vector load(const float* p) { return ::load(p); }
    INLINE static Vec add_product(Vector a, Vector b, Vec sums) { return fma(a, b, sums); }
    // `count` <= STEP elements, zeros behind them.
    INLINE static void pack(const float* x, int64_t count, float* to) {
        store(to, count == STEP ? ::load(x) : load_partial(x, count));
    }
    INLINE static void keep(Vector v, float* to) { store(to, v); }

    template <class T> INLINE static Vector weights(const T* w) { return ::load(w); }
    template <class T> INLINE static Vector weights(const T* w, int64_t count) { return load_partial(w, count); }
    INLINE static Vector weights(Sparse24 p) {
        const bf16* values = p.values + p.at / 2;
#if defined(__AVX512F__)
        uint16_t mask;
        memcpy(&mask, p.kept + p.at / 8, 2);
        const __m512i widened =
            _mm512_cvtepu16_epi32(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)values)));
        return (Vec)_mm512_maskz_expand_epi32(mask, _mm512_slli_epi32(widened, 16));
#else
        Vec v{};
        for (int i = 0, next = 0; i < LANES; i++)
            if (p.kept[(p.at + i) / 8] >> (p.at + i) % 8 & 1) {
                const uint32_t bits = (uint32_t)values[next++] << 16;
                float value;
                memcpy(&value, &bits, 4);
                v[i] = value;
            }
        return v;
#endif
    }
    INLINE static Vector weights(Sparse24, int64_t) { return Vec{}; }  // rows are whole vectors
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VBMI2__)
#define HAS_BF16_UNITS 1
// Pairs of bf16 numbers are multiplied and added to a sum in fp32: twice the products of an instruction, of tokens that
// are rounded to bf16. Weights of all formats but fp32 are bf16 numbers.
struct Bf16Units {
    using Element = bf16;
    using Vector = __m512bh;
    static constexpr int STEP = 2 * LANES;
    static constexpr int DIRECT_TOKENS = 4;
    static constexpr int TOKENS_AHEAD = 0;

    INLINE static uint32_t first(int64_t count) { return count < STEP ? (1u << count) - 1 : ~0u; }
    INLINE static Vector load(const bf16* p) { return (Vector)_mm512_loadu_si512(p); }
    INLINE static Vec add_product(Vector a, Vector b, Vec sums) { return (Vec)_mm512_dpbf16_ps((__m512)sums, a, b); }
    INLINE static void pack(const float* x, int64_t count, bf16* to) {
        const uint32_t mask = first(count);
        const __m512 low = _mm512_maskz_loadu_ps(mask, x), high = _mm512_maskz_loadu_ps(mask >> LANES, x + LANES);
        keep(_mm512_cvtne2ps_pbh(high, low), to);
    }
    INLINE static void keep(Vector v, bf16* to) { _mm512_storeu_si512(to, (__m512i)v); }

    INLINE static Vector weights(const bf16* w) { return load(w); }
    INLINE static Vector weights(const bf16* w, int64_t count) {
        return (Vector)_mm512_maskz_loadu_epi16(first(count), w);
    }
    // A number's bits, four places further and its exponent's bias replaced; but the eight smallest are a table.
    INLINE static Vector weights(const e4m3* w) {
        alignas(64) static constexpr bf16 SUBNORMAL[STEP] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
        const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w));
        const __m512i magnitude = _mm512_add_epi16(
            _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x7F0)), _mm512_set1_epi16(0x3C00));
        const __m512i number =
            _mm512_mask_permutexvar_epi16(magnitude, _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78)), words,
                                          _mm512_load_si512(SUBNORMAL));
        constexpr int FIRST_OR_SECOND_AND_THIRD = 0xF8;
        return (Vector)_mm512_ternarylogic_epi32(number, words, _mm512_set1_epi16((short)0x8000),
                                                 FIRST_OR_SECOND_AND_THIRD);
    }
    INLINE static Vector weights(const e4m3* w, int64_t count) {
        e4m3 padded[STEP] = {};
        memcpy(padded, w, count);
        return weights(padded);
    }
    INLINE static Vector weights(Sparse24 p) {
        uint32_t mask;
        memcpy(&mask, p.kept + p.at / 8, 4);
        return expanded(mask, _mm256_loadu_si256((const __m256i*)(p.values + p.at / 2)));
    }
    INLINE static Vector weights(Sparse24 p, int64_t) {  // rows are whole vectors of LANES
        uint16_t mask;
        memcpy(&mask, p.kept + p.at / 8, 2);
        return expanded(mask, _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(p.values + p.at / 2))));
    }
    INLINE static Vector expanded(uint32_t mask, __m256i values) {
        return (Vector)_mm512_maskz_expand_epi16(mask, _mm512_castsi256_si512(values));
    }
};
#endif

template <class T> INLINE const char* address(const T* p) { return (const char*)p; }
INLINE const char* address(Sparse24 p) { return (const char*)(p.values + p.at / 2); }
template <class T> constexpr size_t element_bytes(const T*) { return sizeof(T); }
constexpr size_t element_bytes(Sparse24) { return 1; }
