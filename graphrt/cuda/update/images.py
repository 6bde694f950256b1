"""The parameters of a task's nodes, as plain data that outlives the graph it was read from."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from graphrt.cuda.driver.nodes import (
    argument_sizes,
    arguments_of,
    function_of,
    kernel_parameters,
    memory_parameters,
)

KERNEL, MEMCPY, MEMSET, EMPTY = 0, 1, 2, 5  # CUgraphNodeType
SETTABLE = frozenset({KERNEL, MEMCPY, MEMSET, EMPTY})
ALIGNMENT = 8
"""Bytes: each argument in the data of an image begins at a multiple."""
WORD = 4
"""Bytes of a word, the unit by which images of layers are compared."""

_PLAIN = (bool, int, float, str, type(None))
"""Host values whose contents cannot change behind a key."""


class Image(NamedTuple):
    """The parameters of one node: two nodes with equal images do the same.

    `launch` is how a kernel is launched (function, kernel, context, grid, block, shared bytes). The
    arguments of a kernel are in `data` one after the other, each at a multiple of eight bytes. The
    parameters of a copy or a fill are its only argument.
    """

    kind: int
    """`KERNEL`, `MEMCPY`, `MEMSET` or `EMPTY`."""
    launch: tuple[Any, ...]
    sizes: tuple[int, ...]
    """Bytes of each argument, without the padding behind it."""
    data: bytes


Images = tuple[Image, ...]
"""The images of the nodes of one task, in order."""


NOTHING = Image(EMPTY, (), (), b"")
"""The image of every node that only orders others."""
SKIPPED: tuple[Any, ...] = ("skipped",)
"""The `launch` of a node that is switched off."""


def with_skipped(bases: Images, images: Images) -> Images:
    """`images`, which are of the first nodes of a task, and the other nodes switched off."""
    return images + tuple(base._replace(launch=SKIPPED) for base in bases[len(images) :])


def image_of(kind: int, launch: tuple[Any, ...], arguments: Iterable[bytes]) -> Image:
    """The image of a node with these arguments."""
    arguments = list(arguments)
    data = b"".join(each + bytes(-len(each) % ALIGNMENT) for each in arguments)
    return Image(kind, launch, tuple(map(len, arguments)), data)


def offsets(sizes: Sequence[int]) -> list[int]:
    """The offset of each argument in the data of an image."""
    starts, offset = [], 0
    for size in sizes:
        starts.append(offset)
        offset += size + -size % ALIGNMENT
    return starts


def words(image: Image) -> memoryview:
    """The data as words of four bytes."""
    return memoryview(image.data).cast("I")


def read_image(node: int, kind: int, sizes_of: dict[int, tuple[int, ...] | None]) -> Image | None:
    """The image of a node; None if the driver does not tell the sizes of its arguments.

    `sizes_of` remembers these by function.
    """
    if kind == EMPTY:
        return NOTHING
    if kind != KERNEL:
        return image_of(kind, (), [memory_parameters(node, kind)])
    parameters = kernel_parameters(node)
    function = function_of(parameters)
    if function is None:
        return None
    if function not in sizes_of:
        sizes_of[function] = argument_sizes(function)
    sizes = sizes_of[function]
    if sizes is None or (sizes and not parameters.arguments):
        return None  # unknown sizes, or arguments that were launched as one buffer
    launch = (
        parameters.function,
        parameters.kernel,
        parameters.context,
        tuple(parameters.grid),
        tuple(parameters.block),
        parameters.shared_bytes,
    )
    return image_of(kind, launch, arguments_of(parameters, sizes))


def key_of(values: Mapping[str, Any]) -> Hashable | None:
    """Host arguments as a key that tells 1 from 1.0 and 0.0 from -0.0; None if they are more than
    plain values, whose contents might change behind a key."""
    key: list[Any] = []
    for name, value in values.items():
        parts = value if isinstance(value, list | tuple) else (value,)
        kinds = list(map(type, parts))
        if not all(map(_PLAIN.__contains__, set(kinds))):
            return None
        if float in kinds:
            parts = [part.hex() if type(part) is float else part for part in parts]
        key += (name, type(value), tuple(parts), tuple(kinds))
    return tuple(key)
