// Attention as such: what the operators of attention have in common.
#pragma once

#include "operators/operators.h"

namespace sim {

struct AttentionOptions {
    int64_t heads, kv_heads;
    double scale;
    int64_t sparse_mode, before, after, block_size;
};

// One call. Undefined tensors and empty lists are those that were not given.
struct Attention {
    Tensor query;
    Tensors keys, values;
    Tensor mask, shift, sinks, query_rope, key_rope;
    Ints query_lengths, key_lengths;
    Tensor blocks;  // the table of pages: [requests, most pages]
    std::string layouts;
    AttentionOptions options;
    bool wants_lse;
    Tensor out, lse;
};

// Writes `out`, and `lse` if it is wanted.
void attend(const Attention& call);

}  // namespace sim
