// How codes of 8 bits and fewer lie in memory, and how they are taken apart.

#pragma once

#include "vector.h"
#include "weight.h"

namespace {

constexpr int TILE_ROWS = 16;
constexpr int64_t GROUPS_AHEAD = 16;

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

// The formats. `decode` calls use(i, w) for the i-th word of x in a step and the weights that it multiplies; `bytes`
// for the i-th four elements with the codes of each row as bytes: 8-bit ones signed, others about CENTRE.

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
    template <class Use> INLINE static void bytes(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 4 * TILE_ROWS;
        for (int64_t i = 0; i < length / 4; i++) use(i, load_words(w + i * TILE_ROWS));
    }
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
    template <class Use> INLINE static void bytes(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 8 * TILE_ROWS;
        for (int64_t i = 0; i < length / 4; i += 8, w += 4 * TILE_ROWS)
            unroll<4>([&](auto j) LAMBDA {
                const UintVec v = load_words(w + j * TILE_ROWS);
                use(i + j, v & 0x0F0F0F0Fu);
                use(i + j + 4, v >> 4 & 0x0F0F0F0Fu);
            });
    }
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
    template <class Use> INLINE static void bytes(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 16 * TILE_ROWS;
        for (int64_t i = 0; i < length / 4; i += 8, w += 2 * TILE_ROWS)
            unroll<2>([&](auto j) LAMBDA {
                const UintVec v = load_words(w + j * TILE_ROWS);
                unroll<4>([&](auto c) LAMBDA { use(i + 2 * c + j, v >> 2 * c & 0x03030303u); });
            });
    }
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
    template <class Use> INLINE static void bytes(Stream w, int64_t element, int64_t length, Use use) {
        w += element / 32 * 3 * TILE_ROWS;
        for (int64_t i = 0; i < length / 4; i += 8, w += 3 * TILE_ROWS) {
            const UintVec third = load_words(w + 2 * TILE_ROWS);
            unroll<2>([&](auto j) LAMBDA {
                const UintVec v = load_words(w + j * TILE_ROWS);
                unroll<4>([&](auto c) LAMBDA {
                    constexpr int bit = 4 * c + 2 * j;
                    const UintVec high = (third >> bit & 0x00010001u) | (third >> (bit + 1) & 0x00010001u) << 8;
                    use(i + 2 * c + j, (v >> 2 * c & 0x03030303u) | high << 2);
                });
            });
        }
    }
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

struct W8a8 : Int8 {  // one step: integers all along the row
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

struct W4a8 : Int4 {
    static constexpr int X = QUADS;
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

struct Int4Split : Int4 {
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
        nibbles(w, element, [&](auto j, UintVec v) LAMBDA {
            use(2 * j, std::integral_constant<int, 2 * (j % 2)>{}, both_halves(v, 0x000F000F));
            use(2 * j + 1, std::integral_constant<int, 2 * (j % 2) + 1>{}, both_halves(v >> 8, 0x000F000F));
        });
    }
    template <class Use> INLINE static void bytes(Stream w, int64_t element, int64_t, Use use) {
        nibbles(w, element, [&](auto j, UintVec v) LAMBDA { use(j, v & 0x0F0F0F0Fu); });
    }
    // Calls use(j, v) with the j-th four codes of a step in the lower halves of bytes.
    template <class Use> INLINE static void nibbles(Stream w, int64_t element, Use use) {
        const int64_t sub = element % 256 / 32;
        const int shift = sub % 2 * 4;
        w = block(w, element) + (4 + sub / 2 * 8) * TILE_ROWS;
        unroll<8>([&](auto j) LAMBDA { use(j, load_words(w + j * TILE_ROWS) >> shift); });
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
    template <class Use> INLINE static void decode(Stream w, int64_t element, int64_t length, Use use) {
        bytes(w, element, length, [&](auto j, UintVec v) LAMBDA {
            use(2 * j, std::integral_constant<int, 2 * (j % 2)>{}, both_halves(v, 0x00FF00FF));
            use(2 * j + 1, std::integral_constant<int, 2 * (j % 2) + 1>{}, both_halves(v >> 8, 0x00FF00FF));
        });
    }
    template <class Use> INLINE static void bytes(Stream w, int64_t element, int64_t, Use use) {
        const int64_t within = element % 256, side = within / 128, quarter = within % 128 / 32, j0 = within % 32 / 4;
        const Stream low = block(w, element) + (side * 16 + quarter % 2 * 8 + j0) * TILE_ROWS;
        const Stream high = block(w, element) + (32 + side * 8 + j0) * TILE_ROWS;
        const int shift = quarter / 2 * 4;
        unroll<4>([&](auto j) LAMBDA {
            const UintVec nibbles = load_words(low + j * TILE_ROWS) >> shift & 0x0F0F0F0Fu;
            use(j, nibbles | (load_words(high + j * TILE_ROWS) >> 2 * quarter & 0x03030303u) << 4);
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

// The integers that a step of a token is multiplied as.
struct Rounded {
    float scale;
    uint32_t sum;  // of the integers
};

// Of 16 bits: u and l of 256 u + l, with l in [-128, 127], are bytes.
constexpr float BYTES_LEVELS = 127 * 256 + 127;
constexpr int32_t HALF_A_BYTE = 128;  // with it added, u is the upper byte, and the lower one is l + 128

// Rounds x [count] to integers up to `levels`; `added` to each are the codes, whose memory goes on to whole vectors.
template <class Code>
INLINE Rounded round_step(const float* x, int64_t count, float levels, int32_t added, Code* codes) {
    typedef Code Codes __attribute__((vector_size(LANES * sizeof(Code))));
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    auto part = [&](int64_t i) LAMBDA { return i + LANES <= count ? load(x + i) : load_partial(x + i, count - i); };
    // Compared as integers, infinity and NaN are the largest: the scale takes them on.
    UintVec magnitudes{};
    for (int64_t i = 0; i < count; i += LANES) {
        const UintVec magnitude = (UintVec)part(i) & 0x7FFFFFFFu;
        magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
    }
    const uint32_t largest_bits = max(magnitudes);
    float largest;
    memcpy(&largest, &largest_bits, sizeof largest);
    const float scale = largest / levels;
    const Vec inverse = broadcast(scale > 0 ? 1.0f / scale : 0.0f);
    UintVec total{};
    for (int64_t i = 0; i < count; i += LANES) {
        const IntVec rounded = (IntVec)((UintVec)(part(i) * inverse + magic) - (UintVec)magic);
        const Codes narrow = __builtin_convertvector(rounded + added, Codes);
        memcpy(codes + i, &narrow, sizeof narrow);
        total += (UintVec)rounded;
    }
    return {scale, sum(total)};
}

}  // namespace
