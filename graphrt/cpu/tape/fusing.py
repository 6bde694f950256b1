"""Compiles elementwise operators in a row as one call, where that leaves the bits of eager ones."""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphrt.core.base.errors import warn_caller
from graphrt.core.base.log import logger
from graphrt.cpu.arena import Arena
from graphrt.cpu.tape.aliases import unexpanded, with_replaced
from graphrt.cpu.tape.loops import Loop, loops_of, output_of, span
from graphrt.cpu.tape.lowering import Call
from graphrt.cpu.tape.recorder import Step

_Function = Callable[[Any], object]
_FLAGS = "-x c++ -O3 -march=native -ffp-contract=off -fno-math-errno -shared -fPIC"
# <cmath> takes a compiler longer than the loops do.
_HEAD = """
static inline float root(float x) { return __builtin_sqrtf(x); }
static inline double root(double x) { return __builtin_sqrt(x); }
"""
_LONGEST_S = 60
"""A compiler that takes longer is stopped."""
_TRIALS = 16
"""On random numbers, of the first chain of a function; one of each later one. A chain of three
numbers agrees by chance: torch rounds one square root in four otherwise."""
_SPECIAL = (0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, math.inf, -math.inf)


class LoopsNotCompiledWarning(UserWarning):
    """No C++ compiler was found, or it failed: elementwise operators are replayed one by one."""


class Fused(NamedTuple):
    """The compiled chains of a tape."""

    calls: dict[int, Call | None]
    """Index of a step -> the call in its place; None if the call of an earlier step does it."""
    outside: list[tuple[Callable[[], int], int]]
    """Tells where memory outside of the arena is now, and where the chains look for it."""


class Compiler:
    """Compiles the chains of tapes. Those of the same operators are compiled once."""

    def __init__(self) -> None:
        self._functions: dict[str, _Function] = {}
        """Body in C++ -> the function, as long as it agrees."""
        self._tried: set[str] = set()
        self._failed = False

    def fuse(self, steps: Sequence[Step], apart: Container[int], arena: Arena) -> Fused:
        """Compile what can be of the steps, but for those `apart`. It runs operators: call it where
        a replay may issue them."""
        chains = list(_chains(steps, apart))
        bodies = {chain.body for chain in chains}
        self._compile(sorted(bodies - self._functions.keys() - self._tried))
        calls: dict[int, Call | None] = {}
        outside: dict[int, Callable[[], int]] = {}
        for chain in chains:
            function = self._functions.get(chain.body)
            if function is None:
                continue
            trials = 1 if chain.body in self._tried else _TRIALS
            self._tried.add(chain.body)
            if not chain.agrees(function, trials):
                self._functions.pop(chain.body, None)
                labels = ", ".join(step.label for step in chain.steps)
                logger.info("the CPU does not fuse what C++ computes otherwise: %s", labels)
                continue
            calls |= dict.fromkeys(range(chain.first, chain.first + len(chain.steps)))
            calls[chain.first] = Call(function, (chain.parameters(torch.Tensor.data_ptr),))
            given = [t for step in chain.steps for t in step.tensors]
            outside |= {t.data_ptr(): t.data_ptr for t in given if not arena.owns(t)}
        for step in steps:
            step.values = []
        return Fused(calls, [(now, address) for address, now in outside.items()])

    def _compile(self, bodies: Sequence[str]) -> None:
        if not bodies or self._failed:
            return
        heads = (f'extern "C" void f{at}(const long long *p)' for at in range(len(bodies)))
        texts = (f"{head} {{\n{body}\n}}\n" for head, body in zip(heads, bodies, strict=True))
        source = _HEAD + "".join(texts)
        try:
            # A new folder that no other user may enter. It is gone when the library is loaded.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                library = str(Path(folder, "loops.so"))
                compiler = shlex.split(os.environ.get("CXX") or "c++")
                subprocess.run(
                    [*compiler, *_FLAGS.split(), "-o", library, "-"],
                    input=source.encode(),
                    capture_output=True,
                    timeout=_LONGEST_S,
                    check=True,
                )
                loaded = ctypes.PyDLL(library)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._failed = True
            printed = (getattr(error, "stderr", None) or b"").decode(errors="replace")[:500]
            warn_caller(
                "CpuPlatform(fuse=True) compiles nothing, and elementwise operators are replayed "
                f"one by one: {error} {printed}; install a C++ compiler as c++, or name one in CXX",
                LoopsNotCompiledWarning,
            )
            return
        for at, body in enumerate(bodies):
            function = loaded[f"f{at}"]
            function.restype = None
            self._functions[body] = function


class _Chain:
    """Steps in a row, from index `first` of a tape on, and their loops."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.steps: list[Step] = []
        self.body = ""
        """In C++."""
        self._loops: list[Loop] = []
        self._count = 0
        """Of parameters."""

    def add(self, step: Step, loops: Iterable[Loop]) -> None:
        self.steps.append(step)
        for loop in loops:
            self._loops.append(loop)
            self.body += loop.source(self._count) + "\n"
            self._count += len(loop.parameters(torch.Tensor.data_ptr))

    def parameters(self, address_of: Callable[[torch.Tensor], int]) -> Any:
        """The argument of the function, for tensors at these addresses."""
        every = (number for loop in self._loops for number in loop.parameters(address_of))
        return (ctypes.c_longlong * self._count)(*every)

    def agrees(self, function: _Function, trials: int) -> bool:
        """Whether the function leaves the bits that eager operators leave: on the numbers of the
        capture, and so often on random ones."""
        random = torch.Generator("cpu").manual_seed(self.first)
        return all(self._agrees(function, each) for each in (None, *[random] * trials))

    def _agrees(self, function: _Function, random: torch.Generator | None) -> bool:
        used = [t for loop in self._loops for t in loop.tensors]
        used += [t for step in self.steps for t in step.tensors]
        compiled, eager = _Elsewhere(used), _Elsewhere(used)
        # Backwards: of two steps that are given one place, the first one's numbers count.
        for step in reversed(self.steps):
            filled = list(zip(step.tensors, step.values, strict=True))
            if random is not None:
                filled = [(tensor, _random_like(value, random)) for tensor, value in filled]
            if step.lowered.kind == "constant":
                filled = [(step.lowered.call.args[1],) * 2]
            for tensor, numbers in filled:
                for memory in (compiled, eager):
                    unexpanded(memory.tensor(tensor)).copy_(numbers)
        function(self.parameters(lambda tensor: compiled.tensor(tensor).data_ptr()))
        for step in self.steps:
            moved = {id(t): eager.tensor(t) for t in step.tensors}
            args, kwargs = with_replaced(step.args, moved), with_replaced(step.kwargs, moved)
            result = step.op.raw(*args, **kwargs)
            if step.lowered.kind != "in_place":
                eager.tensor(output_of(step)).copy_(result)
        return all(map(torch.equal, compiled.regions.values(), eager.regions.values()))


def _chains(steps: Sequence[Step], apart: Container[int]) -> Iterator[_Chain]:
    chain = None
    for index, step in enumerate(steps):
        loops = [] if index in apart else loops_of(step)
        if loops:
            chain = chain or _Chain(index)
            chain.add(step, loops)
        elif chain is not None:
            yield chain
            chain = None
    if chain is not None:
        yield chain


class _Elsewhere:
    """Zeros, in which each of some tensors has a place; what overlaps there overlaps here."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans: list[list[int]] = []
        for start, end in sorted(map(span, tensors)):
            aligned = start - start % 64
            if spans and aligned < spans[-1][1]:
                spans[-1][1] = max(end, spans[-1][1])
            else:
                spans.append([aligned, end])
        self.regions = {
            start: torch.zeros(end - start, dtype=torch.uint8, device="cpu") for start, end in spans
        }
        """An address there -> the bytes here."""

    def tensor(self, there: torch.Tensor) -> torch.Tensor:
        """The tensor here that stands for the one there."""
        start = max(start for start in self.regions if start <= there.data_ptr())
        offset = (there.data_ptr() - start) // there.element_size()
        here = torch.empty(0, dtype=there.dtype, device="cpu")
        storage = self.regions[start].untyped_storage()
        return here.set_(storage, offset, there.size(), there.stride())


def _random_like(value: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Small and large numbers, zeros and infinities."""
    size, special = value.size(), torch.tensor(_SPECIAL, dtype=torch.float32, device="cpu")
    scales = 10.0 ** torch.randint(-6, 7, size, generator=random, device="cpu")
    chosen = torch.randint(8 * len(special), size, generator=random, device="cpu")
    numbers = scales * torch.randn(size, generator=random, dtype=torch.float32, device="cpu")
    if value.dtype == torch.bool:
        return numbers > 0
    return torch.where(chosen < len(special), special[chosen % len(special)], numbers)
