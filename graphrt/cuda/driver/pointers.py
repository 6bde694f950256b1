"""The words in the nodes of a template that may be addresses of memory they touch.

The search is conservative: every aligned word of eight bytes in the arguments of a kernel, or in
the parameters of a copy or a fill, that is large enough to be an address. The padding between the
fields of a struct is never written, so a word there may be left from an earlier call. Not found are
addresses in packed structs, in arrays on the device (grouped matrix products), in TMA descriptors,
which encode them, and in `__device__` variables.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

from graphrt.core.device.contract import GraphPointers
from graphrt.cuda.driver.api import DriverError
from graphrt.cuda.driver.nodes import (
    CHILD,
    KERNEL,
    MEMORY_NAMES,
    KernelParameters,
    argument_sizes,
    child_graph,
    function_of,
    kernel_parameters,
    memory_parameters,
    node_type,
    nodes_of,
)

_TOUCH_NOTHING = frozenset({5, 6, 7, 8, 9, 10, 11})
"""Nodes that only order others, and those that allocate and free memory of the graph's own."""
_WORD = 8
LEAST_ADDRESS, _MOST = 1 << 20, 1 << 57
"""Smaller numbers are lengths and strides, larger ones are no addresses of any machine."""
_END, _BUFFER, _BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_*


def pointers_of(graph: int) -> GraphPointers:
    """The possible addresses in kernels, copies and fills of a template and its child graphs.

    Unread are nodes of other kinds that may touch memory (host functions, conditional bodies, waits
    and writes of memory), and kernels where the driver does not tell the sizes of arguments, as
    before CUDA 12.4. Raises `DriverError` if it does not list the nodes of `graph`.
    """
    scan = WordScan()
    arguments: list[tuple[int, ...]] = []
    unread = 0
    pending = nodes_of(graph)
    while pending:
        node = pending.pop()
        try:
            kind = node_type(node)
            if kind == CHILD:
                pending += nodes_of(child_graph(node))
                continue
            words = scan.words(node, kind)
        except DriverError:
            words = None
        if words is None:
            unread += 1
        elif plausible := tuple([word for word in words if LEAST_ADDRESS <= word < _MOST]):
            arguments.append(plausible)
    return GraphPointers(arguments, unread)


class WordScan:
    """Reads the words of nodes, in their order; the layout of arguments is asked for once for each
    function."""

    def __init__(self) -> None:
        # (function, kernel) -> layout; None where the driver does not tell it.
        self._layouts: dict[tuple[int, int], _Layout | None] = {}

    def words(self, node: int, kind: int) -> Sequence[int] | None:
        """The words that may be addresses; None if the driver does not tell them, or if nodes of
        this kind may touch memory in another way."""
        if kind == KERNEL:
            return self._of_kernel(kernel_parameters(node))
        if kind in MEMORY_NAMES:
            return memoryview(memory_parameters(node, kind)).cast("Q")
        return () if kind in _TOUCH_NOTHING else None

    def _of_kernel(self, parameters: KernelParameters) -> Sequence[int] | None:
        if not parameters.arguments and parameters.extra:
            return _of_packed(parameters.extra)
        key = (parameters.function or 0, parameters.kernel or 0)
        if key not in self._layouts:
            self._layouts[key] = _layout_of(parameters)
        layout = self._layouts[key]
        if layout is None or (layout.count and not parameters.arguments):
            return None
        return layout.words(parameters.arguments)


class _Layout:
    """Reads the arguments of a function that have room for an address."""

    def __init__(self, sizes: Iterable[int]) -> None:
        sizes = list(sizes)
        self.count = len(sizes)
        # The type of the driver's array of pointers to arguments.
        self._places = ctypes.c_void_p * self.count
        # Index of an argument of a word or more -> the type of its whole words.
        self._wide = [
            (index, ctypes.c_uint64 * (size // _WORD))
            for index, size in enumerate(sizes)
            if size >= _WORD
        ]

    def words(self, arguments: int) -> list[int]:
        """All whole words. `arguments` is the address of the driver's array of pointers to them."""
        words: list[int] = []
        if self._wide:
            addresses = self._places.from_address(arguments)
            for index, array in self._wide:
                address = addresses[index]
                if address:
                    words += array.from_address(address)[:]
        return words


def _layout_of(parameters: KernelParameters) -> _Layout | None:
    function = function_of(parameters)
    sizes = None if function is None else argument_sizes(function)
    return None if sizes is None else _Layout(sizes)


def _of_packed(extra: int) -> Sequence[int] | None:
    """The words of arguments that were handed over as one buffer; None without its size."""
    buffer = size = 0
    while (key := _word_at(extra)) != _END:
        value = _word_at(extra + _WORD)
        if key == _BUFFER:
            buffer = value
        elif key == _BUFFER_SIZE:
            size = _word_at(value)
        else:
            return None
        extra += 2 * _WORD
    if not buffer:
        return None
    return (ctypes.c_uint64 * (size // _WORD)).from_address(buffer)[:]


def _word_at(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
