"""A thread-by-thread interpreter of the few PTX instructions that graphrt's kernel is made of.

It runs on the memory of this process, so a kernel can be tried without a GPU: what it computes,
which bytes it touches and in which order blocks may come. Not how memory is ordered, nor time.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_BYTES = {"u8": 1, "u32": 4, "b32": 4, "u64": 8, "b64": 8, "s64": 8}
_PARAM = re.compile(r"\.param \.(\w+) (\w+)")
_SHARED_BASE = 1 << 60

Instruction = tuple[str | None, bool, str, list[str]]


class Kernel:
    """The only entry of a PTX text; `launch` runs it."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        head, body = text.split("{", 1)
        self.parameters = [name for _, name in _PARAM.findall(head)]
        self.labels: dict[str, int] = {}
        self.code: list[Instruction] = []
        for statement in re.split(r"[;\n]", body.replace("}\n", "\n").replace(":\n", ":;")):
            statement = statement.strip()
            if statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.code)
            elif statement and not statement.startswith((".", "}")):
                self.code.append(_parsed(statement))

    def launch(
        self, blocks: Sequence[int], count: int, threads: int, values: Sequence[int]
    ) -> None:
        """Run `blocks` of a grid of `count`, in that order, each to its end."""
        parameters = dict(zip(self.parameters, values, strict=True))
        for block in blocks:
            shared = bytearray(2048)
            special = {"%ctaid.x": block, "%nctaid.x": count}
            running = [
                self._thread({**special, "%tid.x": number}, parameters, shared)
                for number in range(threads)
            ]
            while running:
                running = [thread for thread in running if next(thread, None) is not None]

    def _thread(
        self, special: dict[str, int], parameters: dict[str, int], shared: bytearray
    ) -> Iterator[bool]:
        registers: dict[str, int] = {"head": _SHARED_BASE}
        at = 0

        def value(name: str, mask: int) -> int:
            if name in special:
                return special[name]
            if re.fullmatch(r"-?(0x)?[0-9A-Fa-f]+", name) and name not in registers:
                return int(name, 0) & mask
            return registers[name] & mask

        def memory(text: str, size: int) -> Any:
            name, _, more = text.strip("[]").partition("+")
            address = value(name, (1 << 64) - 1) + int(more or 0)
            if address >= _SHARED_BASE:
                start = address - _SHARED_BASE
                return (ctypes.c_ubyte * size).from_buffer(shared, start)
            assert address % size == 0, f"{text} is not aligned to {size}"
            return (ctypes.c_ubyte * size).from_address(address)

        while at < len(self.code):
            guard, wanted, name, args = self.code[at]
            at += 1
            if guard is not None and bool(registers[guard]) is not wanted:
                continue
            kind, *parts = name.split(".")
            size = _BYTES.get(parts[-1], 0) if parts else 0
            mask = (1 << 8 * size) - 1
            if kind == "bra":
                at = self.labels[args[0]]
            elif kind == "ret":
                return
            elif kind == "bar":
                yield True
            elif kind == "membar":
                pass
            elif kind == "ld" and parts[0] == "param":
                registers[args[0]] = parameters[args[1].strip("[]")]
            elif kind in ("ld", "st"):
                many = args[:-1] if kind == "ld" else args[1:]
                place = args[-1] if kind == "ld" else args[0]
                span = memory(place, size * len(many))
                for number, register in enumerate(many):
                    part = slice(number * size, (number + 1) * size)
                    if kind == "ld":
                        registers[register] = int.from_bytes(bytes(span[part]), "little")
                    else:
                        span[part] = list(value(register, mask).to_bytes(size, "little"))
            elif kind == "atom":
                span = memory(args[1], size)
                before = int.from_bytes(bytes(span), "little")
                registers[args[0]] = before
                span[:] = list((before + value(args[2], mask)).to_bytes(size, "little"))
            elif kind == "setp":
                a, b = (value(each, mask) for each in args[1:])
                if parts[-1].startswith("s"):
                    a, b = (each - (1 << 8 * size) * (each >> 8 * size - 1) for each in (a, b))
                registers[args[0]] = int(_COMPARE[parts[0]](a, b))
            elif kind == "selp":
                registers[args[0]] = value(args[1 if registers[args[3]] else 2], mask)
            elif kind == "cvt":
                registers[args[0]] = value(args[1], mask) & ((1 << 8 * _BYTES[parts[0]]) - 1)
            elif kind in ("mul", "mad") and parts[0] == "wide":
                registers[args[0]] = value(args[1], mask) * value(args[2], mask)
            elif kind == "mad":
                a, b, c = (value(each, mask) for each in args[1:])
                registers[args[0]] = (a * b + c) & mask
            elif kind == "shr":
                registers[args[0]] = value(args[1], mask) >> min(value(args[2], 255), 8 * size)
            else:
                sources = [value(each, mask) for each in args[1:]]
                registers[args[0]] = _COMPUTE[kind](*sources) & mask


def _parsed(statement: str) -> Instruction:
    guard, wanted = None, True
    if statement.startswith("@"):
        word, statement = statement.split(None, 1)
        wanted, guard = word[1] != "!", word.lstrip("@!")
    name, _, rest = statement.partition(" ")
    return guard, wanted, name, [each.strip(" {}") for each in rest.split(",") if each.strip()]


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
_COMPUTE: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "shl": lambda a, b: a << b,
    "rem": lambda a, b: a % b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "max": max,
    "min": min,
}
