// Where the tokens of a step live, as cpu.py hands it over; base.py (`RaggedBatch`) says what its parts mean.

#pragma once

#include <cstdint>

struct Batch {
    const int64_t *positions, *slots;  // [tokens]
    const int32_t* query_start;        // [sequences + 1]
    const int32_t* context_len;        // [sequences]
    const int32_t* block_table;        // [sequences, table_stride]
    const int64_t* tree;               // [tokens], bit j: sees the j-th new token of its sequence; null: causal
    const int64_t* seats;              // [sequences]; null: in their order
    int64_t tokens, sequences, table_stride;

    int64_t seat(int64_t sequence) const { return seats ? seats[sequence] : sequence; }
};

// How many rows an operation works on: what it was called with, or in a replay so many for each token of the step.
struct Rows {
    int64_t fixed;
    const Batch* batch;
    int64_t each;

    operator int64_t() const { return batch ? batch->tokens * each : fixed; }
};
