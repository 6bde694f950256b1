"""Which streams have a workspace, by a snapshot; and what a clean-up asks for again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from graphrt.cuda import _workspaces as workspaces
from graphrt.cuda import memory as cuda_memory

SIZE = 8 << 20


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    # A torch that is built for CUDA asks the driver for them, which may not be there.
    monkeypatch.setattr(workspaces, "workspace_sizes", lambda: frozenset({SIZE}))


def segment(stream: int, *blocks: tuple[str, int]) -> dict[str, Any]:
    return {
        "stream": stream,
        "blocks": [{"state": state, "requested_size": size} for state, size in blocks],
    }


def test_streams_with_a_workspace_are_found_by_blocks_of_its_size():
    streams = workspaces.streams_with_workspaces(
        [
            segment(1, ("active_allocated", 512), ("active_allocated", SIZE)),
            segment(2, ("inactive", SIZE), ("active_allocated", SIZE + 512)),
            segment(3, ("active_pending_free", SIZE)),
        ]
    )
    assert streams == {1}


class Stream:
    device_index = 0

    def __init__(self, number: int) -> None:
        self.cuda_stream = number


class Asked:
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.routed = False

    def prepare(self) -> None: ...

    def ask(self, streams: Any) -> None:
        where = "pool" if self.routed else "outside"
        numbers = [stream.cuda_stream for stream in streams]
        if numbers:
            self.calls.append((where, numbers))


@pytest.mark.parametrize(
    ("left", "calls"),
    [(True, [("pool", [1]), ("outside", [2])]), (False, [("outside", [2])])],
)
def test_after_a_reset_workspaces_are_allocated_again_on_the_same_streams(left, calls, monkeypatch):
    """1 is graphrt's, with a workspace in the pool; 2 the host's, without; 3 has none."""
    monkeypatch.setattr(workspaces, "_hosts", {(0, 2)})
    memory = cuda_memory.GraphMemory.__new__(cuda_memory.GraphMemory)
    asked = Asked()

    class Routing(nullcontext[None]):
        def __enter__(self) -> None:
            asked.routed = True

        def __exit__(self, *exc_info: object) -> None:
            asked.routed = False

    class Empty:
        resets = 0

        def reset(self) -> None:
            Empty.resets += 1

    memory._share, memory._empties = None, [Empty()]
    memory._loans = []
    memory._streams = {n: Stream(n) for n in (1, 2, 3)}  # type: ignore[assignment]
    memory._with_workspace, memory._workspaces = {1}, asked  # type: ignore[assignment]
    monkeypatch.setattr(cuda_memory.GraphMemory, "_refresh", lambda self: None)
    memory._graphs = {object()} if left else set()  # type: ignore[assignment]
    monkeypatch.setattr(cuda_memory, "captured_pool", lambda graph: (0, 1))
    monkeypatch.setattr(cuda_memory.GraphMemory, "allocating", lambda self: Routing())
    memory.before_reset()
    memory.after_reset()
    assert asked.calls == calls
    assert Empty.resets == (not left)
