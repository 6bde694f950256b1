// The device as such: its count, its name, its context and its figures.

#include <cstdint>
#include <map>
#include <string>

#include "abi.h"
#include "device/device.h"
#include "errors.h"
#include "settings.h"

using namespace sim;

namespace {

thread_local int current_device = 0;
constexpr int64_t kCores = 24;

}  // namespace

API aclError aclInit(const char*) { return kOk; }
API aclError aclFinalize() { return kOk; }
API aclError aclrtSetDevice(int id) {
    if (id != 0) return fail(kParameter, "the simulator has one device");
    current_device = id;
    return kOk;
}
API aclError aclrtGetDevice(int* id) {
    *id = current_device;
    return kOk;
}
API aclError aclrtResetDevice(int) { return kOk; }
API aclError aclrtGetDeviceCount(uint32_t* count) {
    *count = 1;
    return kOk;
}
API const char* aclrtGetSocName() { return settings().soc.c_str(); }
API aclError aclrtGetCurrentContext(void** context) {
    *context = &device();
    return kOk;
}
API aclError aclrtSetCurrentContext(void*) { return kOk; }
API aclError aclrtGetPrimaryCtxState(int, uint32_t* flags, int* active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return kOk;
}
API aclError aclrtDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return kOk;
}
API aclError aclrtDeviceEnablePeerAccess(int, uint32_t) { return kOk; }
API aclError aclGetCannAttribute(int, int32_t* value) {
    *value = 1;
    return kOk;
}
API aclError aclGetDeviceCapability(uint32_t, int, int64_t* value) {
    *value = kCores;
    return kOk;
}
API aclError aclrtGetDeviceInfo(uint32_t, int, int64_t* value) {
    *value = kCores;
    return kOk;
}

// Switches that change nothing here.
API aclError aclrtSetStreamFailureMode(void*, uint64_t) { return kOk; }
API aclError aclrtSetOpWaitTimeout(uint32_t) { return kOk; }
API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
API aclError aclrtSetDeviceSatMode(int) { return kOk; }
API aclError aclrtCtxSetSysParamOpt(int, int64_t) { return kOk; }
API aclError aclrtSetSysParamOpt(int, int64_t) { return kOk; }
API aclError aclrtGetSysParamOpt(int, int64_t* value) {
    *value = 0;
    return kOk;
}
