// A mixture of experts: who goes where, each expert's weights read once for all of its rows, and the weighted sum.
//
// What the parts mean says routing.py. A row has the same bits whatever other rows its expert has.

#include <cmath>

#include "batch.h"
#include "threads.h"
#include "vector.h"
#include "weight.h"

namespace {

struct RouteArguments {
    const float* logits;   // [tokens, experts]
    const float* bias;     // [experts] or null
    int32_t* chosen;       // [tokens, top_k]
    float* weights;        // [tokens, top_k]
    int32_t* order;        // [tokens * top_k], slots by expert
    int32_t* offsets;      // [experts + 1]
    float* probabilities;  // [tokens, experts]
    Rows tokens;
    int64_t experts, top_k, groups, group_top_k;
    int64_t sigmoid, normalized, bias_in_logits, best_two;
    float scale;
};

// The number of the largest of `count` values, the lowest of equal ones, which then is no candidate any more.
int64_t take_largest(const float* values, uint8_t* taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = 1;
    return best;
}

// Marks the experts outside the groups whose best expert, or best two, score highest.
void leave_groups(const RouteArguments& a, const float* ranked, float* group_scores, uint8_t* group_taken,
                  uint8_t* taken) {
    const int64_t size = a.experts / a.groups;
    for (int64_t g = 0; g < a.groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            if (ranked[i] > first)
                second = first, first = ranked[i];
            else if (ranked[i] > second)
                second = ranked[i];
        }
        group_scores[g] = a.best_two ? first + second : first;
        group_taken[g] = 0;
    }
    for (int64_t i = 0; i < a.group_top_k; i++) take_largest(group_scores, group_taken, a.groups);
    for (int64_t i = 0; i < a.experts; i++) taken[i] = !group_taken[i / size];
}

// The scores of a token's logits, and their shares of 1.
void score(const RouteArguments& a, const float* logits, float* scores, float* shares) {
    const int64_t count = a.experts;
    float highest = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; i++) {
        scores[i] = logits[i] + (a.bias && a.bias_in_logits ? a.bias[i] : 0.0f);
        highest = scores[i] > highest ? scores[i] : highest;
    }
    for (int64_t i = 0; i < count; i += LANES) {
        const Vec x = load(scores + i);
        store(scores + i, a.sigmoid ? broadcast(1.0f) / (broadcast(1.0f) + exp(-x)) : exp(x - broadcast(highest)));
    }
    for (int64_t i = 0; i < count; i++) total += scores[i];
    for (int64_t i = 0; i < count; i++) shares[i] = scores[i] / total;
    if (!a.sigmoid) memcpy(scores, shares, count * sizeof(float));
}

void route_token(const RouteArguments& a, int64_t token) {
    thread_local Scratch scratch;
    const int64_t count = a.experts, padded = round_up(count, LANES);
    float *scores = scratch.floats(4 * padded), *ranked = scores + padded, *group_scores = ranked + padded;
    uint8_t *taken = (uint8_t*)(group_scores + padded), *group_taken = taken + padded;
    score(a, a.logits + token * count, scores, a.probabilities + token * count);
    const bool ranks_biased = a.bias && !a.bias_in_logits;
    for (int64_t i = 0; i < count; i++) {
        ranked[i] = scores[i] + (ranks_biased ? a.bias[i] : 0.0f);
        taken[i] = 0;
    }
    if (a.groups > 1) leave_groups(a, ranked, group_scores, group_taken, taken);
    int32_t* chosen = a.chosen + token * a.top_k;
    float *weights = a.weights + token * a.top_k, total = 0;
    for (int64_t i = 0; i < a.top_k; i++) {
        chosen[i] = take_largest(ranked, taken, count);
        weights[i] = scores[chosen[i]];
        total += weights[i];
    }
    const float divisor = a.normalized ? total + 1e-20f : 1.0f;
    for (int64_t i = 0; i < a.top_k; i++) weights[i] = weights[i] / divisor * a.scale;
}

struct GroupedArguments {
    const PackedWeight* weights;   // [experts], each [n, k]
    const float* const* biases;    // [experts] of [n], or null
    const float* x;                // [slots, k], or where slots share rows [tokens, k]
    float* out;                    // [slots, n]
    const int32_t *order, *offsets;
    int64_t experts, slots_a_row;  // how many slots a row of x has
};

void add_to(float* row, const float* bias, int64_t n) {
    for (int64_t i = 0; i < n; i++) row[i] += bias[i];
}

void expert_rows(const GroupedArguments& a, int64_t expert, int threads) {
    thread_local Scratch scratch;
    const PackedWeight& w = a.weights[expert];
    const int32_t* slots = a.order + a.offsets[expert];
    const int64_t count = a.offsets[expert + 1] - a.offsets[expert];
    const float* bias = a.biases ? a.biases[expert] : nullptr;
    auto row_of = [&](int32_t slot) { return a.x + slot / a.slots_a_row * w.k; };
    if (count == 1) {
        linear_rows(w, row_of(*slots), a.out + *slots * w.n, 1, threads);
        if (bias) add_to(a.out + *slots * w.n, bias, w.n);
        return;
    }
    float *x = scratch.floats(count * (w.k + w.n)), *y = x + count * w.k;
    for (int64_t i = 0; i < count; i++) memcpy(x + i * w.k, row_of(slots[i]), w.k * sizeof(float));
    linear_rows(w, x, y, count, threads);
    for (int64_t i = 0; i < count; i++) {
        if (bias) add_to(y + i * w.n, bias, w.n);
        memcpy(a.out + slots[i] * w.n, y + i * w.n, w.n * sizeof(float));
    }
}

struct CombineArguments {
    const float* slots;     // [tokens * top_k, n]
    const int32_t* chosen;  // [tokens, top_k]
    const float* weights;   // [tokens, top_k]
    float* out;             // [tokens, n]
    Rows tokens;
    int64_t n, top_k;
};

struct CountArguments {
    const int32_t* offsets;      // [experts + 1]
    const float* probabilities;  // [tokens, experts]
    int64_t *counted, *load;     // [1], [experts]
    double* probability;         // [experts]
    Rows tokens;
    int64_t experts;
};

}  // namespace

EXPORT void membound_route(const RouteArguments* arguments, int threads) {
    const RouteArguments& a = *arguments;
    const int64_t tokens = a.tokens;
    parallel_for(tokens, rows_at_once(tokens, a.experts * a.top_k), threads, [&](int64_t token, int64_t last) {
        for (; token < last; token++) route_token(a, token);
    });
    memset(a.offsets, 0, (a.experts + 1) * sizeof(int32_t));
    const int64_t slots = tokens * a.top_k;
    for (int64_t slot = 0; slot < slots; slot++) a.offsets[a.chosen[slot] + 1]++;
    for (int64_t e = 0; e < a.experts; e++) a.offsets[e + 1] += a.offsets[e];
    for (int64_t slot = 0; slot < slots; slot++) a.order[a.offsets[a.chosen[slot]]++] = slot;
    for (int64_t e = a.experts; e > 0; e--) a.offsets[e] = a.offsets[e - 1];
    a.offsets[0] = 0;
}

EXPORT void membound_grouped(const GroupedArguments* arguments, int threads) {
    for (int64_t e = 0; e < arguments->experts; e++)
        if (arguments->offsets[e + 1] > arguments->offsets[e]) expert_rows(*arguments, e, threads);
}

// Each token's slots in the order of its experts, as if these were added one after the other.
EXPORT void membound_combine(const CombineArguments* arguments, int threads) {
    const CombineArguments& a = *arguments;
    const int64_t tokens = a.tokens, n = a.n;
    parallel_for(tokens, rows_at_once(tokens, n * a.top_k), threads, [&](int64_t token, int64_t last) {
        for (; token < last; token++) {
            const int32_t* chosen = a.chosen + token * a.top_k;
            float* out = a.out + token * n;
            memset(out, 0, n * sizeof(float));
            for (int64_t i = 0, before = -1; i < a.top_k; i++) {
                int64_t next = -1;
                for (int64_t j = 0; j < a.top_k; j++)
                    if (chosen[j] > before && (next < 0 || chosen[j] < chosen[next])) next = j;
                before = chosen[next];
                const float* slot = a.slots + (token * a.top_k + next) * n;
                const float weight = a.weights[token * a.top_k + next];
                for (int64_t at = 0; at < n; at++) out[at] += slot[at] * weight;
            }
        }
    });
}

EXPORT void membound_count_routed(const CountArguments* arguments, int) {
    const CountArguments& a = *arguments;
    const int64_t tokens = a.tokens;
    *a.counted += tokens;
    for (int64_t e = 0; e < a.experts; e++) a.load[e] += a.offsets[e + 1] - a.offsets[e];
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t e = 0; e < a.experts; e++) a.probability[e] += a.probabilities[token * a.experts + e];
}
