"""Host buffers for the parameters of nodes, from which the driver copies them."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from graphrt.cuda.driver.nodes import KernelParameters
from graphrt.cuda.update.images import KERNEL, WORD, Image, offsets


class Setting(Protocol):
    """The next parameters of a node; the driver is passed `reference`."""

    @property
    def reference(self) -> Any: ...

    def load(self, image: Image) -> None: ...


class _Parameters:
    """The launch of a kernel, with a pointer to each argument, or a copy's or fill's parameters.

    `head` and `tail` are the bytes of a launch before and behind its pointers to arguments. They
    can be copied to the launch of another node.
    """

    __slots__ = ("_memory", "_pointers", "head", "launch", "reference", "tail")

    def __init__(self, kind: int, addresses: list[int], buffer: Any) -> None:
        self._memory = (ctypes.c_char * ctypes.sizeof(KernelParameters))()
        view = memoryview(self._memory).cast("B")
        self.head = view[: KernelParameters.arguments.offset]
        self.tail = view[KernelParameters.kernel.offset :]
        self.launch = KernelParameters.from_buffer(self._memory)
        self._pointers = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        self.launch.arguments = ctypes.addressof(self._pointers)
        self.reference = ctypes.byref(self.launch) if kind == KERNEL else buffer

    def set_launch(self, image: Image) -> None:
        if image.kind == KERNEL:
            launch = self.launch
            launch.function, launch.kernel, launch.context = image.launch[:3]
            launch.grid, launch.block, launch.shared_bytes = image.launch[3:]


class WholeSetting:
    """The parameters of one image: its launch, and the bytes of its arguments. `load` takes further
    images with arguments of the same sizes."""

    __slots__ = ("_buffer", "_bytes", "image", "parameters", "reference")

    def __init__(self, image: Image) -> None:
        self._buffer = _buffer_of(image.data)
        self._bytes = memoryview(self._buffer).cast("B")
        addresses = [self.address(offset) for offset in offsets(image.sizes)]
        self.parameters = _Parameters(image.kind, addresses, self._buffer)
        self.parameters.set_launch(image)
        self.reference = self.parameters.reference
        self.image = image

    def address(self, offset: int) -> int:
        """The address of the byte at `offset` of the data."""
        return ctypes.addressof(self._buffer) + offset

    def load(self, image: Image) -> None:
        before = self.image
        if image is before:
            return
        self._bytes[: len(image.data)] = image.data
        # By identity: an equal launch, of another capture, is set once more.
        if image.launch is not before.launch:
            self.parameters.set_launch(image)
        self.image = image


class SharedSetting(WholeSetting):
    """The parameters that layers share: all but the `unshared` words (of four bytes), which differ
    from layer to layer.

    `mixed` says which arguments have unshared words; `pieces` are the shared bytes of these.
    """

    __slots__ = ("_runs", "mixed", "pieces")

    def __init__(self, image: Image, unshared: frozenset[int]) -> None:
        super().__init__(image)
        # The ranges of shared bytes in arguments that also have unshared words.
        self._runs: list[slice] = []
        self.mixed: list[bool] = []
        for offset, size in zip(offsets(image.sizes), image.sizes, strict=True):
            first, end = offset // WORD, (offset + size + WORD - 1) // WORD
            # A copy's or fill's parameters are one struct: a layer cannot take parts from here.
            mixed = image.kind != KERNEL or not unshared.isdisjoint(range(first, end))
            self.mixed.append(mixed)
            if mixed:
                self._runs += _runs(first, end, unshared)
        self.pieces = [(run, image.data[run]) for run in self._runs]

    def load(self, image: Image) -> None:
        super().load(image)
        self.pieces = [(run, image.data[run]) for run in self._runs]


class PatchedSetting:
    """A layer's node, set from the image of another layer except for its own words.

    Arguments without own words are read from the buffer of `shared`, so they cost nothing.
    """

    __slots__ = ("_buffer", "_bytes", "_image", "_parameters", "_shared", "reference")

    def __init__(self, base: Image, shared: SharedSetting) -> None:
        self._buffer = _buffer_of(base.data)
        self._bytes = memoryview(self._buffer).cast("B")
        addresses = [
            ctypes.addressof(self._buffer) + offset if mixed else shared.address(offset)
            for offset, mixed in zip(offsets(base.sizes), shared.mixed, strict=True)
        ]
        self._parameters = _Parameters(base.kind, addresses, self._buffer)
        self._parameters.set_launch(base)
        self.reference = self._parameters.reference
        self._shared = shared
        self._image = base

    def load(self, image: Image) -> None:
        shared = self._shared
        # `shared` has the image that some layer loaded last.
        if shared.image is not image:
            shared.load(image)
        before = self._image
        if image is before:
            return
        for run, piece in shared.pieces:
            self._bytes[run] = piece
        if image.launch is not before.launch:
            self._parameters.head[:] = shared.parameters.head
            self._parameters.tail[:] = shared.parameters.tail
        self._image = image


def _runs(first: int, end: int, unshared: frozenset[int]) -> list[slice]:
    """The bytes of the words from `first` to `end` that are not `unshared`, in as few pieces."""
    runs: list[slice] = []
    for word in range(first, end):
        if word in unshared:
            continue
        start, stop = word * WORD, (word + 1) * WORD
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        runs.append(slice(start, stop))
    return runs


def _buffer_of(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(data, max(len(data), 1))
