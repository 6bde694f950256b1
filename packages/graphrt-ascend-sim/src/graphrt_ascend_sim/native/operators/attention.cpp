// Fused attention: npu_fused_infer_attention_score, v1 and v2.

#include <cmath>
#include <limits>
#include <string>

#include "errors.h"
#include "operators/operators.h"

using namespace sim;

namespace {

constexpr aclError kTilingFailed = 561002;
constexpr uint64_t kWorkspace = 1024, kLargestWorkspace = 4096;

struct Options {
    int64_t heads, kv_heads;
    double scale;
    int64_t sparse_mode, before, after, block_size;
};

// True where a query does not see a key; queries are the last ones of the keys in modes 3 and 4.
Tensor hidden_of(const Options& options, const Tensor& mask, int64_t queries, int64_t keys) {
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

// query [heads, queries, dim], key and value [kv_heads, keys, dim], all float32.
std::pair<Tensor, Tensor> attend(const Options& options, const Tensor& query, Tensor key,
                                 Tensor value, const Tensor& hidden) {
    const int64_t groups = query.size(0) / key.size(0);
    key = key.repeat_interleave(groups, 0);
    value = value.repeat_interleave(groups, 0);
    Tensor scores = at::matmul(query, key.transpose(-1, -2)) * options.scale;
    if (hidden.defined()) scores.masked_fill_(hidden, -std::numeric_limits<float>::infinity());
    const Tensor lse = at::logsumexp(scores, {-1}, true);
    // A query that sees nothing gets zeros.
    return {at::matmul(at::nan_to_num(at::softmax(scores, -1), 0.0), value), lse};
}

// The keys of one request from the cache: [blocks, size, kv_heads * dim] or
// [blocks, kv_heads, size, dim].
Tensor paged(const Tensor& cache, const Tensor& blocks, int64_t keys, const Options& options) {
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

void fused_attention(const Tensor& query, const Tensors& keys, const Tensors& values,
                     const Tensor& mask, const Ints& query_lengths, const Ints& key_lengths,
                     const Tensor& blocks, const std::string& layouts, Options options,
                     bool wants_lse, const Tensor& out, const Tensor& lse) {
    const size_t bar = layouts.find('_');
    const std::string layout = layouts.substr(0, bar);
    const std::string out_layout = bar == std::string::npos ? layout : layouts.substr(bar + 1);
    if (!options.kv_heads) options.kv_heads = options.heads;
    const Tensor q = normal_form(query, layout, options.heads).to(at::kFloat);
    const Tensor o = normal_form(out, out_layout, options.heads);
    const bool packed = layout == "TND" || layout == "NTD";
    const bool table = blocks.defined();
    const Tensor k = table ? keys[0] : normal_form(keys[0], layout, options.kv_heads);
    const Tensor v = table ? values[0] : normal_form(values[0], layout, options.kv_heads);
    const Spans q_spans = packed ? spans_of(query_lengths) : Spans{};
    const Spans k_spans = packed && !table ? spans_of(key_lengths) : Spans{};
    const int64_t requests = packed ? static_cast<int64_t>(query_lengths.size()) : q.size(0);
    Tensor all_lse = at::full({q.size(0), q.size(1), q.size(2), 1},
                              std::numeric_limits<float>::infinity());
    o.zero_();
    for (int64_t request = 0; request < requests; request++) {
        const int64_t batch = packed ? 0 : request;
        const int64_t from = packed ? q_spans.starts[request] : 0;
        const int64_t queries = packed ? q_spans.lengths[request]
                                       : std::min(q.size(2), at_or(query_lengths, request, q.size(2)));
        const int64_t count = packed && !table ? k_spans.lengths[request]
                              : table          ? at_or(key_lengths, request, 0)
                                               : std::min(k.size(2), at_or(key_lengths, request,
                                                                           k.size(2)));
        if (count <= 0 || queries <= 0) continue;
        const int64_t k_from = packed && !table ? k_spans.starts[request] : 0;
        const auto keys_of = [&](const Tensor& cache) {
            if (table) return paged(cache, blocks[request], count, options);
            return cache[batch].slice(1, k_from, k_from + count).to(at::kFloat);
        };
        const Tensor own_mask =
            mask.defined() && mask.dim() > 2 ? mask[mask.size(0) == 1 ? 0 : request] : mask;
        const auto [found, found_lse] =
            attend(options, q[batch].slice(1, from, from + queries), keys_of(k), keys_of(v),
                   hidden_of(options, own_mask, queries, count));
        o[batch].slice(1, from, from + queries).copy_(found);
        all_lse[batch].slice(1, from, from + queries).copy_(found_lse);
    }
    if (!wants_lse || lse.numel() != all_lse.numel()) return;
    lse.copy_(packed ? all_lse[0].transpose(0, 1).reshape(lse.sizes()) : all_lse.view(lse.sizes()));
}

int prepare_attention(const char* name, uint64_t* workspace, aclOpExecutor** executor, In query,
                      List keys, List values, In mask, Array query_lengths, Array key_lengths,
                      In blocks, const char* layout, Options options, bool wants_lse, Out out,
                      Out lse) {
    const std::string layouts = layout;
    if (layouts.substr(0, 3) == "TND") {
        const Ints ends = hold(query_lengths);
        if (ends.empty() || ends.back() != query->sizes[0]) {
            return fail(kTilingFailed,
                        "in layout TND the last of actual_seq_lengths must be the number of "
                        "tokens of the query, queryT: " +
                            (ends.empty() ? "none given" : std::to_string(ends.back())) +
                            " is not " + std::to_string(query->sizes[0]));
        }
    }
    return prepare(
        name, kWorkspace, workspace, executor,
        [=](const Tensor& q, const Tensors& k, const Tensors& v, const Tensor& hidden,
            const Ints& q_lengths, const Ints& k_lengths, const Tensor& table, const Tensor& o,
            const Tensor& sums) {
            fused_attention(q, k, v, hidden, q_lengths, k_lengths, table, layouts, options,
                            wants_lse, o, sums);
        },
        query, keys, values, mask, query_lengths, key_lengths, blocks, out, lse);
}

}  // namespace

// The parameters up to the shared prefix are those of all versions.
#define COMMON_PARAMETERS                                                                       \
    In query, List key, List value, In, In mask, Array query_lengths, Array key_lengths, In, In, \
        In, In, In, In, In, In blocks, In, In, In, In, In, In, In, In, Array
#define OPTION_PARAMETERS                                                                       \
    int64_t heads, double scale, int64_t before, int64_t after, char *layout, int64_t kv_heads, \
        int64_t sparse_mode, int64_t, int64_t block_size, int64_t, bool wants_lse, int64_t, int64_t
#define RESULTS Out out, Out lse, uint64_t *workspace, aclOpExecutor **executor

#define FUSED_ATTENTION(name, ...)                                                             \
    API int name##GetWorkspaceSize(COMMON_PARAMETERS, __VA_ARGS__, RESULTS) {                  \
        const Options options{heads, kv_heads, scale, sparse_mode, before, after, block_size}; \
        return prepare_attention(#name, workspace, executor, query, key, value, mask,          \
                                 query_lengths, key_lengths, blocks, layout, options,          \
                                 wants_lse, out, lse);                                         \
    }                                                                                          \
    API int name##GetMaxWorkspaceSize(COMMON_PARAMETERS, __VA_ARGS__, RESULTS) {               \
        *workspace = kLargestWorkspace;                                                        \
        *executor = new aclOpExecutor{#name, [] {}};                                           \
        return kOk;                                                                            \
    }                                                                                          \
    SIM_LAUNCH(name)

FUSED_ATTENTION(aclnnFusedInferAttentionScoreV2, OPTION_PARAMETERS)
FUSED_ATTENTION(aclnnFusedInferAttentionScoreV3, In, In, In, OPTION_PARAMETERS)
FUSED_ATTENTION(aclnnFusedInferAttentionScoreV4, In, In, In, In, In, OPTION_PARAMETERS, int64_t)

// scaled_dot_product_attention and npu_fusion_attention, without dropout.
OPERATOR(aclnnFlashAttentionScore,
         (In query_, In key_, In value_, In shift_, In dropped_, In, In mask_, Array,
          double scale_, double, int64_t before_, int64_t after_, int64_t heads_, char* layout_,
          int64_t, int64_t sparse_mode_, Out, Out, Out, Out out_),
         (query_, key_, value_, shift_, dropped_, mask_, scale_, before_, after_, heads_, layout_,
          sparse_mode_, out_),
         [](const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& shift,
            const Tensor& dropped, const Tensor& mask, double scale, int64_t before, int64_t after,
            int64_t heads, const std::string& layout, int64_t sparse_mode, const Tensor& out) {
             TORCH_CHECK(!shift.defined() || !shift.numel(), "the simulator lacks pse");
             TORCH_CHECK(!dropped.defined() || !dropped.numel(), "the simulator lacks dropout here");
             const int64_t kv_heads = layout == "BSH"    ? heads * key.size(2) / query.size(2)
                                      : layout == "BNSD" ? key.size(1)
                                                         : key.size(2);
             const Options options{heads, kv_heads, scale, sparse_mode, before, after, 0};
             fused_attention(query, {key}, {value}, mask, {}, {}, Tensor(), layout, options, false,
                             out, Tensor());
         })
