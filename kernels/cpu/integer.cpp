// y = x W^T with W in codes of 8 bits and fewer: how few bytes and instructions can a weight cost?
//
// Rows lie 16 at a time, a 32-bit word of each beside the next, so a vector holds the same columns of 16 rows: their
// scales and minima are vectors too, and nothing is summed across lanes. Codes stay integers: x is rounded to 16 bits
// (8 for w8a8 and w4a8) with a scale for each step of at most 128 elements, an error of 1/65,000 of the largest of
// them, a hundredth of what bf16 loses. Integer sums are exact and the steps are added in order, so a row has the same
// bits whatever else is in the batch, on every processor.
//
//   m <= MOST_TOKENS  words are taken apart in registers as they come from memory, and used for all tokens;
//   more tokens       those of PANEL_VECTORS x LANES rows are taken apart once, into caches, and multiplied by blocks
//                     of PANEL_TOKENS tokens, whose sums fill the registers.

#include <iterator>

#include "threads.h"
#include "vector.h"
#include "weight.h"

namespace {

constexpr int TILE_ROWS = 16;
constexpr int MOST_TOKENS = 16;
constexpr int WIDTHS[] = {1, 2, 4, 6, 8, 12, MOST_TOKENS};  // tokens that the kernel of few of them is made for
constexpr int PANEL_VECTORS = REGISTERS == 32 ? 3 : 2;
constexpr int PANEL_TOKENS = REGISTERS == 32 ? 8 : 4;
constexpr int64_t WORDS_AHEAD = 512;  // of a row; 32 kB of a tile
constexpr int64_t GROUPS_AHEAD = 16;
constexpr int64_t SERIAL_PRODUCTS = 1 << 17;
constexpr int64_t PIECES_PER_THREAD = 4;

struct Arguments : PackedWeight {
    const float* x;  // [m, k]
    float* out;      // [m, n]
    int64_t m;

    const uint32_t* codes() const { return (const uint32_t*)data; }
};

INLINE UintVec load_words(const uint32_t* p) {
    UintVec v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Words of a tile; when they are read, those `ahead` of them are asked for.
struct Stream {
    const uint32_t* words;
    int64_t ahead;

    INLINE Stream operator+(int64_t count) const { return {words + count, ahead}; }
    INLINE void operator+=(int64_t count) { words += count; }
};

INLINE UintVec load_words(Stream s) {
    __builtin_prefetch(s.words + s.ahead, 0, 2);
    return load_words(s.words);
}

INLINE IntVec both_halves(UintVec v, uint32_t mask) { return (IntVec)(v & (UintVec{} + mask)); }

// sums += the products of the two int16 in each lane of w and in *x.
INLINE IntVec dot_pairs(IntVec sums, IntVec w, const int32_t* x) {
#if defined(__AVX512VNNI__)
    return (IntVec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(*x));
#elif defined(__AVX512BW__)
    return sums + (IntVec)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(*x));
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    return sums + (IntVec)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(*x));
#else
    const int32_t low = (int16_t)*x, high = *x >> 16;
    return sums + (w << 16 >> 16) * low + (w >> 16) * high;
#endif
}

// sums += the products of the four unsigned bytes in each lane of w and the four signed bytes in *x.
INLINE IntVec dot_quads(IntVec sums, IntVec w, const int32_t* x) {
#if defined(__AVX512VNNI__)
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(*x));
#else
    const int32_t even = (uint16_t)(int8_t)*x | (uint32_t)(int32_t)(int8_t)(*x >> 16) << 16;
    const int32_t odd = (uint16_t)(int8_t)(*x >> 8) | (uint32_t)(int32_t)(int8_t)(*x >> 24) << 16;
    sums = dot_pairs(sums, both_halves((UintVec)w, 0x00FF00FF), &even);
    return dot_pairs(sums, both_halves((UintVec)w >> 8, 0x00FF00FF), &odd);
#endif
}

// The fp16 in the lower or upper half of each word.
INLINE Vec half_of(UintVec words, int shift) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(words >> shift)));
#else
    Vec v;
    for (int i = 0; i < LANES; i++) v[i] = to_float(half{(uint16_t)(words[i] >> shift)});
    return v;
#endif
}

INLINE Vec to_floats(IntVec v) { return __builtin_convertvector(v, Vec); }

// A step's words of x: pairs (0, 2) and (1, 3) of each four elements, for as even and odd bytes of a word of weights
// are what two instructions widen; or the four as bytes.
constexpr int PAIRS = 2, QUADS = 4;

// Where a processor multiplies bytes, the 16 bits of an x may as well be two of them, u and l of 256 u + l with l in
// [-128, 127]: weights are then taken apart into half as many words. The sums are the same integers.
#if defined(__AVX512VNNI__)
constexpr int SPLIT_TOKENS = 4;  // more need too many registers for their sums
#else
constexpr int SPLIT_TOKENS = 0;
#endif
constexpr float BYTES_LEVELS = 127 * 256 + 127;
constexpr int32_t HALF_A_BYTE = 128;  // with it added, u is the upper byte, and the lower one is l + 128

INLINE uint32_t even_bytes(uint64_t eight) {
#if defined(__BMI2__)
    return _pext_u64(eight, 0x00FF00FF00FF00FF);
#else
    eight &= 0x00FF00FF00FF00FF;
    eight = (eight | eight >> 8) & 0x0000FFFF0000FFFF;
    return eight | eight >> 16;
#endif
}

// The formats. `decode` calls use(i, w) for the i-th word of x in a step and the weights that it multiplies.

struct Grouped {  // scales and offsets beside the codes
    static constexpr int X = PAIRS, CENTRE = 0;
    static constexpr bool SPLIT = false;

    static int64_t step_of(const Arguments& a) {
        if (!a.group) return 128;
        return a.group % 128 == 0 ? 128 : a.group % 64 == 0 ? 64 : 32;
    }
    static Vec scale(const Arguments& a, const uint32_t*, int64_t tile, int64_t element, int64_t lane) {
        return of_group(a, (const half*)a.scale, tile, element, lane);
    }
    static Vec offset(const Arguments& a, const uint32_t*, int64_t tile, int64_t element, int64_t lane) {
        return of_group(a, a.offset, tile, element, lane);
    }
    static Vec of_group(const Arguments& a, const half* numbers, int64_t tile, int64_t element, int64_t lane) {
        const half* here = numbers + (tile * (a.k / a.group) + element / a.group) * TILE_ROWS + lane;
        __builtin_prefetch(here + GROUPS_AHEAD * TILE_ROWS, 0, 2);
        return load(here);
    }
    static bool has_offset(const Arguments& a) { return a.offset; }
};

struct Int8 : Grouped {
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 4 * TILE_ROWS;
        auto word = [&](int64_t i, auto part) LAMBDA {
            const UintVec v = load_words(w + i * TILE_ROWS);
#if defined(__AVX512BW__)
            const IntVec even = (IntVec)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)v, 8), 8);
            const IntVec odd = (IntVec)_mm512_srai_epi16((__m512i)v, 8);
#else
            typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
            const IntVec even = (IntVec)((Shorts)v << 8 >> 8), odd = (IntVec)((Shorts)v >> 8);
#endif
            use(2 * i, part, even);
            use(2 * i + 1, std::integral_constant<int, part + 1>{}, odd);
        };
        const int64_t words = length / 4, whole = words / 2 * 2;
        for (int64_t i = 0; i < whole; i += 2)
            unroll<2>([&](auto j) LAMBDA { word(i + j, std::integral_constant<int, 2 * j>{}); });
        if (whole < words) word(whole, std::integral_constant<int, 0>{});
    }
};

struct Int4 : Grouped {  // of 32 codes, byte i holds i (low) and i + 16 (high), as in GGUF's Q4_0
    static constexpr int CENTRE = 8;
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 8 * TILE_ROWS;
        for (int64_t i = 0; i < length / 2; i += 16)
            unroll<4>([&](auto j) LAMBDA {
                const UintVec v = load_words(w);
                w += TILE_ROWS;
                use(i + 2 * j, std::integral_constant<int, 0>{}, both_halves(v, 0x000F000F));
                use(i + 2 * j + 1, std::integral_constant<int, 1>{}, both_halves(v >> 8, 0x000F000F));
                use(i + 2 * j + 8, std::integral_constant<int, 2>{}, both_halves(v >> 4, 0x000F000F));
                use(i + 2 * j + 9, std::integral_constant<int, 3>{}, both_halves(v >> 12, 0x000F000F));
            });
    }
};

struct Int2 : Grouped {  // of 32 codes, bits 2c of byte i (8 bytes) hold code i + 8c
    static constexpr int CENTRE = 2;
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 16 * TILE_ROWS;
        for (int64_t i = 0; i < length / 2; i += 16, w += 2 * TILE_ROWS)
            unroll<2>([&](auto j) LAMBDA {
                const UintVec v = load_words(w + j * TILE_ROWS);
                unroll<4>([&](auto c) LAMBDA {
                    use(i + 4 * c + 2 * j, std::integral_constant<int, 0>{}, both_halves(v >> 2 * c, 0x00030003));
                    use(i + 4 * c + 2 * j + 1, std::integral_constant<int, 1>{},
                        both_halves(v >> (2 * c + 8), 0x00030003));
                });
            });
    }
};

// The lower two bits as int2, then a word whose bit s of either half is the third of what the s-th use takes.
struct Int3 : Grouped {
    static constexpr int CENTRE = 4;
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 32 * 3 * TILE_ROWS;
        for (int64_t i = 0; i < length / 2; i += 16, w += 3 * TILE_ROWS) {
            const UintVec third = load_words(w + 2 * TILE_ROWS);
            auto code = [&](UintVec low, UintVec high) LAMBDA {
                return both_halves(low, 0x00030003) | both_halves(high, 0x00010001) << 2;
            };
            unroll<2>([&](auto j) LAMBDA {
                const UintVec v = load_words(w + j * TILE_ROWS);
                unroll<4>([&](auto c) LAMBDA {
                    constexpr int bit = 4 * c + 2 * j;
                    use(i + bit, std::integral_constant<int, 0>{}, code(v >> 2 * c, third >> bit));
                    use(i + bit + 1, std::integral_constant<int, 1>{}, code(v >> (2 * c + 8), third >> (bit + 1)));
                });
            });
        }
    }
};

struct W8a8 : Grouped {  // one step: integers all along the row
    static constexpr int X = QUADS, CENTRE = 128;
    static int64_t step_of(const Arguments& a) { return round_up(a.k, 4); }
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 4 * TILE_ROWS;
        auto word = [&](int64_t i, auto part) LAMBDA {
            use(i, part, (IntVec)(load_words(w + i * TILE_ROWS) ^ 0x80808080u));  // unsigned, about 128
        };
        const int64_t words = length / 4, whole = words / 4 * 4;
        for (int64_t i = 0; i < whole; i += 4) unroll<4>([&](auto part) LAMBDA { word(i + part, part); });
        for (int64_t i = whole; i < words; i++) word(i, std::integral_constant<int, 0>{});
    }
};

struct W4a8 : Grouped {  // the codes of int4
    static constexpr int X = QUADS, CENTRE = 8;
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 8 * TILE_ROWS;
        for (int64_t i = 0; i < length / 4; i += 8)
            unroll<4>([&](auto j) LAMBDA {
                const UintVec v = load_words(w);
                w += TILE_ROWS;
                use(i + j, j, (IntVec)(v & 0x0F0F0F0Fu));
                use(i + j + 4, j, (IntVec)(v >> 4 & 0x0F0F0F0Fu));
            });
    }
};

// A pair of words of x, of its upper and lower bytes, for each word of weights.
struct Int8Split : Grouped {
    static constexpr int CENTRE = W8a8::CENTRE;
    static constexpr bool SPLIT = true;
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t length, Use use) {
        W8a8::decode(w, element, length, use);
    }
};

struct Int4Split : Grouped {
    static constexpr int CENTRE = W4a8::CENTRE;
    static constexpr bool SPLIT = true;
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t length, Use use) {
        W4a8::decode(w, element, length, use);
    }
};

// GGUF's k-quants: blocks of 256 elements with their scales inside.
struct KQuant {
    static constexpr int X = PAIRS, CENTRE = 0;
    static constexpr bool SPLIT = false;
};

struct BlockQ4K : KQuant {  // 36 words: scale and minimum (fp16); eight 6-bit scales and minima; nibbles
    static constexpr int WORDS = 36;
    static int64_t step_of(const Arguments&) { return 32; }
    template <class W> static W block(W w, int64_t element) { return w + element / 256 * WORDS * TILE_ROWS; }
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t, Use use) {
        const int64_t sub = element % 256 / 32;
        const int shift = sub % 2 * 4;
        w = block(w, element) + (4 + sub / 2 * 8) * TILE_ROWS;
        unroll<8>([&](auto j) LAMBDA {
            const UintVec v = load_words(w + j * TILE_ROWS) >> shift;
            use(2 * j, std::integral_constant<int, 2 * (j % 2)>{}, both_halves(v, 0x000F000F));
            use(2 * j + 1, std::integral_constant<int, 2 * (j % 2) + 1>{}, both_halves(v >> 8, 0x000F000F));
        });
    }
    // Of 12 bytes: four scales, four minima, and the low halves of four more of each, whose high two bits are on top.
    static IntVec six_bits(const uint32_t* b, int64_t sub, bool minimum) {
        const UintVec own = load_words(b + (minimum ? 2 : 1) * TILE_ROWS);
        const int byte = sub % 4 * 8;
        if (sub < 4) return (IntVec)(own >> byte & 63u);
        const UintVec more = load_words(b + 3 * TILE_ROWS);
        return (IntVec)((more >> (byte + (minimum ? 4 : 0)) & 15u) | (own >> (byte + 6) & 3u) << 4);
    }
    static Vec scale(const Arguments&, const uint32_t* w, int64_t, int64_t element, int64_t) {
        const uint32_t* b = block(w, element);
        return half_of(load_words(b), 0) * to_floats(six_bits(b, element % 256 / 32, false));
    }
    static Vec offset(const Arguments&, const uint32_t* w, int64_t, int64_t element, int64_t) {
        const uint32_t* b = block(w, element);
        return -half_of(load_words(b), 16) * to_floats(six_bits(b, element % 256 / 32, true));
    }
    static bool has_offset(const Arguments&) { return true; }
};

struct BlockQ6K : KQuant {  // 53 words: low nibbles, high two bits, 16 int8 scales, scale (fp16)
    static constexpr int CENTRE = 32, WORDS = 53;
    static int64_t step_of(const Arguments&) { return 16; }
    template <class W> static W block(W w, int64_t element) { return w + element / 256 * WORDS * TILE_ROWS; }
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t, Use use) {
        const int64_t within = element % 256, side = within / 128, quarter = within % 128 / 32, j0 = within % 32 / 4;
        const Stream low = block(w, element) + (side * 16 + quarter % 2 * 8 + j0) * TILE_ROWS;
        const Stream high = block(w, element) + (32 + side * 8 + j0) * TILE_ROWS;
        const int shift = quarter / 2 * 4;
        unroll<4>([&](auto j) LAMBDA {
            const UintVec nibbles = load_words(low + j * TILE_ROWS) >> shift & 0x0F0F0F0Fu;
            const UintVec v = nibbles | (load_words(high + j * TILE_ROWS) >> 2 * quarter & 0x03030303u) << 4;
            use(2 * j, std::integral_constant<int, 2 * (j % 2)>{}, both_halves(v, 0x00FF00FF));
            use(2 * j + 1, std::integral_constant<int, 2 * (j % 2) + 1>{}, both_halves(v >> 8, 0x00FF00FF));
        });
    }
    static Vec scale(const Arguments&, const uint32_t* w, int64_t, int64_t element, int64_t) {
        const uint32_t* b = block(w, element);
        const int64_t sub = element % 256 / 16;
        const IntVec scales = (IntVec)(load_words(b + (48 + sub / 4) * TILE_ROWS) << (24 - sub % 4 * 8)) >> 24;
        return half_of(load_words(b + 52 * TILE_ROWS), 0) * to_floats(scales);
    }
    static Vec offset(const Arguments&, const uint32_t*, int64_t, int64_t, int64_t) { return Vec{}; }
    static bool has_offset(const Arguments&) { return false; }
};

// The tokens of a block, as integers.
struct Tokens {
    int32_t* words;  // [elements / X, tokens]
    float* scale;    // [steps, tokens]
    int32_t* start;  // [steps, tokens], what the integer sums begin with: - centre * (sum of x)
    float* sum;      // [steps, tokens], of x as rounded

    static int64_t floats(int64_t elements, int64_t steps, int64_t tokens) {
        return (round_up(elements, 4) / 2 + 3 * steps) * tokens;
    }
    Tokens(float* memory, int64_t elements, int64_t steps, int64_t tokens)
        : words((int32_t*)memory), scale(memory + round_up(elements, 4) / 2 * tokens),
          start((int32_t*)(scale + steps * tokens)), sum(scale + 2 * steps * tokens) {}
};

// Rounds one token; `place` is its number among the `tokens` of its block.
template <class F>
void round_token(const float* x, int64_t k, int64_t step_length, int centre, Tokens to, int64_t place, int64_t tokens) {
    using Code = std::conditional_t<F::X == PAIRS, int16_t, int8_t>;
    typedef Code Codes __attribute__((vector_size(LANES * sizeof(Code))));
    constexpr float LEVELS = F::X == PAIRS ? BYTES_LEVELS : 127.0f;
    thread_local Scratch scratch;
    Code* codes = (Code*)scratch.floats(round_up(step_length, LANES));
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    for (int64_t step = 0, first = 0; first < k; step++, first += step_length) {
        const int64_t count = k - first < step_length ? k - first : step_length;
        auto part = [&](int64_t i) {
            return i + LANES <= count ? load(x + first + i) : load_partial(x + first + i, count - i);
        };
        // Compared as integers, infinity and NaN are the largest: the scale takes them on.
        UintVec magnitudes{};
        for (int64_t i = 0; i < count; i += LANES) {
            const UintVec magnitude = (UintVec)part(i) & 0x7FFFFFFFu;
            magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
        }
        const uint32_t largest_bits = max(magnitudes);
        float largest;
        memcpy(&largest, &largest_bits, sizeof largest);
        const float scale = largest / LEVELS;
        const Vec inverse = broadcast(scale > 0 ? 1.0f / scale : 0.0f);
        UintVec total{};
        for (int64_t i = 0; i < count; i += LANES) {
            const IntVec rounded = (IntVec)((UintVec)(part(i) * inverse + magic) - (UintVec)magic);
            const Codes narrow = __builtin_convertvector(F::SPLIT ? rounded + HALF_A_BYTE : rounded, Codes);
            memcpy(codes + i, &narrow, sizeof narrow);
            total += (UintVec)rounded;
        }
        const int64_t at = step * tokens + place;
        const uint32_t all = sum(total);
        to.scale[at] = scale;
        to.start[at] = -(uint32_t)centre * all;
        to.sum[at] = scale * (int32_t)all;
        int32_t* words = to.words + first / F::X * tokens + place;
        for (int64_t i = 0; i < count; i += 4) {
            if constexpr (F::SPLIT) {
                uint64_t four;
                memcpy(&four, codes + i, sizeof four);
                words[0] = even_bytes(four >> 8);
                words[tokens] = even_bytes(four) ^ 0x80808080;
                words += 2 * tokens;
            } else if constexpr (F::X == PAIRS) {
                uint64_t four;
                memcpy(&four, codes + i, sizeof four);
                words[0] = (four & 0xFFFF) | (four >> 16 & 0xFFFF0000);
                words[tokens] = (four >> 16 & 0xFFFF) | (four >> 32 & 0xFFFF0000);
                words += 2 * tokens;
            } else {
                memcpy(words, codes + i, sizeof *words);
                words += tokens;
            }
        }
    }
}

// LANES rows, from `lane` on, of each of TILES tiles times the TOKENS of a block.
template <class F, int TOKENS, int TILES>
void multiply(const Arguments& a, Tokens x, int64_t tile, int64_t lane, int64_t token, int tokens) {
    constexpr int PARTS = TOKENS >= 8 ? 1 : TOKENS >= 4 ? 2 : 4;
    const int64_t step_length = F::step_of(a), elements = round_up(a.k, 4);
    const bool a_scale_a_row = !a.group && a.scale, has_offset = F::has_offset(a);
    const uint32_t* rows[TILES];
    for (int r = 0; r < TILES; r++) rows[r] = a.codes() + (tile + r) * a.words * TILE_ROWS + lane;
    Vec sums[TILES][TOKENS] = {};
    for (int64_t step = 0, element = 0; element < elements; step++, element += step_length) {
        // Behind the end of these tiles come the next ones.
        const bool leaves = element * a.words >= (a.words - WORDS_AHEAD) * elements;
        const int64_t ahead = (WORDS_AHEAD + (leaves ? (TILES - 1) * a.words : 0)) * TILE_ROWS;
        const int64_t length = elements - element < step_length ? elements - element : step_length;
        const int32_t* words = x.words + element / F::X * TOKENS;
        const int32_t* start = x.start + step * TOKENS;
        const float *x_scale = x.scale + step * TOKENS, *x_sum = x.sum + step * TOKENS;
        for (int r = 0; r < TILES; r++) {
            IntVec parts[PARTS][TOKENS] = {};
            if (F::CENTRE)
                for (int t = 0; t < TOKENS; t++) parts[F::SPLIT][t] += start[t];
            F::decode(Stream{rows[r], ahead}, element, length, [&](int64_t word, auto part, IntVec w) LAMBDA {
                unroll<TOKENS>([&](auto t) LAMBDA {
                    if constexpr (F::SPLIT) {
                        IntVec &upper = parts[part * 2 % PARTS][t], &lower = parts[part * 2 % PARTS + 1][t];
                        const int32_t* at = words + word * 2 * TOKENS + t;
                        upper = dot_quads(upper, w, at), lower = dot_quads(lower, w, at + TOKENS);
                    } else {
                        IntVec& into = parts[part % PARTS][t];
                        const int32_t* at = words + word * TOKENS + t;
                        into = F::X == PAIRS ? dot_pairs(into, w, at) : dot_quads(into, w, at);
                    }
                });
            });
            Vec scale{}, offset{};
            if (!a_scale_a_row) scale = F::scale(a, rows[r], tile + r, element, lane);
            if (has_offset) offset = F::offset(a, rows[r], tile + r, element, lane);
            for (int t = 0; t < TOKENS; t++) {
                IntVec all = parts[0][t];
                if constexpr (F::SPLIT) {
                    for (int i = 2; i < PARTS; i += 2) all += parts[i][t];
                    all <<= 8;
                    for (int i = 1; i < PARTS; i += 2) all += parts[i][t];
                } else {
                    for (int i = 1; i < PARTS; i++) all += parts[i][t];
                }
                const Vec value = to_floats(all);
                if (a_scale_a_row)
                    sums[r][t] = fma(value, broadcast(x_scale[t]), sums[r][t]);
                else
                    sums[r][t] = fma(value * broadcast(x_scale[t]), scale, sums[r][t]);
                if (has_offset) sums[r][t] = fma(broadcast(x_sum[t]), offset, sums[r][t]);
            }
        }
    }
    for (int r = 0; r < TILES; r++) {
        const int64_t row = (tile + r) * TILE_ROWS + lane;
        if (row >= a.n) return;
        const int64_t count = a.n - row < LANES ? a.n - row : LANES;
        for (int t = 0; t < tokens; t++) {
            const Vec y = a_scale_a_row ? sums[r][t] * load((const float*)a.scale + row) : sums[r][t];
            memcpy(a.out + (token + t) * a.n + row, &y, count * sizeof(float));
        }
    }
}

// Few tokens wait for memory, which one core asks for faster in several streams.
template <int TOKENS> constexpr int TILES_OF = TOKENS <= 2 ? 2 : 1;

template <class F, int TOKENS>
void tiles(const Arguments& a, Tokens x, int64_t first, int64_t last, int64_t token, int tokens) {
    constexpr int TILES = TILES_OF<TOKENS>;
    for (int64_t lane = 0; lane < TILE_ROWS; lane += LANES) {
        int64_t tile = first;
        for (; tile + TILES <= last; tile += TILES)
            multiply<F, TOKENS, TILES>(a, x, tile, lane, token, tokens);
        for (; tile < last; tile++) multiply<F, TOKENS, 1>(a, x, tile, lane, token, tokens);
    }
}

// Weights of VECTORS x LANES rows, taken apart.
template <int VECTORS> struct Panel {
    IntVec* words;         // [elements / X, VECTORS]
    Vec *scales, *offsets;  // [steps, VECTORS], where there are some

    static int64_t floats(int64_t words, int64_t steps) { return (words + 2 * steps) * VECTORS * LANES; }
    Panel(float* memory, int64_t words, int64_t steps)
        : words((IntVec*)memory), scales((Vec*)memory + words * VECTORS), offsets(scales + steps * VECTORS) {}
};

// How a matrix is multiplied, apart from how its words are read.
struct Form {
    int64_t elements, step_length, steps;
    bool a_scale_a_row, has_offset;

    template <class F> static Form of(const Arguments& a) {
        const int64_t elements = round_up(a.k, 4), step_length = F::step_of(a);
        return {elements, step_length, ceil_div(elements, step_length), !a.group && a.scale, F::has_offset(a)};
    }
};

template <class F, int VECTORS> void fill(const Arguments& a, const Form& form, int64_t vector, Panel<VECTORS> panel) {
    for (int v = 0; v < VECTORS; v++) {
        const int64_t row = (vector + v) * LANES, tile = row / TILE_ROWS, lane = row % TILE_ROWS;
        const uint32_t* rows = a.codes() + tile * a.words * TILE_ROWS + lane;
        for (int64_t step = 0, element = 0; step < form.steps; step++, element += form.step_length) {
            const int64_t left = form.elements - element;
            IntVec* words = panel.words + element / F::X * VECTORS + v;
            F::decode(Stream{rows, 0}, element, left < form.step_length ? left : form.step_length,
                      [&](int64_t word, auto, IntVec w) LAMBDA { words[word * VECTORS] = w; });
            if (!form.a_scale_a_row) panel.scales[step * VECTORS + v] = F::scale(a, rows, tile, element, lane);
            if (form.has_offset) panel.offsets[step * VECTORS + v] = F::offset(a, rows, tile, element, lane);
        }
    }
}

// A panel times the TOKENS of a block. The sums are those of `multiply`, in the same order.
template <int X, int VECTORS, int TOKENS>
void multiply_panel(const Arguments& a, const Form& form, const Panel<VECTORS> panel, Tokens x, int64_t vector,
                    int64_t token, int tokens, Prefetch& ahead) {
    Vec sums[VECTORS][TOKENS];
    auto each = [&](auto body) LAMBDA {
        unroll<TOKENS>([&](auto t) LAMBDA { unroll<VECTORS>([&](auto v) LAMBDA { body(v, t); }); });
    };
    each([&](auto v, auto t) LAMBDA { sums[v][t] = Vec{}; });
    // Results are many, and a store waits for the line that it changes.
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) __builtin_prefetch(a.out + (token + t) * a.n + (vector + v) * LANES, 1, 2);
    const IntVec* weights = panel.words;
    const int32_t* words = x.words;
    for (int64_t step = 0, element = 0; step < form.steps; step++, element += form.step_length) {
        const int64_t left = form.elements - element;
        const IntVec* end = weights + (left < form.step_length ? left : form.step_length) / X * VECTORS;
        const int32_t* start = x.start + step * TOKENS;
        IntVec parts[VECTORS][TOKENS];
        each([&](auto v, auto t) LAMBDA { parts[v][t] = IntVec{} + start[t]; });
        for (; weights < end; weights += VECTORS, words += TOKENS) {
            IntVec w[VECTORS];
            unroll<VECTORS>([&](auto v) LAMBDA { w[v] = weights[v]; });
            each([&](auto v, auto t) LAMBDA {
                IntVec& into = parts[v][t];
                into = X == PAIRS ? dot_pairs(into, w[v], words + t) : dot_quads(into, w[v], words + t);
            });
            ahead.step();
        }
        const float *x_scale = x.scale + step * TOKENS, *x_sum = x.sum + step * TOKENS;
        const Vec *scales = panel.scales + step * VECTORS, *offsets = panel.offsets + step * VECTORS;
        if (form.a_scale_a_row)
            each([&](auto v, auto t) LAMBDA {
                sums[v][t] = fma(to_floats(parts[v][t]), broadcast(x_scale[t]), sums[v][t]);
            });
        else
            each([&](auto v, auto t) LAMBDA {
                sums[v][t] = fma(to_floats(parts[v][t]) * broadcast(x_scale[t]), scales[v], sums[v][t]);
            });
        if (form.has_offset)
            each([&](auto v, auto t) LAMBDA { sums[v][t] = fma(broadcast(x_sum[t]), offsets[v], sums[v][t]); });
    }
    for (int v = 0; v < VECTORS; v++) {
        const int64_t row = (vector + v) * LANES, count = a.n - row < LANES ? a.n - row : LANES;
        const Vec scale = form.a_scale_a_row ? load((const float*)a.scale + row) : broadcast(1.0f);
        for (int t = 0; t < tokens; t++) {
            const Vec y = form.a_scale_a_row ? sums[v][t] * scale : sums[v][t];
            float* out = a.out + (token + t) * a.n + row;
            if (count == LANES)
                store(out, y);
            else
                memcpy(out, &y, count * sizeof(float));
        }
    }
}

// The tokens of a product, rounded, in blocks.
struct Blocks {
    const Form& form;
    float* memory;
    int64_t tokens, together;

    int64_t count() const { return ceil_div(tokens, together); }
    int64_t tokens_of(int64_t block) const {
        const int64_t left = tokens - block * together;
        return left < together ? left : together;
    }
    // As many as one of the kernels takes.
    int64_t width_of(int64_t block) const {
        const int64_t own = tokens_of(block);
        if (together == PANEL_TOKENS) return own <= 4 ? 4 : PANEL_TOKENS;
        int64_t enough = MOST_TOKENS;
        for (const int width : WIDTHS)
            if (own <= width && width < enough) enough = width;
        return enough;
    }
    int64_t floats() const { return Tokens::floats(form.elements, form.steps, together); }
    Tokens at(int64_t block) const {
        return Tokens(memory + block * floats(), form.elements, form.steps, width_of(block));
    }
};

template <class F, int VECTORS>
void panel_product(const Arguments& a, const Blocks& blocks, int64_t vector, Prefetch ahead) {
    thread_local Scratch scratch;
    const Form& form = blocks.form;
    const int64_t words = form.elements / F::X;
    const Panel<VECTORS> panel(scratch.floats(Panel<VECTORS>::floats(words, form.steps)), words, form.steps);
    fill<F>(a, form, vector, panel);
    for (int64_t block = 0; block < blocks.count(); block++) {
        auto run = multiply_panel<F::X, VECTORS, PANEL_TOKENS>;
        if (blocks.width_of(block) == 4) run = multiply_panel<F::X, VECTORS, 4>;
        run(a, form, panel, blocks.at(block), vector, block * PANEL_TOKENS, blocks.tokens_of(block), ahead);
    }
}

template <class F> void many_tokens(const Arguments& a, const Blocks& blocks, int threads) {
    const int64_t count = ceil_div(a.n, LANES);
    // With more tokens a piece may be smaller.
    const int64_t pieces = threads * (blocks.count() > PIECES_PER_THREAD ? blocks.count() : PIECES_PER_THREAD);
    const int64_t grain =
        a.m * a.n * a.k <= SERIAL_PRODUCTS ? count : round_up(ceil_div(count, pieces), PANEL_VECTORS);
    parallel_for(count, grain, threads, [&](int64_t vector, int64_t last) {
        for (; vector < last; vector += PANEL_VECTORS) {
            const char* next = (const char*)(a.codes() + (vector + PANEL_VECTORS) * LANES * a.words);
            const int64_t rows = (count - vector) * LANES - PANEL_VECTORS * LANES;
            const int64_t following = rows < PANEL_VECTORS * LANES ? (rows > 0 ? rows : 0) : PANEL_VECTORS * LANES;
            const Prefetch ahead{next, next + following * a.words * 4};
            switch (last - vector) {
                case 1: panel_product<F, 1>(a, blocks, vector, ahead); break;
                case 2: panel_product<F, 2>(a, blocks, vector, ahead); break;
                default: panel_product<F, PANEL_VECTORS>(a, blocks, vector, ahead);
            }
        }
    });
}

template <class F> void few_tokens(const Arguments& a, const Blocks& blocks, int threads) {
    const int64_t count = ceil_div(a.n, TILE_ROWS);
    const int64_t grain = a.m * a.n * a.k <= SERIAL_PRODUCTS
                              ? count
                              : round_up(ceil_div(count, threads * PIECES_PER_THREAD), TILES_OF<1>);
    const Tokens x = blocks.at(0);
    parallel_for(count, grain, threads, [&](int64_t tile, int64_t last) {
        for (; tile < last; tile += TILES_OF<1>) {
            const int64_t end = tile + TILES_OF<1> < last ? tile + TILES_OF<1> : last;
            unroll<std::size(WIDTHS)>([&](auto i) LAMBDA {
                constexpr int width = WIDTHS[i];
                if constexpr (!F::SPLIT || width <= SPLIT_TOKENS)
                    if (width == blocks.width_of(0)) tiles<F, width>(a, x, tile, end, 0, a.m);
            });
        }
    });
}

template <class F> void linear(const Arguments& a, int threads) {
    thread_local Scratch scratch;
    const Form form = Form::of<F>(a);
    const bool few = a.m <= MOST_TOKENS;
    Blocks blocks{form, nullptr, a.m, few ? MOST_TOKENS : PANEL_TOKENS};
    blocks.memory = scratch.floats(blocks.count() * blocks.floats());
    const int64_t last_block = blocks.count() - 1, width = blocks.width_of(last_block);
    if (blocks.tokens_of(last_block) < width)
        // The places of tokens that are not there: any bits would do, but denormal numbers are slow.
        memset(blocks.at(last_block).scale, 0, 3 * form.steps * width * sizeof(float));
    int64_t tokens_at_once = 1 + SERIAL_PRODUCTS / 8 / a.k;
    if (!few) tokens_at_once = round_up(tokens_at_once, PANEL_TOKENS);  // whole blocks: no two threads write into one
    parallel_for(a.m, tokens_at_once, threads, [&](int64_t token, int64_t last) {
        for (; token < last; token++) {
            const int64_t block = token / blocks.together;
            round_token<F>(a.x + token * a.k, a.k, form.step_length, form.has_offset ? 0 : F::CENTRE, blocks.at(block),
                           token % blocks.together, blocks.width_of(block));
        }
    });
    if (few) return few_tokens<F>(a, blocks, threads);
    if constexpr (!F::SPLIT) many_tokens<F>(a, blocks, threads);
}

}  // namespace

void linear_integer(const PackedWeight& weight, const float* x, float* out, int64_t m, int threads) {
    const Arguments a{weight, x, out, m};
    switch (weight.format) {
        case INT8: return m <= SPLIT_TOKENS ? linear<Int8Split>(a, threads) : linear<Int8>(a, threads);
        case INT4: return m <= SPLIT_TOKENS ? linear<Int4Split>(a, threads) : linear<Int4>(a, threads);
        case INT3: return linear<Int3>(a, threads);
        case INT2: return linear<Int2>(a, threads);
        case W8A8: return linear<W8a8>(a, threads);
        case W4A8: return linear<W4a8>(a, threads);
        case Q4_K: return linear<BlockQ4K>(a, threads);
        case Q6_K: return linear<BlockQ6K>(a, threads);
    }
}
