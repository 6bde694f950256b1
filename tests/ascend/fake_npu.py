"""A `torch.npu` that does nothing but write down what it is told, in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FakeStream:
    def __init__(self, npu: FakeNpu, name: str, number: int) -> None:
        self.npu, self.name, self.npu_stream = npu, name, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.npu_stream == self.npu_stream

    def __hash__(self) -> int:
        return self.npu_stream

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, other: FakeStream) -> None:
        self.npu.log.append(f"{self} waits for {other}")

    def wait_event(self, event: FakeEvent) -> None:
        self.npu.log.append(f"{self} waits for {event}")

    def record_event(self) -> FakeEvent:
        event = FakeEvent(f"event {next(self.npu.events)}")
        self.npu.log.append(f"{self} records {event}")
        return event


class FakeEvent:
    """Is over when `is_over` says so; `asked` counts how often anybody wanted to know."""

    def __init__(self, name: str, is_over: bool = True) -> None:
        self.name, self.is_over, self.asked = name, is_over, 0

    def __repr__(self) -> str:
        return self.name

    def query(self) -> bool:
        self.asked += 1
        return self.is_over


class FakeSignal:
    def __init__(self, npu: FakeNpu, name: str) -> None:
        self.npu, self.name = npu, name

    def record(self, stream: FakeStream) -> None:
        self.npu.log.append(f"{stream} signals {self.name}")

    def wait(self, stream: FakeStream) -> None:
        self.npu.log.append(f"{stream} takes {self.name}")

    def reset(self, stream: FakeStream) -> None:
        self.npu.log.append(f"{stream} resets {self.name}")


class FakeGraph:
    """Fails at the calls whose names are in `fails`; `has_pool` is whether a capture was ended."""

    def __init__(self, npu: FakeNpu, name: str = "graph", fails: tuple[str, ...] = ()) -> None:
        self.npu, self.name, self.fails, self.has_pool = npu, name, fails, False

    def _do(self, call: str, said: str | None = None) -> None:
        self.npu.log.append(said or f"{self.name}.{call} on {self.npu.current}")
        if call in self.fails:
            raise RuntimeError(f"{call} fails")

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self._do("capture_begin", f"{self.name}.capture_begin({pool}, {capture_error_mode})")

    def capture_end(self) -> None:
        self._do("capture_end")
        self.has_pool = True

    def replay(self) -> None:
        self._do("replay")

    def reset(self) -> None:
        self._do("reset", f"{self.name}.reset")
        self.has_pool = False

    def pool(self) -> tuple[int, int]:
        if not self.has_pool:
            raise RuntimeError("Called NPUGraph::pool() without a preceding successful capture.")
        return (0, 1)


class FakeNpu:
    """Hands out `streams` streams in turn, as torch_npu does; "C" is current at first."""

    def __init__(self, streams: int = 8) -> None:
        self.log: list[str] = []
        self.events = itertools.count(1)
        numbers = itertools.count(1000 + 1000 * next(_numbers))
        self.current = self.first = FakeStream(self, "C", next(numbers))
        self.pool = [FakeStream(self, f"S{place}", next(numbers)) for place in range(streams)]
        self._turn = itertools.cycle(self.pool)
        self._signals = itertools.count()
        self.capturing = False

    def Stream(self) -> FakeStream:
        return next(self._turn)

    def ExternalEvent(self) -> FakeSignal:
        return FakeSignal(self, f"signal {next(self._signals)}")

    def current_stream(self) -> FakeStream:
        return self.current

    def default_stream(self) -> FakeStream:
        return self.first

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: int) -> None:
        self.log.append(f"device {device}")

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return []

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_task_group_begin(self, stream: FakeStream) -> None:
        self.log.append(f"{stream} group begin")

    def graph_task_group_end(self, stream: FakeStream) -> str:
        self.log.append(f"{stream} group end")
        return "group"

    def graph_task_update_begin(self, stream: FakeStream, group: str) -> None:
        self.log.append(f"{stream} begin {group}")

    def graph_task_update_end(self, stream: FakeStream) -> None:
        self.log.append(f"{stream} end")

    def told(self) -> list[str]:
        """What it was told since it was last asked."""
        calls, self.log = self.log, []
        return calls


_numbers = itertools.count()
