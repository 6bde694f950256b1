// Fused attention: npu_fused_infer_attention_score, v1 and v2.

#include <algorithm>
#include <string>
#include <utility>

#include "errors.h"
#include "operators/attend.h"

using namespace sim;

namespace {

constexpr aclError kTilingFailed = 561002;

// What a call takes, and what is written of it: a part that is always needed, and one for each
// tile of keys. The numbers mean nothing; that the need follows the lengths is what the device does.
constexpr uint64_t kWorkspace = 1024, kTileBytes = 16;
constexpr int64_t kTileKeys = 16;

struct Lengths {
    Ints queries, keys;
};

// What the lengths of a call are held against.
struct Shapes {
    bool packed;             // layouts TND and NTD: query lengths add up
    bool paged;
    int64_t requests;        // of the call
    int64_t queries;         // tokens, of all requests if packed
    int64_t keys;            // that one request may have; without pages those of all if packed
    int64_t rows;            // of the table
};

Shapes shapes_of(In query, List keys, In blocks, const Lengths& lengths, const std::string& layouts,
                 int64_t block_size) {
    const std::string layout = layouts.substr(0, layouts.find('_'));
    const bool packed = layout == "TND" || layout == "NTD";
    const auto tokens_of = [&](const aclTensor& tensor) {
        if (layout == "TND") return tensor.sizes[0];
        return tensor.sizes[layout == "BNSD" ? 2 : 1];
    };
    Shapes shapes{packed, blocks != nullptr, 0, tokens_of(*query), 0, 0};
    shapes.requests = packed ? static_cast<int64_t>(lengths.queries.size()) : query->sizes[0];
    shapes.rows = blocks ? blocks->sizes[0] : 0;
    shapes.keys = blocks ? blocks->sizes[1] * block_size : tokens_of(*keys->tensors[0]);
    return shapes;
}

std::string wrong_list(const char* name, const Ints& values, bool adds_up, int64_t requests,
                       int64_t most) {
    const auto count = static_cast<int64_t>(values.size());
    if (count < requests && count != 1) {
        return std::string(name) + " has " + std::to_string(count) + " entries for " +
               std::to_string(requests) + " requests";
    }
    int64_t before = 0;
    for (int64_t value : values) {
        if (value < (adds_up ? before : 0) || value > most) {
            return std::string(name) + " has " + std::to_string(value) + ", which is not between " +
                   std::to_string(adds_up ? before : 0) + " and " + std::to_string(most);
        }
        if (adds_up) before = value;
    }
    return "";
}

// The constraints of the public documentation of npu_fused_infer_attention_score (op-plugin,
// docs/zh/custom_APIs), which the tiling of the operator checks on the host: lengths are not
// negative and not beyond the tensors, those of layout TND add up to the tokens, one list has an
// entry for each request or one for all, the table is [requests, >= most pages of a request].
std::string wrong_lengths(const Shapes& shapes, const Lengths& lengths) {
    if (shapes.packed) {
        if (lengths.queries.empty() || lengths.queries.back() != shapes.queries) {
            const std::string last =
                lengths.queries.empty() ? "none given" : std::to_string(lengths.queries.back());
            return "in layout TND the last of actual_seq_lengths must be the number of tokens of "
                   "the query, queryT: " +
                   last + " is not " + std::to_string(shapes.queries);
        }
    }
    std::string wrong;
    // Elsewhere they are an upper bound, which tests of torch_npu's set beyond a single token.
    if (shapes.packed) {
        wrong = wrong_list("actual_seq_lengths", lengths.queries, true, shapes.requests,
                           shapes.queries);
    }
    if (!wrong.empty()) return wrong;
    if (shapes.paged && shapes.rows < shapes.requests) {
        return "the block table has " + std::to_string(shapes.rows) + " rows for " +
               std::to_string(shapes.requests) + " requests";
    }
    if (lengths.keys.empty()) {
        return shapes.paged || shapes.packed ? "actual_seq_lengths_kv is missing" : "";
    }
    return wrong_list("actual_seq_lengths_kv", lengths.keys, shapes.packed && !shapes.paged,
                      shapes.requests, shapes.keys);
}

uint64_t tiles_of(int64_t keys) { return (keys + kTileKeys - 1) / kTileKeys; }

uint64_t needed_workspace(const Shapes& shapes, const Lengths& lengths, int64_t heads) {
    uint64_t tiles = 0;
    const bool adds_up = shapes.packed && !shapes.paged;
    for (int64_t request = 0; request < shapes.requests; request++) {
        if (lengths.keys.empty() || adds_up) {
            tiles += tiles_of(shapes.keys);
            continue;
        }
        tiles += tiles_of(lengths.keys[lengths.keys.size() == 1 ? 0 : request]);
    }
    return kWorkspace + kTileBytes * static_cast<uint64_t>(heads) * tiles - kOddBytes;
}

// Of all lengths that the tensors allow.
uint64_t largest_workspace(const Shapes& shapes, int64_t heads) {
    const auto requests = static_cast<uint64_t>(std::max(shapes.requests, shapes.rows));
    return kWorkspace + kTileBytes * static_cast<uint64_t>(heads) * requests * tiles_of(shapes.keys);
}

// Arguments that the simulator does not compute with are refused: on the device they change the
// result.
int lacked(std::initializer_list<std::pair<const char*, bool>> given) {
    for (const auto& [name, is_given] : given) {
        if (is_given) return fail(kNoOperator, std::string("the simulator's attention lacks ") + name);
    }
    return kOk;
}

struct Call {
    In query;
    List keys, values;
    In shift, mask;
    Array query_lengths, key_lengths;
    In blocks;
    const char* layout;
    AttentionOptions options;
    bool wants_lse;
    In query_rope, key_rope, sinks;
    bool is_v2;
};

bool is_contiguous(const aclTensor& tensor) {
    int64_t stride = 1;
    for (size_t dim = tensor.sizes.size(); dim-- > 0; stride *= tensor.sizes[dim]) {
        if (tensor.sizes[dim] > 1 && tensor.strides[dim] != stride) return false;
    }
    return true;
}

// What the page of npu_fused_infer_attention_score allows (the numbers are its lines), or that of its
// v2 (275): op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu. Of what the simulator computes.
std::string wrong_tensors(const Call& call) {
    const std::string layouts = call.layout, layout = layouts.substr(0, layouts.find('_'));
    const bool packed = layout == "TND" || layout == "NTD";
    const int64_t heads = call.options.heads, kv_heads = call.options.kv_heads ? call.options.kv_heads : heads;
    const auto type = call.query->type;
    if (!is_contiguous(*call.query)) return "query is not contiguous";  // 86
    if (type != at::kHalf && type != at::kBFloat16) return "query is not float16 or bfloat16";  // 86
    for (List list : {call.keys, call.values}) {
        // 88, 90 and 270: other types, int8 among them, come with scales.
        for (const aclTensor* tensor : list->tensors) {
            if (tensor->type != type) return "key or value have another data type than query";
        }
    }
    if (heads > 256) return "num_heads is more than 256: " + std::to_string(heads);  // 76
    if (layout == "BNSD" && heads != call.query->sizes[1]) {  // 185
        return "num_heads is " + std::to_string(heads) + ", and query has " + std::to_string(call.query->sizes[1]);
    }
    if (packed && call.query_lengths && hold(call.query_lengths).size() > 4096) {  // 377
        return "layout " + layout + " takes at most 4096 requests";
    }
    if (heads % kv_heads || heads / kv_heads > 64) {  // 208
        return "num_heads is not a multiple of num_key_value_heads, or more than 64 times as many";
    }
    if (call.mask) {  // 98
        const auto mask = call.mask->type;
        if (mask != at::kBool && mask != at::kChar && mask != at::kByte) {
            return "atten_mask is not bool, int8 or uint8";
        }
    }
    // 224: without a rope the mode means nothing for a query of one token. Packed ones have no such axis.
    const bool one = !packed && call.query->sizes[layout == "BNSD" ? 2 : 1] == 1;
    const int64_t mode = call.options.sparse_mode;
    if (mode >= 2 && mode <= 4 && (!one || call.query_rope)) {  // 216 to 218, 408, and v2 333
        if (!call.mask) return "atten_mask is missing, which sparse_mode 2, 3 and 4 need: (2048, 2048)";
        Ints sizes = call.mask->sizes;
        while (sizes.size() > 2 && sizes.size() < 5 && sizes.front() == 1) sizes.erase(sizes.begin());
        if (sizes != Ints{2048, 2048}) {
            std::string shape;
            for (int64_t size : call.mask->sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
            return "atten_mask is (" + shape + "), and with sparse_mode 2, 3 and 4 it is (2048, 2048), "
                   "with one or two dimensions of 1 before it or none";
        }
    }
    const auto width = [&](const aclTensor& tensor, int64_t count, bool paged) {
        const bool joined = paged ? tensor.sizes.size() == 3 : layout == "BSH";
        return tensor.sizes.back() / (joined ? count : 1);
    };
    const bool paged = call.blocks != nullptr;
    const int64_t q = width(*call.query, heads, false);
    const int64_t k = width(*call.keys->tensors[0], kv_heads, paged);
    const int64_t v = width(*call.values->tensors[0], kv_heads, paged);
    const std::string widths = std::to_string(q) + ", " + std::to_string(k) + ", " + std::to_string(v);
    if (!call.query_rope != !call.key_rope) return "query_rope and key_rope go together";  // 324
    if (call.query_rope) {
        if (call.query_rope->type != type || call.key_rope->type != type) {  // 325
            return "query_rope or key_rope have another data type than query";
        }
        if (width(*call.query_rope, heads, false) != 64 || width(*call.key_rope, kv_heads, paged) != 64) {
            return "the head size of query_rope and key_rope is not 64";  // 331, 332, 341
        }
        if (k != q || v != q || (q != 512 && q != 128)) {  // 326, 389
            return "head sizes beside a query_rope are not all 512 or all 128: " + widths;
        }
        if (q == 512 && mode == 2) return "head size 512 takes sparse_mode 0, 3 and 4, not 2";  // 330, 381
        if (q == 512 && (heads > 128 || (heads & (heads - 1)) || kv_heads != 1)) {  // 331, 332
            return "beside a query_rope there is one key head, and 1, 2, 4 to 128 of the query";
        }
    } else if (packed) {  // 388, 275
        const bool same = k == q && v == q && (q == 128 || q == 192 || (q == 64 && kv_heads == heads));
        if (!same && !(q == 192 && k == 192 && v == 128)) {
            return "head sizes of layout " + layout + " are not 128, 192 or (without GQA) 64: " + widths;
        }
        if (call.is_v2 && v == 192 && (paged || kv_heads != heads)) {  // v2 275
            return "v2 takes no values of head size 192 beside a block_table or with GQA";
        }
    } else if (q != k || q > 512 || v > 512 || q % 8 || v % 8) {  // 78, 400
        return "head sizes are not multiples of 16 bytes up to 512: " + widths;
    }
    if (!paged) return "";
    if (call.blocks->type != at::kInt || call.blocks->sizes.size() != 2) {  // 128
        return "block_table is not int32 of two dimensions";
    }
    const Ints& cache = call.keys->tensors[0]->sizes;
    if (cache.size() == 3 && cache[2] > 65535) {  // 311, v2 341
        return "a cache of (blocks, block_size, H) has H above 65535: " + std::to_string(cache[2]);
    }
    const int64_t block = call.options.block_size;
    const bool fits = packed || call.query_rope ? block % 16 == 0 && block <= 1024     // 335, 391
                      : one                     ? block <= 512                         // 300
                                                : block % 128 == 0 && block <= 512;
    return fits && block > 0 ? "" : "block_size has a value that the layout does not take: " + std::to_string(block);
}

int prepare_attention(const char* name, uint64_t* workspace, aclOpExecutor** executor,
                      const Call& call, Out out, Out lse) {
    const Lengths lengths{hold(call.query_lengths), hold(call.key_lengths)};
    const AttentionOptions options = call.options;
    const std::string layouts = call.layout;
    const Shapes shapes = shapes_of(call.query, call.keys, call.blocks, lengths, layouts,
                                    options.block_size);
    std::string wrong = wrong_tensors(call);
    if (wrong.empty()) wrong = wrong_lengths(shapes, lengths);
    if (!wrong.empty()) return fail(kTilingFailed, wrong);
    const bool wants_lse = call.wants_lse;
    return prepare(
        name, needed_workspace(shapes, lengths, options.heads), workspace, executor,
        [=](const Tensor& q, const Tensors& k, const Tensors& v, const Tensor& mask,
            const Tensor& shift, const Tensor& sinks, const Tensor& q_rope, const Tensor& k_rope,
            const Tensor& table, const Tensor& o, const Tensor& sums) {
            attend({q, k, v, mask, shift, sinks, q_rope, k_rope, lengths.queries, lengths.keys,
                    table, layouts, options, wants_lse, o, sums});
        },
        call.query, call.keys, call.values, call.mask, call.shift, call.sinks, call.query_rope,
        call.key_rope, call.blocks, out, lse);
}

int largest_of(const char* name, uint64_t* workspace, aclOpExecutor** executor, const Call& call) {
    const Lengths lengths{hold(call.query_lengths), hold(call.key_lengths)};
    const Shapes shapes = shapes_of(call.query, call.keys, call.blocks, lengths, call.layout,
                                    call.options.block_size);
    *workspace = largest_workspace(shapes, call.options.heads);
    *executor = new aclOpExecutor{name, [] {}};
    return kOk;
}

}  // namespace

// The parameters up to the shared prefix are those of all versions.
#define COMMON_PARAMETERS                                                                      \
    In query, List key, List value, In shift, In mask, Array query_lengths, Array key_lengths, \
        In dequant1, In quant1, In dequant2, In quant2, In offset2, In antiquant,              \
        In antiquant_offset, In blocks, In query_padding, In kv_padding, In key_antiquant,     \
        In key_antiquant_offset, In value_antiquant, In value_antiquant_offset, In key_prefix, \
        In value_prefix, Array
#define OPTION_PARAMETERS                                                                       \
    int64_t heads, double scale, int64_t before, int64_t after, char *layout, int64_t kv_heads, \
        int64_t sparse_mode, int64_t, int64_t block_size, int64_t, bool wants_lse, int64_t, int64_t
#define RESULTS Out out, Out lse, uint64_t *workspace, aclOpExecutor **executor
#define LACKED_ARGUMENTS                                                                 \
    {"dequant_scale1", dequant1 != nullptr}, {"quant_scale1", quant1 != nullptr},        \
        {"dequant_scale2", dequant2 != nullptr}, {"quant_scale2", quant2 != nullptr},    \
        {"quant_offset2", offset2 != nullptr}, {"antiquant_scale", antiquant != nullptr}, \
        {"antiquant_offset", antiquant_offset != nullptr},                               \
        {"query_padding_size", query_padding != nullptr},                                \
        {"kv_padding_size", kv_padding != nullptr},                                      \
        {"key_antiquant_scale", key_antiquant != nullptr},                               \
        {"key_antiquant_offset", key_antiquant_offset != nullptr},                       \
        {"value_antiquant_scale", value_antiquant != nullptr},                           \
        {"value_antiquant_offset", value_antiquant_offset != nullptr},                   \
        {"key_shared_prefix", key_prefix != nullptr},                                    \
        {"value_shared_prefix", value_prefix != nullptr}

// `own` are the tensors of a version (query_rope, key_rope, what quantizes the two, learnable_sink)
// and whether it is what torch_npu's v2 calls.
#define FUSED_ATTENTION(name, own, ...)                                                            \
    API int name##GetWorkspaceSize(COMMON_PARAMETERS, __VA_ARGS__, RESULTS) {                      \
        struct { In query_rope, key_rope, key_rope_antiquant, query_dequant, sinks; bool is_v2; }  \
        more = own;                                                                                \
        if (int error = lacked({LACKED_ARGUMENTS,                                                  \
                                {"key_rope_antiquant_scale", more.key_rope_antiquant != nullptr},  \
                                {"dequant_scale_query", more.query_dequant != nullptr}})) {        \
            return error;                                                                          \
        }                                                                                          \
        const AttentionOptions options{heads, kv_heads, scale, sparse_mode, before, after,         \
                                       block_size};                                                \
        return prepare_attention(#name, workspace, executor,                                       \
                                 {query, key, value, shift, mask, query_lengths, key_lengths,      \
                                  blocks, layout, options, wants_lse, more.query_rope,             \
                                  more.key_rope, more.sinks, more.is_v2},                          \
                                 out, lse);                                                        \
    }                                                                                              \
    API int name##GetMaxWorkspaceSize(COMMON_PARAMETERS, __VA_ARGS__, RESULTS) {                   \
        const AttentionOptions options{heads, kv_heads, scale, sparse_mode, before, after,         \
                                       block_size};                                                \
        return largest_of(#name, workspace, executor,                                              \
                          {query, key, value, shift, mask, query_lengths, key_lengths, blocks,     \
                           layout, options, wants_lse, nullptr, nullptr, nullptr, false});         \
    }                                                                                              \
    SIM_LAUNCH(name)

#define NO_TENSORS \
    { nullptr, nullptr, nullptr, nullptr, nullptr, false }
#define ROPE_TENSORS \
    { query_rope, key_rope, rope_antiquant, nullptr, nullptr, false }
#define ALL_TENSORS \
    { query_rope, key_rope, rope_antiquant, query_dequant, sinks, true }

FUSED_ATTENTION(aclnnFusedInferAttentionScoreV2, SIM_UNWRAP(NO_TENSORS), OPTION_PARAMETERS)
FUSED_ATTENTION(aclnnFusedInferAttentionScoreV3, SIM_UNWRAP(ROPE_TENSORS), In query_rope,
                In key_rope, In rope_antiquant, OPTION_PARAMETERS)
FUSED_ATTENTION(aclnnFusedInferAttentionScoreV4, SIM_UNWRAP(ALL_TENSORS), In query_rope,
                In key_rope, In rope_antiquant, In query_dequant, In sinks, OPTION_PARAMETERS,
                int64_t)
// Of Ascend 950, where it takes the place of the others.
FUSED_ATTENTION(aclnnFusedInferAttentionScoreV5, SIM_UNWRAP(ALL_TENSORS), In query_rope,
                In key_rope, In rope_antiquant, In query_dequant, In sinks, Array, Array,
                OPTION_PARAMETERS, int64_t, int64_t)

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
             Attention call{};
             call.query = query, call.keys = {key}, call.values = {value}, call.mask = mask;
             call.layouts = layout, call.out = out;
             call.options = {heads, kv_heads, scale, sparse_mode, before, after, 0};
             attend(call);
         })
