"""The plain CPU as a platform: real capture and replay, with a device's own semantics."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from graphrt.core.base.errors import CaptureError, InvalidOptionError, ResourceExhaustedError
from graphrt.core.base.option_values import check_kind, shown
from graphrt.core.base.texts import error_text
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.device.contract import (
    CONTRACT_VERSION,
    Capability,
    MemoryFigures,
    TaskUpdate,
)
from graphrt.core.device.platform import Availability, Platform
from graphrt.cpu.arena import Arena
from graphrt.cpu.graph import TapeGraph
from graphrt.cpu.tape.fusing import Compiler
from graphrt.cpu.task import TaskHandle


class CpuPlatform(Platform):
    """Captures by recording operators as they run; replays them from one call."""

    name = "cpu"
    contract_version = CONTRACT_VERSION
    device_type = "cpu"
    capabilities = frozenset(
        {
            Capability.CAPTURE,
            Capability.SHARED_POOL,
            Capability.TASK_UPDATE,
            Capability.RANDOM,
            Capability.HOST_POOL,
        }
    )
    capture_executes = True
    raw_storages = True

    def __init__(self, *, max_pool_bytes: int | None = None, fuse: bool = False) -> None:
        """`max_pool_bytes` limits each pool: captured addresses never move, so a capture that does
        not fit raises `ResourceExhaustedError`.

        With `fuse` captures compile elementwise operators in a row (float32, float64) as one call,
        by the C++ compiler `c++` or the one that the variable CXX names, where that gives eager
        bits; only the bits inside of a NaN may differ. Dispatch modes and profilers see none of
        them at replays. Without a compiler a `LoopsNotCompiledWarning` says so, and operators are
        replayed one by one."""
        self._max_pool_bytes = max_pool_bytes
        check_kind("fuse", fuse, bool, optional=False, example="True")
        self._compiler = Compiler() if fuse else None

    def availability(self) -> Availability:
        return Availability(True)

    def get_static_graph_wrapper_cls(self) -> str:
        return "graphrt.cpu.CPUGraphWrapper"

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def new_memory(self) -> Arena:
        return Arena(max_bytes=self._max_pool_bytes)

    def adopt_memory(self, handle: object) -> Arena:
        if not isinstance(handle, Arena):
            raise InvalidOptionError(
                "no handle of graph memory on the CPU",
                got=shown(handle),
                expected="the handle of another GraphPool",
                advice='GraphPool("cpu", handle=pool.handle), or leave handle= out',
            )
        return handle.share()

    def memory_handle(self, memory: Arena) -> Arena:
        return memory

    def new_graph(self) -> TapeGraph:
        graph = TapeGraph()
        graph.compiler = self._compiler
        return graph

    def begin_capture(self, graph: TapeGraph, memory: Arena) -> None:
        graph.capture_begin(memory)

    def end_capture(self, graph: TapeGraph) -> bool:
        graph.capture_end()
        return True

    def abort_capture(self, graph: TapeGraph) -> None:
        graph.capture_abort()

    def owns(self, memory: Arena, tensor: torch.Tensor) -> bool:
        return memory.owns(tensor)

    def weak_ref(self, memory: Arena, tensor: torch.Tensor) -> torch.Tensor:
        return memory.alias(tensor)

    def memory_bytes(self, memory: Arena) -> int:
        return memory.reserved_bytes

    def save(self, memory: Arena) -> list[tuple[memoryview, bytes]]:
        return memory.save()

    def restore(self, memory: Arena, saved: list[tuple[memoryview, bytes]]) -> bool:
        memory.restore(saved)
        return True

    def release_memory(self, memory: Arena) -> None:
        memory.release()

    def explain(self, error: BaseException) -> CaptureError:
        if isinstance(error, CaptureError):
            return error
        # torch raises a plain RuntimeError where malloc gives nothing: only its text tells.
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in error_text(error):
            return ResourceExhaustedError(
                "the machine ran out of memory during a capture",
                got=" ".join(error_text(error).split()) or None,
                advice="capture fewer or smaller sizes, or leave caches less memory",
            )
        return super().explain(error)

    def float32_precision(self, use: str) -> str:
        mkldnn: Any = torch.backends.mkldnn
        owners = {"convolution": mkldnn.conv, "rnn": mkldnn.rnn}
        precision: str = owners.get(use, mkldnn.matmul).fp32_precision
        return precision

    def memory_figures(self) -> MemoryFigures | None:
        try:
            page = os.sysconf("SC_PAGE_SIZE")
            free, total = (page * os.sysconf(f"SC_{name}_PAGES") for name in ("AVPHYS", "PHYS"))
        except (AttributeError, OSError, ValueError):
            return None  # no POSIX system, or one without these figures
        with contextlib.suppress(OSError, ValueError, IndexError):
            # Memory of cached files counts as free: the system gives it to a process that asks.
            available = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2]
            free = int(available.split()[0]) << 10
        return MemoryFigures(free, total)

    def task_begin(self, graph: TapeGraph) -> None:
        graph.task_begin()

    def task_end(self, graph: TapeGraph) -> TaskHandle:
        return graph.task_end()

    def replay_updated(
        self, graph: TapeGraph, updates: Sequence[TaskUpdate], *, changed: bool, name: str = ""
    ) -> None:
        if changed:
            for update in updates:
                graph.update_task(update.handle, update.issue)
        graph.replay()


class CPUGraphWrapper(GraphWrapper):
    """A `GraphWrapper` whose graphs are tapes of operators."""

    platform_name = "cpu"
