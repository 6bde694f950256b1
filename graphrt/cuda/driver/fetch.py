"""The ring of slots from which CUDA graphs fetch their inputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch

from graphrt.cuda.driver._fetch_ptx import NAME, PTX, THREADS
from graphrt.cuda.driver.api import INVALID_CONTEXT, check, enter_context, need, pointer
from graphrt.cuda.private_torch import raw_stream_of
from graphrt.cuda.ring.format import RingFormat, slot_bytes

_CHUNK = 16
_MOST_BLOCKS = 264
"""Two for each multiprocessor of a large GPU: the payload of 1 MiB goes in one round of loads."""


class FetchRing:
    """Pinned slots, and a kernel that fetches the next one into `slab`; it keeps its counter, and
    how many of its blocks are done, in memory of its own."""

    def __init__(self, slab: torch.Tensor, slots: int, nbytes: int, moves: int) -> None:
        """Raises `DriverError` where the driver does not take the kernel."""
        self.slots = slots
        self.payload, self.stride = slot_bytes(nbytes, moves)
        size = RingFormat.CONTROL_BYTES + slots * self.stride
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._device = slab.get_device()
        self._slab = slab
        self._counter = torch.zeros(RingFormat.COUNTER_BYTES, dtype=torch.uint8, device=slab.device)
        self.device_memory: Sequence[torch.Tensor] = (self._counter,)
        with torch.cuda.device(self._device):
            self._function = _function(_context())
        # A call of its own, as whoever else calls it may say otherwise what its arguments are.
        self._launch = need()["cuLaunchKernel"]
        self._launch.argtypes = (
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            *[ctypes.c_void_p] * 3,
        )

    def prepare(self, nbytes: int, moves: int) -> Callable[[], None]:
        """See `graphrt.cuda.ring.RingDevice`. Raises `DriverError` when it is called."""
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
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        launch, device = self._launch, self._device
        kernel = pointer(self._function), blocks, 1, 1, THREADS, 1, 1, 0

        def fetch() -> None:
            # The kernel's arguments are read from `values`, which must live as long.
            status = launch(*kernel, raw_stream_of(device), places, None)
            if status == INVALID_CONTEXT:
                # This thread's first call: a step by pieces whose inputs are all the host's.
                enter_context(need())
                status = launch(*kernel, raw_stream_of(device), places, None)
            if status:
                check("cuLaunchKernel", status)

        fetch.values = values  # type: ignore[attr-defined]
        return fetch

    def wait(self) -> None:
        """See `graphrt.cuda.ring.RingDevice`."""
        torch.cuda.current_stream(self._device).synchronize()


def _context() -> int:
    context = ctypes.c_void_p()
    check("cuCtxGetCurrent", need().cuCtxGetCurrent(ctypes.byref(context)))
    return context.value or 0


@cache
def _function(context: int) -> int:
    """The kernel in a context, which is current; it stays loaded as long as the process lives."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    library = need()
    check("cuModuleLoadData", library.cuModuleLoadData(ctypes.byref(module), PTX))
    check(
        "cuModuleGetFunction",
        library.cuModuleGetFunction(ctypes.byref(function), module, NAME),
    )
    assert function.value is not None
    return function.value
