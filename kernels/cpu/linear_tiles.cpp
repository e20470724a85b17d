// y = x W^T on matrix units (AMX), of weights that are bf16 or become it.
//
// A tile of weights is 16 rows of STEP elements, as they lie in memory or as they were converted; one of tokens is the
// STEP / 2 pairs of elements of up to 16 tokens, side by side. Sums stay in their tiles from one end of k to the other
// whatever m is, so a token has the same bits in every batch.
//   up to 32 tokens  weights are read once, and converted a little at a time, as they come from memory;
//   more tokens      a slab of weights that fits in L2 is converted, and multiplied with all tokens, 32 at a time, so
//                    that each writes its results one behind the other.

#include "tile_units.h"

#include <vector>

#if defined(HAS_TILE_UNITS)

#include "threads.h"
#include "units.h"
#include "weight.h"

namespace {

constexpr int64_t STEP = Bf16Units::STEP;
constexpr int64_t BLOCK_TOKENS = 2 * TILE_LINES;
constexpr int64_t FEW_STEPS = 4;                  // of k, converted while memory brings what follows
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;      // below this a second thread costs more than it brings
constexpr int64_t PIECES_PER_THREAD = 4;
constexpr int64_t SLABS_PER_THREAD = 2;
constexpr int64_t FEW_BLOCKS = 3;                 // of tokens, which copies of weights do not pay for
constexpr int64_t PANEL_AHEAD_BYTES = 256 << 10;  // a panel that fits in L2 beside its tokens
constexpr int64_t ROW_AHEAD_BYTES = 1024;

struct Product {
    const float* x;      // [m, k]
    const float* scale;  // [n] or null
    float* out;          // [m, n]
    int64_t m, n, k;

    int64_t steps() const { return ceil_div(k, STEP); }
};

// Tokens in tiles, packed one tile behind the other.
struct Tokens {
    bf16* packed;
    int64_t m, steps;

    int64_t tiles() const { return ceil_div(m, TILE_LINES); }
    int64_t width(int64_t tile) const {
        const int64_t left = m - tile * TILE_LINES;
        return left < TILE_LINES ? left : TILE_LINES;
    }
    bf16* at(int64_t tile) const { return packed + tile * TILE_LINES * steps * STEP; }
};

// Up to 16 tokens to [steps, pairs, tokens, 2], zeros behind the end of k.
void pack_tile(const float* x, int64_t k, int64_t tokens, bf16* to) {
    const __mmask16 columns = (__mmask16)((1u << tokens) - 1);
    for (int64_t i = 0; i < k; i += STEP) {
        __m512i v[TILE_LINES] = {};
        alignas(64) bf16 line[STEP];
        for (int64_t j = 0; j < tokens; j++) {
            Bf16Units::pack(x + j * k + i, k - i < STEP ? k - i : STEP, line);
            v[j] = _mm512_load_si512(line);
        }
        transpose(v);
        for (int64_t pair = 0; pair < TILE_LINES; pair++, to += 2 * tokens)
            _mm512_mask_storeu_epi32(to, columns, v[pair]);
    }
}

// Weights of TILES x 16 rows, as tiles: those of tile r at step s lie at data + r * tile + s * step.
struct Panel {
    const char* data;
    int64_t tile, step, line;
};

// Rows of bf16 as they lie in memory.
template <class W> Panel lying(W w, int64_t k) {
    const int64_t line = k * sizeof(bf16);
    return {address(w), TILE_LINES * line, TILE_LINE, line};
}

// Asks for a line of what comes behind the weights at p.
struct Ahead {
    int64_t bytes;

    Ahead(int64_t panel_bytes) : bytes(panel_bytes <= PANEL_AHEAD_BYTES ? panel_bytes : ROW_AHEAD_BYTES) {}
    INLINE void operator()(const char* p) const { __builtin_prefetch(p + bytes, 0, 2); }
};

// Steps [first, last) of `rows` weight rows as contiguous tiles, zeros where there are none.
template <int TILES, class W>
Panel convert(W w, int64_t k, int64_t first, int64_t last, int64_t rows, Ahead ahead, char* memory) {
    constexpr int64_t STEPS_A_LINE = ceil_div(TILE_LINE, STEP * element_bytes(W{}));
    for (int64_t r = 0; r < TILES * TILE_LINES; r++) {
        bf16* to = (bf16*)(memory + r / TILE_LINES * TILE_BYTES + r % TILE_LINES * TILE_LINE);
        const W from = w + r * k;
        for (int64_t s = first; s < last; s++, to += TILES * TILE_BYTES / sizeof(bf16)) {
            const int64_t left = k - s * STEP;
            if (r >= rows)
                memset(to, 0, TILE_LINE);
            else if (left >= STEP)
                Bf16Units::keep(Bf16Units::weights(from + s * STEP), to);
            else
                Bf16Units::keep(Bf16Units::weights(from + s * STEP, left), to);
            if (s % STEPS_A_LINE == 0) ahead(address(from + s * STEP));
        }
    }
    return {memory, TILE_BYTES, TILES * TILE_BYTES, TILE_LINE};
}

// The sums [16 rows, 16 tokens] of a tile, of which `tokens` are some, to their places.
void put(const Product& p, const float* sums, int64_t tokens, int64_t token, int64_t row) {
    if (row >= p.n) return;
    const __mmask16 kept = (__mmask16)(p.n - row < TILE_LINES ? (1u << (p.n - row)) - 1 : 0xFFFF);
    const __m512 scale = p.scale ? _mm512_maskz_loadu_ps(kept, p.scale + row) : _mm512_set1_ps(1.0f);
    __m512i v[TILE_LINES];
    for (int64_t i = 0; i < TILE_LINES; i++) v[i] = _mm512_load_si512(sums + i * TILE_LINES);
    transpose(v);
    for (int64_t j = 0; j < tokens; j++) {
        const __m512 y = p.scale ? _mm512_mul_ps((__m512)v[j], scale) : (__m512)v[j];
        _mm512_mask_storeu_ps(p.out + (token + j) * p.n + row, kept, y);
    }
}

// TILES tiles of weights times TOKEN_TILES tiles of tokens. The registers: sums, then weights, then tokens.
template <int TILES, int TOKEN_TILES> struct Block {
    static constexpr int sums(int r, int t) { return r * TOKEN_TILES + t; }
    static constexpr int weights(int r) { return 4 + r; }
    static constexpr int tokens(int t) { return 6 + t; }

    const Tokens& x;
    int64_t tile;  // of tokens, the first

    template <class Body> INLINE static void each(Body body) {
        unroll<TILES>([&](auto r) LAMBDA { unroll<TOKEN_TILES>([&](auto t) LAMBDA { body(r, t); }); });
    }

    void shape() const {
        TileShapes shapes;
        for (int t = 0; t < TOKEN_TILES; t++) {
            const int64_t bytes = x.width(tile + t) * sizeof(float);
            for (int r = 0; r < TILES; r++) shapes.set(sums(r, t), TILE_LINES, bytes);
            shapes.set(tokens(t), TILE_LINES, bytes);
        }
        for (int r = 0; r < TILES; r++) shapes.set(weights(r), TILE_LINES, TILE_LINE);
        shapes.use();
    }

    INLINE void begin() const {
        each([&](auto r, auto t) LAMBDA { tile_clear<sums(r, t)>(); });
    }

    // Adds the products of steps [first, last), of which the panel begins with the first.
    template <bool ASKS = false> INLINE void add(Panel panel, int64_t first, int64_t last, Ahead ahead) const {
        const bf16* packed[TOKEN_TILES];
        int64_t pairs[TOKEN_TILES];  // elements in a line
        unroll<TOKEN_TILES>([&](auto t) LAMBDA {
            pairs[t] = 2 * x.width(tile + t);
            packed[t] = x.at(tile + t) + first * TILE_LINES * pairs[t];
        });
        for (int64_t s = first; s < last; s++, panel.data += panel.step) {
            unroll<TOKEN_TILES>([&](auto t) LAMBDA {
                tile_load<tokens(t)>(packed[t], pairs[t] * sizeof(bf16));
                packed[t] += TILE_LINES * pairs[t];
            });
            unroll<TILES>([&](auto r) LAMBDA {
                const char* lines = panel.data + r * panel.tile;
                tile_load<weights(r)>(lines, panel.line);
                if (ASKS)
                    for (int64_t line = 0; line < TILE_LINES; line++) ahead(lines + line * panel.line);
                unroll<TOKEN_TILES>([&](auto t) LAMBDA { tile_add_bf16<sums(r, t), weights(r), tokens(t)>(); });
            });
        }
    }

    INLINE void end(const Product& p, int64_t row) const {
        each([&](auto r, auto t) LAMBDA {
            alignas(64) float numbers[TILE_LINES * TILE_LINES];
            tile_store<sums(r, t)>(numbers, TILE_LINE);
            put(p, numbers, x.width(tile + t), (tile + t) * TILE_LINES, row + r * TILE_LINES);
        });
    }
};

// All tokens, in TOKEN_TILES tiles, times the weights as they come from memory.
template <int TILES, int TOKEN_TILES, class W> void few_tokens(const Product& p, W w, const Tokens& x, int threads) {
    constexpr int64_t ROWS = TILES * TILE_LINES;
    const int64_t panels = ceil_div(p.n, ROWS);
    const int64_t grain = p.m * p.n * p.k <= SERIAL_PRODUCTS ? panels : ceil_div(panels, threads * PIECES_PER_THREAD);
    const Ahead ahead(ROWS * p.k * element_bytes(w));
    parallel_for(panels, grain, threads, [&](int64_t panel, int64_t end) {
        const TileUse use;
        const Block<TILES, TOKEN_TILES> block{x, 0};
        block.shape();
        for (; panel < end; panel++) {
            const int64_t row = panel * ROWS, rows = p.n - row < ROWS ? p.n - row : ROWS;
            const W from = w + row * p.k;
            block.begin();
            int64_t first = 0;
            if constexpr (std::is_same_v<W, const bf16*>)
                if (rows == ROWS) {
                    first = p.k / STEP;
                    block.template add<true>(lying(from, p.k), 0, first, ahead);
                }
            for (; first < x.steps; first += FEW_STEPS) {
                alignas(64) char memory[FEW_STEPS * TILES * TILE_BYTES];
                const int64_t last = first + FEW_STEPS < x.steps ? first + FEW_STEPS : x.steps;
                block.add(convert<TILES>(from, p.k, first, last, rows, ahead, memory), first, last, ahead);
            }
            block.end(p, row);
        }
    });
}

// Rows of weights that stay in L2 while all tokens pass, in whole panels.
int64_t rows_of_slab(const Product& p, int64_t panel_rows, int threads) {
    const int64_t fitting = l2_bytes() / 2 / (p.steps() * STEP * (int64_t)sizeof(bf16));
    const int64_t shared = ceil_div(p.n, threads * SLABS_PER_THREAD);
    const int64_t rows = fitting < shared ? fitting / panel_rows * panel_rows : round_up(shared, panel_rows);
    return rows < panel_rows ? panel_rows : rows;
}

template <class W> void many_tokens(const Product& p, W w, const Tokens& x, int threads) {
    constexpr int TILES = 2;
    constexpr int64_t ROWS = TILES * TILE_LINES;
    const bool as_they_lie = std::is_same_v<W, const bf16*> && p.m <= FEW_BLOCKS * BLOCK_TOKENS && p.k % STEP == 0;
    const int64_t slab_rows = rows_of_slab(p, ROWS, threads), panel_bytes = x.steps * TILES * TILE_BYTES;
    const Ahead ahead(as_they_lie ? ROWS * p.k * element_bytes(w) : PANEL_AHEAD_BYTES + 1);
    parallel_for(ceil_div(p.n, slab_rows), 1, threads, [&](int64_t slab, int64_t end) {
        thread_local Scratch scratch;
        thread_local std::vector<Panel> panels;
        char* memory = (char*)scratch.floats(slab_rows / ROWS * panel_bytes / sizeof(float));
        const TileUse use;
        for (; slab < end; slab++) {
            const int64_t first = slab * slab_rows, last = first + slab_rows < p.n ? first + slab_rows : p.n;
            panels.clear();
            for (int64_t row = first; row < last; row += ROWS) {
                const W from = w + row * p.k;
                char* to = memory + (row - first) / ROWS * panel_bytes;
                if (as_they_lie && row + ROWS <= p.n)
                    panels.push_back(lying(from, p.k));
                else
                    panels.push_back(convert<TILES>(from, p.k, 0, x.steps, last - row, ahead, to));
            }
            auto pass = [&](auto block) {
                block.shape();
                for (int64_t row = first; row < last; row += ROWS) {
                    const Panel panel = panels[(row - first) / ROWS];
                    block.begin();
                    if (as_they_lie && block.tile == 0)
                        block.template add<true>(panel, 0, x.steps, ahead);
                    else
                        block.add(panel, 0, x.steps, ahead);
                    block.end(p, row);
                }
            };
            int64_t tile = 0;
            for (; tile + 1 < x.tiles(); tile += 2) pass(Block<TILES, 2>{x, tile});
            if (tile < x.tiles()) pass(Block<TILES, 1>{x, tile});
        }
    });
}

template <class W> void linear(const Product& p, W w, int threads) {
    thread_local Scratch scratch;
    Tokens x{nullptr, p.m, p.steps()};
    x.packed = (bf16*)scratch.floats(x.tiles() * TILE_LINES * x.steps * STEP * sizeof(bf16) / sizeof(float));
    parallel_for(x.tiles(), 1 + SERIAL_PRODUCTS / (64 * p.k * TILE_LINES), threads, [&](int64_t tile, int64_t last) {
        for (; tile < last; tile++)
            pack_tile(p.x + tile * TILE_LINES * p.k, p.k, x.width(tile), x.at(tile));
    });
    if (p.m <= TILE_LINES) return few_tokens<1, 1>(p, w, x, threads);
    if (p.m <= BLOCK_TOKENS) return few_tokens<2, 2>(p, w, x, threads);
    many_tokens(p, w, x, threads);
}

}  // namespace

void linear_by_tiles(const PackedWeight& w, const float* x, float* out, int64_t m, int threads) {
    const Product p{x, (const float*)w.scale, out, m, w.n, w.k};
    switch (w.format) {
        case FP8: return linear(p, (const e4m3*)w.data, threads);
        case SPARSE24: return linear(p, Sparse24{(const bf16*)w.data, w.kept}, threads);
        default: return linear(p, (const bf16*)w.data, threads);
    }
}
#endif
