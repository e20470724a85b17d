// y = x W^T with W in codes of 8 bits and fewer, on matrix units for bytes (AMX).
//
// As in integer.cpp x is rounded to 16 bits, which are two bytes here, or to 8; integer sums are exact, and the steps
// are added in the same order, so a row has the bits that it has there. A tile of codes is 64 elements of 16 rows, as
// four bytes of each row beside those of the next: 8-bit codes lie like that in memory, others are taken apart. A tile
// of tokens has a row for each byte of each token, and its product takes as long as it has rows.
//   one block of tokens  weights are taken apart a step at a time, as they come from memory;
//   more tokens          a slab of them that fits in L2 is taken apart, and multiplied with one block after the other.

#include "tile_units.h"

#if defined(HAS_TILE_UNITS)

#include <vector>

#include "codes.h"
#include "threads.h"

namespace {

constexpr int64_t DEPTH = 64;              // elements of a tile
constexpr int64_t BLOCK_ROWS = 32;         // of bytes of tokens: two tiles
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;
constexpr int64_t PIECES_PER_THREAD = 4;
constexpr int64_t SLABS_PER_THREAD = 2;

// How codes become bytes, and how many bytes of x they are multiplied with.
template <class F, int PLANES_, bool SIGNED_, bool AS_THEY_LIE_ = false> struct Form {
    using Format = F;
    static constexpr int PLANES = PLANES_;
    static constexpr bool SIGNED = SIGNED_, AS_THEY_LIE = AS_THEY_LIE_;
    static constexpr int CENTRE = SIGNED_ ? 0 : F::CENTRE;
};

// How a matrix is divided: steps have a scale, and subtiles are what tiles hold of a step.
struct Division {
    int64_t elements, step_length, steps, depth;
    bool a_scale_a_row, has_offset;

    template <class F> static Division of(const Arguments& a) {
        const int64_t elements = round_up(a.k, 4), step = F::step_of(a);
        const int64_t depth = step < DEPTH ? step : DEPTH;
        return {elements, step, ceil_div(elements, step), depth, !a.group && a.scale, F::has_offset(a)};
    }
    int64_t subtiles() const { return ceil_div(elements, depth); }
};

// The tokens of a block: `rows` rows of bytes (the upper ones of all tokens, then the lower ones), and what steps need.
struct Block {
    int8_t* codes;   // [subtiles, rows, depth]
    float* scale;    // [steps, tokens]
    int32_t* start;  // [steps, tokens], what the integer sums begin with: - centre * (sum of x)
    float* sum;      // [steps, tokens], of x as rounded
    int64_t tokens, rows;

    // Where two tiles take them, the first row of the second one, which has a row even if it is nobody's.
    int64_t second() const { return ceil_div(rows, 2); }
};

struct Blocks {
    const Division& division;
    float* memory;
    int64_t m, planes;

    int64_t together() const { return BLOCK_ROWS / planes; }
    int64_t count() const { return ceil_div(m, together()); }
    int64_t code_floats() const { return division.subtiles() * division.depth * BLOCK_ROWS / 4; }
    int64_t floats() const { return round_up(code_floats() + 3 * division.steps * together(), 16); }
    Block at(int64_t block) const {
        const int64_t left = m - block * together(), tokens = left < together() ? left : together();
        float* here = memory + block * floats();
        float* scale = here + code_floats();
        const int64_t numbers = division.steps * tokens;
        return {(int8_t*)here, scale, (int32_t*)(scale + numbers), scale + 2 * numbers, tokens, tokens * planes};
    }
};

template <class F> void round_token(const Arguments& a, const Division& d, const float* x, Block to, int64_t place) {
    using Code = std::conditional_t<F::PLANES == 2, int16_t, int8_t>;
    constexpr float LEVELS = F::PLANES == 2 ? BYTES_LEVELS : 127.0f;
    thread_local Scratch scratch;
    const int64_t room = round_up(d.step_length, DEPTH);
    Code* codes = (Code*)scratch.floats(room);
    for (int64_t step = 0, first = 0; first < a.k; step++, first += d.step_length) {
        const int64_t count = a.k - first < d.step_length ? a.k - first : d.step_length;
        const Rounded rounded = round_step(x + first, count, LEVELS, F::PLANES == 2 ? HALF_A_BYTE : 0, codes);
        const int64_t at = step * to.tokens + place, centre = d.has_offset ? 0 : F::CENTRE;
        to.scale[at] = rounded.scale;
        to.start[at] = -(uint32_t)centre * rounded.sum;
        to.sum[at] = rounded.scale * (int32_t)rounded.sum;
        for (int64_t i = 0; i < count; i += d.depth) {
            int8_t* line = to.codes + ((first + i) / d.depth * to.rows + place) * d.depth;
            auto first_bytes = [](int64_t count) { return count < 64 ? (1ull << count) - 1 : ~0ull; };
            const uint64_t kept = first_bytes(count - i < d.depth ? count - i : d.depth), all = first_bytes(d.depth);
            if constexpr (F::PLANES == 2) {
                const __m512i low = _mm512_maskz_loadu_epi16((uint32_t)kept, codes + i);
                const __m512i high = _mm512_maskz_loadu_epi16((uint32_t)(kept >> 32), codes + i + 32);
                const __m512i halves = _mm512_set1_epi16(HALF_A_BYTE);
                auto bytes = [](__m512i a, __m512i b) {
                    const __m512i first = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(a));
                    return _mm512_inserti64x4(first, _mm512_cvtepi16_epi8(b), 1);
                };
                const __m512i upper = bytes(_mm512_srai_epi16(low, 8), _mm512_srai_epi16(high, 8));
                const __m512i lower = bytes(_mm512_sub_epi16(low, halves), _mm512_sub_epi16(high, halves));
                _mm512_mask_storeu_epi8(line, all, upper);
                _mm512_mask_storeu_epi8(line + to.tokens * d.depth, all, _mm512_maskz_mov_epi8(kept, lower));
            } else {
                _mm512_mask_storeu_epi8(line, all, _mm512_maskz_loadu_epi8(kept, codes + i));
            }
        }
    }
}

// Elements [element, element + length) of a tile of rows as bytes, zeros up to whole tiles.
template <class F> INLINE void take_apart(const Arguments& a, const uint32_t* rows, int64_t element, int64_t length,
                                          int64_t depth, int64_t ahead, char* to) {
    F::Format::bytes(Stream{rows, ahead}, element, length, [&](int64_t word, UintVec codes) LAMBDA {
        memcpy(to + word * TILE_LINE, &codes, TILE_LINE);
    });
    for (int64_t i = length; i < round_up(length, depth); i += 4) memset(to + i / 4 * TILE_LINE, 0, TILE_LINE);
}

// The registers: sums of weight tile r and token tile t, then the tiles of tokens, then those of weights.
template <int TOKEN_TILES> struct Registers {
    static constexpr int TILES = 4 / TOKEN_TILES;  // of weights, multiplied at once
    static constexpr int sums(int r, int t) { return r * TOKEN_TILES + t; }
    static constexpr int tokens(int t) { return 4 + t; }
    static constexpr int weights(int r) { return 4 + TOKEN_TILES + r % (4 - TOKEN_TILES); }

    static void shape(const Block& block, int64_t depth) {
        TileShapes shapes;
        for (int t = 0; t < TOKEN_TILES; t++) {
            const int64_t rest = block.rows > 1 ? block.rows - block.second() : 1;
            const int64_t rows = TOKEN_TILES == 1 ? block.rows : t ? rest : block.second();
            for (int r = 0; r < TILES; r++) shapes.set(sums(r, t), rows, TILE_LINE);
            shapes.set(tokens(t), rows, depth);
        }
        for (int r = 0; r < TILES; r++) shapes.set(weights(r), depth / 4, TILE_LINE);
        shapes.use();
    }
    template <class Body> INLINE static void each(Body body) {
        unroll<TILES>([&](auto r) LAMBDA { unroll<TOKEN_TILES>([&](auto t) LAMBDA { body(r, t); }); });
    }
};

// Codes as bytes: subtile s of tile r lies at data + r * tile + s * depth * 16.
struct Panel {
    const char* data;
    int64_t tile;
};

template <bool SIGNED, int TOKEN_TILES>
INLINE void multiply(Panel panel, const Block& block, int64_t depth, int64_t first, int64_t count, int64_t ahead) {
    using R = Registers<TOKEN_TILES>;
    const int8_t* tokens = block.codes + first * block.rows * depth;
    const int64_t second = block.second() * depth, bytes = depth * TILE_LINES;
    for (int64_t s = 0; s < count; s++, tokens += block.rows * depth, panel.data += bytes) {
        unroll<TOKEN_TILES>([&](auto t) LAMBDA { tile_load<R::tokens(t)>(tokens + t * second, depth); });
        unroll<R::TILES>([&](auto r) LAMBDA {
            const char* weights = panel.data + r * panel.tile;
            tile_load<R::weights(r)>(weights, TILE_LINE);
            if (ahead)
                for (int64_t at = 0; at < bytes; at += TILE_LINE) __builtin_prefetch(weights + at + ahead, 0, 2);
            unroll<TOKEN_TILES>([&](auto t) LAMBDA {
                tile_add_bytes<R::sums(r, t), R::tokens(t), R::weights(r), SIGNED>();
            });
        });
    }
}

// Those of tiles of sums: [tiles of weights, rows of tokens, 16].
constexpr int64_t BLOCK_NUMBERS = 4 * TILE_LINES * TILE_LINES;

template <class F, int TOKEN_TILES> struct Job {
    using R = Registers<TOKEN_TILES>;
    static constexpr int64_t TILES = R::TILES, ROWS = TOKEN_TILES * TILE_LINES;  // of a tile of weights in a block

    const Arguments& a;
    const Division& d;
    Blocks blocks;

    // Adds a step's integers [TILES, ROWS, 16] to the sums of a block.
    INLINE void add_step(const Block& block, int64_t tile, int64_t step, const int32_t* integers, float* sums) const {
        const int64_t element = step * d.step_length;
        const float *x_scale = block.scale + step * block.tokens, *x_sum = block.sum + step * block.tokens;
        const int32_t* start = block.start + step * block.tokens;
        for (int64_t r = 0; r < TILES; r++) {
            const uint32_t* rows = a.codes() + (tile + r) * a.words * TILE_ROWS;
            const bool there = (tile + r) * TILE_ROWS < a.n;
            if (!there) return;
            Vec scale{}, offset{};
            if (!d.a_scale_a_row) scale = F::Format::scale(a, rows, tile + r, element, 0);
            if (d.has_offset) offset = F::Format::offset(a, rows, tile + r, element, 0);
            for (int64_t t = 0; t < block.tokens; t++) {
                const int32_t* here = integers + (r * ROWS + t) * TILE_LINES;
                IntVec all = (IntVec)_mm512_load_si512(here);
                if (F::PLANES == 2) all = (all << 8) + (IntVec)_mm512_load_si512(here + block.tokens * TILE_LINES);
                if (F::CENTRE) all += start[t];
                const Vec value = to_floats(all);
                float* sum = sums + (r * ROWS + t) * TILE_LINES;
                Vec y = step ? load(sum) : Vec{};
                y = d.a_scale_a_row ? fma(value, broadcast(x_scale[t]), y)
                                    : fma(value * broadcast(x_scale[t]), scale, y);
                if (d.has_offset) y = fma(broadcast(x_sum[t]), offset, y);
                store(sum, y);
            }
        }
    }

    void put(const Block& block, int64_t token, int64_t tile, const float* sums) const {
        for (int64_t r = 0; r < TILES; r++) {
            const int64_t row = (tile + r) * TILE_ROWS;
            if (row >= a.n) return;
            const __mmask16 kept = a.n - row < TILE_ROWS ? (__mmask16)((1u << (a.n - row)) - 1) : (__mmask16)0xFFFF;
            const Vec scale = d.a_scale_a_row ? load((const float*)a.scale + row) : broadcast(1.0f);
            for (int64_t t = 0; t < block.tokens; t++) {
                const Vec sum = load(sums + (r * ROWS + t) * TILE_LINES), y = d.a_scale_a_row ? sum * scale : sum;
                _mm512_mask_storeu_ps(a.out + (token + t) * a.n + row, kept, (__m512)y);
            }
        }
    }

    // The sums of steps [first, last), whose weights the panel holds from the first of them on.
    void add(const Block& block, Panel panel, int64_t tile, int64_t first, int64_t last, int64_t ahead,
             float* sums) const {
        // Integers of two steps: those of one are added up while the next one's are being made.
        alignas(64) int32_t integers[2][BLOCK_NUMBERS];
        for (int64_t step = first; step < last; step++) {
            const int64_t element = step * d.step_length, left = d.elements - element;
            const int64_t length = left < d.step_length ? left : d.step_length;
            const Panel here{panel.data + (step - first) * d.step_length * TILE_ROWS, panel.tile};
            R::each([&](auto r, auto t) LAMBDA { tile_clear<R::sums(r, t)>(); });
            multiply<F::SIGNED, TOKEN_TILES>(here, block, d.depth, element / d.depth, ceil_div(length, d.depth), ahead);
            R::each([&](auto r, auto t) LAMBDA {
                int32_t* to = integers[step % 2] + (r * ROWS + t * block.second()) * TILE_LINES;
                tile_store<R::sums(r, t)>(to, TILE_LINE);
            });
            if (step > first) add_step(block, tile, step - 1, integers[(step - 1) % 2], sums);
        }
        add_step(block, tile, last - 1, integers[(last - 1) % 2], sums);
    }

    // The codes of steps [first, last) of a panel: in memory as they lie, or taken apart, with zeros behind the last.
    Panel codes(int64_t tile, int64_t first, int64_t last, char* memory) const {
        const int64_t tile_bytes = a.words * TILE_ROWS * sizeof(uint32_t), begin = first * d.step_length;
        const int64_t end = last * d.step_length < d.elements ? last * d.step_length : d.elements;
        const bool all_there = (tile + TILES) * TILE_ROWS < a.n + TILE_ROWS;
        if (F::AS_THEY_LIE && all_there && (end - begin) % d.depth == 0)
            return {(const char*)(a.codes() + tile * a.words * TILE_ROWS) + begin * TILE_ROWS, tile_bytes};
        const int64_t stride = round_up(end - begin, d.depth) * TILE_ROWS;
        for (int64_t r = 0; r < TILES && (tile + r) * TILE_ROWS < a.n; r++) {
            const uint32_t* rows = a.codes() + (tile + r) * a.words * TILE_ROWS;
            for (int64_t element = begin; element < end; element += d.step_length) {
                const int64_t length = end - element < d.step_length ? end - element : d.step_length;
                take_apart<F>(a, rows, element, length, d.depth, tile_bytes / sizeof(uint32_t) * TILES,
                              memory + r * stride + (element - begin) * TILE_ROWS);
            }
        }
        return {memory, stride};
    }

    // Of a panel whose codes were taken apart.
    int64_t panel_bytes() const { return TILES * d.subtiles() * d.depth * TILE_ROWS; }

    // All tokens, a block of them, times the weights as they come from memory.
    void few_tokens(int64_t tile, char* memory) const {
        alignas(64) float sums[BLOCK_NUMBERS];
        const Block block = blocks.at(0);
        // Taking weights apart alternates with multiplying them, so that memory goes on all the time.
        const int64_t together = F::AS_THEY_LIE || d.step_length >= DEPTH ? 1 : DEPTH / d.step_length;
        const int64_t ahead = F::AS_THEY_LIE ? panel_bytes() : 0;
        for (int64_t first = 0; first < d.steps; first += together) {
            const int64_t last = first + together < d.steps ? first + together : d.steps;
            add(block, codes(tile, first, last, memory), tile, first, last, ahead, sums);
        }
        put(block, 0, tile, sums);
    }

    // All tokens, block by block, times panels [first, last), whose codes stay in L2.
    void many_tokens(int64_t first, int64_t last, char* memory) const {
        alignas(64) float sums[BLOCK_NUMBERS];
        thread_local std::vector<Panel> panels;
        panels.clear();
        for (int64_t panel = first; panel < last; panel++)
            panels.push_back(codes(panel * TILES, 0, d.steps, memory + (panel - first) * panel_bytes()));
        for (int64_t i = 0; i < blocks.count(); i++) {
            const Block block = blocks.at(i);
            if (i == 0 || block.rows < BLOCK_ROWS) R::shape(block, d.depth);
            for (int64_t panel = first; panel < last; panel++) {
                add(block, panels[panel - first], panel * TILES, 0, d.steps, 0, sums);
                put(block, i * blocks.together(), panel * TILES, sums);
            }
        }
    }
};

template <class F, int TOKEN_TILES>
void multiply_all(const Arguments& a, const Division& d, const Blocks& blocks, int threads) {
    using J = Job<F, TOKEN_TILES>;
    const J job{a, d, blocks};
    const int64_t panels = ceil_div(a.n, J::TILES * TILE_ROWS);
    const bool serial = a.m * a.n * a.k <= SERIAL_PRODUCTS;
    if (blocks.count() == 1) {
        const int64_t grain = serial ? panels : ceil_div(panels, threads * PIECES_PER_THREAD);
        return parallel_for(panels, grain, threads, [&](int64_t panel, int64_t last) {
            thread_local Scratch scratch;
            char* memory = (char*)scratch.floats(job.panel_bytes() / sizeof(float));
            const TileUse use;
            J::R::shape(blocks.at(0), d.depth);
            for (; panel < last; panel++) job.few_tokens(panel * J::TILES, memory);
        });
    }
    const int64_t fitting = l2_bytes() / 2 / job.panel_bytes(), shared = ceil_div(panels, threads * SLABS_PER_THREAD);
    const int64_t slab = serial ? panels : fitting < 1 ? 1 : fitting < shared ? fitting : shared;
    parallel_for(panels, slab, threads, [&](int64_t panel, int64_t end) {
        thread_local Scratch scratch;
        char* memory = (char*)scratch.floats(slab * job.panel_bytes() / sizeof(float));
        const TileUse use;
        for (; panel < end; panel += slab) job.many_tokens(panel, panel + slab < end ? panel + slab : end, memory);
    });
}

template <class F> void linear(const Arguments& a, int threads) {
    thread_local Scratch scratch;
    const Division d = Division::of<typename F::Format>(a);
    Blocks blocks{d, nullptr, a.m, F::PLANES};
    blocks.memory = scratch.floats(blocks.count() * blocks.floats());
    parallel_for(a.m, 1 + SERIAL_PRODUCTS / 16 / a.k, threads, [&](int64_t token, int64_t last) {
        for (; token < last; token++)
            round_token<F>(a, d, a.x + token * a.k, blocks.at(token / blocks.together()), token % blocks.together());
    });
    if (a.m * F::PLANES <= TILE_LINES) return multiply_all<F, 1>(a, d, blocks, threads);
    multiply_all<F, 2>(a, d, blocks, threads);
}

}  // namespace

void linear_integer_by_tiles(const PackedWeight& weight, const float* x, float* out, int64_t m, int threads) {
    const Arguments a{weight, x, out, m};
    switch (weight.format) {
        case INT8: return linear<Form<Int8, 2, true, true>>(a, threads);
        case INT4: return linear<Form<Int4, 2, false>>(a, threads);
        case INT3: return linear<Form<Int3, 2, false>>(a, threads);
        case INT2: return linear<Form<Int2, 2, false>>(a, threads);
        case W8A8: return linear<Form<W8a8, 1, true, true>>(a, threads);
        case W4A8: return linear<Form<W4a8, 1, false>>(a, threads);
        case Q4_K: return linear<Form<BlockQ4K, 2, false>>(a, threads);
        case Q6_K: return linear<Form<BlockQ6K, 2, false>>(a, threads);
    }
}
#endif
