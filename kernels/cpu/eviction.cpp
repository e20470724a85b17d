// Which tokens a cache keeps or reads for each KV head: where a new one goes, and which pages matter to a query.

#include <algorithm>
#include <cmath>
#include <functional>

#include "batch.h"
#include "kv.h"
#include "threads.h"
#include "vector.h"

namespace {

struct PlacesArguments {
    const Batch* batch;  // one token a sequence; its slots are entries of `order`
    int32_t* positions;  // [seats, kv_heads, places]
    float* scores;       // the same, or null
    const int32_t* order;  // [seats, kv_heads, budget]
    int64_t* slots;        // [tokens, kv_heads]
    int64_t kv_heads, places, budget, block_size, recent;
};

// Of `budget` tokens the one that ranks lowest after the position `newest`, as `Policy.rank` says.
int64_t lowest(const float* scores, const int32_t* positions, int64_t budget, int64_t newest, int64_t recent) {
    const int64_t before = newest - recent;
    int64_t found = 0;
    float least = INFINITY;
    for (int64_t t = 0; t < budget; t++) {
        const float rank = positions[t] > before ? (float)positions[t] : -1.0f / (1.0f + scores[t]);
        if (rank < least) least = rank, found = t;
    }
    return found;
}

struct PagesArguments {
    const float* q;  // [tokens, heads, head_dim]
    const Batch* batch;
    bf16* bounds;     // [blocks, kv_heads, 2 * head_dim]: the largest of each page's keys, and of their negatives
    int32_t* tables;  // [sequences, kv_heads, width]
    KvBlocks kv;
    int64_t heads, pages, width;
    int64_t most_selecting;  // a sequence that brings more reads all of its pages
};

INLINE float number(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The new keys [first, last) count for the bounds of their pages; those of a page's first token begin anew.
void widen(const PagesArguments& a, int64_t first, int64_t last, int64_t head, float* key) {
    const int64_t dim = a.kv.head_dim, padded = round_up(dim, LANES);
    Places here, none;
    here.first = 0, here.count = 1, here.head = head;
    none.first = none.count = 0;
    for (int64_t token = first; token < last; token++) {
        const int64_t slot = a.batch->slots[token], block = slot / a.kv.block_size, offset = slot % a.kv.block_size;
        here.at[KEYS][0] = a.kv.place(KEYS, block, offset, head);
        here.scales[0] = a.kv.scale_place(block, offset, head);
        convert(a.kv, KEYS, here, padded, key, KEYS, none);
        bf16* bounds = a.bounds + (block * a.kv.kv_heads + head) * 2 * dim;
        for (int64_t i = 0; i < dim; i++) {
            const bf16 high = to_bf16(key[i]), low = to_bf16(-key[i]);
            if (offset == 0 || number(high) > number(bounds[i])) bounds[i] = high;
            if (offset == 0 || number(low) > number(bounds[dim + i])) bounds[dim + i] = low;
        }
    }
}

// The products of rows of `signed_q` [rows, 2 * head_dim] with a page's bounds are no less than a score there.
float bound_of(const float* signed_q, int64_t rows, const bf16* bounds, int64_t width) {
    float best = -INFINITY;
    const int64_t whole = width / LANES * LANES;
    for (int64_t r = 0; r < rows; r++, signed_q += width) {
        Vec products{};
        for (int64_t i = 0; i < whole; i += LANES) products = fma(load(signed_q + i), load(bounds + i), products);
        float bound = sum(products);
        for (int64_t i = whole; i < width; i++) bound += signed_q[i] * number(bounds[i]);
        best = bound > best ? bound : best;
    }
    return best;
}

void choose(const PagesArguments& a, int64_t sequence, int64_t head) {
    thread_local Scratch scratch;
    const int64_t first = a.batch->query_start[sequence], last = a.batch->query_start[sequence + 1], size = a.kv.block_size;
    const int64_t fresh = last - first, start = a.batch->positions[first], end = start + fresh;
    const int64_t dim = a.kv.head_dim, group = a.heads / a.kv.kv_heads, rows = fresh * group, pages = ceil_div(end, size);
    const int64_t touched = fresh >= 2 ? (fresh - 2) / size + 2 : 1, kept = a.pages > touched ? a.pages : touched;
    const bool selecting = start > 0 && fresh <= a.most_selecting && pages > kept;
    float* key = scratch.floats(round_up(dim, LANES) + (selecting ? 2 * rows * dim + 2 * pages : 0));
    widen(a, first, last, head, key);
    const int32_t* all = a.batch->block_table + sequence * a.batch->table_stride;
    int32_t* table = a.tables + (sequence * a.kv.kv_heads + head) * a.width;
    if (!selecting) {
        const int64_t there = a.batch->table_stride < a.width ? a.batch->table_stride : a.width;
        for (int64_t p = 0; p < a.width; p++) table[p] = p < there ? all[p] : 0;
        return;
    }
    float *signed_q = key + round_up(dim, LANES), *bound = signed_q + 2 * rows * dim, *sorted = bound + pages;
    for (int64_t r = 0; r < rows; r++) {
        const float* q = a.q + ((first + r / group) * a.heads + head * group + r % group) * dim;
        float* to = signed_q + r * 2 * dim;
        for (int64_t i = 0; i < dim; i++) to[i] = q[i] > 0 ? q[i] : 0, to[dim + i] = q[i] < 0 ? -q[i] : 0;
    }
    for (int64_t p = 0; p < pages; p++) {
        const bool own = p >= start / size;
        bound[p] = own ? INFINITY : bound_of(signed_q, rows, a.bounds + (all[p] * a.kv.kv_heads + head) * 2 * dim, 2 * dim);
        sorted[p] = bound[p];
    }
    std::nth_element(sorted, sorted + kept - 1, sorted + pages, std::greater<float>());
    const float least = sorted[kept - 1];
    int64_t above = 0;
    for (int64_t p = 0; p < pages; p++) above += bound[p] > least;
    int64_t taken = 0, equal = kept - above;
    for (int64_t p = 0; p < pages && taken < kept; p++) {
        if (bound[p] < least || (!(bound[p] > least) && equal-- <= 0)) continue;
        table[taken++] = all[p];
    }
    for (; taken < a.width; taken++) table[taken] = 0;
}

}  // namespace

// A place for each head of a new token: the one that its slot names in the order of the seat, or where scores are kept
// and no place is free, that of the token with the lowest rank.
EXPORT void membound_choose_places(const PlacesArguments* arguments, int threads) {
    const PlacesArguments& a = *arguments;
    const int64_t work = a.scores ? a.budget : 1;
    parallel_for(a.batch->tokens * a.kv_heads, rows_at_once(a.batch->tokens * a.kv_heads, work), threads,
                 [&](int64_t i, int64_t last) {
        for (; i < last; i++) {
            const int64_t token = i / a.kv_heads, newest = a.batch->positions[token];
            const int64_t row = a.batch->seat(token) * a.kv_heads + i % a.kv_heads;
            int32_t* positions = a.positions + row * a.places;
            float* scores = a.scores ? a.scores + row * a.places : nullptr;
            const bool full = newest >= a.budget;
            const int64_t place = full && scores ? lowest(scores, positions, a.budget, newest, a.recent)
                                                 : a.order[row * a.budget + a.batch->slots[token]];
            positions[place] = (int32_t)newest;
            if (scores) scores[place] = 0;
            a.slots[i] = (int64_t)a.batch->block_table[token * a.batch->table_stride] * a.block_size + place;
        }
    });
}

// Counts the new tokens' keys for the bounds of their pages, and fills each head's table with the pages that it reads.
EXPORT void membound_choose_pages(const PagesArguments* arguments, int threads) {
    const PagesArguments& a = *arguments;
    parallel_for(a.batch->sequences * a.kv.kv_heads, 1, threads, [&](int64_t i, int64_t last) {
        for (; i < last; i++) choose(a, i / a.kv.kv_heads, i % a.kv.kv_heads);
    });
}
