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

// aclCANNPackageVersion of acl_rt.h. Its other parts, which torch_npu does not read, stay empty.
struct PackageVersion {
    char version[128];
    char parts[4][64];
    char reserved[128];
};
constexpr int kDriver = 7;  // ACL_PKG_NAME_DRIVER

}  // namespace

API aclError aclInit(const char*) {
    SIM_CALL();
    return kOk;
}
API aclError aclFinalize() {
    SIM_CALL();
    return kOk;
}
API aclError aclrtSetDevice(int id) {
    SIM_CALL();
    if (id != 0) return fail(kParameter, "the simulator has one device");
    current_device = id;
    return kOk;
}
API aclError aclrtGetDevice(int* id) {
    SIM_CALL();
    *id = current_device;
    return kOk;
}
API aclError aclrtResetDevice(int) {
    SIM_CALL();
    return kOk;
}
API aclError aclrtGetDeviceCount(uint32_t* count) {
    SIM_CALL();
    *count = 1;
    return kOk;
}
API aclError aclsysGetCANNVersion(int package, PackageVersion* version) {
    SIM_CALL();
    if (package == kDriver) return fail(kParameter, "the simulator has no driver");
    *version = {};
    settings().cann.copy(version->version, sizeof(version->version) - 1);
    return kOk;
}
API const char* aclrtGetSocName() { return settings().soc.c_str(); }
API aclError aclrtGetCurrentContext(void** context) {
    SIM_CALL();
    *context = &device();
    return kOk;
}
API aclError aclrtSetCurrentContext(void*) {
    SIM_CALL();
    return kOk;
}
API aclError aclrtGetPrimaryCtxState(int, uint32_t* flags, int* active) {
    SIM_CALL();
    if (flags) *flags = 0;
    if (active) *active = 1;
    return kOk;
}
API aclError aclrtDeviceCanAccessPeer(int* can, int, int) {
    SIM_CALL();
    *can = 1;
    return kOk;
}
API aclError aclrtDeviceEnablePeerAccess(int, uint32_t) {
    SIM_CALL();
    return kOk;
}
API aclError aclGetCannAttribute(int, int32_t* value) {
    SIM_CALL();
    *value = 1;
    return kOk;
}
API aclError aclGetDeviceCapability(uint32_t, int, int64_t* value) {
    SIM_CALL();
    *value = kCores;
    return kOk;
}
API aclError aclrtGetDeviceInfo(uint32_t, int, int64_t* value) {
    SIM_CALL();
    *value = kCores;
    return kOk;
}

// Switches that change nothing here.
API aclError aclrtSetStreamFailureMode(void*, uint64_t) {
    SIM_CALL();
    return kOk;
}
API aclError aclrtSetOpWaitTimeout(uint32_t) {
    SIM_CALL();
    return kOk;
}
API aclError aclrtSetOpExecuteTimeOut(uint32_t) {
    SIM_CALL();
    return kOk;
}
API aclError aclrtSetDeviceSatMode(int) {
    SIM_CALL();
    return kOk;
}
API aclError aclrtCtxSetSysParamOpt(int, int64_t) {
    SIM_CALL();
    return kOk;
}
API aclError aclrtSetSysParamOpt(int, int64_t) {
    SIM_CALL();
    return kOk;
}
API aclError aclrtGetSysParamOpt(int, int64_t* value) {
    SIM_CALL();
    *value = 0;
    return kOk;
}
