"""The ring of slots from which CUDA graphs fetch their inputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch

from graphrt.cuda.driver._fetch_ptx import NAME, PTX, THREADS
from graphrt.cuda.driver.api import INVALID_CONTEXT, call, check, enter_context, need, pointer
from graphrt.cuda.private_torch import raw_stream_of
from graphrt.cuda.ring.format import RingFormat, slot_bytes

_CHUNK = 16
"""Bytes that a thread of the kernel copies at once."""
_MOST_BLOCKS = 264
"""Two for each multiprocessor of a large GPU: for 1 MiB each thread loads one chunk."""


class FetchRing:
    """Pinned slots for the inputs of steps, and a kernel that copies the next slot into `slab`. The
    kernel counts steps, and its finished blocks, in device memory of its own."""

    def __init__(self, slab: torch.Tensor, slots: int, nbytes: int, moves: int) -> None:
        """Raises `DriverError` where the driver does not take the kernel."""
        self.slots = slots
        self.payload, self.stride = slot_bytes(nbytes, moves)
        size = RingFormat.CONTROL_BYTES + slots * self.stride
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._device = slab.get_device()
        self._slab = slab
        # The kernel's counts of steps and of finished blocks.
        self._counter = torch.zeros(RingFormat.COUNTER_BYTES, dtype=torch.uint8, device=slab.device)
        self.device_memory: Sequence[torch.Tensor] = (self._counter,)
        with torch.cuda.device(self._device):
            self._function = _function(_context())
        # By index ctypes makes a new object: other code may set other argtypes on the attribute.
        self._launch = need()["cuLaunchKernel"]
        self._launch.argtypes = (
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            *[ctypes.c_void_p] * 3,
        )

    def prepare(self, nbytes: int, moves: int) -> Callable[[], None]:
        """See `graphrt.cuda.ring.RingDevice`. The function that it returns raises `DriverError`."""
        control = self.memory.data_ptr()
        chunks = -(-nbytes // _CHUNK)
        blocks = min(max(-(-chunks // THREADS), 1), _MOST_BLOCKS)
        values = (
            ctypes.c_uint64(control + RingFormat.CONTROL_BYTES),
            ctypes.c_uint64(self._slab.data_ptr()),
            ctypes.c_uint64(self._counter.data_ptr()),
            ctypes.c_uint64(control),
            ctypes.c_uint64(self.slots),
            ctypes.c_uint64(self.stride),
            ctypes.c_uint64(self.payload),
            ctypes.c_uint32(RingFormat.FIRST_MOVE + RingFormat.MOVE_WORDS * moves),
            ctypes.c_uint32(chunks),
        )
        value_pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        launch, device = self._launch, self._device
        kernel = pointer(self._function), blocks, 1, 1, THREADS, 1, 1, 0

        def fetch() -> None:
            status = launch(*kernel, raw_stream_of(device), value_pointers, None)
            if status == INVALID_CONTEXT:
                # This thread's first call on a device: a PIECEWISE step with host inputs alone.
                enter_context(need())
                status = launch(*kernel, raw_stream_of(device), value_pointers, None)
            if status:
                check("cuLaunchKernel", status)

        # Every launch reads the arguments from `values`, so they live as long as the function.
        fetch.values = values  # type: ignore[attr-defined]
        return fetch

    def wait(self) -> None:
        """See `graphrt.cuda.ring.RingDevice`."""
        torch.cuda.current_stream(self._device).synchronize()


def _context() -> int:
    context = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


@cache
def _function(context: int) -> int:
    """The kernel in a context, which is current; it stays loaded as long as the process lives."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    call("cuModuleGetFunction", ctypes.byref(function), module, NAME)
    assert function.value is not None
    return function.value
