// Device and pinned memory, and the copies between them.

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/memory.h"
#include "errors.h"
#include "graphs/graph.h"

using namespace sim;

namespace {

// Freed memory is kept for a while, so that who still reads it finds the pattern and no crash.
constexpr size_t kKeptBytes = 256u << 20;
// The policy that torch_npu's NPUWorkspaceAllocator.cpp asks with, and no other of its allocators.
constexpr int kHugeOnly = 1;
enum CopyKind { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2 };

struct Freed {
    std::deque<std::pair<void*, size_t>> blocks;
    size_t kept = 0;
};

Freed& freed() {
    static auto* all = new Freed;
    return *all;
}

// Blocks that touch count as one, as the maps of a segment do.
bool contains(const Blocks& blocks, const void* pointer, size_t bytes) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    const auto end = address + bytes;
    auto block = blocks.upper_bound(address);
    if (block == blocks.begin()) return false;
    for (--block; block != blocks.end() && block->first <= address; ++block) {
        address = block->first + block->second;
        if (end <= address) return true;
    }
    return false;
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

namespace sim {

Memory& memory() {
    static auto* all = new Memory;
    return *all;
}

aclError Memory::take(size_t bytes, aclError code) {
    if (used + bytes > settings().memory) {
        return fail(code, "the device is out of memory: " + std::to_string(bytes) +
                              " bytes asked for, " + std::to_string(settings().memory - used) +
                              " free");
    }
    used += bytes;
    return kOk;
}

}  // namespace sim

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
    if (aclError error = memory().take(bytes, kOutOfMemory)) return error;
    // The spare bytes are those that operators of the real device may read past the end.
    if (posix_memalign(pointer, 512, bytes + 512)) {
        memory().used -= bytes;
        return fail(kOutOfMemory, "out of host memory");
    }
    std::memset(*pointer, kPattern, bytes);
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
    auto& [blocks, kept] = freed();
    blocks.emplace_back(pointer, bytes);
    kept += bytes;
    while (kept > kKeptBytes) {
        kept -= blocks.front().second;
        std::free(blocks.front().first);
        blocks.pop_front();
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
