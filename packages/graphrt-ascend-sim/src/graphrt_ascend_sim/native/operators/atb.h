// What torch_npu's libop_plugin_atb.so takes from libatb.so: the layout of the classes that ATB
// publishes, as far as they are used, and no more of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "abi.h"

#pragma GCC visibility push(default)
namespace atb {

using Status = int32_t;
constexpr Status kInvalidParameter = 1;

// Up to 64 elements in place. The member at the end is memory that nothing here uses.
template <class T>
struct SVector {
    size_t capacity = 0, size = 0;
    T storage[65];
    T* heap = nullptr;
    const T& operator[](size_t i) const { return heap ? heap[i] : storage[i]; }
};

struct Tensor {
    int dtype = -1, format = -1;
    int64_t sizes[8];
    uint64_t dims = 0;
    void *device = nullptr, *host = nullptr;
    uint64_t bytes = 0;
};

struct VariantPack {
    SVector<Tensor> in, out;
};

class Context {
public:
    virtual ~Context() = default;
    virtual Status SetExecuteStream(aclrtStream stream) = 0;
    virtual aclrtStream GetExecuteStream() const = 0;
    virtual Status SetAsyncTilingCopyStatus(bool enable) = 0;
    virtual bool GetAsyncTilingCopyStatus() const = 0;
};

class Operation {
public:
    virtual ~Operation() = default;
    virtual std::string GetName() const = 0;
    virtual Status InferShape(const void* in, void* out) const = 0;
    virtual uint32_t GetInputNum() const = 0;
    virtual uint32_t GetOutputNum() const = 0;
    virtual Status Setup(const VariantPack& tensors, uint64_t& workspace, Context* context) = 0;
    virtual Status Execute(const VariantPack& tensors, uint8_t* workspace, uint64_t size,
                           Context* context) = 0;
};

Status CreateContext(Context** context);
Status DestroyContext(Context* context);
template <class Parameters>
Status CreateOperation(const Parameters& parameters, Operation** operation);
Status DestroyOperation(Operation* operation);

class Utils {
public:
    static uint64_t GetTensorSize(const Tensor& tensor);
};

namespace infer {

struct PagedAttentionParam {
    int32_t heads;
    float scale;
    int32_t kv_heads;
    int32_t mask;
    bool skips_requests;
    int32_t quantized;
};
struct LinearParam;
struct ElewiseParam;
struct RmsNormParam;
struct GroupTopkParam;
struct SelfAttentionParam;
struct ReshapeAndCacheParam;
struct RopeParam;

}  // namespace infer
}  // namespace atb
#pragma GCC visibility pop
