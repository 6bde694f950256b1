"""The CPU platform, whose graphs say when they are replayed."""

from __future__ import annotations

from collections import Counter

from graphrt.cpu import CpuPlatform, TapeGraph


class TracedGraph(TapeGraph):
    """A graph of the CPU that counts its replays in the trace of its platform."""

    def __init__(self, trace: Counter[int], number: int) -> None:
        super().__init__()
        self._trace = trace
        self._number = number

    def replay(self) -> None:
        self._trace[self._number] += 1
        super().replay()


class TracingCpuPlatform(CpuPlatform):
    """`trace` counts the replays of each graph, by the order in which the graphs were made."""

    name = "tracing_cpu"
    contract_version = 2

    def __init__(self) -> None:
        super().__init__()
        self.trace: Counter[int] = Counter()
        self._made = 0

    def get_static_graph_wrapper_cls(self) -> str:
        return "graphrt_example_platform.wrapper.TracingGraphWrapper"

    def new_graph(self) -> TracedGraph:
        self._made += 1
        return TracedGraph(self.trace, self._made)
