"""What two captured graphs must have in common to run on one executable."""

from __future__ import annotations

from collections.abc import Hashable

from graphrt.cuda import driver

_KERNEL, _MEMCPY, _MEMSET, _EMPTY = 0, 1, 2, 5
_COOPERATIVE, _CLUSTER, _PREFERRED_CLUSTER = 2, 4, 11
_COMMUNICATION = ("nccl", "nvshmem")


def signature_of(graph: int) -> Hashable | None:
    """The structure of a template: nodes, kernels, launch attributes and edges, without grids and
    arguments. None if no other graph may share an executable with it.

    Communication is never shared: its kernels keep state of their own for each graph. A kernel
    whose preferred cluster the driver does not tell is not either: an update may keep the old one.
    """
    nodes = driver.nodes(graph)
    places = {node: place for place, node in enumerate(nodes)}
    found: list[Hashable] = []
    for node in nodes:
        kind = driver.node_type(node)
        if kind == _KERNEL:
            kernel = _kernel(node)
            if kernel is None:
                return None
            found.append(kernel)
        elif kind in (_MEMCPY, _MEMSET, _EMPTY):
            found.append(kind)
        else:
            return None
    edges = tuple((places[a], places[b], kind) for a, b, kind in driver.edges(graph))
    return tuple(found), edges


def _kernel(node: int) -> Hashable | None:
    parameters = driver.kernel_parameters(node)
    name = driver.kernel_name(parameters)
    if name is None or any(word in name.lower() for word in _COMMUNICATION):
        return None
    cluster = driver.kernel_attribute(node, _CLUSTER)
    preferred = driver.kernel_attribute(node, _PREFERRED_CLUSTER)
    if cluster is None or (preferred is None and any(cluster)):
        return None
    return (
        parameters.function or parameters.kernel,
        tuple(parameters.block),
        parameters.shared_bytes,
        driver.kernel_attribute(node, _COOPERATIVE),
        cluster,
        preferred,
    )
