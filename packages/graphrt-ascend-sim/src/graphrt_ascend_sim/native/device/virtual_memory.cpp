// Addresses without memory, memory without addresses, and their maps: by them torch_npu's allocator
// grows a segment (expandable_segments:True). Each rule is one of the CANN runtime's repository:
// docs/zh/api_ref/11-04_virtual_memory_management.md, src/acl/aclrt_impl/memory.cpp.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>

#include "device/device.h"
#include "device/memory.h"
#include "errors.h"

using namespace sim;

namespace {

// The first fields of aclrtPhysicalMemProp.
struct Property {
    int handle_type, allocation_type, attribute;
    unsigned place;
    int place_type;
    uint64_t reserved;
};
constexpr int kOnTheDevice = 1;
// CANN's huge pages, of which torch_npu asks for all that it maps.
constexpr size_t kPage = 2u << 20;

struct Physical {
    size_t offset, bytes;
    int maps = 0;
    bool freed = false;
};

struct Mapped {
    size_t bytes;
    Physical* memory;
};

struct Virtual {
    Blocks reserved;
    std::map<uintptr_t, Mapped> maps;
    std::map<Physical*, std::unique_ptr<Physical>> physical;
    // One file holds all physical memory, each piece at a place of its own.
    int file = memfd_create("simulated device", MFD_CLOEXEC);
    size_t end = 0;
};

Virtual& all() {
    static auto* only = new Virtual;
    return *only;
}

void drop(Physical* piece) {
    fallocate(all().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(piece->offset), static_cast<off_t>(piece->bytes));
    memory().used -= piece->bytes;
    all().physical.erase(piece);
}

void* no_memory(void* at, size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
    return mmap(at, bytes, PROT_NONE, flags, -1, 0);
}

// The last block that begins at this address or before it.
template <class Map>
typename Map::iterator block_at(Map& blocks, uintptr_t address) {
    auto found = blocks.upper_bound(address);
    return found == blocks.begin() ? blocks.end() : --found;
}

}  // namespace

API aclError aclrtReserveMemAddress(void** pointer, size_t bytes, size_t alignment, void* wanted,
                                    uint64_t flags) {
    SIM_CALL();
    Lock lock(device().mutex);
    if (!bytes || alignment || flags > 1) return fail(kParameter, "size, alignment or flags");
    if (wanted) return fail(kNotSupported, "the simulator chooses reserved addresses itself");
    // Whole pages of the device, at one of them.
    const size_t room = (bytes + kPage - 1) / kPage * kPage;
    auto* raw = static_cast<char*>(no_memory(nullptr, room + kPage));
    if (raw == MAP_FAILED) return fail(kMemoryAllocation, "no addresses of the host are left");
    const size_t before = (kPage - reinterpret_cast<uintptr_t>(raw) % kPage) % kPage;
    if (before) munmap(raw, before);
    if (before < kPage) munmap(raw + before + room, kPage - before);
    *pointer = raw + before;
    all().reserved[reinterpret_cast<uintptr_t>(*pointer)] = room;
    return kOk;
}

API aclError aclrtReleaseMemAddress(void* pointer) {
    SIM_CALL();
    Lock lock(device().mutex);
    const auto found = all().reserved.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == all().reserved.end()) return fail(kParameter, "not the start of reserved addresses");
    const auto inside = all().maps.lower_bound(found->first);
    if (inside != all().maps.end() && inside->first < found->first + found->second) {
        return fail(kParameter, "the addresses are still mapped");
    }
    munmap(pointer, found->second);
    all().reserved.erase(found);
    return kOk;
}

API aclError aclrtMallocPhysical(void** handle, size_t bytes, const Property* property,
                                 uint64_t flags) {
    SIM_CALL();
    Lock lock(device().mutex);
    if (!bytes || flags) return fail(kParameter, "size or flags");
    if (property->handle_type || property->allocation_type) return fail(kParameter, "types");
    if (property->place_type != kOnTheDevice) {
        return fail(kNotSupported, "the simulator has physical memory of its device alone");
    }
    // The code that torch_npu's ExpandableSegment::map takes for a full device.
    if (aclError error = memory().take(bytes, kMemoryAllocation)) return error;
    Virtual& here = all();
    auto piece = std::make_unique<Physical>(Physical{here.end, bytes});
    here.end += bytes;
    auto* key = piece.get();
    here.physical[key] = std::move(piece);
    void* filled = MAP_FAILED;
    if (ftruncate(here.file, static_cast<off_t>(here.end)) == 0) {
        filled = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, here.file,
                      static_cast<off_t>(key->offset));
    }
    if (filled == MAP_FAILED) {
        drop(key);
        return fail(kMemoryAllocation, "out of host memory");
    }
    std::memset(filled, kPattern, bytes);
    munmap(filled, bytes);
    *handle = key;
    return kOk;
}

API aclError aclrtFreePhysical(void* handle) {
    SIM_CALL();
    Lock lock(device().mutex);
    const auto found = all().physical.find(static_cast<Physical*>(handle));
    if (found == all().physical.end() || found->first->freed) {
        return fail(kParameter, "no handle of physical memory");
    }
    found->first->freed = true;
    // Mapped memory is freed when its last map goes.
    if (!found->first->maps) drop(found->first);
    return kOk;
}

API aclError aclrtMapMem(void* pointer, size_t bytes, size_t offset, void* handle, uint64_t flags) {
    SIM_CALL();
    Lock lock(device().mutex);
    Virtual& here = all();
    const auto start = reinterpret_cast<uintptr_t>(pointer);
    const auto room = block_at(here.reserved, start);
    if (room == here.reserved.end() || start + bytes > room->first + room->second) {
        return fail(kParameter, "the addresses are not reserved");
    }
    const auto found = here.physical.find(static_cast<Physical*>(handle));
    if (found == here.physical.end() || found->first->freed) {
        return fail(kParameter, "no handle of physical memory");
    }
    Physical* piece = found->first;
    if (bytes != piece->bytes || bytes % kPage || offset || flags) {
        return fail(kParameter, "size, offset or flags");
    }
    const auto before = block_at(here.maps, start + bytes - 1);
    if (before != here.maps.end() && before->first + before->second.bytes > start) {
        return fail(kParameter, "the addresses are mapped already");
    }
    if (mmap(pointer, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, here.file,
             static_cast<off_t>(piece->offset)) == MAP_FAILED) {
        return fail(kParameter, "no address of a page");
    }
    ++piece->maps;
    here.maps[start] = {bytes, piece};
    memory().device[start] = bytes;
    return kOk;
}

API aclError aclrtUnmapMem(void* pointer) {
    SIM_CALL();
    Lock lock(device().mutex);
    const auto found = all().maps.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == all().maps.end()) return fail(kParameter, "not the start of mapped addresses");
    const Mapped mapped = found->second;
    no_memory(pointer, mapped.bytes);
    memory().device.erase(found->first);
    all().maps.erase(found);
    if (!--mapped.memory->maps && mapped.memory->freed) drop(mapped.memory);
    return kOk;
}
