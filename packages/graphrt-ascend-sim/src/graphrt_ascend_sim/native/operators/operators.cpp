// Handles of the aclnn interface, and the way of an operator onto a stream.

#include "operators/operators.h"

#include <algorithm>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "errors.h"

// Of the device library; `function` is a std::function<void()>.
extern "C" int graphrt_sim_launch(aclrtStream stream, const char* name, const void* function,
                                  bool allocated);
extern "C" aclError graphrt_sim_counted(const char* function);
extern "C" bool graphrt_sim_is_device_memory(const void* pointer, size_t bytes);
extern "C" bool graphrt_sim_is_cached_workspace(const void* pointer);
extern "C" aclError graphrt_sim_fail(aclError code, const char* text);

namespace sim {
namespace {

// Device memory that an operator writes while it runs. aclnn takes address and size as they come
// (CommonOpExecutorRun of CANN's opbase), so that on the device one that is too small or was given
// back is written nevertheless; here it is the error that the device would give at best.
class Workspace {
public:
    Workspace(void* start, uint64_t size, uint64_t needed)
        : start_(static_cast<unsigned char*>(start)), needed_(needed) {
        if (!needed) return;
        TORCH_CHECK(size >= needed, "a workspace of ", size, " bytes is too small: these lengths ",
                    "need ", needed);
        TORCH_CHECK(graphrt_sim_is_device_memory(start, needed),
                    "the workspace is no device memory, or was given back");
        std::fill_n(start_, needed_, kWritten);
    }

    void check() const {
        TORCH_CHECK(std::all_of(start_, start_ + needed_,
                                [](unsigned char byte) { return byte == kWritten; }),
                    "the workspace is memory of a tensor of the same call");
    }

private:
    static constexpr unsigned char kWritten = 0xFF;  // no number, in every floating-point type
    unsigned char* start_;
    uint64_t needed_;
};

}  // namespace

aclError fail(aclError code, const std::string& text) {
    return graphrt_sim_fail(code, text.c_str());
}

// The numbers that the interface gives to types.
at::ScalarType scalar_type(int acl_type) {
    switch (acl_type) {
        case 0: return at::kFloat;
        case 1: return at::kHalf;
        case 2: return at::kChar;
        case 3: return at::kInt;
        case 4: return at::kByte;
        case 6: return at::kShort;
        case 9: return at::kLong;
        case 11: return at::kDouble;
        case 12: return at::kBool;
        case 16: return at::kComplexFloat;
        case 17: return at::kComplexDouble;
        case 27: return at::kBFloat16;
        case 35: return at::kFloat8_e5m2;
        case 36: return at::kFloat8_e4m3fn;
        default: return at::ScalarType::Undefined;
    }
}

HeldTensor hold(const aclTensor* tensor) {
    return tensor ? HeldTensor{true, *tensor} : HeldTensor{false, {}};
}

HeldList hold(const aclTensorList* list) {
    HeldList held;
    if (!list) return held;
    for (const aclTensor* tensor : list->tensors) held.tensors.push_back(hold(tensor));
    return held;
}

Tensor open(const HeldTensor& held) {
    if (!held.present) return Tensor();
    const aclTensor& view = held.tensor;
    TORCH_CHECK(view.type != at::ScalarType::Undefined, "the simulator lacks this data type");
    char* data = static_cast<char*>(view.data) + view.offset * c10::elementSize(view.type);
    return at::from_blob(data, view.sizes, view.strides, at::TensorOptions().dtype(view.type));
}

Tensors open(const HeldList& held) {
    Tensors tensors;
    for (const HeldTensor& each : held.tensors) tensors.push_back(open(each));
    return tensors;
}

int begun(const char* name) {
    return graphrt_sim_counted((std::string(name) + "GetWorkspaceSize").c_str());
}

int launch(aclOpExecutor* executor, aclrtStream stream, void* workspace, uint64_t size) {
    const std::function<void()> run = [body = std::move(executor->run), workspace, size,
                                       needed = executor->workspace] {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        Workspace used(workspace, size, needed);
        body();
        used.check();
    };
    // To the byte what was asked for (see kOddBytes), or of the cache: allocated in this call.
    const bool odd = executor->workspace % 16 == kOddBytes && size == executor->workspace;
    const bool allocated = executor->workspace && (odd || graphrt_sim_is_cached_workspace(workspace));
    const int error = graphrt_sim_launch(stream, executor->name.c_str(), &run, allocated);
    delete executor;
    return error;
}

}  // namespace sim

API aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, int type,
                               const int64_t* strides, int64_t offset, int, const int64_t*,
                               uint64_t, void* data) {
    return new aclTensor{
        {sizes, sizes + dims}, {strides, strides + dims}, offset, sim::scalar_type(type), data};
}

API aclScalar* aclCreateScalar(void* value, int type) {
    const at::ScalarType scalar = sim::scalar_type(type);
    if (scalar == at::ScalarType::Undefined) return nullptr;
    return new aclScalar{at::from_blob(value, {}, at::TensorOptions().dtype(scalar)).item()};
}

API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
    return new aclIntArray{{values, values + size}};
}

API aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
    return new aclTensorList{{tensors, tensors + size}};
}

// No operator here takes these.
API void* aclCreateFloatArray(const float*, uint64_t) { return new char; }
API void* aclCreateBoolArray(const bool*, uint64_t) { return new char; }
API void* aclCreateScalarList(const void*, uint64_t) { return new char; }
API int aclDestroyFloatArray(void* array) {
    delete static_cast<char*>(array);
    return 0;
}
API int aclDestroyBoolArray(void* array) { return aclDestroyFloatArray(array); }
API int aclDestroyScalarList(void* list) { return aclDestroyFloatArray(list); }

API int aclDestroyTensor(const aclTensor* tensor) {
    delete tensor;
    return 0;
}
API int aclDestroyScalar(const aclScalar* scalar) {
    delete scalar;
    return 0;
}
API int aclDestroyIntArray(const aclIntArray* array) {
    delete array;
    return 0;
}
API int aclDestroyTensorList(const aclTensorList* list) {
    for (const aclTensor* tensor : list->tensors) delete tensor;
    delete list;
    return 0;
}
