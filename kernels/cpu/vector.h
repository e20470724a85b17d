// Vectors of fp32, conversions from stored formats and scratch memory: what every CPU kernel is written with.
//
// LANES fp32 values make one vector (16 with AVX-512, 8 with AVX2, 4 elsewhere). A sum over an inner dimension is
// always kept in LANES partial sums, lane i taking the elements i, i + LANES, ..., and reduced in one fixed order, so
// that an output element has the same bits whatever else is computed beside it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__SSE__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))
#define LAMBDA __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int REGISTERS = 32;
#else
constexpr int LANES = 4;
constexpr int REGISTERS = 16;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float VecUnaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t UintVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));
typedef int8_t ByteVec __attribute__((vector_size(LANES)));

typedef uint16_t bf16;

// Not Vec{} + x, which costs an addition: -0 plus 0 is 0.
INLINE Vec broadcast(float x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_set1_ps(x);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vec)_mm256_set1_ps(x);
#else
    return x - Vec{};
#endif
}
INLINE Vec load(const float* p) { return *(const VecUnaligned*)p; }
INLINE void store(float* p, Vec v) { *(VecUnaligned*)p = v; }

INLINE Vec load(const bf16* p) {
    HalfVec h;
    memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, UintVec) << 16);
}

INLINE Vec load(const int8_t* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(__aarch64__)
    uint32_t bits;
    memcpy(&bits, p, sizeof bits);
    return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bits)))));
#else
    ByteVec b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, IntVec), Vec);
#endif
}

struct half { uint16_t bits; };  // IEEE fp16
struct e4m3 { uint8_t bits; };   // fp8 with 4 bits of exponent: no infinity, 448 is the largest

INLINE float to_float(half x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    // fp16's exponent, moved to where fp32 has its own, is too small by 112; a product scales subnormals right too.
    const uint32_t magnitude = (uint32_t)(x.bits & 0x7FFF) << 13, sign = (uint32_t)(x.bits & 0x8000) << 16;
    float value;
    memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (magnitude >= 0x7C00u << 13) bits |= 0x7F800000;
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
#endif
}

// Round to nearest even; what is too large becomes infinite.
INLINE half to_half(float x) {
#if defined(__F16C__)
    return {(uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)};
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return {(uint16_t)(sign | 0x7E00)};
    if (bits >= 0x477FF000) return {(uint16_t)(sign | 0x7C00)};
    if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves a multiple of 2^-24 in the low bits
        float value;
        memcpy(&value, &bits, 4);
        value += 0.5f;
        memcpy(&bits, &value, 4);
        return {(uint16_t)(sign | (bits - 0x3F000000))};
    }
    bits += 0xFFF + (bits >> 13 & 1);
    return {(uint16_t)(sign | ((bits - 0x38000000) >> 13))};
#endif
}

INLINE Vec load(const half* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    Vec v;
    for (int i = 0; i < LANES; i++) v[i] = to_float(p[i]);
    return v;
#endif
}

// e4m3's bits, put where fp16 has the same fields, are the number over 256: that is what is loaded.
constexpr float E4M3_UNIT = 256.0f;
INLINE Vec load(const e4m3* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16((short)0xBF80));
    return (Vec)_mm512_cvtph_ps(halves);
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    const __m128i halves = _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16((short)0xBF80));
    return (Vec)_mm256_cvtph_ps(halves);
#else
    Vec v;
    for (int i = 0; i < LANES; i++)
        v[i] = to_float(half{(uint16_t)((p[i].bits & 0x7F) << 7 | (p[i].bits & 0x80) << 8)});
    return v;
#endif
}

// Round to nearest even, saturated at 448.
INLINE e4m3 to_e4m3(float x) {
    const float magnitude = __builtin_fabsf(x);
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint8_t sign = bits >> 24 & 0x80;
    if (!(magnitude < 448.0f)) return {(uint8_t)(sign | (magnitude >= 448.0f ? 0x7E : 0x7F))};
    if (magnitude < 0x1p-6f) return {(uint8_t)(sign | (int)__builtin_rintf(magnitude * 512.0f))};
    memcpy(&bits, &magnitude, 4);
    bits += 0x7FFFF + (bits >> 20 & 1);
    return {(uint8_t)(sign | ((bits - 0x3C000000) >> 20))};
}

// The first `count` < LANES elements, zeros behind them: reading a whole vector could leave the tensor.
template <class T> INLINE Vec load_partial(const T* p, int count) {
    T padded[LANES] = {};
    memcpy(padded, p, count * sizeof(T));
    return load(padded);
}

// Spelled out, and the build turns contraction off: a compiler that fuses here and not there changes the bits.
INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Sum of all lanes: i with i + LANES / 2, then halves of the halves.
INLINE float sum(Vec v) {
#if defined(__AVX512F__)
    __m512 z = (__m512)v;
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(z),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(z), 1)));
#elif defined(__AVX2__) && defined(__FMA__)
    __m256 y = (__m256)v;
#endif
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// Sums of all lanes of a 4 x COLUMNS tile of vectors, rows to out, out + stride, ...; the same bits as `sum` of each.
template <int COLUMNS> INLINE void sum_tile(const Vec tile[4][COLUMNS], float* out, ptrdiff_t stride) {
    static_assert(COLUMNS == 2 || COLUMNS == 4);
#if defined(__AVX512F__)
    __m512 fold[COLUMNS];  // fold[i] has in its 128-bit lane j the four partial sums of tile[j][i]
    for (int i = 0; i < COLUMNS; i++) {
        __m512 a = (__m512)tile[0][i], b = (__m512)tile[1][i], c = (__m512)tile[2][i], d = (__m512)tile[3][i];
        __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
        __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
        fold[i] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    }
    __m512 p = _mm512_add_ps(_mm512_shuffle_ps(fold[0], fold[1], 0x44), _mm512_shuffle_ps(fold[0], fold[1], 0xEE));
    __m512 q = p;
    if constexpr (COLUMNS == 4)
        q = _mm512_add_ps(_mm512_shuffle_ps(fold[2], fold[3], 0x44), _mm512_shuffle_ps(fold[2], fold[3], 0xEE));
    __m512 r = _mm512_add_ps(_mm512_shuffle_ps(p, q, 0x88), _mm512_shuffle_ps(p, q, 0xDD));
    const __m128 rows[4] = {_mm512_castps512_ps128(r), _mm512_extractf32x4_ps(r, 1), _mm512_extractf32x4_ps(r, 2),
                            _mm512_extractf32x4_ps(r, 3)};
    for (int j = 0; j < 4; j++) {
        if constexpr (COLUMNS == 4)
            _mm_storeu_ps(out + j * stride, rows[j]);
        else
            _mm_storel_pi((__m64*)(out + j * stride), rows[j]);
    }
#else
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < COLUMNS; i++) out[j * stride + i] = sum(tile[j][i]);
#endif
}

INLINE float max(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

INLINE uint32_t max(UintVec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)v);
#endif
    uint32_t m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

INLINE uint32_t sum(UintVec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#endif
    uint32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

// from [rows, columns] to [columns, rows], both multiples of four.
INLINE void transpose(const float* from, int64_t rows, int64_t columns, float* to) {
    for (int64_t r = 0; r < rows; r += 4)
        for (int64_t c = 0; c < columns; c += 4) {
            const float* block = from + r * columns + c;
            float* turned = to + c * rows + r;
#if defined(__SSE__)
            __m128 a = _mm_loadu_ps(block), b = _mm_loadu_ps(block + columns);
            __m128 d = _mm_loadu_ps(block + 2 * columns), e = _mm_loadu_ps(block + 3 * columns);
            _MM_TRANSPOSE4_PS(a, b, d, e);
            _mm_storeu_ps(turned, a), _mm_storeu_ps(turned + rows, b);
            _mm_storeu_ps(turned + 2 * rows, d), _mm_storeu_ps(turned + 3 * rows, e);
#else
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) turned[j * rows + i] = block[i * columns + j];
#endif
        }
}

// e^x to about 1e-7 relative; exactly 0 below -87.3 (so masked scores vanish), saturated above 88.3.
INLINE Vec exp(Vec x) {
    const Vec low = broadcast(-87.3f), high = broadcast(88.3f);
    Vec clamped = x > high ? high : x;
    clamped = clamped < low ? low : clamped;
    // Adding 1.5 * 2^23 rounds to an integer, which then sits in the low mantissa bits.
    const Vec magic = broadcast(12582912.0f);
    Vec shifted = fma(clamped, broadcast(1.44269504f), magic);
    Vec n = shifted - magic;
    Vec r = fma(n, broadcast(-0.693359375f), clamped);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Vec p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, r * r, r) + broadcast(1.0f);
    Vec power = (Vec)(((UintVec)shifted << 23) + 0x3F800000u);
    return x < low ? Vec{} : p * power;
}

INLINE Vec tanh(Vec x) { return broadcast(1.0f) - broadcast(2.0f) / (exp(x + x) + broadcast(1.0f)); }

INLINE Vec sigmoid(Vec x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(-x)); }
INLINE Vec silu(Vec x) { return x / (broadcast(1.0f) + exp(-x)); }

// log(1 + e^x) = max(x, 0) + log(1 + e) with e = e^-|x|, whose logarithm is 2 artanh(e / (2 + e)).
INLINE Vec softplus(Vec x) {
    const Vec magnitude = (Vec)((UintVec)x & 0x7FFFFFFFu), e = exp(-magnitude);
    const Vec z = e / (broadcast(2.0f) + e), square = z * z;
    Vec series = broadcast(1.0f / 13);
    for (int odd = 11; odd > 0; odd -= 2) series = fma(series, square, broadcast(1.0f / odd));
    return (x > Vec{} || x != x ? x : Vec{}) + (z + z) * series;
}

// Pairs (i, i + half) of x [2 half], turned by an angle each.
INLINE void turn(const float* x, const float* cos, const float* sin, int64_t half, float* to) {
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        to[i] = first * cos[i] - second * sin[i];
        to[i + half] = second * cos[i] + first * sin[i];
    }
}

// Round to nearest even; a NaN stays a NaN.
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return (bits >> 16) | 0x40;
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

// Asks for one more cache line of the next panel at each step, so that memory works while the panel is multiplied.
struct Prefetch {
    const char *next, *end;
    INLINE void step() {
        __builtin_prefetch(next, 0, 2);
        next = next + 64 < end ? next + 64 : end;
    }
};

template <int... I, class Body> INLINE void unroll(std::integer_sequence<int, I...>, Body body) {
    (body(std::integral_constant<int, I>{}), ...);
}
// body(0), ..., body(COUNT - 1) with the number as a constant.
template <int COUNT, class Body> INLINE void unroll(Body body) {
    unroll(std::make_integer_sequence<int, COUNT>{}, body);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Memory of one thread that lives as long as the thread, grown when asked for more.
struct Scratch {
    float* data = nullptr;
    int64_t capacity = 0;
    ~Scratch() { free(data); }
    float* floats(int64_t count) {
        if (count > capacity) {
            free(data);
            capacity = round_up(count, 1024);
            data = (float*)aligned_alloc(64, capacity * sizeof(float));
            if (!data) abort();
        }
        return data;
    }
};
