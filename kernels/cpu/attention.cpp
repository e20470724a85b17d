// Grouped-query attention over paged K and V in any of their formats, for any mix of prefill, decode and verify.
//
// Few rows of q are vectors along head_dim, whose products are summed across lanes; of COLUMN_ROWS and more, LANES lie
// side by side, so that a sum of theirs stays in its lane, and is added up in the same order.
// A context is cut into spans of SPAN_TOKENS at fixed positions. Within a span the softmax is online over tiles of
// TILE_TOKENS; spans are merged from the first to the last. Nothing in that order depends on what else is in the
// batch or on how many threads run, so a query token has the same bits alone, in a batch, and as part of a draft.
// Threads share sequences, kv heads and blocks of queries; where those are few (one long sequence) also spans.

#include <cmath>
#include <type_traits>
#include <vector>

#include "batch.h"
#include "kv.h"
#include "threads.h"
#include "vector.h"

namespace {

constexpr int TILE_TOKENS = 64;  // as many as the bits of a mask
constexpr int SPAN_TOKENS = 128;
constexpr int BLOCK_ROWS = 128;  // rows (query tokens x heads of the group) that share one conversion of K and V
constexpr int ROW_TILE = 4;
constexpr int DIRECT_ROWS = REGISTERS == 32 ? 8 : 2;  // up to which K and V need no fp32 copies
constexpr int COLUMN_ROWS = LANES * 3 / 4;  // from so many rows on, lanes are rows
constexpr int COLUMN_VECTORS = 2;
constexpr int COLUMN_TOKENS = REGISTERS == 32 ? 2 : 1;
constexpr int DIM_VECTORS = REGISTERS == 32 ? 4 : 2;
constexpr int64_t SERIAL_PRODUCTS = 1 << 17;

struct Arguments {
    const float* q;  // [tokens, heads, head_dim]
    const Batch* batch;
    float* out;  // [tokens, heads, head_dim], or for `membound_attention_scores` [sequences, kv_heads, out_stride]
    const float* sinks;  // [heads], logits that join the softmax with values of zero, or null
    KvBlocks kv;
    int64_t heads;
    int64_t window;  // a token sees itself and the window - 1 before it
    int64_t queries, out_stride;  // for scores: how many of a sequence's last tokens count
    float scale;
    float softcap;               // scores become softcap * tanh(score / softcap); 0: they stay
    const int32_t* head_tables;  // [sequences, kv_heads, head_table_stride], the blocks of each head; null: the batch's
    int64_t head_table_stride;
    int64_t added;  // scores are added to what is in `out` [seats, kv_heads, out_stride] for a sequence's seat

    const int32_t* table(int64_t sequence, int64_t head) const {
        return head_tables ? head_tables + (sequence * kv.kv_heads + head) * head_table_stride
                           : batch->block_table + sequence * batch->table_stride;
    }
};

// What the new token `query` of a sequence sees, of all its tokens.
struct Sight {
    int64_t committed;  // tokens before the new ones
    int64_t oldest, newest;  // the range that it may see
    uint64_t tree;  // of the new tokens, from `committed` on
    bool causal;

    Sight(const Arguments& a, int64_t sequence, int64_t query) {
        const int64_t first = a.batch->query_start[sequence], queries = a.batch->query_start[sequence + 1] - first;
        committed = a.batch->context_len[sequence] - queries;
        causal = !a.batch->tree;
        newest = committed + query;
        int64_t position = newest;
        if (a.batch->tree) {
            tree = a.batch->tree[first + query];
            // In a tree, new tokens lie in the order of the batch; how far apart two are is their number of ancestors.
            position = committed + __builtin_popcountll(tree) - 1;
            for (int64_t extra = __builtin_popcountll(tree) - a.window; extra > 0; extra--) tree &= tree - 1;
        }
        oldest = position - a.window + 1 > 0 ? position - a.window + 1 : 0;
        if (!causal && oldest > committed) oldest = committed;
    }

    // Of the 64 tokens from `start` on, a bit each.
    uint64_t mask(int64_t start) const {
        uint64_t seen = ones(newest + 1 - start);
        if (!causal) {
            const int64_t before = committed - start;
            seen = ones(before);
            if (before > -64 && before < 64) seen |= before >= 0 ? tree << before : tree >> -before;
        }
        return seen & ~ones(oldest - start);
    }

    static uint64_t ones(int64_t count) {
        return count <= 0 ? 0 : count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    }
};

// Queries [first, first + count) of a sequence with one kv head, over the spans [span, last_span) of the context.
struct Task {
    int32_t sequence, kv_head, first, count, span, last_span;
    float* partial;  // where each span's state goes when spans are shared out; null when the task merges them itself
};

// The softmax of some rows so far: maximum and sum of the scores' exponentials, and the weighted sum of V.
struct State {
    float *maximum, *total;  // [rows]
    float* sums;             // [rows, dim]

    static int64_t floats(int64_t rows, int64_t dim) { return round_up(rows, LANES) * 2 + rows * dim; }
    State(float* memory, int64_t rows)
        : maximum(memory), total(memory + round_up(rows, LANES)), sums(memory + round_up(rows, LANES) * 2) {}
    void clear(int64_t rows, int64_t dim) {
        for (int64_t r = 0; r < round_up(rows, LANES); r++) maximum[r] = -INFINITY, total[r] = 0;
        memset(sums, 0, rows * dim * sizeof(float));
    }
};

void merge(State into, State span, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        if (span.maximum[r] == -INFINITY) continue;
        const float maximum = into.maximum[r] > span.maximum[r] ? into.maximum[r] : span.maximum[r];
        const Vec old_weight = exp(broadcast(into.maximum[r] - maximum));
        const Vec new_weight = exp(broadcast(span.maximum[r] - maximum));
        into.total[r] = fma(broadcast(into.total[r]), old_weight, broadcast(span.total[r]) * new_weight)[0];
        into.maximum[r] = maximum;
        float *a = into.sums + r * dim, *b = span.sums + r * dim;
        for (int64_t i = 0; i < dim; i += LANES) store(a + i, fma(load(a + i), old_weight, load(b + i) * new_weight));
    }
}

// scores [ROWS, 4] = rows of q [ROWS, dim] times 4 tokens of k [4, dim].
template <int ROWS> INLINE void scores_of(const float* q, const float* k, int64_t dim, float* scores) {
    Vec sums[4][4] = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        Vec rows[ROWS];
        for (int r = 0; r < ROWS; r++) rows[r] = load(q + r * dim + i);
        for (int t = 0; t < 4; t++) {
            const Vec token = load(k + t * dim + i);
            for (int r = 0; r < ROWS; r++) sums[r][t] = fma(rows[r], token, sums[r][t]);
        }
    }
    if (ROWS == 4) return sum_tile<4>(sums, scores, TILE_TOKENS);
    float tile[16];
    sum_tile<4>(sums, tile, 4);
    for (int r = 0; r < ROWS; r++) memcpy(scores + r * TILE_TOKENS, tile + r * 4, 4 * sizeof(float));
}

// sums [ROWS, dim] += weights [ROWS, count] times v [count, dim].
template <int ROWS, int VECTORS>
INLINE void weigh(const float* weights, const float* v, int count, int64_t dim, float* sums) {
    Vec acc[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECTORS; i++) acc[r][i] = load(sums + r * dim + i * LANES);
    for (int t = 0; t < count; t++) {
        Vec value[VECTORS];
        for (int i = 0; i < VECTORS; i++) value[i] = load(v + t * dim + i * LANES);
        for (int r = 0; r < ROWS; r++) {
            const Vec weight = broadcast(weights[r * TILE_TOKENS + t]);
            for (int i = 0; i < VECTORS; i++) acc[r][i] = fma(weight, value[i], acc[r][i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECTORS; i++) store(sums + r * dim + i * LANES, acc[r][i]);
}

// Row r of scores: `softcap` applied, and -inf where seen[r] has no bit.
INLINE void mask_scores(float* row, uint64_t seen, float softcap) {
    if (softcap > 0)
        for (int t = 0; t < TILE_TOKENS; t += LANES)
            store(row + t, tanh(load(row + t) * broadcast(1.0f / softcap)) * broadcast(softcap));
    if (seen == ~uint64_t{0}) return;
    for (int t = 0; t < TILE_TOKENS; t++) row[t] = seen >> t & 1 ? row[t] : -INFINITY;
}

// Scores [ROWS, TILE_TOKENS] of a tile become weights, row r seeing the tokens whose bits are set in seen[r] (possibly
// none); what the rows have summed so far shrinks to the new maximum.
template <int ROWS>
INLINE void softmax_rows(float* scores, const uint64_t* seen, int64_t dim, float softcap, float* maximum, Vec* totals,
                         float* sums) {
    for (int r = 0; r < ROWS; r++) {
        float* row = scores + r * TILE_TOKENS;
        if (!seen[r]) {
            memset(row, 0, TILE_TOKENS * sizeof(float));
            continue;
        }
        mask_scores(row, seen[r], softcap);
        Vec top = load(row);
        for (int t = LANES; t < TILE_TOKENS; t += LANES) {
            const Vec s = load(row + t);
            top = s > top ? s : top;
        }
        const float highest = max(top);
        if (highest > maximum[r]) {
            const Vec shrink = exp(broadcast(maximum[r] - highest));
            maximum[r] = highest;
            totals[r] *= shrink;
            for (int64_t i = 0; i < dim; i += LANES) store(sums + r * dim + i, load(sums + r * dim + i) * shrink);
        }
        for (int t = 0; t < TILE_TOKENS; t += LANES) {
            const Vec weight = exp(load(row + t) - broadcast(maximum[r]));
            store(row + t, weight);
            totals[r] += weight;
        }
    }
}

// One tile of `count` tokens, in fp32, for ROWS rows.
template <int ROWS>
void attend_rows(const float* q, const float* k, const float* v, const uint64_t* seen, int count, int64_t dim,
                 float softcap, float* maximum, Vec* totals, float* sums) {
    alignas(64) float scores[ROWS * TILE_TOKENS];
    for (int t = 0; t < count; t += 4) scores_of<ROWS>(q, k + t * dim, dim, scores + t);
    softmax_rows<ROWS>(scores, seen, dim, softcap, maximum, totals, sums);
    int64_t i = 0;
    for (; i + DIM_VECTORS * LANES <= dim; i += DIM_VECTORS * LANES)
        weigh<ROWS, DIM_VECTORS>(scores, v + i, count, dim, sums + i);
    for (; i < dim; i += LANES) weigh<ROWS, 1>(scores, v + i, count, dim, sums + i);
}

// Many rows lie side by side, q as [dim, VECTORS * LANES], so that neither a score nor a maximum is summed up across
// lanes.
//
// sums = what lanes LANE, LANE + APART, ... of the vectors of dim add to the scores of TOKENS tokens, in the order in
// which `scores_of` sums them.
template <int LANE, int APART, int VECTORS, int TOKENS, int DIM>
INLINE void lane_sums(const float* q, const float* k, int64_t dim, Vec sums[VECTORS][TOKENS]) {
    auto each = [&](auto body) LAMBDA {
        unroll<TOKENS>([&](auto t) LAMBDA { unroll<VECTORS>([&](auto v) LAMBDA { body(v, t); }); });
    };
    if constexpr (APART == LANES) {
        const int64_t end = DIM ? DIM : dim;
        each([&](auto v, auto t) LAMBDA { sums[v][t] = Vec{}; });
        for (int64_t i = LANE; i < end; i += LANES) {
            Vec rows[VECTORS];
            unroll<VECTORS>([&](auto v) LAMBDA { rows[v] = load(q + (i * VECTORS + v) * LANES); });
            each([&](auto v, auto t) LAMBDA { sums[v][t] = fma(rows[v], broadcast(k[t * end + i]), sums[v][t]); });
        }
    } else {
        Vec others[VECTORS][TOKENS];
        lane_sums<LANE, 2 * APART, VECTORS, TOKENS, DIM>(q, k, dim, sums);
        lane_sums<LANE + APART, 2 * APART, VECTORS, TOKENS, DIM>(q, k, dim, others);
        each([&](auto v, auto t) LAMBDA { sums[v][t] += others[v][t]; });
    }
}

// scores [count, VECTORS * LANES] of `count` tokens and so many rows; up to 3 tokens more.
template <int VECTORS, int DIM>
void column_scores(const float* q, const float* k, int count, int64_t dim, float* scores) {
    constexpr int TOKENS = COLUMN_TOKENS * COLUMN_VECTORS / VECTORS;
    for (int t = 0; t < count; t += TOKENS) {
        Vec sums[VECTORS][TOKENS];
        lane_sums<0, 1, VECTORS, TOKENS, DIM>(q, k + t * (DIM ? DIM : dim), dim, sums);
        for (int j = 0; j < TOKENS; j++)
            for (int v = 0; v < VECTORS; v++) store(scores + ((t + j) * VECTORS + v) * LANES, sums[v][j]);
    }
}

// Scores of LANES rows, a token's `width` behind those of the one before, become weights, of the first `count` tokens.
// What the rows have summed so far is to shrink to the new maximum.
void softmax_columns(float* scores, int64_t width, const uint64_t* seen, int count, float softcap, float* maximum,
                     Vec* totals, float* shrink) {
    UintVec halves[2];
    uint64_t all = ~uint64_t{0};
    for (int r = 0; r < LANES; r++) {
        halves[0][r] = (uint32_t)seen[r], halves[1][r] = seen[r] >> 32;
        all &= seen[r];
    }
    const bool some_unseen = ~all & Sight::ones(count);
    const Vec before = load(maximum);
    Vec top = before;
    for (int t = 0; t < count; t++) {
        Vec s = load(scores + t * width);
        if (softcap > 0) s = tanh(s * broadcast(1.0f / softcap)) * broadcast(softcap);
        if (some_unseen) s = (IntVec)(halves[t / 32] << (31 - t % 32)) < IntVec{} ? s : broadcast(-INFINITY);
        if (softcap > 0 || some_unseen) store(scores + t * width, s);
        top = s > top ? s : top;
    }
    store(maximum, top);
    const Vec highest = top == broadcast(-INFINITY) ? Vec{} : top;  // of a row that has seen nothing, all weights are 0
    const Vec less = exp(before - highest);
    store(shrink, less);
    for (int lane = 0; lane < LANES; lane++) {
        Vec total = totals[lane] * less;
        for (int t = lane; t < count; t += LANES) {
            const Vec weight = exp(load(scores + t * width) - highest);
            store(scores + t * width, weight);
            total += weight;
        }
        totals[lane] = total;
    }
}

// sums [ROWS, dim] = `shrink` [ROWS] of them + weights [count, ROWS], `width` apart, times v [count, dim].
template <int ROWS, int VECTORS>
INLINE void weigh_columns(const float* weights, int64_t width, const float* v, int count, int64_t dim,
                          const float* shrink, float* sums) {
    Vec acc[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECTORS; i++) acc[r][i] = load(sums + r * dim + i * LANES) * broadcast(shrink[r]);
    for (int t = 0; t < count; t++) {
        Vec value[VECTORS];
        for (int i = 0; i < VECTORS; i++) value[i] = load(v + t * dim + i * LANES);
        for (int r = 0; r < ROWS; r++) {
            const Vec weight = broadcast(weights[t * width + r]);
            for (int i = 0; i < VECTORS; i++) acc[r][i] = fma(weight, value[i], acc[r][i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECTORS; i++) store(sums + r * dim + i * LANES, acc[r][i]);
}

template <int ROWS>
void weigh_rows(const float* weights, int64_t width, const float* v, int count, int64_t dim, const float* shrink,
                float* sums) {
    int64_t i = 0;
    for (; i + DIM_VECTORS * LANES <= dim; i += DIM_VECTORS * LANES)
        weigh_columns<ROWS, DIM_VECTORS>(weights, width, v + i, count, dim, shrink, sums + i);
    for (; i < dim; i += LANES) weigh_columns<ROWS, 1>(weights, width, v + i, count, dim, shrink, sums + i);
}

// One tile of tokens, in fp32, for VECTORS x LANES rows, of which there are `rows`.
template <int VECTORS>
void attend_columns(const float* q, const float* k, const float* v, const uint64_t* seen, int rows,
                    int64_t dim, float softcap, float* maximum, Vec* totals, float* sums) {
    alignas(64) float scores[TILE_TOKENS * VECTORS * LANES], shrink[VECTORS * LANES];
    uint64_t any = 0;
    for (int r = 0; r < rows; r++) any |= seen[r];
    if (!any) return;
    const int count = 64 - __builtin_clzll(any);
    auto score = column_scores<VECTORS, 0>;
    if (dim == 64) score = column_scores<VECTORS, 64>;
    if (dim == 128) score = column_scores<VECTORS, 128>;
    score(q, k, count, dim, scores);
    for (int i = 0; i < VECTORS; i++)
        softmax_columns(scores + i * LANES, VECTORS * LANES, seen + i * LANES, count, softcap, maximum + i * LANES,
                        totals + i * LANES, shrink + i * LANES);
    for (int r = 0; r < rows; r += ROW_TILE) {
        const int together = rows - r < ROW_TILE ? rows - r : ROW_TILE;
        uint64_t theirs = 0;
        for (int i = 0; i < together; i++) theirs |= seen[r + i];
        if (!theirs) continue;
        const int most = 64 - __builtin_clzll(theirs);
        auto weigh = [&](auto weigh_rows) {
            weigh_rows(scores + r, VECTORS * LANES, v, most, dim, shrink + r, sums + r * dim);
        };
        switch (together) {
            case 1: weigh(weigh_rows<1>); break;
            case 2: weigh(weigh_rows<2>); break;
            case 3: weigh(weigh_rows<3>); break;
            case 4: weigh(weigh_rows<4>); break;
        }
    }
}

// The tokens of a tile, read from the cache where they are used: with few rows, fp32 copies cost more than they save.
// The sums are those of the copies, in the same order.
template <KvFormat FORMAT> struct Direct {
    const uint8_t* base;
    const int64_t *at, *scale_at;
    const half* scales;
    Vec head_scale;
    int64_t half_dim, bytes;
    int first, last;

    Direct(const KvBlocks& kv, KvPart part, const Places& places)
        : base(kv.base(part)), at(places.at[part]), scale_at(places.scales), scales(kv.token_scales(part, 0)),
          head_scale(broadcast(FORMAT == KV_FP8 ? E4M3_UNIT * kv.head_scale(part, places.head) : 0)),
          half_dim(kv.head_dim / 2), bytes(kv.stored() * kv.element_bytes()), first(places.first),
          last(places.count - 1) {}

    struct Token {
        const uint8_t* from;
        float scale, minimum;  // where each token has its own
    };
    // What lies before or behind the tile's tokens is not read, and no weight falls on what stands for it.
    INLINE int clamped(int t) const { return t < first ? first : t > last ? last : t; }
    INLINE Token token(int t) const {
        t = clamped(t);
        Token token{base + at[t], 0, 0};
        if constexpr (FORMAT == KV_INT8 || FORMAT == KV_INT4) token.scale = to_float(scales[scale_at[t]]);
        if constexpr (FORMAT == KV_INT4) token.minimum = to_float(scales[scale_at[t] + 1]);
        return token;
    }
    INLINE Vec read(const Token& token, int64_t i) const {
        if constexpr (FORMAT == KV_BF16) return load((const bf16*)token.from + i);
        if constexpr (FORMAT == KV_FP8) return load((const e4m3*)token.from + i) * head_scale;
        if constexpr (FORMAT == KV_INT8) return load((const int8_t*)token.from + i) * broadcast(token.scale);
        const bool low = i < half_dim;
        const IntVec codes = low ? load_bytes(token.from + i) & 15 : load_bytes(token.from + i - half_dim) >> 4;
        return fma(__builtin_convertvector(codes, Vec), broadcast(token.scale), broadcast(token.minimum));
    }
    INLINE void prefetch(int t) const {
        if (last < 0) return;
        const uint8_t* from = base + at[clamped(t)];
        __builtin_prefetch(from, 0, 2);
        __builtin_prefetch(from + bytes - 1, 0, 2);
        for (int64_t i = 64; i < bytes - 64; i += 64) __builtin_prefetch(from + i, 0, 2);
    }
};

template <KvFormat FORMAT, int ROWS>
void attend_direct(const KvBlocks& kv, const Places& here, const Places& next, const float* q, const uint64_t* seen,
                   int count, int64_t dim, float softcap, float* maximum, Vec* totals, float* sums) {
    constexpr int TOGETHER = ROWS == 1 ? 16 : ROWS == 2 ? 8 : ROWS <= 4 ? 4 : 2;  // tokens with sums in a tile of 4 x 4
    constexpr int WIDE = ROWS <= 4 ? DIM_VECTORS : DIM_VECTORS / 2;
    alignas(64) float scores[ROWS * TILE_TOKENS];
    const Direct<FORMAT> keys(kv, KEYS, here), values(kv, VALUES, here), next_keys(kv, KEYS, next);
    for (int t = 0; t < count; t += TOGETHER) {
        Vec tile[4][4] = {};
        typename Direct<FORMAT>::Token tokens[TOGETHER];
        for (int j = 0; j < TOGETHER; j++) {
            values.prefetch(t + j);
            tokens[j] = keys.token(t + j);
        }
        for (int64_t i = 0; i < dim; i += LANES) {
            Vec rows[ROWS];
            unroll<ROWS>([&](auto r) LAMBDA { rows[r] = load(q + r * dim + i); });
            unroll<TOGETHER>([&](auto j) LAMBDA {
                const Vec key = keys.read(tokens[j], i);
                unroll<ROWS>([&](auto r) LAMBDA {
                    constexpr int at = r * TOGETHER + j;
                    Vec& sum = tile[at / 4][at % 4];
                    sum = fma(rows[r], key, sum);
                });
            });
        }
        float packed[16];
        sum_tile<4>(tile, packed, 4);
        for (int r = 0; r < ROWS; r++)
            memcpy(scores + r * TILE_TOKENS + t, packed + r * TOGETHER, TOGETHER * sizeof(float));
    }
    softmax_rows<ROWS>(scores, seen, dim, softcap, maximum, totals, sums);
    for (int64_t i = 0; i < dim;) {
        const int vectors = dim - i >= WIDE * LANES ? WIDE : 1;
        auto weigh_vectors = [&](auto constant) {
            constexpr int VECTORS = decltype(constant)::value;
            Vec acc[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int d = 0; d < VECTORS; d++) acc[r][d] = load(sums + r * dim + i + d * LANES);
            for (int t = 0; t < count; t++) {
                if (i == 0) next_keys.prefetch(t);
                const auto token = values.token(t);
                Vec value[VECTORS];
                unroll<VECTORS>([&](auto d) LAMBDA { value[d] = values.read(token, i + d * LANES); });
                unroll<ROWS>([&](auto r) LAMBDA {
                    const Vec weight = broadcast(scores[r * TILE_TOKENS + t]);
                    unroll<VECTORS>([&](auto d) LAMBDA { acc[r][d] = fma(weight, value[d], acc[r][d]); });
                });
            }
            for (int r = 0; r < ROWS; r++)
                for (int d = 0; d < VECTORS; d++) store(sums + r * dim + i + d * LANES, acc[r][d]);
        };
        if (vectors == WIDE)
            weigh_vectors(std::integral_constant<int, WIDE>{});
        else
            weigh_vectors(std::integral_constant<int, 1>{});
        i += vectors * LANES;
    }
}

// The first token that a row of the task sees; what lies before may be no memory of this sequence any more.
int64_t oldest_of(const Arguments& a, const Task& task) {
    if (!a.batch->tree) return Sight(a, task.sequence, task.first).oldest;
    int64_t oldest = INT64_MAX;
    for (int32_t i = 0; i < task.count; i++) {
        const int64_t own = Sight(a, task.sequence, task.first + i).oldest;
        oldest = own < oldest ? own : oldest;
    }
    return oldest;
}

// One behind the last token that a row of the task sees; in a tree, all new tokens are there.
int64_t end_of(const Arguments& a, const Task& task) {
    const int64_t context = a.batch->context_len[task.sequence];
    const int64_t queries = a.batch->query_start[task.sequence + 1] - a.batch->query_start[task.sequence];
    return a.batch->tree ? context : context - queries + task.first + task.count;
}

// Rows of one block against one span of the context.
void attend_span(const Arguments& a, const Task& task, const float* q, int64_t span, int64_t dim, float* tiles,
                 Vec* totals, State state) {
    const int64_t group = a.heads / a.kv.kv_heads, rows = task.count * group;
    const int32_t* table = a.table(task.sequence, task.kv_head);
    const int64_t end_of_task = end_of(a, task), oldest = oldest_of(a, task);
    const int64_t end = end_of_task < (span + 1) * SPAN_TOKENS ? end_of_task : (span + 1) * SPAN_TOKENS;
    const bool columns = rows >= COLUMN_ROWS;
    const int64_t width = round_up(rows, LANES);
    thread_local std::vector<uint64_t> sights;  // of each row, on a tile
    if (columns) sights.resize(width);
    state.clear(rows, dim);
    for (int64_t r = 0; r < width; r++) totals[r] = Vec{};
    float *k = tiles, *v = tiles + TILE_TOKENS * dim;
    const bool direct = rows <= DIRECT_ROWS && a.kv.head_dim % (2 * LANES) == 0;
    Places next;
    next.find(a.kv, table, task.kv_head, span * SPAN_TOKENS, oldest, end);
    for (int64_t start = span * SPAN_TOKENS; start < end; start += TILE_TOKENS) {
        const Places here = next;
        const int count = here.count;
        next.find(a.kv, table, task.kv_head, start + TILE_TOKENS, oldest, end_of_task);
        if (here.first >= count) continue;
        if (direct) {
            uint64_t seen[DIRECT_ROWS], any = 0;
            for (int64_t r = 0; r < rows; r++) {
                seen[r] = Sight(a, task.sequence, task.first + r / group).mask(start) & Sight::ones(count);
                any |= seen[r];
            }
            if (!any) continue;
            const int most = 64 - __builtin_clzll(any);
            auto attend = [&](auto format) {
                constexpr KvFormat FORMAT = decltype(format)::value;
                unroll<DIRECT_ROWS>([&](auto before) LAMBDA {
                    if (rows == before + 1)
                        attend_direct<FORMAT, before + 1>(a.kv, here, next, q, seen, most, dim, a.softcap,
                                                          state.maximum, totals, state.sums);
                });
            };
            switch (a.kv.format) {
                case KV_BF16: attend(std::integral_constant<KvFormat, KV_BF16>{}); break;
                case KV_FP8: attend(std::integral_constant<KvFormat, KV_FP8>{}); break;
                case KV_INT8: attend(std::integral_constant<KvFormat, KV_INT8>{}); break;
                case KV_INT4: attend(std::integral_constant<KvFormat, KV_INT4>{}); break;
            }
            continue;
        }
        convert(a.kv, KEYS, here, dim, k, VALUES, here);
        convert(a.kv, VALUES, here, dim, v, KEYS, next);
        if (columns) {
            for (int64_t r = 0; r < width; r++)
                sights[r] = r >= rows || r % group
                                ? sights[r - 1]
                                : Sight(a, task.sequence, task.first + r / group).mask(start) & Sight::ones(count);
            for (int64_t r = 0; r < width; r += COLUMN_VECTORS * LANES) {
                const int together = rows - r < COLUMN_VECTORS * LANES ? rows - r : COLUMN_VECTORS * LANES;
                auto attend = width - r <= LANES ? attend_columns<1> : attend_columns<COLUMN_VECTORS>;
                attend(q + r * dim, k, v, sights.data() + r, together, dim, a.softcap, state.maximum + r, totals + r,
                       state.sums + r * dim);
            }
            continue;
        }
        for (int64_t r = 0; r < rows; r += ROW_TILE) {
            const int together = rows - r < ROW_TILE ? rows - r : ROW_TILE;
            uint64_t seen[ROW_TILE], any = 0;
            for (int i = 0; i < together; i++) {
                seen[i] = Sight(a, task.sequence, task.first + (r + i) / group).mask(start) & Sight::ones(count);
                any |= seen[i];
            }
            if (!any) continue;
            const int most = 64 - __builtin_clzll(any);
            const float* rows_q = q + r * dim;
            float *maximum = state.maximum + r, *sums = state.sums + r * dim;
            switch (together) {
                case 1: attend_rows<1>(rows_q, k, v, seen, most, dim, a.softcap, maximum, totals + r, sums); break;
                case 2: attend_rows<2>(rows_q, k, v, seen, most, dim, a.softcap, maximum, totals + r, sums); break;
                case 3: attend_rows<3>(rows_q, k, v, seen, most, dim, a.softcap, maximum, totals + r, sums); break;
                case 4: attend_rows<4>(rows_q, k, v, seen, most, dim, a.softcap, maximum, totals + r, sums); break;
            }
        }
    }
    if (!columns) {
        for (int64_t r = 0; r < rows; r++) state.total[r] = sum(totals[r]);
        return;
    }
    for (int64_t r = 0; r < width; r += LANES) {
        Vec* lanes = totals + r;
        for (int apart = LANES / 2; apart; apart /= 2)  // as `sum` does it
            for (int i = 0; i < apart; i++) lanes[i] += lanes[i + apart];
        store(state.total + r, lanes[0]);
    }
}

void write_out(const Arguments& a, const Task& task, State state, int64_t dim) {
    const int64_t group = a.heads / a.kv.kv_heads;
    for (int64_t r = 0; r < task.count * group; r++) {
        const int64_t token = a.batch->query_start[task.sequence] + task.first + r / group;
        const int64_t head = task.kv_head * group + r % group;
        float* out = a.out + (token * a.heads + head) * a.kv.head_dim;
        float inverse = 1.0f / state.total[r];
        if (a.sinks) {
            const float sink = a.sinks[head], highest = sink > state.maximum[r] ? sink : state.maximum[r];
            const float kept = std::exp(state.maximum[r] - highest);
            inverse = kept / (state.total[r] * kept + std::exp(sink - highest));
        }
        for (int64_t i = 0; i < a.kv.head_dim; i++) out[i] = state.sums[r * dim + i] * inverse;
    }
}

// The task's rows of q, scaled, [count * group, dim], zeros behind head_dim.
void gather_queries(const Arguments& a, const Task& task, int64_t dim, float* q) {
    const int64_t group = a.heads / a.kv.kv_heads;
    for (int64_t r = 0; r < task.count * group; r++) {
        const int64_t token = a.batch->query_start[task.sequence] + task.first + r / group;
        const float* from = a.q + (token * a.heads + task.kv_head * group + r % group) * a.kv.head_dim;
        for (int64_t i = 0; i < a.kv.head_dim; i++) q[r * dim + i] = from[i] * a.scale;
        for (int64_t i = a.kv.head_dim; i < dim; i++) q[r * dim + i] = 0;
    }
}

void run(const Arguments& a, const Task& task, int64_t dim) {
    thread_local Scratch scratch;
    const int64_t group = a.heads / a.kv.kv_heads, rows = task.count * group;
    const int64_t state_floats = State::floats(rows, dim);
    // A tile is read in fours of tokens, so up to three rows behind its last token.
    const int64_t tile_floats = 2 * (TILE_TOKENS + 4) * dim, width = round_up(rows, LANES);
    float* memory = scratch.floats(tile_floats + width * (2 * dim + LANES) + 2 * state_floats);
    float *tiles = memory, *q = tiles + tile_floats, *columns = q + width * dim;
    Vec* totals = (Vec*)(columns + width * dim);
    float* states = columns + width * (dim + LANES);
    gather_queries(a, task, dim, q);
    if (rows >= COLUMN_ROWS) {
        memset(q + rows * dim, 0, (width - rows) * dim * sizeof(float));
        for (int64_t r = 0; r < width; r += COLUMN_VECTORS * LANES)
            transpose(q + r * dim, width - r < COLUMN_VECTORS * LANES ? width - r : COLUMN_VECTORS * LANES, dim,
                      columns + r * dim);
        q = columns;
    }
    State merged(states, rows);
    if (!task.partial) merged.clear(rows, dim);
    for (int64_t span = task.span; span < task.last_span; span++) {
        State state(task.partial ? task.partial + (span - task.span) * state_floats : states + state_floats, rows);
        attend_span(a, task, q, span, dim, tiles, totals, state);
        if (!task.partial) merge(merged, state, rows, dim);
    }
    if (!task.partial) write_out(a, task, merged, dim);
}

std::vector<Task> tasks_of(const Arguments& a) {
    std::vector<Task> tasks;
    const int64_t group = a.heads / a.kv.kv_heads;
    const int32_t block = group < BLOCK_ROWS ? BLOCK_ROWS / group : 1;
    for (int32_t s = 0; s < a.batch->sequences; s++) {
        const int32_t queries = a.batch->query_start[s + 1] - a.batch->query_start[s];
        for (int32_t first = 0; first < queries; first += block) {
            const int32_t count = queries - first < block ? queries - first : block;
            Task task{s, 0, first, count, 0, 0, nullptr};
            task.span = oldest_of(a, task) / SPAN_TOKENS;
            task.last_span = ceil_div(end_of(a, task), SPAN_TOKENS);
            for (; task.kv_head < a.kv.kv_heads; task.kv_head++) tasks.push_back(task);
        }
    }
    return tasks;
}

// Few tasks over long contexts: each span becomes a task that leaves its state, and the states are merged after.
void share_spans(const Arguments& a, const std::vector<Task>& whole, int64_t dim, int threads) {
    thread_local Scratch scratch;
    const int64_t group = a.heads / a.kv.kv_heads;
    int64_t floats = 0, spans = 0;
    for (const Task& task : whole) {
        floats += (task.last_span - task.span) * State::floats(task.count * group, dim);
        spans += task.last_span - task.span;
    }
    float* memory = scratch.floats(floats);
    std::vector<Task> parts;
    parts.reserve(spans);
    std::vector<float*> states;
    for (const Task& task : whole) {
        states.push_back(memory);
        for (int32_t span = task.span; span < task.last_span; span++) {
            parts.push_back({task.sequence, task.kv_head, task.first, task.count, span, span + 1, memory});
            memory += State::floats(task.count * group, dim);
        }
    }
    parallel_for(parts.size(), 1, threads, [&](int64_t i, int64_t last) {
        for (; i < last; i++) run(a, parts[i], dim);
    });
    std::vector<float> merged_memory;
    for (size_t i = 0; i < whole.size(); i++) {
        const int64_t rows = whole[i].count * group, state_floats = State::floats(rows, dim);
        merged_memory.resize(state_floats);
        State merged(merged_memory.data(), rows);
        merged.clear(rows, dim);
        for (int32_t span = 0; span < whole[i].last_span - whole[i].span; span++)
            merge(merged, State(states[i] + span * state_floats, rows), rows, dim);
        write_out(a, whole[i], merged, dim);
    }
}

}  // namespace

EXPORT void membound_attention(const Arguments* arguments, int threads) {
    const Arguments& a = *arguments;
    const int64_t dim = round_up(a.kv.head_dim, LANES);
    std::vector<Task> tasks = tasks_of(a);
    int64_t products = 0, most_spans = 0;
    for (const Task& task : tasks) {
        products += (task.last_span - task.span) * SPAN_TOKENS * task.count * (a.heads / a.kv.kv_heads) * dim;
        most_spans = task.last_span - task.span > most_spans ? task.last_span - task.span : most_spans;
    }
    if (products <= SERIAL_PRODUCTS) threads = 1;
    const bool few = (int64_t)tasks.size() < 4 * threads;
    if (threads > 1 && most_spans > 1 && few) return share_spans(a, tasks, dim, threads);
    // The last queries of a prompt see the most: begun first, they leave no thread waiting for another.
    parallel_for(tasks.size(), 1, threads, [&](int64_t i, int64_t last) {
        for (; i < last; i++) run(a, tasks[tasks.size() - 1 - i], dim);
    });
}

// out [sequences, kv_heads, out_stride] = the probabilities that each sequence's last `queries` new tokens give to each
// of its tokens, summed over those tokens and the heads of a group; zeros behind the context. Or they are `added`.
EXPORT void membound_attention_scores(const Arguments* arguments, int threads) {
    const Arguments& a = *arguments;
    const int64_t dim = round_up(a.kv.head_dim, LANES), group = a.heads / a.kv.kv_heads;
    parallel_for(a.batch->sequences * a.kv.kv_heads, 1, threads, [&](int64_t i, int64_t last) {
        thread_local Scratch scratch;
        for (; i < last; i++) {
            const int64_t sequence = i / a.kv.kv_heads, context = a.batch->context_len[sequence];
            const int32_t all = a.batch->query_start[sequence + 1] - a.batch->query_start[sequence];
            const int32_t count = a.queries < all ? a.queries : all;
            const Task task{(int32_t)sequence, (int32_t)(i % a.kv.kv_heads), all - count, count, 0, 0, nullptr};
            const int64_t rows = count * group, width = round_up(context, TILE_TOKENS);
            float* q = scratch.floats((rows + TILE_TOKENS + 8) * dim + (rows + 1) * width);
            float *k = q + rows * dim, *scores = k + (TILE_TOKENS + 8) * dim;
            gather_queries(a, task, dim, q);
            float* out = a.added ? scores + rows * width : a.out + i * a.out_stride;
            memset(out, 0, (a.added ? context : a.out_stride) * sizeof(float));
            const int64_t oldest = oldest_of(a, task);
            Places here, none;
            none.first = none.count = 0;
            for (int64_t start = 0; start < context; start += TILE_TOKENS) {
                here.find(a.kv, a.table(sequence, task.kv_head), task.kv_head, start, oldest, context);
                if (here.first < here.count) convert(a.kv, KEYS, here, dim, k, KEYS, none);
                for (int64_t r = 0; r < rows; r += ROW_TILE) {
                    alignas(64) float tile[ROW_TILE * TILE_TOKENS];
                    const int64_t together = rows - r < ROW_TILE ? rows - r : ROW_TILE;
                    for (int t = 0; t < TILE_TOKENS; t += 4) {
                        const float *from = q + r * dim, *tokens = k + t * dim;
                        switch (together) {
                            case 1: scores_of<1>(from, tokens, dim, tile + t); break;
                            case 2: scores_of<2>(from, tokens, dim, tile + t); break;
                            case 3: scores_of<3>(from, tokens, dim, tile + t); break;
                            case 4: scores_of<4>(from, tokens, dim, tile + t); break;
                        }
                    }
                    for (int64_t i = 0; i < together; i++) {
                        const Sight sight(a, sequence, task.first + (r + i) / group);
                        float* row = tile + i * TILE_TOKENS;
                        mask_scores(row, sight.mask(start) & Sight::ones(here.count), a.softcap);
                        memcpy(scores + (r + i) * width + start, row, TILE_TOKENS * sizeof(float));
                    }
                }
            }
            for (int64_t r = 0; r < rows; r++) {
                float* row = scores + r * width;
                Vec top = load(row), total{};
                for (int64_t t = LANES; t < width; t += LANES) top = load(row + t) > top ? load(row + t) : top;
                const Vec highest = broadcast(max(top));
                for (int64_t t = 0; t < width; t += LANES) {
                    store(row + t, exp(load(row + t) - highest));
                    total += load(row + t);
                }
                const float inverse = 1.0f / sum(total);
                for (int64_t t = 0; t < context; t++) out[t] += row[t] * inverse;
            }
            if (!a.added) continue;
            float* sums = a.out + (a.batch->seat(sequence) * a.kv.kv_heads + task.kv_head) * a.out_stride;
            for (int64_t t = 0; t < context; t++) sums[t] += out[t];
        }
    });
}
