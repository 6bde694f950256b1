"""Graphs of equal structure on one executable, which is switched between them."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

import torch

from graphrt.core.base import ExecutableSwitchError
from graphrt.core.device import SharingFigures
from graphrt.cuda.driver import clone_graph, destroy_graph, node_count, update_executable
from graphrt.cuda.signature import signature_of


class ShareableGraph:
    """A `torch.cuda.CUDAGraph` that keeps its template, so that it can give up its executable.

    Launches are those of torch's graphs, so profilers see them; what is missing there for a graph
    that was switched in is the state of random generators, so a graph that draws random numbers
    is never shared.
    """

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.random: bool | None = None
        self.template = 0
        self.group: Group | None = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.graph.capture_begin(pool=pool, capture_error_mode=capture_error_mode)

    def capture_end(self) -> None:
        self.graph.capture_end()

    def pool(self) -> Any:
        return self.graph.pool()

    def raw_cuda_graph(self) -> int:
        """The template: of a graph on another one's executable, the copy that is its own."""
        return self.graph.raw_cuda_graph() if self.group is None else self.template

    def instantiate(self) -> None:
        """Make the executable anew from the template, for the update of tasks."""
        self.graph.instantiate()

    def raw_cuda_graph_exec(self) -> int:
        """The executable, for the update of tasks; a graph that has some is never shared."""
        return self.graph.raw_cuda_graph_exec()

    def replay(self) -> None:
        group = self.group
        if group is not None:
            if group.current is not self:
                group.switch(self)
            group.owner.graph.replay()
            return
        if self.random is None:
            before = _random_offset()
            self.graph.replay()
            self.random = _random_offset() != before
            return
        self.graph.replay()

    def reset(self) -> None:
        group, self.group = self.group, None
        if group is None:
            self.graph.reset()
            return
        group.remove(self)


class Group:
    """Graphs of one structure; the owner's executable has the parameters of the current one."""

    def __init__(self, owner: ShareableGraph, sharing: Sharing, signature: Hashable) -> None:
        self.owner = owner
        self.current = owner
        self.members = {owner}
        self._sharing = sharing
        self._signature = signature

    def switch(self, graph: ShareableGraph) -> None:
        """Give the executable the parameters of `graph`, for its coming launches."""
        started = time.perf_counter()
        if not update_executable(self.owner.graph.raw_cuda_graph_exec(), graph.template):
            raise ExecutableSwitchError(
                "the driver refused to switch a shared executable to another graph",
                expected="what it accepted when the graph was captured",
                advice="use share_executables=False",
            )
        self.current = graph
        self._sharing.switches += 1
        self._sharing.switch_s += time.perf_counter() - started

    def join(self, graph: ShareableGraph) -> bool:
        """Take `graph` in and destroy its own executable; False if the driver refuses."""
        template = clone_graph(graph.graph.raw_cuda_graph())
        if not update_executable(self.owner.graph.raw_cuda_graph_exec(), template):
            destroy_graph(template)
            return False
        # A launch of it that is under way still ends: the driver frees it afterwards.
        graph.graph.reset()
        graph.template = template
        graph.group = self
        self.members.add(graph)
        self.current = graph
        return True

    def remove(self, graph: ShareableGraph) -> None:
        """Let `graph` go; the executable lives until the last one has gone."""
        self.members.discard(graph)
        if graph is not self.owner:
            destroy_graph(graph.template)
        if not self.members:
            self._sharing.groups.pop(self._signature, None)
            self.owner.graph.reset()


class Sharing:
    """The executables that graphs of one pool share."""

    def __init__(self) -> None:
        self.groups: dict[Hashable, Group] = {}
        self.unshared = 0
        self.nodes = 0
        self.nodes_saved = 0
        self.switches = 0
        self.switch_s = 0.0

    def add(self, graph: ShareableGraph) -> None:
        """Share the executable of a graph that was replayed once, if that is safe."""
        template = graph.graph.raw_cuda_graph()
        nodes = node_count(template)
        signature = None if graph.random is not False else signature_of(template)
        group = None if signature is None else self.groups.get(signature)
        if group is not None and group.join(graph):
            self.nodes_saved += nodes
            return
        self.nodes += nodes
        if signature is None or group is not None:
            self.unshared += 1
            return
        graph.template = template
        graph.group = self.groups[signature] = Group(graph, self, signature)

    def figures(self) -> SharingFigures:
        return SharingFigures(
            graphs=self.unshared + sum(len(group.members) for group in self.groups.values()),
            executables=self.unshared + len(self.groups),
            nodes=self.nodes,
            nodes_saved=self.nodes_saved,
            switches=self.switches,
            switch_s=self.switch_s,
        )


def _random_offset() -> int:
    # A replay moves the default generator by what the graph draws.
    device = torch.cuda.current_device()
    return int(torch.cuda.default_generators[device].get_offset())
