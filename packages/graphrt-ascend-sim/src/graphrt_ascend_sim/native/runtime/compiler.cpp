// What torch_npu falls back to for an operator whose aclnn function is missing. The simulator has
// no such operators, so that all of it only serves to say which function was missing.

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "abi.h"
#include "errors.h"

using namespace sim;

namespace {

std::mutex missing_mutex;
std::string& missing() {
    static auto* name = new std::string;
    return *name;
}

}  // namespace

// torch_npu logs "aclnnX or aclnnXGetWorkspaceSize not in libopapi.so" before it falls back.
API void aclAppLog(int, const char*, const char*, uint32_t, const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const char* name = std::strstr(text, "aclnn");
    const char* end = name ? std::strstr(name, " or ") : nullptr;
    if (!end || !std::strstr(end, "GetWorkspaceSize not in")) return;
    std::lock_guard<std::mutex> lock(missing_mutex);
    missing().assign(name, end);
}

API aclError aclopCompileAndExecute(const char* type, ...) {
    std::lock_guard<std::mutex> lock(missing_mutex);
    const std::string name = missing().empty() ? "the aclnn function of it" : missing();
    return fail(kCompileFailed, std::string("the simulator lacks an operator: torch_npu asked for ") +
                                    type + " because it did not find " + name);
}

API aclError aclSetCompileopt(int, const char*) { return kOk; }
API size_t aclGetCompileoptSize(int) { return 256; }
API aclError aclGetCompileopt(int, char* value, size_t length) {
    if (length) value[0] = '\0';
    return kOk;
}
API aclError aclopSetCompileFlag(int) { return kOk; }
API aclError aclGenGraphAndDumpForOp() { return kOk; }
API void* aclCreateGraphDumpOpt() { return &missing(); }
API aclError aclDestroyGraphDumpOpt(void*) { return kOk; }
API aclError aclDestroyAclOpExecutor(void*) { return kOk; }
API aclError aclSetAclOpExecutorRepeatable(void*) { return kOk; }

// The descriptions that such operators are called with.
#define EMPTY_HANDLE(name) \
    API void* name() { return std::malloc(1); }
EMPTY_HANDLE(aclopCreateAttr)
EMPTY_HANDLE(aclCreateTensorDesc)
EMPTY_HANDLE(aclCreateDataBuffer)
API void aclopDestroyAttr(void* handle) { std::free(handle); }
API void aclDestroyTensorDesc(void* handle) { std::free(handle); }
API aclError aclDestroyDataBuffer(void* handle) {
    std::free(handle);
    return kOk;
}
