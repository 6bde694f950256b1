// ATB's paged attention and multi-head latent attention, whose lengths are on the host.

#include "operators/atb.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "errors.h"
#include "operators/attend.h"

using namespace sim;

namespace {

constexpr uint64_t kWorkspace = 1024, kTileBytes = 16;
constexpr int64_t kTileKeys = 16;

// The one context of torch_npu: the stream of the next operation.
class Streams : public atb::Context {
public:
    atb::Status SetExecuteStream(aclrtStream stream) override {
        stream_ = stream;
        return kOk;
    }
    aclrtStream GetExecuteStream() const override { return stream_; }
    atb::Status SetAsyncTilingCopyStatus(bool) override { return kOk; }
    bool GetAsyncTilingCopyStatus() const override { return false; }

private:
    aclrtStream stream_ = nullptr;
};

// What a call runs, and the workspace that its lengths need. An operation may be asked for the next
// call before the last one is executed, but torch_npu does both in one go.
class Attending : public atb::Operation {
public:
    explicit Attending(std::string name) : name_(std::move(name)) {}
    std::string GetName() const override { return name_; }
    atb::Status InferShape(const void*, void*) const override { return atb::kInvalidParameter; }
    uint32_t GetInputNum() const override { return 5; }
    uint32_t GetOutputNum() const override { return 1; }
    atb::Status Setup(const atb::VariantPack&, uint64_t&, atb::Context*) override {
        return atb::kInvalidParameter;
    }

    // Of lengths that are neither negative nor beyond the table: [requests, pages].
    atb::Status plan(uint64_t& workspace, const Ints& lengths, const aclTensor& table,
                     int64_t page, int64_t heads, std::function<void()> run) {
        const auto count = static_cast<int64_t>(lengths.size());
        if (count < table.sizes[0]) {
            return refused("context_lens has " + std::to_string(count) + " entries for " +
                           std::to_string(table.sizes[0]) + " requests");
        }
        const int64_t most = table.sizes[1] * page;
        uint64_t tiles = 0;
        for (int64_t length : lengths) {
            if (length < 0 || length > most) {
                return refused("context_lens has " + std::to_string(length) +
                               ", which is not between 0 and " + std::to_string(most));
            }
            tiles += (length + kTileKeys - 1) / kTileKeys;
        }
        // ATB's tiling gives a request without keys no row, so that the rows of those behind it
        // move up (GetLookaheadBatchTiling; of latent attention until December 2025).
        const auto empty = std::find(lengths.begin(), lengths.end(), 0);
        if (std::any_of(empty, lengths.end(), [](int64_t length) { return length > 0; })) {
            return refused("context_lens has 0 for a request before others with keys, whose rows "
                           "the device would move");
        }
        needed_ = workspace = kWorkspace + kTileBytes * static_cast<uint64_t>(heads) * tiles;
        run_ = std::move(run);
        return kOk;
    }

    atb::Status refused(const std::string& text) const {
        fail(kParameter, text);
        return atb::kInvalidParameter;
    }

    atb::Status Execute(const atb::VariantPack&, uint8_t* workspace, uint64_t size,
                        atb::Context* context) override {
        return launch(new aclOpExecutor{name_, run_, needed_}, context->GetExecuteStream(),
                      workspace, size);
    }

protected:
    std::string name_;
    std::function<void()> run_;
    uint64_t needed_ = 0;
};

aclTensor described(const atb::Tensor& tensor) {
    aclTensor found;
    found.sizes.assign(tensor.sizes, tensor.sizes + tensor.dims);
    found.strides.resize(tensor.dims);
    int64_t stride = 1;
    for (size_t i = tensor.dims; i-- > 0;) {
        found.strides[i] = stride;
        stride *= found.sizes[i];
    }
    found.type = scalar_type(tensor.dtype);
    found.data = tensor.device ? tensor.device : tensor.host;
    return found;
}

Tensor opened(const aclTensor& tensor) { return open(HeldTensor{true, tensor}); }

Ints on_host(const aclTensor& tensor) {
    const Tensor values = opened(tensor).to(at::kLong).contiguous();
    return {values.data_ptr<int64_t>(), values.data_ptr<int64_t>() + values.numel()};
}

// [pages, size, heads, dim] as attend() takes it.
Tensor pages_of(const aclTensor& cache) { return opened(cache).flatten(2); }

// Attends from the requests that have keys, which come first; what is behind them is not written.
void attend_live(Attention call, const Ints& queries, const Ints& keys) {
    const auto live = std::find(keys.begin(), keys.end(), 0) - keys.begin();
    call.query_lengths.resize(live);
    std::partial_sum(queries.begin(), queries.begin() + live, call.query_lengths.begin());
    call.key_lengths.assign(keys.begin(), keys.begin() + live);
    const int64_t tokens = live ? call.query_lengths.back() : 0;
    for (Tensor* each : {&call.query, &call.query_rope, &call.out, &call.lse}) {
        if (each->defined()) *each = each->slice(0, 0, tokens);
    }
    call.layouts = "TND";
    attend(call);
}

class PagedAttention : public Attending {
public:
    explicit PagedAttention(const atb::infer::PagedAttentionParam& parameters)
        : Attending("PagedAttentionOperation"), parameters_(parameters) {}

    atb::Status Setup(const atb::VariantPack& tensors, uint64_t& workspace,
                      atb::Context*) override {
        if (const int wanted = begun(name_.c_str())) return wanted;
        std::vector<aclTensor> in;
        for (size_t i = 0; i < 5; i++) in.push_back(described(tensors.in[i]));
        const aclTensor out = described(tensors.out[0]);
        const Ints lengths = on_host(in[4]);
        const auto parameters = parameters_;
        const int64_t page = in[1].sizes[1], width = in[1].sizes[3], tokens = in[0].sizes[0];
        const int64_t value_width = in[2].sizes[3];
        if (!fits(page, width, value_width)) {
            return refused("blocks of " + std::to_string(page) + " tokens, " +
                           std::to_string(width) + " and " + std::to_string(value_width) +
                           " wide, are none that ATB takes");
        }
        if (tokens > in[3].sizes[0] || tokens > static_cast<int64_t>(lengths.size())) {
            return refused(std::to_string(tokens) + " tokens, more than block_table or "
                           "context_lens has requests");
        }
        return plan(workspace, lengths, in[3], page, parameters.heads, [=] {
            Attention call{};
            call.query = opened(in[0]), call.out = opened(out);
            call.keys = {pages_of(in[1])}, call.values = {pages_of(in[2])};
            call.blocks = opened(in[3]);
            call.options = {parameters.heads, parameters.kv_heads, parameters.scale, 0, 0, 0, page};
            attend_live(call, Ints(lengths.size(), 1), lengths);
        });
    }

private:
    // Of CheckPagedAttentionNdEnhance and GetPagedAttentionInfo of ATB's tiling.
    static bool fits(int64_t page, int64_t width, int64_t value_width) {
        const int64_t widest = std::max(width, value_width);
        if (page <= 0 || page % 16 || widest > 576) return false;
        if (widest > 256) return page <= 128;
        if (width == 256 && value_width == 256 && page >= 128) return page % 128 == 0;
        return width != value_width || page * width <= 128 * 128;
    }

    atb::infer::PagedAttentionParam parameters_;
};

enum class Calculation { kDecode = 0, kSpeculative = 1, kRing = 2 };

struct LatentCall {
    aclTensor query, query_rope, latents, rope, table, out;
    Ints keys, queries;
    const aclTensor* lse;
    int64_t heads, kv_heads;
    float scale;
    Calculation calculation;
};

class LatentAttention : public Attending {
public:
    LatentAttention() : Attending("AtbMLA") {}

    atb::Status setup(const LatentCall& given, uint64_t& workspace) {
        if (const int wanted = begun(name_.c_str())) return wanted;
        if (const std::string wrong = wrong_with(given); !wrong.empty()) return refused(wrong);
        const bool speculative = given.calculation == Calculation::kSpeculative;
        const bool ring = given.calculation == Calculation::kRing;
        const Ints queries = speculative ? given.queries : Ints(given.keys.size(), 1);
        // Without a mask only the kernel for 128 heads hides later keys (GetNdMLAMtpTilingTP1).
        const int64_t causal = speculative && given.heads == 128 ? 3 : 0;
        const HeldTensor sums = hold(ring ? given.lse : nullptr);
        const int64_t page = given.latents.sizes[1];
        return plan(workspace, given.keys, given.table, page, given.heads, [=] {
            Attention call{};
            call.query = opened(given.query), call.query_rope = opened(given.query_rope);
            call.keys = call.values = {pages_of(given.latents)};
            call.key_rope = pages_of(given.rope), call.blocks = opened(given.table);
            call.out = opened(given.out), call.lse = open(sums), call.wants_lse = ring;
            call.options = {given.heads, given.kv_heads, given.scale, causal, 0, 0, page};
            attend_live(call, queries, given.keys);
        });
    }

private:
    // By ATB's atb_acl_mla.cpp and MultiLatentAttentionOperation, of which it says less: what it
    // reads under another calc_type only, it does not look at.
    static std::string wrong_with(const LatentCall& call) {
        const bool speculative = call.calculation == Calculation::kSpeculative;
        const bool ring = call.calculation == Calculation::kRing;
        const int64_t tokens = call.query.sizes[0], requests = call.table.sizes[0];
        const Ints heads{8, 16, 32, 64, 128};
        if (std::find(heads.begin(), heads.end(), call.heads) == heads.end() || call.kv_heads != 1) {
            return "latent attention has 8, 16, 32, 64 or 128 heads, and 1 of keys";
        }
        if (!(call.scale > 0 && call.scale <= 1)) return "qk_scale has to be above 0, at most 1";
        if (call.query.sizes[2] != 512 || call.latents.sizes[3] != 512 ||
            call.query_rope.sizes[2] != 64 || call.rope.sizes[3] != 64) {
            return "latents are 512 wide, and their rope 64";
        }
        if (call.latents.sizes[1] > 128) return "blocks have at most 128 tokens";
        if (static_cast<int64_t>(call.keys.size()) != requests) {
            return "context_lens has another number of requests than block_tables";
        }
        if (call.calculation == Calculation::kDecode && tokens != requests) {
            return "one token a request, but with calc_type_spec";
        }
        if (speculative != !call.queries.empty()) return "qseqlen is read with calc_type_spec only";
        const int64_t asked = std::accumulate(call.queries.begin(), call.queries.end(), int64_t{0});
        if (asked > tokens || (speculative && call.queries.size() != call.keys.size())) {
            return "qseqlen does not fit the queries";
        }
        // torch_npu's overload with a workspace cannot do without: a single number is nobody's.
        if (!ring && call.lse && is_a_row_each(*call.lse, tokens)) {
            return "lse is written with calc_type_ring only";
        }
        if (ring && !(call.lse && is_a_row_each(*call.lse, tokens * call.heads))) {
            return "calc_type_ring writes lse, for each token and head";
        }
        return "";
    }

    static bool is_a_row_each(const aclTensor& tensor, int64_t rows) {
        int64_t count = 1;
        for (int64_t size : tensor.sizes) count *= size;
        return count > 1 && count >= rows;
    }
};

}  // namespace

namespace atb {

Status CreateContext(Context** context) {
    *context = new Streams;
    return kOk;
}

Status DestroyContext(Context* context) {
    delete context;
    return kOk;
}

Status DestroyOperation(Operation* operation) {
    delete operation;
    return kOk;
}

uint64_t Utils::GetTensorSize(const Tensor& tensor) {
    uint64_t bytes = c10::elementSize(scalar_type(tensor.dtype));
    for (uint64_t i = 0; i < tensor.dims; i++) bytes *= static_cast<uint64_t>(tensor.sizes[i]);
    return bytes;
}

template <class Parameters>
Status CreateOperation(const Parameters&, Operation** operation) {
    *operation = nullptr;
    fail(kNoOperator, "the simulator's libatb has paged and latent attention only");
    return kInvalidParameter;
}

template <>
__attribute__((visibility("default"))) Status CreateOperation(
    const infer::PagedAttentionParam& parameters, Operation** operation) {
    if (parameters.mask || parameters.quantized || parameters.skips_requests) {
        fail(kNoOperator, "the simulator's paged attention lacks masks and quantized caches");
        return kInvalidParameter;
    }
    *operation = new PagedAttention(parameters);
    return kOk;
}

#define LACKED(name) \
    template __attribute__((visibility("default"))) Status CreateOperation(const infer::name&, Operation**);
LACKED(LinearParam)
LACKED(ElewiseParam)
LACKED(RmsNormParam)
LACKED(GroupTopkParam)
LACKED(SelfAttentionParam)
LACKED(ReshapeAndCacheParam)
LACKED(RopeParam)

}  // namespace atb

// npu_multi_head_latent_attention: a cache of latents, which are the values too, and one of rope.
API int AtbMLAGetWorkspaceSize(In q_nope, In q_rope, In latents, In k_rope, In table, In lengths,
                               In mask, In query_lengths, In qk_descale, In pv_descale,
                               int64_t heads, float scale, int64_t kv_heads, int mask_type,
                               int calc_type, int cache_mode, Out out, Out lse,
                               uint64_t* workspace, atb::Operation** operation, atb::Context*) {
    if (!*operation) *operation = new LatentAttention;
    const LatentCall call{*q_nope, *q_rope, *latents, *k_rope, *table, *out, on_host(*lengths),
                          query_lengths ? on_host(*query_lengths) : Ints{}, lse, heads, kv_heads,
                          scale, static_cast<Calculation>(calc_type)};
    constexpr int kRopeBesideLatents = 1;
    if (mask || mask_type || qk_descale || pv_descale || cache_mode != kRopeBesideLatents) {
        return fail(kNoOperator, "the simulator's latent attention lacks masks and quantized "
                                 "caches, and those in format NZ");
    }
    return static_cast<LatentAttention*>(*operation)->setup(call, *workspace);
}

API int AtbMLA(void* workspace, uint64_t size, atb::Operation* operation, atb::Context* context) {
    return operation->Execute({}, static_cast<uint8_t*>(workspace), size, context);
}
