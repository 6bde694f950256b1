// Device and pinned memory, and the copies between them.

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "errors.h"
#include "graphs/graph.h"

using namespace sim;

namespace {

// All bits set: not a number in every floating-point type, -1 in every integer.
constexpr int kPattern = 0xFF;
// Freed memory is kept for a while, so that who still reads it finds the pattern and no crash.
constexpr size_t kKeptBytes = 256u << 20;
// The policy that torch_npu's NPUWorkspaceAllocator.cpp asks with, and no other of its allocators.
constexpr int kHugeOnly = 1;
enum CopyKind { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2 };

struct Memory {
    std::map<uintptr_t, size_t> device, pinned;
    std::map<uintptr_t, size_t> workspaces;  // those of `device` that torch_npu's cache has
    std::deque<std::pair<void*, size_t>> freed;
    size_t used = 0, kept = 0;
};

Memory& memory() {
    static auto* all = new Memory;
    return *all;
}

bool contains(const std::map<uintptr_t, size_t>& blocks, const void* pointer, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto after = blocks.upper_bound(address);
    if (after == blocks.begin()) return false;
    --after;
    return address + bytes <= after->first + after->second;
}

bool pageable(const void* pointer, size_t bytes) {
    return !contains(memory().device, pointer, bytes) && !contains(memory().pinned, pointer, bytes);
}

TaskPtr memory_task(const char* name, std::function<void(GraphRun*)> run) {
    auto task = std::make_shared<Task>();
    task->name = name;
    task->unlocked = true;
    task->run = std::move(run);
    return task;
}

}  // namespace

// Of the operator library: whether memory that was not given back holds it all.
API bool graphrt_sim_is_device_memory(const void* pointer, size_t bytes) {
    Lock lock(device().mutex);
    return contains(memory().device, pointer, bytes);
}
// Whether it is of the cache of workspaces that torch_npu has for each stream.
API bool graphrt_sim_is_cached_workspace(const void* pointer) {
    Lock lock(device().mutex);
    return contains(memory().workspaces, pointer, 1);
}

API aclError aclrtMalloc(void** pointer, size_t bytes, int policy) {
    SIM_CALL();
    Lock lock(device().mutex);
    if (memory().used + bytes > settings().memory) {
        return fail(kOutOfMemory, "the device is out of memory: " + std::to_string(bytes) +
                                      " bytes asked for, " +
                                      std::to_string(settings().memory - memory().used) + " free");
    }
    // The spare bytes are those that operators of the real device may read past the end.
    if (posix_memalign(pointer, 512, bytes + 512)) return fail(kOutOfMemory, "out of host memory");
    std::memset(*pointer, kPattern, bytes);
    memory().used += bytes;
    memory().device[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
    if (policy == kHugeOnly) memory().workspaces[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
    return kOk;
}

API aclError aclrtMallocAlign32(void** pointer, size_t bytes, int policy) {
    SIM_CALL();
    return aclrtMalloc(pointer, bytes, policy);
}

API aclError aclrtFree(void* pointer) {
    SIM_CALL();
    Lock lock(device().mutex);
    Memory& all = memory();
    const auto found = all.device.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == all.device.end()) return fail(kParameter, "not the start of device memory");
    const size_t bytes = found->second;
    std::memset(pointer, kPattern, bytes);
    all.used -= bytes;
    all.workspaces.erase(found->first);
    all.device.erase(found);
    all.freed.emplace_back(pointer, bytes);
    all.kept += bytes;
    while (all.kept > kKeptBytes) {
        all.kept -= all.freed.front().second;
        std::free(all.freed.front().first);
        all.freed.pop_front();
    }
    return kOk;
}

API aclError aclrtMallocHost(void** pointer, size_t bytes) {
    SIM_CALL();
    Lock lock(device().mutex);
    if (posix_memalign(pointer, 64, bytes + 64)) return fail(kOutOfMemory, "out of host memory");
    memory().pinned[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
    return kOk;
}

API aclError aclrtFreeHost(void* pointer) {
    SIM_CALL();
    Lock lock(device().mutex);
    memory().pinned.erase(reinterpret_cast<uintptr_t>(pointer));
    std::free(pointer);
    return kOk;
}

API aclError aclrtGetMemInfo(int, size_t* free, size_t* total) {
    SIM_CALL();
    Lock lock(device().mutex);
    *total = settings().memory;
    *free = settings().memory - memory().used;
    return kOk;
}

API aclError aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, int) {
    SIM_CALL();
    {
        Lock lock(device().mutex);
        if (aclError error = check_blocking("memory was copied at once", kCaptureMode)) return error;
    }
    std::memmove(to, from, bytes);
    return kOk;
}

API aclError aclrtMemset(void* to, size_t, int value, size_t bytes) {
    SIM_CALL();
    {
        Lock lock(device().mutex);
        if (aclError error = check_blocking("memory was set at once", kCaptureMode)) return error;
    }
    std::memset(to, value, bytes);
    return kOk;
}

API aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, int kind,
                              aclrtStream handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    Stream& stream = *device().find(handle);
    const void* host = kind == kHostToDevice ? from : kind == kDeviceToHost ? to : nullptr;
    const bool slow = host && bytes && pageable(host, bytes);
    // Of the CANN runtime's api_error.cc: such a copy becomes a wait and a copy at once, which a
    // capture on the stream refuses as a parameter, and one elsewhere by its mode.
    if (slow && stream.capture) {
        return fail(kParameter, "a capture cannot hold a copy with pageable host memory");
    }
    if (slow) {
        if (aclError error = check_blocking("a copy with pageable memory", kBlockingCall)) {
            return error;
        }
    }
    if (slow && kind == kHostToDevice) {
        // The driver stages such a copy before the call returns.
        const char* first = static_cast<const char*>(from);
        auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
        return device().submit(lock, stream, memory_task("memcpy", [=](GraphRun*) {
                                   std::memcpy(to, staged->data(), staged->size());
                               }));
    }
    return device().submit(lock, stream, memory_task("memcpy", [=](GraphRun*) {
                               std::memmove(to, from, bytes);
                           }));
}

API aclError aclrtMemsetAsync(void* to, size_t, int value, size_t bytes, aclrtStream stream) {
    SIM_CALL();
    Lock lock(device().mutex);
    return device().submit(lock, *device().find(stream), memory_task("memset", [=](GraphRun*) {
                               std::memset(to, value, bytes);
                           }));
}
