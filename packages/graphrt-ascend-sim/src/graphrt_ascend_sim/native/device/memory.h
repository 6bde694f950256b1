// The memory of the device: what is allocated, mapped and pinned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "abi.h"

namespace sim {

// All bits set: not a number in every floating-point type, -1 in every integer.
constexpr int kPattern = 0xFF;

using Blocks = std::map<uintptr_t, size_t>;  // sizes in bytes by the first address

// Guarded by the lock of the device.
struct Memory {
    Blocks device, pinned;
    Blocks workspaces;  // those of `device` that torch_npu's cache has
    size_t used = 0;    // of the device, mapped or not

    // Takes so many bytes of the device; fails with `code` where there are fewer.
    aclError take(size_t bytes, aclError code);
};

Memory& memory();

}  // namespace sim
