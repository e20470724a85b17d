// y = x W^T with W stored row by row in fp32, bf16, fp8 or half sparse: how close to the memory (few tokens) or the
// multiply units (many tokens) can a plain layout get?
//
// Every output element is accumulated in the same order whatever m is: LANES partial sums over k, one multiply-add of
// the units each STEP elements, then `sum`. Only the blocking differs:
//   m <= DIRECT_TOKENS  each weight is read once, converted in a register and used for all tokens;
//   more tokens         PANEL_ROWS weight rows are converted in L1 and multiplied by blocks of tokens.

#include "batch.h"
#include "threads.h"
#include "tile_units.h"
#include "units.h"
#include "vector.h"
#include "weight.h"

namespace {

constexpr int TILE_TOKENS = 4;
constexpr int PANEL_ROWS = REGISTERS == 32 ? 6 : 3;  // 4 x 6 (4 x 3) sums, the rows or tokens of a step, one spare
constexpr int64_t PANEL_DEPTH_BYTES = 4096;          // of k in a panel, which takes 24 kB, half of an L1
constexpr int64_t LINE_BYTES = 64;
constexpr int64_t BYTES_AHEAD = 512;                 // of a stream of weights
constexpr int64_t SERIAL_PRODUCTS = 1 << 16;         // below this a second thread costs more than it brings
constexpr int64_t PIECES_PER_THREAD = 4;

struct Product {
    const float* x;      // [m, k]
    const float* scale;  // [n] or null
    float* out;          // [m, n]
    int64_t m, n, k;
    float unit = 1.0f;   // what weights are loaded in, where they have a scale

    void put(int64_t token, int64_t row, float value) const {
        out[token * n + row] = scale ? value * unit * scale[row] : value;
    }
};

// x [tokens, k] to [ceil(k / STEP), tokens, STEP], zeros behind the end of k.
template <class U> void interleave(const float* x, int64_t k, int tokens, typename U::Element* packed) {
    for (int64_t i = 0; i < k; i += U::STEP)
        for (int j = 0; j < tokens; j++, packed += U::STEP)
            U::pack(x + j * k + i, k - i < U::STEP ? k - i : U::STEP, packed);
}

// W points at weights: const float*, const bf16*, const e4m3*, Sparse24. Rows `row` + r * `apart`, for r < ROWS.
template <class U, class W, int TOKENS, int ROWS>
void direct_rows(const Product& p, const typename U::Element* x /* interleaved */, W w, int64_t row, int64_t apart) {
    constexpr int64_t BYTES = element_bytes(W{}) * U::STEP;
    constexpr int VECTORS = BYTES < 64 ? 64 / BYTES : 1;  // in a cache line
    Vec sums[ROWS][TOKENS];
    unroll<ROWS>([&](auto r) LAMBDA { unroll<TOKENS>([&](auto j) LAMBDA { sums[r][j] = Vec{}; }); });
    w = w + row * p.k;
    const int64_t whole = p.k / U::STEP * U::STEP, lines = p.k / (VECTORS * U::STEP) * (VECTORS * U::STEP);
    auto add = [&](auto r, typename U::Vector weights, const typename U::Element* tokens) LAMBDA {
        unroll<TOKENS>([&](auto j) LAMBDA {
            sums[r][j] = U::add_product(weights, U::load(tokens + j * U::STEP), sums[r][j]);
        });
    };
    int64_t i = 0;
    for (; i < lines; i += VECTORS * U::STEP, x += VECTORS * TOKENS * U::STEP)
        unroll<ROWS>([&](auto r) LAMBDA {
            const W here = w + (r * apart * p.k + i);
            __builtin_prefetch(address(here) + BYTES_AHEAD, 0, 3);
            unroll<VECTORS>(
                [&](auto v) LAMBDA { add(r, U::weights(here + v * U::STEP), x + v * TOKENS * U::STEP); });
        });
    for (; i < whole; i += U::STEP, x += TOKENS * U::STEP)
        unroll<ROWS>([&](auto r) LAMBDA { add(r, U::weights(w + (r * apart * p.k + i)), x); });
    if (whole < p.k)
        unroll<ROWS>([&](auto r) LAMBDA { add(r, U::weights(w + (r * apart * p.k + whole), p.k - whole), x); });
    unroll<ROWS>([&](auto r) LAMBDA {
        unroll<TOKENS>([&](auto j) LAMBDA { p.put(j, row + r * apart, sum(sums[r][j])); });
    });
}

template <class U, class W, int TOKENS>
void direct(const Product& p, const typename U::Element* x, W w, int threads) {
    // A core fills its share of the bandwidth by several long streams: rows that lie far apart, each going on in the
    // row behind it. Hardware follows such streams up to the end of a page, so what comes next is asked for here.
    constexpr int SUMS = REGISTERS == 32 ? 24 : 12;
    constexpr int ROWS = SUMS / TOKENS < 8 ? SUMS / TOKENS : 8;
    const int64_t grain = p.m * p.n * p.k <= SERIAL_PRODUCTS
                              ? p.n
                              : round_up(ceil_div(p.n, threads * PIECES_PER_THREAD), ROWS * 4);
    parallel_for(p.n, grain, threads, [&](int64_t row, int64_t last) {
        const int64_t apart = (last - row) / ROWS, rest = row + apart * ROWS;
        for (int64_t i = 0; i < apart; i++) direct_rows<U, W, TOKENS, ROWS>(p, x, w, row + i, apart);
        for (row = rest; row < last; row++) direct_rows<U, W, TOKENS, 1>(p, x, w, row, 0);
    });
}

// As `direct` of m tokens; MOST is the most.
template <class U, class W, int MOST>
void direct_of(const Product& p, const typename U::Element* x, W w, int threads) {
    if constexpr (MOST > 1)
        if (p.m < MOST) return direct_of<U, W, MOST - 1>(p, x, w, threads);
    direct<U, W, MOST>(p, x, w, threads);
}

template <class U, class W> void few_tokens(const Product& p, W w, int threads) {
    using Element = typename U::Element;
    thread_local Scratch scratch;
    if constexpr (std::is_same_v<Element, float>)
        if (p.m == 1 && p.k % U::STEP == 0) return direct<U, W, 1>(p, p.x, w, threads);
    Element* x = (Element*)scratch.floats(ceil_div(round_up(p.k, U::STEP) * p.m * sizeof(Element), sizeof(float)));
    interleave<U>(p.x, p.k, p.m, x);
    direct_of<U, W, U::DIRECT_TOKENS>(p, x, w, threads);
}

// Weights as the units take them: those of row r at step s lie at data + r * row + s * step.
template <class U> struct Panel {
    const typename U::Element* data;
    int64_t row, step;
};

// Elements [start, start + depth) of `rows` weight rows to [depth / STEP, PANEL_ROWS, STEP], zero padded.
template <class U, class W>
Panel<U> convert(W w, int64_t k, int64_t start, int64_t depth, int rows, typename U::Element* panel) {
    constexpr int64_t APART = PANEL_ROWS * U::STEP;
    if constexpr (std::is_same_v<W, const typename U::Element*>)
        if (rows == PANEL_ROWS && k % U::STEP == 0) return {w + start, k, U::STEP};
    const int64_t end = start + depth < k ? start + depth : k;
    const int64_t whole = start + (end - start) / U::STEP * U::STEP;
    for (int r = 0; r < PANEL_ROWS; r++) {
        typename U::Element* to = panel + r * U::STEP;
        if (r >= rows) {
            for (int64_t i = 0; i < depth; i += U::STEP, to += APART) memset(to, 0, U::STEP * sizeof *to);
            continue;
        }
        const W from = w + r * k;
        for (int64_t i = start; i < whole; i += U::STEP, to += APART) U::keep(U::weights(from + i), to);
        if (whole < end) U::keep(U::weights(from + whole, end - whole), to);
    }
    return {panel, U::STEP, APART};
}

// What comes next of the weights, asked for `lines` at each step.
struct Ahead {
    Prefetch next;
    int lines;

    INLINE void step() {
        for (int i = 0; i < lines; i++) next.step();
    }
};

// sums [PANEL_ROWS, TOKENS] += the products of `steps` vectors of a panel and of an interleaved block of tokens.
template <class U, int TOKENS>
INLINE void multiply(Panel<U> panel, const typename U::Element* x, int64_t steps, Vec sums[PANEL_ROWS][TOKENS],
                     Ahead& ahead) {
    for (int64_t s = 0; s < steps; s++, panel.data += panel.step, x += TOKENS * U::STEP) {
        typename U::Vector tokens[TOKENS];
        unroll<TOKENS>([&](auto j) LAMBDA {
            if (U::TOKENS_AHEAD) __builtin_prefetch(x + (U::TOKENS_AHEAD * TOKENS + j) * U::STEP, 0, 3);
            tokens[j] = U::load(x + j * U::STEP);
        });
        unroll<PANEL_ROWS>([&](auto r) LAMBDA {
            const typename U::Vector weights = U::load(panel.data + r * panel.row);
            unroll<TOKENS>([&](auto j) LAMBDA { sums[r][j] = U::add_product(weights, tokens[j], sums[r][j]); });
        });
        ahead.step();
    }
}

template <int TOKENS>
INLINE void finish(const Product& p, const Vec sums[PANEL_ROWS][TOKENS], int64_t token, int64_t row, int rows) {
    float result[4][8];
    if constexpr (TOKENS == 4 && PANEL_ROWS == 6) {
        Vec left[4][4], right[4][2];
        unroll<4>([&](auto j) LAMBDA {
            unroll<4>([&](auto r) LAMBDA { left[j][r] = sums[r][j]; });
            unroll<2>([&](auto r) LAMBDA { right[j][r] = sums[4 + r][j]; });
        });
        sum_tile<4>(left, result[0], 8);
        sum_tile<2>(right, result[0] + 4, 8);
    } else {
        for (int j = 0; j < TOKENS; j++)
            for (int r = 0; r < PANEL_ROWS; r++) result[j][r] = sum(sums[r][j]);
    }
    if (p.scale)
        for (int j = 0; j < TOKENS; j++)
            for (int r = 0; r < rows; r++) result[j][r] *= p.unit * p.scale[row + r];
    for (int j = 0; j < TOKENS; j++) {
        float* out = p.out + (token + j) * p.n + row;
        if (rows == PANEL_ROWS)
            memcpy(out, result[j], PANEL_ROWS * sizeof(float));
        else
            memcpy(out, result[j], rows * sizeof(float));
    }
}

template <class U, int TOKENS>
void block(const Product& p, Panel<U> panel, const typename U::Element* x, int64_t depth, bool first, bool last,
           float* carried, int64_t token, int64_t row, int rows, Ahead& ahead) {
    // Unrolled by hand: where the compiler does it later, the sums go through memory.
    Vec sums[PANEL_ROWS][TOKENS];
    auto each = [&](auto body) LAMBDA {
        unroll<PANEL_ROWS>([&](auto r) LAMBDA { unroll<TOKENS>([&](auto j) LAMBDA { body(r, j); }); });
    };
    if (first)
        each([&](auto r, auto j) LAMBDA { sums[r][j] = Vec{}; });
    else
        each([&](auto r, auto j) LAMBDA { sums[r][j] = load(carried + (r * TOKENS + j) * LANES); });
    multiply<U, TOKENS>(panel, x, depth / U::STEP, sums, ahead);
    if (last) return finish<TOKENS>(p, sums, token, row, rows);
    each([&](auto r, auto j) LAMBDA { store(carried + (r * TOKENS + j) * LANES, sums[r][j]); });
}

// Tokens [begin, end), interleaved in blocks of TILE_TOKENS, times one panel of weight rows.
template <class U, class W>
void panel_product(const Product& p, const typename U::Element* x, W w, int64_t begin, int64_t end, int64_t row,
                   typename U::Element* memory, float* carried) {
    constexpr int64_t MOST_DEPTH = PANEL_DEPTH_BYTES / sizeof(typename U::Element);
    constexpr int64_t STEP_LINES = ceil_div(PANEL_ROWS * U::STEP * element_bytes(W{}), LINE_BYTES);
    const int64_t padded = round_up(p.k, U::STEP);
    const int64_t depth = round_up(ceil_div(padded, ceil_div(padded, MOST_DEPTH)), U::STEP);
    const int rows = p.n - row < PANEL_ROWS ? p.n - row : PANEL_ROWS;
    const W next = w + (row + rows) * p.k;
    const int64_t following = p.n - row - rows < PANEL_ROWS ? p.n - row - rows : PANEL_ROWS;
    const int lines = ceil_div(STEP_LINES, ceil_div(end - begin, TILE_TOKENS));
    Ahead ahead{{address(next), address(next + following * p.k)}, lines};
    for (int64_t start = 0; start < padded; start += depth) {
        const int64_t here = padded - start < depth ? padded - start : depth;
        const bool first = start == 0, last = start + here == padded;
        const Panel<U> panel = convert<U>(w + row * p.k, p.k, start, here, rows, memory);
        float* sums = carried;
        for (int64_t t = begin; t < end; t += TILE_TOKENS, sums += PANEL_ROWS * TILE_TOKENS * LANES) {
            const int tokens = end - t < TILE_TOKENS ? end - t : TILE_TOKENS;
            const typename U::Element* xt = x + (t - begin) * padded + start * tokens;
            switch (tokens) {
                case 1: block<U, 1>(p, panel, xt, here, first, last, sums, t, row, rows, ahead); break;
                case 2: block<U, 2>(p, panel, xt, here, first, last, sums, t, row, rows, ahead); break;
                case 3: block<U, 3>(p, panel, xt, here, first, last, sums, t, row, rows, ahead); break;
                case 4: block<U, 4>(p, panel, xt, here, first, last, sums, t, row, rows, ahead); break;
            }
        }
    }
}

template <class U, class W> void many_tokens(const Product& p, W w, int threads) {
    using Element = typename U::Element;
    constexpr int64_t PANEL_FLOATS = PANEL_ROWS * PANEL_DEPTH_BYTES / sizeof(float);
    thread_local Scratch packed;
    const int64_t padded = round_up(p.k, U::STEP), token_bytes = padded * sizeof(Element);
    // The tokens of a block stay in L2 while all panels pass.
    int64_t block = l2_bytes() * 6 / 10 / token_bytes / TILE_TOKENS * TILE_TOKENS;
    block = block < 32 ? 32 : block;
    block = round_up(ceil_div(p.m, ceil_div(p.m, block)), TILE_TOKENS);
    for (int64_t begin = 0; begin < p.m; begin += block) {
        const int64_t end = begin + block < p.m ? begin + block : p.m;
        const int64_t tiles = ceil_div(end - begin, TILE_TOKENS);
        Element* x = (Element*)packed.floats(block * token_bytes / sizeof(float));
        const int64_t tiles_at_once = 1 + SERIAL_PRODUCTS / (TILE_TOKENS * padded);
        parallel_for(tiles, tiles_at_once, threads, [&](int64_t tile, int64_t last) {
            for (; tile < last; tile++) {
                const int64_t token = begin + tile * TILE_TOKENS;
                const int tokens = end - token < TILE_TOKENS ? end - token : TILE_TOKENS;
                interleave<U>(p.x + token * p.k, p.k, tokens, x + tile * TILE_TOKENS * padded);
            }
        });
        const int64_t panels = ceil_div(p.n, PANEL_ROWS);
        const int64_t grain =
            p.m * p.n * p.k <= SERIAL_PRODUCTS ? panels : ceil_div(panels, threads * PIECES_PER_THREAD);
        parallel_for(panels, grain, threads, [&](int64_t panel, int64_t last) {
            thread_local Scratch scratch;
            float* memory = scratch.floats(PANEL_FLOATS + PANEL_ROWS * tiles * TILE_TOKENS * LANES);
            for (; panel < last; panel++)
                panel_product<U>(p, x, w, begin, end, panel * PANEL_ROWS, (Element*)memory, memory + PANEL_FLOATS);
        });
    }
}

template <class U, class W> void linear_by(const Product& p, W w, int threads) {
    if (p.m <= U::DIRECT_TOKENS) return few_tokens<U>(p, w, threads);
    many_tokens<U>(p, w, threads);
}

template <class W> void linear(const Product& p, W w, bool bf16_tokens, int threads) {
#if defined(HAS_BF16_UNITS)
    if (bf16_tokens) return linear_by<Bf16Units>(p, w, threads);
#endif
    linear_by<Fp32Units>(p, w, threads);
}

}  // namespace

void linear_rows(const PackedWeight& w, const float* x, float* out, int64_t m, int threads) {
    if (m == 0) return;
#if defined(HAS_TILE_UNITS)
    if (w.bf16_tokens && has_tile_units()) return linear_by_tiles(w, x, out, m, threads);
#endif
    const float unit = w.format == FP8 && !w.bf16_tokens ? E4M3_UNIT : 1.0f;
    const Product p{x, (const float*)w.scale, out, m, w.n, w.k, unit};
    switch (w.format) {
        case FP32: return linear_by<Fp32Units>(p, (const float*)w.data, threads);
        case BF16: return linear(p, (const bf16*)w.data, w.bf16_tokens, threads);
        case FP8: return linear(p, (const e4m3*)w.data, w.bf16_tokens, threads);
        case SPARSE24: return linear(p, Sparse24{(const bf16*)w.data, w.kept}, w.bf16_tokens, threads);
        default: return linear_integer(w, x, out, m, threads);
    }
}

struct LinearArguments {
    const PackedWeight* weight;  // [n, k]
    const float* x;              // [rows, k]
    float* out;                  // [rows, n]
    Rows rows;
};

EXPORT void membound_linear(const LinearArguments* a, int threads) {
    linear_rows(*a->weight, a->x, a->out, a->rows, threads);
}

// Whether tokens may be rounded to bf16 for units that multiply such numbers.
EXPORT int membound_bf16_units() {
#if defined(HAS_BF16_UNITS)
    return 1;
#else
    return 0;
#endif
}

// Whether matrix units multiply (tile_units.h).
EXPORT int membound_tile_units() {
#if defined(HAS_TILE_UNITS)
    return has_tile_units();
#else
    return 0;
#endif
}
