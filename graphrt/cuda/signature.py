"""What two captured graphs must have in common to run on one executable."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from graphrt.cuda.driver import (
    edges,
    function_attribute,
    function_name,
    function_of,
    kernel_attribute,
    kernel_parameters,
    node_type,
    nodes_of,
)

_KERNEL, _MEMCPY, _MEMSET, _EMPTY = 0, 1, 2, 5
# CUlaunchAttributeID and CUfunction_attribute
_COOPERATIVE, _CLUSTER, _PREFERRED_CLUSTER = 2, 4, 11
_CLUSTER_OF_FUNCTION = (10, 11, 12, 13)
_COMMUNICATION = ("nccl", "nvshmem")


def signature_of(graph: int) -> Hashable | None:
    """The structure of a template: types of nodes, edges, and how kernels are launched in clusters.
    None if no other graph may share an executable with it.

    An update may change functions, grids, blocks and arguments, and the driver has the last word
    on it. Clusters must be equal: drivers are known that keep the old one without a word.
    Communication is never shared: its kernels keep state for each graph.
    """
    nodes = nodes_of(graph)
    places = {node: place for place, node in enumerate(nodes)}
    found: list[Hashable] = []
    functions: dict[int, Hashable | None] = {}
    for node in nodes:
        kind = node_type(node)
        if kind == _KERNEL:
            kernel = _kernel(node, functions)
            if kernel is None:
                return None
            found.append(kernel)
        elif kind in (_MEMCPY, _MEMSET, _EMPTY):
            found.append(kind)
        else:
            return None
    between = tuple((places[a], places[b], kind) for a, b, kind in edges(graph))
    return tuple(found), between


def _kernel(node: int, functions: dict[int, Hashable | None]) -> Hashable | None:
    """What must be equal about a kernel node; None if it may not be shared."""
    function = function_of(kernel_parameters(node))
    if function is None:
        return None
    if function not in functions:
        functions[function] = _function(function)
    of_function = functions[function]
    cluster = kernel_attribute(node, _CLUSTER)
    preferred = kernel_attribute(node, _PREFERRED_CLUSTER)
    if of_function is None or cluster is None:
        return None
    # Where the driver does not tell, nobody knows whether an update would change it.
    if preferred is None and any(cluster) and _prefers_clusters():
        return None
    return of_function, cluster, preferred, kernel_attribute(node, _COOPERATIVE)


def _prefers_clusters() -> bool:
    """Whether the device has preferred clusters, which came with compute capability 10."""
    return torch.cuda.get_device_capability()[0] >= 10


def _function(function: int) -> Hashable | None:
    """How a function is bound to clusters; None if it communicates or the driver does not tell."""
    name = function_name(function)
    if name is None or any(word in name.lower() for word in _COMMUNICATION):
        return None
    found = tuple(function_attribute(function, each) for each in _CLUSTER_OF_FUNCTION)
    return None if None in found else found
