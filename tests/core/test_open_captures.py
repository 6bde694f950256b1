"""Which captures of a device are open, and when their graphs are reset."""

from __future__ import annotations

from typing import Any

import pytest

from graphrt.platforms import Captures


class Graph:
    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


class Memory:
    def handle(self) -> tuple[int, int]:
        return (0, 1)


class Device(Captures[Memory]):
    """Says at a capture's end whether it recorded something, or raises."""

    def __init__(self, end: bool | Exception) -> None:
        super().__init__()
        self.answer = end
        self.taken_back: list[Graph] = []

    def _stream_to_capture(self) -> str:
        return "stream"

    def _begin(self, graph: Graph, opened: Any) -> None:
        assert not opened.begun

    def _end(self, graph: Graph, opened: Any) -> bool:
        assert opened.begun
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def _take_back(self, graph: Graph, opened: Any) -> None:
        self.taken_back.append(graph)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_graph_that_recorded_no_work_is_reset_at_capture_end(recorded):
    device, graph, memory = Device(recorded), Graph(), Memory()
    device.begin(graph, memory)
    assert device.is_any_open() and device.memory_of(graph) is memory
    assert device.end(graph) is recorded
    assert graph.resets == (0 if recorded else 1)
    assert not device.is_any_open()


def test_a_capture_whose_end_raises_stays_open_until_its_abort():
    device, graph = Device(ValueError("lost")), Graph()
    device.begin(graph, Memory())
    with pytest.raises(ValueError, match="lost"):
        device.end(graph)
    assert device.is_any_open()
    device.abort(graph)
    assert device.taken_back == [graph] and graph.resets == 0
    assert not device.is_any_open()


def test_a_graph_aborted_before_its_capture_began_is_reset():
    device, graph = Device(True), Graph()
    device.abort(graph)
    assert (device.taken_back, graph.resets) == ([], 1)
