"""An allocator whose pages go and come back at the same addresses: sleeping_allocator.c, built."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).with_name("sleeping_allocator.c")


class SleepingAllocator:
    """Memory pools of torch whose pages this takes away and gives back."""

    def __init__(self, folder: Path) -> None:
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        if shutil.which(compiler) is None:
            pytest.skip(f"needs a C compiler ({compiler})")
        library = folder / "sleeping_allocator.so"
        command = [compiler, "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library)]
        subprocess.run([*command, str(SOURCE), "-ldl"], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.mapped_bytes.restype = ctypes.c_size_t
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(library), "sleeping_malloc", "sleeping_free"
        )

    def pool(self) -> torch.cuda.MemPool:
        return torch.cuda.MemPool(self._allocator.allocator())

    def sleep(self) -> None:
        torch.cuda.synchronize()
        assert self._library.sleep_all() == 0

    def wake(self) -> None:
        assert self._library.wake_all() == 0

    @property
    def mapped_bytes(self) -> int:
        return int(self._library.mapped_bytes())
