"""Reserved addresses, physical memory and their maps, and torch_npu's segments made of them."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.npu
if os.environ.get("GRAPHRT_PLATFORM") != "ascend-sim":
    reason = "needs graphrt-ascend-sim and GRAPHRT_PLATFORM=ascend-sim (make test-ascend)"
    pytest.skip(reason, allow_module_level=True)

import graphrt_ascend_sim as simulator  # noqa: E402

simulator.start()

from test_simulator import run  # noqa: E402

PAGE = 2 << 20
REFUSED, FULL = 107000, 207001


class Property(ctypes.Structure):
    _fields_ = (
        ("handle_type", ctypes.c_int),
        ("allocation_type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("device", ctypes.c_uint),
        ("place_type", ctypes.c_int),
        ("reserved", ctypes.c_uint64),
    )


ON_THE_DEVICE = Property(place_type=1)


def call(name: str, *arguments: Any) -> int:
    code: int = getattr(ctypes.CDLL("libascendcl.so"), name)(*arguments)
    return code


def reserved(pages: int) -> int:
    address = ctypes.c_void_p()
    size = ctypes.c_size_t(pages * PAGE)
    zero, one = ctypes.c_size_t(0), ctypes.c_uint64(1)
    assert call("aclrtReserveMemAddress", ctypes.byref(address), size, zero, None, one) == 0
    assert address.value is not None
    return address.value


def physical(pages: int = 1) -> ctypes.c_void_p:
    handle, size = ctypes.c_void_p(), ctypes.c_size_t(pages * PAGE)
    given = ctypes.byref(ON_THE_DEVICE), ctypes.c_uint64(0)
    assert call("aclrtMallocPhysical", ctypes.byref(handle), size, *given) == 0
    return handle


def mapped(address: int, handle: ctypes.c_void_p, pages: int = 1) -> int:
    size, zero = ctypes.c_size_t(pages * PAGE), ctypes.c_size_t(0)
    return call("aclrtMapMem", ctypes.c_void_p(address), size, zero, handle, ctypes.c_uint64(0))


def unmapped(address: int) -> int:
    return call("aclrtUnmapMem", ctypes.c_void_p(address))


def freed(handle: ctypes.c_void_p) -> int:
    return call("aclrtFreePhysical", handle)


def released(address: int) -> int:
    return call("aclrtReleaseMemAddress", ctypes.c_void_p(address))


def free_bytes() -> int:
    free: int = torch.npu.mem_get_info()[0]
    return free


def test_physical_memory_keeps_its_bytes_wherever_it_is_mapped() -> None:
    first, second = reserved(2), reserved(1)
    handle = physical()
    assert mapped(first + PAGE, handle) == 0
    assert ctypes.string_at(first + PAGE, 8) == b"\xff" * 8
    ctypes.memset(first + PAGE, 7, PAGE)
    assert unmapped(first + PAGE) == 0 and mapped(second, handle) == 0
    assert ctypes.string_at(second + PAGE - 8, 8) == b"\x07" * 8
    assert [unmapped(second), freed(handle), released(first), released(second)] == [0] * 4


def test_only_physical_memory_counts_as_used_and_it_is_used_while_it_is_mapped() -> None:
    before = free_bytes()
    address, handle = reserved(1), physical()
    assert before - free_bytes() == PAGE
    # CANN's page of aclrtFreePhysical: mapped memory is freed when its map goes.
    assert mapped(address, handle) == 0 and freed(handle) == 0
    assert before - free_bytes() == PAGE and ctypes.string_at(address, 1) == b"\xff"
    assert unmapped(address) == 0 and free_bytes() == before
    assert released(address) == 0


def test_maps_that_the_documents_exclude_are_refused() -> None:
    address, one, two = reserved(2), physical(1), physical(2)
    assert mapped(address + 4 * PAGE, one) == REFUSED  # not reserved
    assert mapped(address + PAGE, two, 2) == REFUSED  # beyond what is reserved
    assert mapped(address, two, 1) == REFUSED  # another size than the memory's
    assert mapped(address, two, 2) == 0
    assert mapped(address + PAGE, one) == REFUSED  # mapped already
    assert released(address) == REFUSED  # still mapped
    assert unmapped(address + PAGE) == REFUSED  # not where a map begins
    assert unmapped(address) == 0 and unmapped(address) == REFUSED
    assert [freed(one), freed(two), freed(one)] == [0, 0, REFUSED]
    assert mapped(address, one) == REFUSED
    assert released(address) == 0 and released(address) == REFUSED


EXPANDABLE = """
import graphrt_ascend_sim as simulator
small = torch.ones(8, device='npu')
big = [torch.full((3 << 20,), float(n), device='npu') for n in range(4)]
held = torch.npu.memory_reserved()
(segment,) = [s for s in torch.npu.memory_snapshot() if s['segment_type'] == 'large']
print(segment['is_expandable'], segment['total_size'] == 60 << 20)
print([x.sum().item() / x.numel() for x in big], simulator.calls('aclrtMalloc'))
whole = torch.cat(big[:2])  # over the maps of three pieces
print(whole.numel() == 6 << 20, whole[-1].item())
del big, whole
torch.npu.empty_cache()
print(torch.npu.memory_reserved() == 2 << 20, simulator.calls('aclrtUnmapMem') > 0)
try:
    torch.empty(128 << 20, dtype=torch.uint8, device='npu')
except RuntimeError as error:
    print('out of memory' in str(error))
print(torch.full((4 << 20,), 3.0, device='npu')[-1].item())
"""


def test_torch_npu_grows_its_segments_over_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    said = run(EXPANDABLE, memory_mb=128).splitlines()
    assert said == [
        "True True",
        "[0.0, 1.0, 2.0, 3.0] 0",
        "True 1.0",
        "True True",
        "True",
        "3.0",
    ]
