// y = x W^T with W stored row by row in fp32, bf16, fp8 or half sparse: how close to the memory (few tokens) or the
// fp32 multiply units (many tokens) can a plain layout get?
//
// Every output element is accumulated in the same order whatever m is: LANES partial sums over k, one fused
// multiply-add each LANES elements, then `sum`. Only the blocking differs:
//   m <= DIRECT_TOKENS  each weight is read once, converted in a register and used for all tokens;
//   more tokens         PANEL_ROWS weight rows are converted to fp32 in L1 and multiplied by blocks of tokens.

#include <unistd.h>

#include "batch.h"
#include "threads.h"
#include "vector.h"
#include "weight.h"

namespace {

constexpr int DIRECT_TOKENS = 8;
constexpr int TILE_TOKENS = 4;
constexpr int PANEL_ROWS = REGISTERS == 32 ? 6 : 3;  // 4 x 6 (4 x 3) sums, the rows or tokens of a step, one spare
constexpr int64_t PANEL_DEPTH = 1024;                // elements of k in a panel: 24 kB of fp32, half of an L1
constexpr int64_t BYTES_AHEAD = 512;                 // of a stream of weights
constexpr int STEPS_AHEAD = 6;                       // tokens come from L2, this many vectors early
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

// Two of each four numbers, in bf16, and a bit for each of the four that says which.
struct Sparse24 {
    const bf16* values;
    const uint8_t* kept;
    int64_t at = 0;  // the element that it points at, a multiple of LANES

    Sparse24 operator+(int64_t elements) const { return {values, kept, at + elements}; }
};

using ::load, ::load_partial;

INLINE Vec load(Sparse24 p) {
    const bf16* values = p.values + p.at / 2;
#if defined(__AVX512F__)
    uint16_t mask;
    memcpy(&mask, p.kept + p.at / 8, 2);
    const __m512i widened = _mm512_cvtepu16_epi32(
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)values)));
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

INLINE Vec load_partial(Sparse24, int) { return Vec{}; }  // rows are whole vectors

template <class T> INLINE const char* address(const T* p) { return (const char*)p; }
INLINE const char* address(Sparse24 p) { return (const char*)(p.values + p.at / 2); }
template <class T> constexpr size_t element_bytes(const T*) { return sizeof(T); }
constexpr size_t element_bytes(Sparse24) { return 1; }

int64_t l2_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
    static const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (bytes > 0) return bytes;
#endif
    return 1 << 20;
}

// x [tokens, k] to [ceil(k / LANES), tokens, LANES], zeros behind the end of k.
void interleave(const float* x, int64_t k, int tokens, float* packed) {
    const int64_t whole = k / LANES;
    for (int64_t step = 0; step < whole; step++)
        for (int j = 0; j < tokens; j++, packed += LANES) store(packed, load(x + j * k + step * LANES));
    if (k % LANES)
        for (int j = 0; j < tokens; j++, packed += LANES)
            store(packed, load_partial(x + j * k + whole * LANES, k % LANES));
}

// W points at weights: const float*, const bf16*, const e4m3*, Sparse24. Rows `row` + r * `apart`, for r < ROWS.
template <class W, int TOKENS, int ROWS>
void direct_rows(const Product& p, const float* x /* interleaved */, W w, int64_t row, int64_t apart) {
    constexpr int64_t BYTES = element_bytes(W{}) * LANES;
    constexpr int VECTORS = BYTES < 64 ? 64 / BYTES : 1;  // in a cache line
    Vec sums[ROWS][TOKENS] = {};
    w = w + row * p.k;
    const int64_t whole = p.k / LANES * LANES, lines = p.k / (VECTORS * LANES) * (VECTORS * LANES);
    auto add = [&](int r, Vec weights, const float* tokens) LAMBDA {
        for (int j = 0; j < TOKENS; j++) sums[r][j] = fma(weights, load(tokens + j * LANES), sums[r][j]);
    };
    int64_t i = 0;
    for (; i < lines; i += VECTORS * LANES, x += VECTORS * TOKENS * LANES)
        for (int r = 0; r < ROWS; r++) {
            const W here = w + (r * apart * p.k + i);
            __builtin_prefetch(address(here) + BYTES_AHEAD, 0, 3);
            for (int v = 0; v < VECTORS; v++) add(r, load(here + v * LANES), x + v * TOKENS * LANES);
        }
    for (; i < whole; i += LANES, x += TOKENS * LANES)
        for (int r = 0; r < ROWS; r++) add(r, load(w + (r * apart * p.k + i)), x);
    if (whole < p.k)
        for (int r = 0; r < ROWS; r++) add(r, load_partial(w + (r * apart * p.k + whole), p.k - whole), x);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < TOKENS; j++) p.put(j, row + r * apart, sum(sums[r][j]));
}

template <class W, int TOKENS> void direct(const Product& p, const float* x, W w, int threads) {
    // A core fills its share of the bandwidth by several long streams: rows that lie far apart, each going on in the
    // row behind it. Hardware follows such streams up to the end of a page, so what comes next is asked for here.
    constexpr int SUMS = REGISTERS == 32 ? 24 : 12;
    constexpr int ROWS = SUMS / TOKENS < 8 ? SUMS / TOKENS : 8;
    const int64_t grain = p.m * p.n * p.k <= SERIAL_PRODUCTS
                              ? p.n
                              : round_up(ceil_div(p.n, threads * PIECES_PER_THREAD), ROWS * 4);
    parallel_for(p.n, grain, threads, [&](int64_t row, int64_t last) {
        const int64_t apart = (last - row) / ROWS, rest = row + apart * ROWS;
        for (int64_t i = 0; i < apart; i++) direct_rows<W, TOKENS, ROWS>(p, x, w, row + i, apart);
        for (row = rest; row < last; row++) direct_rows<W, TOKENS, 1>(p, x, w, row, 0);
    });
}

template <class W> void few_tokens(const Product& p, W w, int threads) {
    thread_local Scratch scratch;
    const float* x = p.x;
    if (p.m > 1 || p.k % LANES) {
        float* packed = scratch.floats(round_up(p.k, LANES) * p.m);
        interleave(p.x, p.k, p.m, packed);
        x = packed;
    }
    switch (p.m) {
        case 1: return direct<W, 1>(p, x, w, threads);
        case 2: return direct<W, 2>(p, x, w, threads);
        case 3: return direct<W, 3>(p, x, w, threads);
        case 4: return direct<W, 4>(p, x, w, threads);
        case 5: return direct<W, 5>(p, x, w, threads);
        case 6: return direct<W, 6>(p, x, w, threads);
        case 7: return direct<W, 7>(p, x, w, threads);
        case 8: return direct<W, 8>(p, x, w, threads);
    }
}

// Elements [start, start + depth) of `rows` weight rows to fp32 [depth / LANES, PANEL_ROWS, LANES], zero padded.
template <class W> void convert(W w, int64_t k, int64_t start, int64_t depth, int rows, float* panel) {
    const int64_t end = start + depth < k ? start + depth : k;
    const int64_t whole = start + (end - start) / LANES * LANES;
    for (int r = 0; r < PANEL_ROWS; r++) {
        float* to = panel + r * LANES;
        if (r >= rows) {
            for (int64_t i = 0; i < depth; i += LANES, to += PANEL_ROWS * LANES) store(to, Vec{});
            continue;
        }
        const W from = w + r * k;
        for (int64_t i = start; i < whole; i += LANES, to += PANEL_ROWS * LANES) store(to, load(from + i));
        if (whole < end) store(to, load_partial(from + whole, end - whole));
    }
}

// sums [PANEL_ROWS, TOKENS] += the products of `steps` vectors of a panel and of an interleaved block of tokens.
template <int TOKENS>
INLINE void multiply(const float* panel, const float* x, int64_t steps, Vec sums[PANEL_ROWS][TOKENS], Prefetch& ahead) {
    for (int64_t s = 0; s < steps; s++, panel += PANEL_ROWS * LANES, x += TOKENS * LANES) {
        for (int j = 0; j < TOKENS; j++) __builtin_prefetch(x + (STEPS_AHEAD * TOKENS + j) * LANES, 0, 3);
        Vec tokens[TOKENS];
        for (int j = 0; j < TOKENS; j++) tokens[j] = load(x + j * LANES);
        for (int r = 0; r < PANEL_ROWS; r++) {
            const Vec weights = load(panel + r * LANES);
            for (int j = 0; j < TOKENS; j++) sums[r][j] = fma(weights, tokens[j], sums[r][j]);
        }
        ahead.step();
    }
}

template <int TOKENS>
INLINE void finish(const Product& p, const Vec sums[PANEL_ROWS][TOKENS], int64_t token, int64_t row, int rows) {
    float result[4][8];
    if constexpr (TOKENS == 4 && PANEL_ROWS == 6) {
        Vec left[4][4], right[4][2];
        for (int j = 0; j < 4; j++) {
            for (int r = 0; r < 4; r++) left[j][r] = sums[r][j];
            for (int r = 4; r < 6; r++) right[j][r - 4] = sums[r][j];
        }
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

template <int TOKENS>
void block(const Product& p, const float* panel, const float* x, int64_t depth, bool first, bool last, float* carried,
           int64_t token, int64_t row, int rows, Prefetch& ahead) {
    Vec sums[PANEL_ROWS][TOKENS] = {};
    if (!first)
        for (int r = 0; r < PANEL_ROWS; r++)
            for (int j = 0; j < TOKENS; j++) sums[r][j] = load(carried + (r * TOKENS + j) * LANES);
    multiply<TOKENS>(panel, x, depth / LANES, sums, ahead);
    if (last) return finish<TOKENS>(p, sums, token, row, rows);
    for (int r = 0; r < PANEL_ROWS; r++)
        for (int j = 0; j < TOKENS; j++) store(carried + (r * TOKENS + j) * LANES, sums[r][j]);
}

// Tokens [begin, end), interleaved in blocks of TILE_TOKENS, times one panel of weight rows.
template <class W>
void panel_product(const Product& p, const float* x, W w, int64_t begin, int64_t end, int64_t row,
                   float* panel, float* carried) {
    const int64_t padded = round_up(p.k, LANES);
    const int64_t depth = round_up(ceil_div(padded, ceil_div(padded, PANEL_DEPTH)), LANES);
    const int rows = p.n - row < PANEL_ROWS ? p.n - row : PANEL_ROWS;
    const W next = w + (row + rows) * p.k;
    const int64_t following = p.n - row - rows < PANEL_ROWS ? p.n - row - rows : PANEL_ROWS;
    Prefetch ahead{address(next), address(next + following * p.k)};
    for (int64_t start = 0; start < padded; start += depth) {
        const int64_t here = padded - start < depth ? padded - start : depth;
        const bool first = start == 0, last = start + here == padded;
        convert(w + row * p.k, p.k, start, here, rows, panel);
        float* sums = carried;
        for (int64_t t = begin; t < end; t += TILE_TOKENS, sums += PANEL_ROWS * TILE_TOKENS * LANES) {
            const int tokens = end - t < TILE_TOKENS ? end - t : TILE_TOKENS;
            const float* xt = x + (t - begin) * padded + start * tokens;
            switch (tokens) {
                case 1: block<1>(p, panel, xt, here, first, last, sums, t, row, rows, ahead); break;
                case 2: block<2>(p, panel, xt, here, first, last, sums, t, row, rows, ahead); break;
                case 3: block<3>(p, panel, xt, here, first, last, sums, t, row, rows, ahead); break;
                case 4: block<4>(p, panel, xt, here, first, last, sums, t, row, rows, ahead); break;
            }
        }
    }
}

template <class W> void many_tokens(const Product& p, W w, int threads) {
    thread_local Scratch packed;
    const int64_t padded = round_up(p.k, LANES);
    // The tokens of a block stay in L2 while all panels pass.
    int64_t block = l2_bytes() * 6 / 10 / (padded * 4) / TILE_TOKENS * TILE_TOKENS;
    block = block < 32 ? 32 : block;
    block = round_up(ceil_div(p.m, ceil_div(p.m, block)), TILE_TOKENS);
    for (int64_t begin = 0; begin < p.m; begin += block) {
        const int64_t end = begin + block < p.m ? begin + block : p.m;
        const int64_t tiles = ceil_div(end - begin, TILE_TOKENS);
        float* x = packed.floats(block * padded);
        const int64_t tiles_at_once = 1 + SERIAL_PRODUCTS / (TILE_TOKENS * padded);
        parallel_for(tiles, tiles_at_once, threads, [&](int64_t tile, int64_t last) {
            for (; tile < last; tile++) {
                const int64_t token = begin + tile * TILE_TOKENS;
                const int tokens = end - token < TILE_TOKENS ? end - token : TILE_TOKENS;
                interleave(p.x + token * p.k, p.k, tokens, x + tile * TILE_TOKENS * padded);
            }
        });
        const int64_t panels = ceil_div(p.n, PANEL_ROWS);
        const int64_t grain =
            p.m * p.n * p.k <= SERIAL_PRODUCTS ? panels : ceil_div(panels, threads * PIECES_PER_THREAD);
        parallel_for(panels, grain, threads, [&](int64_t panel, int64_t last) {
            thread_local Scratch scratch;
            float* weights = scratch.floats(PANEL_ROWS * (PANEL_DEPTH + tiles * TILE_TOKENS * LANES));
            for (; panel < last; panel++)
                panel_product(p, x, w, begin, end, panel * PANEL_ROWS, weights, weights + PANEL_ROWS * PANEL_DEPTH);
        });
    }
}

template <class W> void linear(const Product& p, W w, int threads) {
    if (p.m <= DIRECT_TOKENS) return few_tokens(p, w, threads);
    many_tokens(p, w, threads);
}

}  // namespace

void linear_rows(const PackedWeight& w, const float* x, float* out, int64_t m, int threads) {
    const Product p{x, (const float*)w.scale, out, m, w.n, w.k, w.format == FP8 ? E4M3_UNIT : 1.0f};
    switch (w.format) {
        case FP32: return linear(p, (const float*)w.data, threads);
        case BF16: return linear(p, (const bf16*)w.data, threads);
        case FP8: return linear(p, (const e4m3*)w.data, threads);
        case SPARSE24: return linear(p, Sparse24{(const bf16*)w.data, w.kept}, threads);
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
