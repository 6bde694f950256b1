// ATB's paged attention and multi-head latent attention, whose lengths are on the host.

#include "operators/atb.h"

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
        if (const int wanted = begun(name_.c_str())) return wanted;
        const auto count = static_cast<int64_t>(lengths.size());
        if (count < table.sizes[0]) {
            fail(kParameter, "context_lens has " + std::to_string(count) + " entries for " +
                                 std::to_string(table.sizes[0]) + " requests");
            return atb::kInvalidParameter;
        }
        const int64_t most = table.sizes[1] * page;
        uint64_t tiles = 0;
        for (int64_t length : lengths) {
            if (length < 0 || length > most) {
                fail(kParameter, "context_lens has " + std::to_string(length) +
                                     ", which is not between 0 and " + std::to_string(most));
                return atb::kInvalidParameter;
            }
            tiles += (length + kTileKeys - 1) / kTileKeys;
        }
        needed_ = workspace = kWorkspace + kTileBytes * static_cast<uint64_t>(heads) * tiles;
        run_ = std::move(run);
        return kOk;
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

Ints ends_of(Ints lengths) {
    std::partial_sum(lengths.begin(), lengths.end(), lengths.begin());
    return lengths;
}

class PagedAttention : public Attending {
public:
    explicit PagedAttention(const atb::infer::PagedAttentionParam& parameters)
        : Attending("PagedAttentionOperation"), parameters_(parameters) {}

    atb::Status Setup(const atb::VariantPack& tensors, uint64_t& workspace,
                      atb::Context*) override {
        std::vector<aclTensor> in;
        for (size_t i = 0; i < 5; i++) in.push_back(described(tensors.in[i]));
        const aclTensor out = described(tensors.out[0]);
        const Ints lengths = on_host(in[4]);
        const auto parameters = parameters_;
        const int64_t page = in[1].sizes[1];
        return plan(workspace, lengths, in[3], page, parameters.heads, [=] {
            Attention call{};
            call.query = opened(in[0]), call.out = opened(out);
            call.keys = {pages_of(in[1])}, call.values = {pages_of(in[2])};
            call.blocks = opened(in[3]), call.key_lengths = lengths;
            call.query_lengths = ends_of(Ints(in[0].sizes[0], 1));
            call.layouts = "TND";
            call.options = {parameters.heads, parameters.kv_heads, parameters.scale, 0, 0, 0, page};
            attend(call);
        });
    }

private:
    atb::infer::PagedAttentionParam parameters_;
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
    constexpr int kRopeBesideLatents = 1;
    if (mask || mask_type || calc_type || qk_descale || pv_descale || lse ||
        cache_mode != kRopeBesideLatents) {
        return fail(kNoOperator, "the simulator's latent attention lacks masks, speculative and "
                                 "ring decoding, quantized caches and the sums of the softmax");
    }
    if (!*operation) *operation = new Attending("AtbMLA");
    const Ints keys = on_host(*lengths);
    const Ints queries = query_lengths ? on_host(*query_lengths) : Ints(q_nope->sizes[0], 1);
    const int64_t page = latents->sizes[1];
    const auto run = [=, query = *q_nope, query_rope = *q_rope, cache = *latents, rope = *k_rope,
                      blocks = *table, result = *out] {
        Attention call{};
        call.query = opened(query), call.query_rope = opened(query_rope);
        call.keys = call.values = {pages_of(cache)};
        call.key_rope = pages_of(rope), call.blocks = opened(blocks), call.out = opened(result);
        call.query_lengths = ends_of(queries), call.key_lengths = keys;
        call.layouts = "TND";
        call.options = {heads, kv_heads, scale, 0, 0, 0, page};
        attend(call);
    };
    return static_cast<Attending*>(*operation)->plan(*workspace, keys, *table, page, heads, run);
}

API int AtbMLA(void* workspace, uint64_t size, atb::Operation* operation, atb::Context* context) {
    return operation->Execute({}, static_cast<uint8_t*>(workspace), size, context);
}
