#include "operators/attend.h"

#include <cmath>
#include <limits>

namespace sim {
namespace {

// True where a query does not see a key; queries are the last ones of the keys in modes 3 and 4.
Tensor hidden_of(const AttentionOptions& options, const Tensor& mask, int64_t queries, int64_t keys) {
    enum { kGiven = 0, kAll = 1, kLeftCausal = 2, kRightCausal = 3, kBand = 4 };
    const int64_t mode = options.sparse_mode;
    if (mode == kGiven || mode == kAll) {
        if (!mask.defined()) return Tensor();
        return mask.to(at::kBool).slice(-2, 0, queries).slice(-1, 0, keys);
    }
    const Tensor query = at::arange(queries).unsqueeze(1), key = at::arange(keys);
    if (mode == kLeftCausal) return key > query;
    const Tensor distance = key - query - (keys - queries);
    if (mode == kRightCausal) return distance > 0;
    TORCH_CHECK(mode == kBand, "the simulator lacks sparse_mode ", mode);
    return at::logical_or(distance > options.after, distance < -options.before);
}

// The softmax over the keys, and over a sink that each head may have beside them.
Tensor weights_of(const Tensor& scores, const Tensor& sinks) {
    if (!sinks.defined()) return at::softmax(scores, -1);
    const Tensor sink = sinks.to(at::kFloat).view({-1, 1, 1}).expand({-1, scores.size(1), 1});
    return at::softmax(at::cat({scores, sink}, -1), -1).slice(-1, 0, scores.size(-1));
}

// query [heads, queries, dim], key and value [kv_heads, keys, dim], all float32.
std::pair<Tensor, Tensor> attend_one(const Attention& call, const Tensor& query, Tensor key,
                                     Tensor value, const Tensor& hidden, const Tensor& shift) {
    const int64_t groups = query.size(0) / key.size(0);
    key = key.repeat_interleave(groups, 0);
    value = value.repeat_interleave(groups, 0);
    Tensor scores = at::matmul(query, key.transpose(-1, -2)) * call.options.scale;
    if (shift.defined()) scores = scores + shift;
    if (hidden.defined()) scores.masked_fill_(hidden, -std::numeric_limits<float>::infinity());
    const Tensor lse = at::logsumexp(scores, {-1}, true);
    // A query that sees nothing gets zeros.
    const Tensor weights = at::nan_to_num(weights_of(scores, call.sinks), 0.0);
    return {at::matmul(weights, value), lse};
}

// The keys of one request from the cache: [blocks, size, kv_heads * dim] or
// [blocks, kv_heads, size, dim].
Tensor paged(const Tensor& cache, const Tensor& blocks, int64_t keys, const AttentionOptions& options) {
    const int64_t count = (keys + options.block_size - 1) / options.block_size;
    Tensor pages = cache.index_select(0, blocks.slice(0, 0, count));
    if (cache.dim() == 3) {
        pages = pages.view({-1, options.kv_heads, cache.size(2) / options.kv_heads}).transpose(0, 1);
    } else {
        pages = pages.transpose(0, 1).flatten(1, 2);
    }
    return pages.slice(1, 0, keys).to(at::kFloat);
}

// As [batch, heads, tokens, dim], whatever the layout; TND counts as one batch.
Tensor normal_form(const Tensor& tensor, const std::string& layout, int64_t heads) {
    if (layout == "BNSD") return tensor;
    if (layout == "BSND") return tensor.transpose(1, 2);
    if (layout == "BSH") return tensor.unflatten(-1, {heads, -1}).transpose(1, 2);
    if (layout == "TND") return tensor.transpose(0, 1).unsqueeze(0);
    if (layout == "NTD" || layout == "NSD") return tensor.unsqueeze(0);
    TORCH_CHECK(false, "the simulator lacks the attention layout ", layout);
}

int64_t at_or(const Ints& values, int64_t index, int64_t otherwise) {
    if (values.empty()) return otherwise;
    return values[values.size() == 1 ? 0 : index];
}

struct Spans {
    Ints lengths, starts;
};

Spans spans_of(const Ints& ends) {
    Spans spans;
    int64_t start = 0;
    for (int64_t end : ends) {
        spans.starts.push_back(start);
        spans.lengths.push_back(end - start);
        start = end;
    }
    return spans;
}

Tensor with_rope(const Tensor& tensor, const Tensor& rope) {
    return rope.defined() ? at::cat({tensor, rope}, -1) : tensor;
}

// What is given for each request, for all of them at once, or not at all.
Tensor own_part(const Tensor& tensor, int64_t request) {
    if (!tensor.defined() || tensor.dim() <= 2) return tensor;
    return tensor[tensor.size(0) == 1 ? 0 : request];
}

}  // namespace

void attend(const Attention& call) {
    AttentionOptions options = call.options;
    const std::string& layouts = call.layouts;
    const size_t bar = layouts.find('_');
    const std::string layout = layouts.substr(0, bar);
    const std::string out_layout = bar == std::string::npos ? layout : layouts.substr(bar + 1);
    if (!options.kv_heads) options.kv_heads = options.heads;
    const auto normal_query = [&](const Tensor& tensor) {
        if (!tensor.defined()) return Tensor();
        return normal_form(tensor, layout, options.heads).to(at::kFloat);
    };
    const Tensor q = with_rope(normal_query(call.query), normal_query(call.query_rope));
    const Tensor o = normal_form(call.out, out_layout, options.heads);
    const bool packed = layout == "TND" || layout == "NTD";
    const bool table = call.blocks.defined();
    const auto normal_keys = [&](const Tensor& tensor) {
        if (table || !tensor.defined()) return tensor;
        return normal_form(tensor, layout, options.kv_heads);
    };
    const Tensor k = normal_keys(call.keys[0]), v = normal_keys(call.values[0]);
    const Tensor k_rope = normal_keys(call.key_rope);
    const Spans q_spans = packed ? spans_of(call.query_lengths) : Spans{};
    const Spans k_spans = packed && !table ? spans_of(call.key_lengths) : Spans{};
    const int64_t requests =
        packed ? static_cast<int64_t>(call.query_lengths.size()) : q.size(0);
    Tensor all_lse = at::full({q.size(0), q.size(1), q.size(2), 1},
                              std::numeric_limits<float>::infinity());
    o.zero_();
    for (int64_t request = 0; request < requests; request++) {
        const int64_t batch = packed ? 0 : request;
        const int64_t from = packed ? q_spans.starts[request] : 0;
        const int64_t queries =
            packed ? q_spans.lengths[request]
                   : std::min(q.size(2), at_or(call.query_lengths, request, q.size(2)));
        const int64_t count = packed && !table ? k_spans.lengths[request]
                              : table          ? at_or(call.key_lengths, request, 0)
                                               : at_or(call.key_lengths, request, k.size(2));
        if (count <= 0 || queries <= 0) continue;
        const int64_t k_from = packed && !table ? k_spans.starts[request] : 0;
        const auto keys_of = [&](const Tensor& cache) {
            if (!cache.defined()) return Tensor();
            if (table) return paged(cache, call.blocks[request], count, options);
            return cache[batch].slice(1, k_from, k_from + count).to(at::kFloat);
        };
        Tensor shift = own_part(call.shift, request);
        if (shift.defined()) {
            shift = shift.to(at::kFloat).slice(-2, 0, queries).slice(-1, 0, count);
        }
        const Tensor mask = own_part(call.mask, request);
        const auto [found, found_lse] =
            attend_one(call, q[batch].slice(1, from, from + queries),
                       with_rope(keys_of(k), keys_of(k_rope)), keys_of(v),
                       hidden_of(options, mask, queries, count), shift);
        o[batch].slice(1, from, from + queries).copy_(found);
        all_lse[batch].slice(1, from, from + queries).copy_(found_lse);
    }
    if (!call.lse.defined()) return;
    if (!call.wants_lse) {
        // A single zero, as npu_fused_infer_attention_score documents it.
        call.lse.zero_();
        return;
    }
    if (call.lse.numel() != all_lse.numel()) return;
    const Tensor ordered = packed ? all_lse[0].transpose(0, 1).contiguous() : all_lse;
    call.lse.copy_(ordered.reshape(call.lse.sizes()));
}

}  // namespace sim
