// An allocator for torch.cuda.MemPool whose pages go in sleep_all() and come back, at the same
// addresses, in wake_all(): what vLLM's cuMem allocator does, in 100 lines and without headers.
// The driver is looked up by name, so that this compiles where there is no CUDA.

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/types.h>

typedef unsigned long long Address;

// CUmemLocation, CUmemAllocationProp and CUmemAccessDesc of cuda.h.
struct Location {
    int type, id;
};
struct Properties {
    int type, handle_types;
    struct Location location;
    void *win32;
    unsigned char flags[8];
};
struct Access {
    struct Location location;
    int flags;
};

enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, MOST = 4096 };

static struct Block {
    Address at;
    size_t size;
    Address handle;
    int device, mapped;
} blocks[MOST];

static void *function(const char *name) {
    static void *library;
    if (library == NULL) {
        library = dlopen("libcuda.so.1", RTLD_NOW);
    }
    return library == NULL ? NULL : dlsym(library, name);
}

// Calls a function of the driver; is 0 for success.
#define CALL(name, types, ...)                                                                     \
    (function(name) == NULL ? -1 : ((int(*) types)function(name))(__VA_ARGS__))

static int failed(const char *what, int error) {
    if (error != 0) {
        fprintf(stderr, "sleeping_allocator: %s: error %d\n", what, error);
    }
    return error;
}

static struct Properties properties(int device) {
    struct Properties made = {PINNED, 0, {ON_DEVICE, device}, NULL, {0}};
    return made;
}

static int map(struct Block *block) {
    struct Properties wanted = properties(block->device);
    struct Access access = {wanted.location, READ_WRITE};
    if (failed("create", CALL("cuMemCreate",
                              (Address *, size_t, const struct Properties *, unsigned long long),
                              &block->handle, block->size, &wanted, 0))) {
        return -1;
    }
    if (failed("map", CALL("cuMemMap", (Address, size_t, size_t, Address, unsigned long long),
                           block->at, block->size, 0, block->handle, 0)) ||
        failed("access", CALL("cuMemSetAccess", (Address, size_t, const struct Access *, size_t),
                              block->at, block->size, &access, 1))) {
        CALL("cuMemRelease", (Address), block->handle);
        return -1;
    }
    block->mapped = 1;
    return 0;
}

static int unmap(struct Block *block) {
    int error = failed("unmap", CALL("cuMemUnmap", (Address, size_t), block->at, block->size));
    error |= failed("release", CALL("cuMemRelease", (Address), block->handle));
    block->mapped = 0;
    return error;
}

void *sleeping_malloc(ssize_t size, int device, void *stream) {
    struct Properties wanted = properties(device);
    size_t step = 0;
    (void)stream;
    for (struct Block *block = blocks; block < blocks + MOST; block++) {
        if (block->at != 0) {
            continue;
        }
        if (failed("granularity", CALL("cuMemGetAllocationGranularity",
                                       (size_t *, const struct Properties *, int), &step, &wanted,
                                       0))) {
            return NULL;
        }
        block->device = device;
        block->size = ((size_t)size + step - 1) / step * step;
        if (failed("reserve",
                   CALL("cuMemAddressReserve",
                        (Address *, size_t, size_t, Address, unsigned long long), &block->at,
                        block->size, 0, 0, 0))) {
            return NULL;
        }
        if (map(block)) {
            CALL("cuMemAddressFree", (Address, size_t), block->at, block->size);
            block->at = 0;
            return NULL;
        }
        return (void *)block->at;
    }
    return NULL;
}

void sleeping_free(void *at, ssize_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    for (struct Block *block = blocks; block < blocks + MOST; block++) {
        if (block->at == (Address)at) {
            if (block->mapped) {
                unmap(block);
            }
            CALL("cuMemAddressFree", (Address, size_t), block->at, block->size);
            block->at = 0;
            return;
        }
    }
}

// Both return how many blocks could not be changed.
int sleep_all(void) {
    int wrong = 0;
    for (struct Block *block = blocks; block < blocks + MOST; block++) {
        wrong += block->at != 0 && block->mapped && unmap(block) != 0;
    }
    return wrong;
}

int wake_all(void) {
    int wrong = 0;
    for (struct Block *block = blocks; block < blocks + MOST; block++) {
        wrong += block->at != 0 && !block->mapped && map(block) != 0;
    }
    return wrong;
}

// Bytes that have pages now.
size_t mapped_bytes(void) {
    size_t bytes = 0;
    for (struct Block *block = blocks; block < blocks + MOST; block++) {
        bytes += block->at != 0 && block->mapped ? block->size : 0;
    }
    return bytes;
}
