// Causal grouped-query attention over paged K and V, for any mix of prefill, decode and verify.
//
// A context is cut into spans of SPAN_TOKENS at fixed positions. Within a span the softmax is online over tiles of
// TILE_TOKENS; spans are merged from the first to the last. Nothing in that order depends on what else is in the
// batch or on how many threads run, so a query token has the same bits alone, in a batch, and as part of a draft.
// Threads share sequences, kv heads and blocks of queries; where those are few (one long sequence) also spans.

#include <cmath>
#include <vector>

#include "cpu_threads.h"
#include "cpu_vector.h"

namespace {

constexpr int TILE_TOKENS = 64;
constexpr int SPAN_TOKENS = 128;
constexpr int BLOCK_ROWS = 64;  // rows (query tokens x heads of the group) that share one conversion of K and V
constexpr int ROW_TILE = 4;
constexpr int DIM_VECTORS = REGISTERS == 32 ? 4 : 2;
constexpr int64_t SERIAL_PRODUCTS = 1 << 17;

struct Arguments {
    const float* q;  // [tokens, heads, head_dim]
    const bf16 *k_blocks, *v_blocks;  // [blocks, block_size, kv_heads, head_dim]
    const int32_t* query_start;  // [sequences + 1]
    const int32_t* context_len;  // [sequences]
    const int32_t* block_table;  // [sequences, table_stride]
    float* out;  // [tokens, heads, head_dim]
    int64_t sequences, heads, kv_heads, head_dim, block_size, table_stride;
    int64_t k_block_stride, v_block_stride;  // elements
    float scale;
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
        for (int64_t r = 0; r < rows; r++) maximum[r] = -INFINITY, total[r] = 0;
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

// Where the tokens of a tile lie for one kv head, as element offsets in the K and the V blocks.
struct Places {
    int64_t k[TILE_TOKENS], v[TILE_TOKENS];
    int count;

    void find(const Arguments& a, const int32_t* table, int64_t kv_head, int64_t start, int64_t end) {
        count = end - start < TILE_TOKENS ? end - start : TILE_TOKENS;
        const int64_t token_stride = a.kv_heads * a.head_dim;
        int64_t block = start / a.block_size, offset = start % a.block_size;
        for (int t = 0; t < count; t++) {
            const int64_t inside = offset * token_stride + kv_head * a.head_dim;
            k[t] = table[block] * a.k_block_stride + inside;
            v[t] = table[block] * a.v_block_stride + inside;
            if (++offset == a.block_size) block++, offset = 0;
        }
    }
};

// `count` tokens of one kv head to fp32 [count, dim], zeros behind head_dim. Meanwhile the rows that are read next,
// scattered over the blocks as they are, are asked for.
void convert(const bf16* blocks, const int64_t* places, int count, int64_t head_dim, int64_t dim, float* tile,
             const bf16* next_blocks, const int64_t* next, int next_count) {
    const int64_t whole = head_dim / LANES * LANES;
    for (int t = 0; t < count; t++, tile += dim) {
        if (t < next_count)
            for (int64_t i = 0; i < head_dim; i += 32) __builtin_prefetch(next_blocks + next[t] + i, 0, 2);
        const bf16* from = blocks + places[t];
        for (int64_t i = 0; i < whole; i += LANES) store(tile + i, load(from + i));
        if (whole < dim) store(tile + whole, load_partial(from + whole, head_dim - whole));
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

// One tile of `count` tokens for ROWS rows, row r seeing its first visible[r] tokens (possibly none).
template <int ROWS>
void attend_rows(const float* q, const float* k, const float* v, const int* visible, int count, int64_t dim,
                 float* maximum, Vec* totals, float* sums) {
    alignas(64) float scores[ROWS * TILE_TOKENS];
    for (int t = 0; t < count; t += 4) scores_of<ROWS>(q, k + t * dim, dim, scores + t);
    for (int r = 0; r < ROWS; r++) {
        float* row = scores + r * TILE_TOKENS;
        for (int t = visible[r] > 0 ? visible[r] : 0; t < TILE_TOKENS; t++) row[t] = -INFINITY;
        if (visible[r] <= 0) {
            memset(row, 0, TILE_TOKENS * sizeof(float));
            continue;
        }
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
    int64_t i = 0;
    for (; i + DIM_VECTORS * LANES <= dim; i += DIM_VECTORS * LANES)
        weigh<ROWS, DIM_VECTORS>(scores, v + i, count, dim, sums + i);
    for (; i < dim; i += LANES) weigh<ROWS, 1>(scores, v + i, count, dim, sums + i);
}

// Rows of one block against one span of the context.
void attend_span(const Arguments& a, const Task& task, const float* q, int64_t span, int64_t dim, float* tiles,
                 Vec* totals, State state) {
    const int64_t group = a.heads / a.kv_heads, rows = task.count * group;
    const int64_t queries = a.query_start[task.sequence + 1] - a.query_start[task.sequence];
    const int64_t first_position = a.context_len[task.sequence] - queries + task.first;
    const int32_t* table = a.block_table + task.sequence * a.table_stride;
    const int64_t end_of_task = first_position + task.count;  // one behind the last token that any row sees
    const int64_t end = end_of_task < (span + 1) * SPAN_TOKENS ? end_of_task : (span + 1) * SPAN_TOKENS;
    state.clear(rows, dim);
    for (int64_t r = 0; r < rows; r++) totals[r] = Vec{};
    float *k = tiles, *v = tiles + TILE_TOKENS * dim;
    Places next;
    next.find(a, table, task.kv_head, span * SPAN_TOKENS, end);
    for (int64_t start = span * SPAN_TOKENS; start < end; start += TILE_TOKENS) {
        const Places here = next;
        const int count = here.count;
        next.find(a, table, task.kv_head, start + TILE_TOKENS, end_of_task);
        convert(a.k_blocks, here.k, count, a.head_dim, dim, k, a.v_blocks, here.v, count);
        convert(a.v_blocks, here.v, count, a.head_dim, dim, v, a.k_blocks, next.k, next.count);
        for (int64_t r = 0; r < rows; r += ROW_TILE) {
            const int together = rows - r < ROW_TILE ? rows - r : ROW_TILE;
            int visible[ROW_TILE], most = 0;
            for (int i = 0; i < together; i++) {
                const int64_t tokens = first_position + (r + i) / group + 1 - start;
                visible[i] = tokens < count ? tokens : count;
                most = visible[i] > most ? visible[i] : most;
            }
            if (most == 0) continue;
            const float* rows_q = q + r * dim;
            float *maximum = state.maximum + r, *sums = state.sums + r * dim;
            switch (together) {
                case 1: attend_rows<1>(rows_q, k, v, visible, most, dim, maximum, totals + r, sums); break;
                case 2: attend_rows<2>(rows_q, k, v, visible, most, dim, maximum, totals + r, sums); break;
                case 3: attend_rows<3>(rows_q, k, v, visible, most, dim, maximum, totals + r, sums); break;
                case 4: attend_rows<4>(rows_q, k, v, visible, most, dim, maximum, totals + r, sums); break;
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) state.total[r] = sum(totals[r]);
}

void write_out(const Arguments& a, const Task& task, State state, int64_t dim) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t r = 0; r < task.count * group; r++) {
        const int64_t token = a.query_start[task.sequence] + task.first + r / group;
        float* out = a.out + (token * a.heads + task.kv_head * group + r % group) * a.head_dim;
        const float inverse = 1.0f / state.total[r];
        for (int64_t i = 0; i < a.head_dim; i++) out[i] = state.sums[r * dim + i] * inverse;
    }
}

void run(const Arguments& a, const Task& task, int64_t dim) {
    thread_local Scratch scratch;
    const int64_t group = a.heads / a.kv_heads, rows = task.count * group;
    const int64_t state_floats = State::floats(rows, dim);
    // A tile is read in fours of tokens, so up to three rows behind its last token.
    const int64_t tile_floats = 2 * (TILE_TOKENS + 4) * dim;
    float* memory = scratch.floats(tile_floats + rows * (dim + LANES) + 2 * state_floats);
    float *tiles = memory, *q = tiles + tile_floats;
    Vec* totals = (Vec*)(q + rows * dim);
    float* states = q + rows * (dim + LANES);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = a.query_start[task.sequence] + task.first + r / group;
        const float* from = a.q + (token * a.heads + task.kv_head * group + r % group) * a.head_dim;
        for (int64_t i = 0; i < dim; i++) q[r * dim + i] = i < a.head_dim ? from[i] * a.scale : 0.0f;
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
    const int64_t group = a.heads / a.kv_heads;
    const int32_t block = group < BLOCK_ROWS ? BLOCK_ROWS / group : 1;
    for (int32_t s = 0; s < a.sequences; s++) {
        const int32_t queries = a.query_start[s + 1] - a.query_start[s];
        for (int32_t first = 0; first < queries; first += block) {
            const int32_t count = queries - first < block ? queries - first : block;
            const int32_t spans = ceil_div(a.context_len[s] - queries + first + count, SPAN_TOKENS);
            for (int32_t h = 0; h < a.kv_heads; h++) tasks.push_back({s, h, first, count, 0, spans, nullptr});
        }
    }
    return tasks;
}

// Few tasks over long contexts: each span becomes a task that leaves its state, and the states are merged after.
void share_spans(const Arguments& a, const std::vector<Task>& whole, int64_t dim, int threads) {
    thread_local Scratch scratch;
    const int64_t group = a.heads / a.kv_heads;
    int64_t floats = 0, spans = 0;
    for (const Task& task : whole) {
        floats += task.last_span * State::floats(task.count * group, dim);
        spans += task.last_span;
    }
    float* memory = scratch.floats(floats);
    std::vector<Task> parts;
    parts.reserve(spans);
    std::vector<float*> states;
    for (const Task& task : whole) {
        states.push_back(memory);
        for (int32_t span = 0; span < task.last_span; span++) {
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
        for (int32_t span = 0; span < whole[i].last_span; span++)
            merge(merged, State(states[i] + span * state_floats, rows), rows, dim);
        write_out(a, whole[i], merged, dim);
    }
}

}  // namespace

EXPORT void membound_attention(const Arguments* arguments, int threads) {
    const Arguments& a = *arguments;
    const int64_t dim = round_up(a.head_dim, LANES);
    std::vector<Task> tasks = tasks_of(a);
    int64_t products = 0, most_spans = 0;
    for (const Task& task : tasks) {
        products += (task.last_span * SPAN_TOKENS) * task.count * (a.heads / a.kv_heads) * dim;
        most_spans = task.last_span > most_spans ? task.last_span : most_spans;
    }
    if (products <= SERIAL_PRODUCTS) threads = 1;
    if (threads > 1 && most_spans > 1 && (int64_t)tasks.size() < 4 * threads) return share_spans(a, tasks, dim, threads);
    parallel_for(tasks.size(), 1, threads, [&](int64_t i, int64_t last) {
        for (; i < last; i++) run(a, tasks[i], dim);
    });
}
