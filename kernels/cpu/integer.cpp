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

#include "codes.h"
#include "threads.h"
#include "tile_units.h"

namespace {

constexpr int MOST_TOKENS = 16;
constexpr int WIDTHS[] = {1, 2, 4, 6, 8, 12, MOST_TOKENS};  // tokens that the kernel of few of them is made for
constexpr int PANEL_VECTORS = REGISTERS == 32 ? 3 : 2;
constexpr int PANEL_TOKENS = REGISTERS == 32 ? 8 : 4;
constexpr int64_t WORDS_AHEAD = 512;  // of a row; 32 kB of a tile
constexpr int64_t TILE_UNIT_TOKENS = 4;  // from so many on matrix units are as fast or faster
constexpr int64_t SERIAL_PRODUCTS = 1 << 17;
constexpr int64_t PIECES_PER_THREAD = 4;

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

// Where a processor multiplies bytes, the 16 bits of an x may as well be two of them, u and l of 256 u + l with l in
// [-128, 127]: weights are then taken apart into half as many words. The sums are the same integers.
#if defined(__AVX512VNNI__)
constexpr int SPLIT_TOKENS = 4;  // more need too many registers for their sums
#else
constexpr int SPLIT_TOKENS = 0;
#endif
INLINE uint32_t even_bytes(uint64_t eight) {
#if defined(__BMI2__)
    return _pext_u64(eight, 0x00FF00FF00FF00FF);
#else
    eight &= 0x00FF00FF00FF00FF;
    eight = (eight | eight >> 8) & 0x0000FFFF0000FFFF;
    return eight | eight >> 16;
#endif
}

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
    constexpr float LEVELS = F::X == PAIRS ? BYTES_LEVELS : 127.0f;
    thread_local Scratch scratch;
    Code* codes = (Code*)scratch.floats(round_up(step_length, LANES));
    for (int64_t step = 0, first = 0; first < k; step++, first += step_length) {
        const int64_t count = k - first < step_length ? k - first : step_length;
        const Rounded rounded = round_step(x + first, count, LEVELS, F::SPLIT ? HALF_A_BYTE : 0, codes);
        const int64_t at = step * tokens + place;
        to.scale[at] = rounded.scale;
        to.start[at] = -(uint32_t)centre * rounded.sum;
        to.sum[at] = rounded.scale * (int32_t)rounded.sum;
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
#if defined(HAS_TILE_UNITS)
    if (m >= TILE_UNIT_TOKENS && has_tile_units()) return linear_integer_by_tiles(weight, x, out, m, threads);
#endif
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
