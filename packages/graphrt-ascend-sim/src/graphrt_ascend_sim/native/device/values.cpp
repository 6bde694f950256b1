// Words of device memory that streams wait for and write: torch.npu.ExternalEvent, where CANN has
// these functions: from 8.2.RC1 on. GRAPHRT_SIM_CANN=8.1.RC1 takes a library without this file.

#include <memory>
#include <string>

#include "device/device.h"
#include "errors.h"

using namespace sim;

API aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
    SIM_CALL();
    Lock lock(device().mutex);
    auto* word = static_cast<volatile uint64_t*>(address);
    auto task = std::make_shared<Task>();
    task->name = "value write of " + std::to_string(value);
    task->run = [=](GraphRun*) { *word = value; };
    return device().submit(lock, *device().find(stream), task);
}

API aclError aclrtValueWait(void* address, uint64_t value, uint32_t how, aclrtStream stream) {
    SIM_CALL();
    enum { kAtLeast = 0, kEqual = 1, kAnd = 2, kNor = 3 };
    Lock lock(device().mutex);
    auto* word = static_cast<volatile uint64_t*>(address);
    auto task = std::make_shared<Task>();
    task->name = "value wait for " + std::to_string(value);
    task->entries = 4;
    task->ready = [=](GraphRun*) {
        const uint64_t found = *word;
        if (how == kAtLeast) return static_cast<int64_t>(found - value) >= 0;
        if (how == kAnd) return (found & value) != 0;
        if (how == kNor) return ~(found | value) != 0;
        return found == value;
    };
    return device().submit(lock, *device().find(stream), task);
}
