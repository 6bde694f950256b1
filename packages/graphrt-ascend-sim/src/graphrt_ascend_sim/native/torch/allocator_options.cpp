// From torch 2.14 on, a CUDA build registers names of allocator options that torch_npu registers
// too, which ends the process (registerDeviceConfigParserHook in c10/core/AllocatorConfig.h). No GPU
// is used beside the simulator, so the names are taken back before torch_npu is loaded: by a library
// that it links to, so that this is done in processes that only inherit the libraries too.

#include <c10/core/AllocatorConfig.h>

#include <string>
#include <unordered_set>

namespace {

using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
std::unordered_set<std::string>& names();

// An explicit instantiation may name what is private.
template <auto Names>
struct Opened {
    friend std::unordered_set<std::string>& names() { return Names(); }
};
template struct Opened<&Config::getMutableKeys>;

}  // namespace

__attribute__((constructor)) static void take_names_back() {
    for (const char* name : {"per_process_memory_fraction", "pinned_reserve_segment_size_mb"}) {
        names().erase(name);
    }
}
