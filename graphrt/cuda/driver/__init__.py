"""The CUDA driver: what it knows of captures, templates and their nodes, and torch does not ask."""

from graphrt.cuda.driver.api import (
    allocation_of,
    begin_capture,
    capture_dependencies,
    capture_is_invalidated,
    captured_nodes,
    driver_available,
    end_capture,
    finish_capture,
    need,
    new_stream,
    restart_capture,
)
from graphrt.cuda.driver.fetch import FetchRing
from graphrt.cuda.driver.forks import ForkWatch
from graphrt.cuda.driver.nodes import (
    KernelParameters,
    NodeCalls,
    argument_sizes,
    arguments_of,
    destroy_graph,
    function_of,
    is_chain,
    kernel_attribute,
    kernel_parameters,
    memory_parameters,
    node_type,
    nodes_of,
)
from graphrt.cuda.driver.pointers import pointers_of

__all__ = [
    "FetchRing",
    "ForkWatch",
    "KernelParameters",
    "NodeCalls",
    "allocation_of",
    "argument_sizes",
    "arguments_of",
    "begin_capture",
    "capture_dependencies",
    "capture_is_invalidated",
    "captured_nodes",
    "destroy_graph",
    "driver_available",
    "end_capture",
    "finish_capture",
    "function_of",
    "is_chain",
    "kernel_attribute",
    "kernel_parameters",
    "memory_parameters",
    "need",
    "new_stream",
    "node_type",
    "nodes_of",
    "pointers_of",
    "restart_capture",
]
