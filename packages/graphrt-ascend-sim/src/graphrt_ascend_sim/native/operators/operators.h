// How an operator is written: what the aclnn interface passes, as ATen's types, on the CPU.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "abi.h"

struct aclTensor {
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
    at::ScalarType type = at::kFloat;
    void* data = nullptr;
};
struct aclScalar {
    at::Scalar value;
};
struct aclIntArray {
    std::vector<int64_t> values;
};
struct aclTensorList {
    std::vector<const aclTensor*> tensors;
};
// What a call needs ends in this many bytes, and what a get_workspace function says never does: so
// a workspace that the caller keeps is told from one that torch_npu allocates for a call.
constexpr uint64_t kOddBytes = 8;

struct aclOpExecutor {
    std::string name;
    std::function<void()> run;
    uint64_t workspace = 0;  // bytes that it writes
};

namespace sim {

using at::Scalar;
using at::Tensor;
using Ints = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;
using Shapes = std::vector<aclTensor>;

// What an executor keeps of an argument: torch_npu destroys the handles before it runs.
struct HeldTensor {
    bool present;
    aclTensor tensor;
};
struct HeldList {
    std::vector<HeldTensor> tensors;
};
// The handle itself, of an output whose shape the operator finds out; torch_npu keeps it alive.
struct Resized {
    aclTensor* tensor;
};

HeldTensor hold(const aclTensor* tensor);
HeldList hold(const aclTensorList* list);
inline Ints hold(const aclIntArray* array) { return array ? array->values : Ints{}; }
inline c10::optional<Scalar> hold(const aclScalar* scalar) {
    return scalar ? c10::optional<Scalar>(scalar->value) : c10::nullopt;
}
inline Resized hold(Resized handle) { return handle; }
inline std::string hold(const char* text) { return text ? text : ""; }
template <class Number>
std::enable_if_t<std::is_arithmetic_v<Number>, Number> hold(Number value) {
    return value;
}

// What the body of an operator gets: undefined tensors where none were passed.
Tensor open(const HeldTensor& held);
Tensors open(const HeldList& held);
template <class Value>
const Value& open(const Value& value) {
    return value;
}

at::ScalarType scalar_type(int acl_type);
int launch(aclOpExecutor* executor, aclrtStream stream, void* workspace, uint64_t size);
// Counts the call of the first of an operator's two functions; the code of a failure that is wanted.
int begun(const char* name);

template <class Body, class... Arguments>
int prepare(const char* name, uint64_t workspace_size, uint64_t* workspace,
            aclOpExecutor** executor, Body body, const Arguments&... arguments) {
    if (const int wanted = begun(name)) return wanted;
    auto held = std::make_tuple(hold(arguments)...);
    *workspace = workspace_size;
    *executor = new aclOpExecutor{name, [body, held] {
                                      std::apply([&](const auto&... each) { body(open(each)...); },
                                                 held);
                                  },
                                  workspace_size};
    return kOk;
}

}  // namespace sim

using In = const aclTensor*;
using Out = aclTensor*;
using Num = const aclScalar*;
using Array = const aclIntArray*;
using List = const aclTensorList*;

#define SIM_UNWRAP(...) __VA_ARGS__
#define SIM_LAUNCH(name)                                                                  \
    API int name(void* workspace, uint64_t size, aclOpExecutor* executor,                 \
                 aclrtStream stream) {                                                    \
        return sim::launch(executor, stream, workspace, size);                            \
    }

// OPERATOR(aclnnMm, (In a, In b, Out out, int8_t cube), (a, b, out), [](Tensor a, ...) {...})
// `parameters` are those of the interface, `passed` those of the body.
#define OPERATOR_WITH_WORKSPACE(name, workspace_size, parameters, passed, ...)            \
    API int name##GetWorkspaceSize(SIM_UNWRAP parameters, uint64_t* workspace_,           \
                                   aclOpExecutor** executor_) {                           \
        return sim::prepare(#name, workspace_size, workspace_, executor_, __VA_ARGS__,    \
                            SIM_UNWRAP passed);                                           \
    }                                                                                     \
    SIM_LAUNCH(name)
#define OPERATOR(name, parameters, passed, ...) \
    OPERATOR_WITH_WORKSPACE(name, 0, parameters, passed, __VA_ARGS__)
