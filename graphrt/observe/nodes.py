"""The kernels of captured graphs: how many there are so far, and what a profiler calls each.

CUDA tells the nodes of a template in the order in which the host captured them, on whatever stream.
The CPU issues the operators of its tape, by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from graphrt.core.base.errors import MissingCapabilityError
from graphrt.core.device.platform import Platform
from graphrt.cpu.graph import TapeGraph


class Kernel(NamedTuple):
    """A kernel of a graph: its `names` in a trace, as it is and demangled; its grid and block, or
    (); its position among the `nodes`; its number, where the driver tells it."""

    names: frozenset[str]
    launch: tuple[int, ...]
    node: int
    number: int | None = None


class Kernels(NamedTuple):
    """The kernels of a graph, as they were captured. `in_order` says that each replay runs them in
    this order, as on one stream."""

    kernels: list[Kernel]
    in_order: bool = True


def check_tells(platform: Platform) -> None:
    """Raise `MissingCapabilityError` for a device that does not tell the kernels of its graphs."""
    from graphrt.cuda.driver.api import driver_available

    if platform.device_type != "cuda" or not driver_available():
        raise MissingCapabilityError(
            "this platform does not tell the kernels of its graphs",
            got=platform.name,
            expected="an NVIDIA GPU, or the CPU",
            advice="run the same forward there",
        )


def counter(platform: Platform, graph: Any) -> Callable[[], int]:
    """A function that tells how many nodes the open capture of `graph` has. Raises
    `MissingCapabilityError` for a platform that does not tell."""
    if isinstance(graph, TapeGraph):
        return lambda: graph.steps_so_far
    check_tells(platform)
    from graphrt.cuda.driver.api import captured_nodes

    stream = torch.cuda.current_stream().cuda_stream
    return lambda: captured_nodes(stream) or 0


def kernels_of(graph: Any) -> Kernels:
    """The kernels of a captured graph."""
    if isinstance(graph, TapeGraph):
        # A loop that was compiled shows none of its operators.
        steps = enumerate(graph.issued)
        return Kernels([Kernel(frozenset([name]), (), at) for at, names in steps for name in names])
    from graphrt.cuda.driver.nodes import edges, nodes_of

    template = graph.raw_cuda_graph()
    nodes, joined = nodes_of(template), edges(template)
    before, after = {b for _, b, _ in joined}, {a for a, _, _ in joined}
    in_order = len(before) == len(after) == len(joined) >= len(nodes) - 1
    return Kernels([*_of_nodes(nodes)], in_order)


def _of_nodes(nodes: list[int], at: int | None = None) -> Iterator[Kernel]:
    """The kernels among nodes; those of a child graph have the position of its node, `at`."""
    from graphrt.cuda.driver import nodes as driver
    from graphrt.cuda.private_torch import demangle

    for number, node in enumerate(nodes):
        place = number if at is None else at
        kind = driver.node_type(node)
        if kind == driver.CHILD:
            yield from _of_nodes(driver.nodes_of(driver.child_graph(node)), place)
        if kind != driver.KERNEL:
            continue
        launch = driver.kernel_parameters(node)
        function = driver.function_of(launch)
        name = None if function is None else driver.function_name(function)
        names = [] if name is None else [name, demangle(name) if demangle else name]
        yield Kernel(frozenset(names), (*launch.grid, *launch.block), place, driver.tools_id(node))
