"""The slab that inputs are packed in, and writing into host memory by address."""

from __future__ import annotations

from ctypes import PYFUNCTYPE, c_size_t, c_void_p, cast, memmove, memset

import torch

from graphrt.core.inputs.spec import InputSpec
from graphrt.core.inputs.transfer.staging import Window

# `ctypes.memmove` gives the interpreter away and takes it back, which costs more than few bytes.
copy_bytes = PYFUNCTYPE(None, c_void_p, c_void_p, c_size_t)(cast(memmove, c_void_p).value or 0)
"""Copy (to, from, size); the interpreter is held meanwhile."""


class Slab:
    """The buffer of all packed inputs: those of a size lie in its first bytes."""

    def __init__(self, buffer: torch.Tensor, nbytes: int) -> None:
        """`nbytes` are those of the largest size."""
        self.buffer = buffer
        self.window = Window(buffer)
        self.nbytes = nbytes
        self.device = buffer.device
        self.low = buffer.data_ptr()
        self.high = self.low + nbytes


class PadSource:
    """Writes constant padding into host memory."""

    def __init__(self, spec: InputSpec) -> None:
        self._element = torch.full((1,), spec.pad_value, dtype=spec.dtype, device="cpu")
        octets = bytes(self._element.view(torch.uint8).tolist())
        self._octet = octets[0] if len(set(octets)) == 1 else None
        self._pattern = self._element
        word = octets * (8 // len(octets)) if len(octets) <= 8 else octets[:8]
        alike = len(octets) <= 8 or octets[8:] == octets[:8]
        self.word = int.from_bytes(word, "little") if alike else None
        """Eight bytes of padding as a number; None where no eight bytes are all of it."""

    def write(self, base: int, pads: list[tuple[int, int]]) -> None:
        """Pad the (start, bytes) after the address `base`."""
        if self._octet is not None:
            for to, size in pads:
                memset(base + to, self._octet, size)
            return
        longest = pads[0][1]
        if self._pattern.nbytes < longest:
            self._pattern = self._element.expand(longest // self._element.nbytes).contiguous()
        pattern = self._pattern.data_ptr()
        for to, size in pads:
            memmove(base + to, pattern, size)


def repeat(row: int, to: int, row_bytes: int, size: int) -> None:
    """Fill `size` bytes at address `to` with copies of the row at address `row`."""
    if size:
        memmove(to, row, row_bytes)
    done = row_bytes
    while done < size:
        more = min(done, size - done)
        memmove(to + done, to, more)
        done += more


def has_lazy_bits(value: torch.Tensor) -> bool:
    """Whether the bits of a tensor are not its values."""
    return value.is_neg() or value.is_conj()
