"""Random forwards, compiled: plain calls and graphs must equal eager, or be refused by name.

python -m tests.compile.random_models --count 1000 --backend eager
"""

from __future__ import annotations

import argparse
import linecache
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphrt import BatchDescriptor, GraphMode, GraphOptions, GraphPool, forward_context
from graphrt.compile import CompileError, CompileOptions, compile_module
from graphrt.core.base import tree
from graphrt.core.base.errors import CaptureSyncError, RefusedOpError
from graphrt.core.capture.wrapper import wrapper_class
from tests.compile import random_lines
from tests.compile.random_lines import Maker, Source

OPERATORS = ("fill", "bump", "fill_two", "fresh", "both", "quiet", "count")
SIZES = (5, 2, 7)
STEPS = (5, 2, 5, 7, 2, 7)
FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE
DIMS = {"x": 0, "y": 0, "z": {0: "reqs"}}


class Mismatch(Exception):
    """Compiled code does not do as the forward does."""


class Model(nn.Module):
    """A module whose forward is a `Source`."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4, generator=generator), requires_grad=False)
        self.cache: torch.Tensor
        self.order: torch.Tensor
        self.register_buffer("cache", torch.randn(8, 4, generator=generator))
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        constant = torch.tensor([1.0, -1.0, 0.5, 2.0])
        self.constant = [constant]  # no buffer: it stays where it is, whatever the device
        text = source.text()
        label = f"<random {abs(hash(text))}>"
        linecache.cache[label] = len(text), None, text.splitlines(keepends=True), label
        namespace: dict[str, Any] = {
            "torch": torch,
            "F": F,
            "CONSTANT": constant,
            **{name: getattr(random_lines, name) for name in OPERATORS},
        }
        exec(compile(text, label, "exec"), namespace)
        self.forward = namespace["forward"].__get__(self)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """All that a forward can write besides its arguments."""
        return {"cache": self.cache, "weight": self.weight, "CONSTANT": self.constant[0]}


def source_of(seed: int) -> Source:
    """A forward that runs eagerly; the same one for the same seed."""
    for attempt in range(100):
        generator = random.Random(1000 * seed + attempt)
        source = Maker(generator).source(generator.randint(4, 20))
        if runs(source):
            return source
    raise AssertionError(f"seed {seed} gives no forward that runs")


def runs(source: Source) -> bool:
    """Whether a forward can be called at all, and is the same in two calls."""
    try:
        with torch.no_grad():
            outputs = [Model(source)(*arguments(size, 0, "cpu")) for size in (2, 2, 5, 7)]
            return all(map(_same, outputs[0], outputs[1]))
    except (RuntimeError, IndexError, NameError, TypeError):
        return False


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def arguments(size: int, step: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * size + step)
    rows = (size, size, size // 2 + 1)
    return [torch.randn(n, 4, generator=generator).to(device) for n in rows]


def check(source: Source, backend: str, device: str, cache_dir: str) -> None:
    """Hold a compiled forward against eager: in plain calls, and in graphs of both modes, each
    replayed with other values. Raises `Mismatch`, and whatever compiled code raises."""
    model = Model(source).to(device)
    pool = GraphPool(device)
    lazy = GraphOptions(lazy=True)
    compiled: Any = compile_module(
        model,
        DIMS,
        pool=pool,
        options=CompileOptions(backend=backend, cache_dir=cache_dir),
        in_place=False,
    )
    compiled.use_wrapper_options(lazy)
    # As a runner's plan does: FULL graphs run the whole graph, the others its pieces.
    compiled.use_modes([(mode, BatchDescriptor(5)) for mode in (FULL, PIECEWISE)])
    compiled.ensure_compiled(*arguments(4, 0, device))
    full = wrapper_class(pool.platform)(compiled, "FULL", pool=pool, options=lazy)
    for mode, call in (("NONE", compiled), ("PIECEWISE", compiled), ("FULL", full)):
        _check_mode(mode, call, model, source, backend, device)


def _check_mode(
    mode: str, call: Any, model: Model, source: Source, backend: str, device: str
) -> None:
    reference = Model(source).to(device)
    with torch.no_grad():
        for name, value in reference.state.items():
            model.state[name].copy_(value)
    # Graphs read what lies here.
    buffers = {size: arguments(size, 0, device) for size in SIZES}
    for step, size in enumerate(STEPS):
        values = arguments(size, step, device)
        for buffer, value in zip(buffers[size], values, strict=True):
            buffer.copy_(value)
        descriptor = BatchDescriptor(size, size // 2 + 1)
        with torch.no_grad():
            expected = reference(*values)
            with forward_context(mode, None if mode == "NONE" else descriptor):
                output = call(*buffers[size])
        where = f"{mode}, step {step} of {size} rows"
        compare(output, expected, backend, where)
        compare(buffers[size], values, backend, f"{where}: the arguments")
        compare(model.state, reference.state, backend, f"{where}: the state")


def compare(actual: Any, expected: Any, backend: str, where: str) -> None:
    tolerance = 0.0 if backend == "eager" else 1e-5
    both = zip(tree.leaves(actual), tree.leaves(expected), strict=True)
    for (path, a), (_, b) in both:
        try:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            first = str(error).splitlines()[0]
            raise Mismatch(f"{where}{path}: {first}\n{a}\nnot\n{b}") from None


def outcome(source: Source, backend: str, device: str, cache_dir: str) -> tuple[str, str]:
    """ "right", "refused" or "wrong", and what was said."""
    try:
        check(source, backend, device, cache_dir)
    except (CompileError, CaptureSyncError, RefusedOpError) as error:
        # What a device cannot capture, a copy from the host say, is refused when it is captured.
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    finally:
        torch._dynamo.reset()
    return "right", ""


def smallest(source: Source, backend: str, device: str, cache_dir: str) -> Source:
    """The source less all that it is wrong without."""
    kind = outcome(source, backend, device, cache_dir)[1].partition(":")[0]

    def fails(other: Source) -> bool:
        if not runs(other):
            return False
        verdict, what = outcome(other, backend, device, cache_dir)
        return verdict == "wrong" and what.partition(":")[0] == kind

    smaller = True
    while smaller:
        smaller = False
        for other in _smaller(source):
            if fails(other):
                source, smaller = other, True
                break
    return source


def _smaller(source: Source) -> Iterator[Source]:
    count = len(source.statements)
    if count > 6:
        for start in range(0, count, 3):
            rest = source.statements[:start] + source.statements[start + 3 :]
            yield replace(source, statements=rest)
    yield from (source.without(index) for index in reversed(range(count)))
    if len(source.returned) > 1:
        for index in range(len(source.returned)):
            rest = source.returned[:index] + source.returned[index + 1 :]
            yield replace(source, returned=rest)
    elif source.returned != ("x",):
        yield replace(source, returned=("x",))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--whole", action="store_true", help="print failing models as they are")
    arguments = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache_dir:
        for seed in range(arguments.first, arguments.first + arguments.count):
            source = source_of(seed)
            kind, what = outcome(source, arguments.backend, arguments.device, cache_dir)
            counts[kind] += 1
            if kind == "refused":
                refusals[what.splitlines()[0]] += 1
            elif kind == "wrong":
                if not arguments.whole:
                    source = smallest(source, arguments.backend, arguments.device, cache_dir)
                    what = outcome(source, arguments.backend, arguments.device, cache_dir)[1]
                print(f"seed {seed}: {what[:1500]}\n{source.text()}", flush=True)
            if sum(counts.values()) % 10 == 0:
                print(f"{sum(counts.values())} of {arguments.count}: {dict(counts)}", flush=True)
    for text, times in refusals.most_common():
        print(f"refused {times}: {text}")
    took = time.perf_counter() - started
    print(
        f"{arguments.count} models, {arguments.backend} on {arguments.device}: "
        f"{dict(counts)}, {took:.0f} s"
    )
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
