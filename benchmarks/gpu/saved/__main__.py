"""Capture the graphs of a model in one process, build them from a file in others, compare.

PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \\
    python3 -m benchmarks.gpu.saved FOLDER llama moe compiled

Prints a line for each model and step. First seconds of capturing, each kind in a process of its own
that has run the largest size once: by `GraphRunner.capture()` with and without its checks, by a
loop of `torch.cuda.graph` with a warm-up for each size, by `capture_begin` without warm-ups. Then
the file that is written into the folder. Then restoring, in two processes:

- after: the model is there, the file comes from the disk.
- beside: while the model is made a thread loads the kernels; the file comes from the cache.

At the end all are built again, by one, four and eight threads.

Of `compiled` only saving and "after" are measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.compiler.compiler import CompiledKernel

from benchmarks.common import environment, in_fork
from benchmarks.gpu import byhand
from benchmarks.gpu.saved import driver as drv
from benchmarks.gpu.saved import memory, models
from graphrt.cuda.driver.api import begin_capture, finish_capture
from graphrt.cuda.driver.nodes import KERNEL, destroy_graph, function_name

CAPTURES = "capture", "off", "by hand", "bare"
"""Levels of `GraphOptions(check=)`, a loop as engines have it, and the least that captures."""
NOT_COUNTED = "model: not counted"
of_triton: dict[int, str] = {}
"""Function -> hash of the Triton kernel that it is: many of these have the same name."""


def _noted(kernel: Any, load: Any = CompiledKernel._init_handles) -> None:
    load(kernel)
    of_triton[kernel.function] = kernel.hash


def identity(function: int) -> list[Any]:
    """What a kernel is known by in another process."""
    # Threads; shared, constant and local bytes; registers; versions of PTX and binary.
    traits = [drv.trait(function, which) for which in range(7)]
    return [function_name(function), traits, drv.layout(function), of_triton.get(function, "")]


class Laps(dict[str, float]):
    """Seconds of phases, each until the device is idle."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        torch.cuda.synchronize()
        last, self._last = self._last, time.perf_counter()
        self[name] = self._last - last


class Session:
    """One process: a model that has run its largest size (and if it compiles its smallest, which is
    other code), a stream, a pool."""

    def __init__(self, name: str) -> None:
        CompiledKernel._init_handles = _noted
        torch.set_grad_enabled(False)
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.case = models.case(name)
        for size in self.case.sizes[:: 34 if name == "compiled" else 35]:
            self.case.run(size)
        self.stream.synchronize()
        self.pool = torch.cuda.MemPool()

    def capture(self, size: int, pool: Any = None, mode: Any = None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin((pool or self.pool).id, capture_error_mode="thread_local")
        with mode or torch.no_grad():
            self.case.run(size)
        graph.capture_end()
        graph.instantiate()
        return graph

    def results(self, size: int, seed: int, step: Callable[[], Any]) -> list[torch.Tensor]:
        """Copies of the output and of the caches after a step, which are put back."""
        self.case.fill(size, seed)
        state = self.case.state()
        before = [each.clone() for each in state]
        self.case.output.fill_(-7)
        step()
        found = [self.case.output.clone(), *(each.clone() for each in state)]
        for each, old in zip(state, before, strict=True):
            each.copy_(old)
        return found

    def equal(self, size: int, seed: int, one: Callable[[], Any], two: Callable[[], Any]) -> bool:
        results = self.results(size, seed, one), self.results(size, seed, two)
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def captured(name: str, how: str) -> float:
    """Seconds of capturing all sizes."""
    session, kept = Session(name), list[Any]()
    sizes, laps = session.case.sizes, Laps()
    if how == "bare":
        kept += map(session.capture, sizes)
    elif how == "by hand":
        kept += byhand.captured(session.case.run, sizes, session.stream)
    else:
        kept.append(session.case.runner(how))
        laps.end("making the runner")
        kept[0].capture()
    laps.end(how)
    return laps[how]


def save(name: str, path: Path) -> dict[str, Any]:
    session, graphs = Session(name), {}
    for size in session.case.sizes:
        mode = memory.Operators(session.stream.cuda_stream)
        with mode:
            session.case.run(size)
        graphs[size] = session.capture(size, mode=mode), mode.calls
    known = memory.ranges(session.case.named(), session.pool.id, session.stream.cuda_stream)
    reader = drv.Reader([(start, end) for start, end, _ in known], identity)
    saved, refused = {}, []
    for size, (graph, calls) in graphs.items():
        try:
            saved[size] = reader.read(graph.raw_cuda_graph())
        except drv.Unsupported as error:
            refused.append(f"{size}: {error}")
            continue
        for part, call in calls:
            for kind, kernel, *_ in saved[size]["nodes"][part].tolist():
                if kind == KERNEL:
                    reader.kernels[kernel].setdefault("operator", call)
    memories = [(label, end - start, start) for start, end, label in known]
    drv.write(path, {"memories": memories, "kernels": reader.kernels}, saved)
    nodes = sum(len(each["nodes"]) for each in saved.values())
    return {"refused": refused, "nodes": nodes, "bytes": path.stat().st_size}


class Kernels:
    """The functions of this process, by what identifies the wanted ones."""

    def __init__(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        self._keys = [json.dumps(each["identity"]) for each in wanted]
        self._operators = [json.dumps(each.get("operator")) for each in wanted]
        self._known: dict[str, set[int]] = {}
        self.failed: dict[str, str] = {}

    def add(self, graph: int) -> None:
        for function in drv.functions_of(graph):
            self._known.setdefault(json.dumps(identity(function)), set()).add(function)

    def handles(self) -> list[int]:
        """0 for a kernel that was not found."""
        return [min(self._known.get(key, {0})) for key in self._keys]

    def found(self) -> list[int]:
        """How many were found, and how many of these may be several functions."""
        counts = [len(self._known.get(key, ())) for key in self._keys]
        return [sum(count > 0 for count in counts), sum(count > 1 for count in counts)]

    def missing(self) -> list[str]:
        """The operators of kernels that are not known yet."""
        pairs = zip(self._keys, self._operators, strict=True)
        return [*{text: 0 for key, text in pairs if key not in self._known and text != "null"}]

    def load(self, operators: Sequence[str]) -> None:
        """Run operators on zeros: the driver loads the kernels of each."""
        for text in operators:
            try:
                memory.prepared(json.loads(text), torch.zeros)()
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                self.failed[text] = f"{text[:100]}: {error}"[:300]
        torch.cuda.current_stream().synchronize()

    def identify(self, operators: Sequence[str], stream: int) -> None:
        """Capture operators that were run, for the functions that they launch."""
        for text in operators:
            if text not in self.failed:
                call = memory.prepared(json.loads(text), torch.empty)
                begin_capture(stream)
                call()
                graph = finish_capture(stream)
                self.add(graph)
                destroy_graph(graph)


def restore(name: str, path: Path, beside: bool) -> dict[str, Any]:
    torch.cuda.init()
    # Moves the memories to other addresses than those of the process that wrote the file.
    _moved = [torch.empty(size, device="cuda") for size in (1000, 30 << 20)]
    code = drv.compiled()
    laps = Laps()
    header, saved = drv.read(path)
    laps.end("read")
    kernels, memories = Kernels(header["kernels"]), header["memories"]
    thread = threading.Thread(target=kernels.load, args=[kernels.missing()])
    if beside:
        thread.start()
    session = Session(name)
    laps.end(NOT_COUNTED)
    if beside:
        thread.join()
    laps.end("wait for the thread")
    memory.map_pool(session.pool, {label: size for label, size, _ in memories})
    sizes, stream = session.case.sizes, session.stream.cuda_stream
    ends = [session.capture(size) for size in (sizes[0], sizes[-1])]
    laps.end("two captures")
    for each in ends:
        kernels.add(each.raw_cuda_graph())
    found, missing = kernels.found(), kernels.missing()
    laps.end("kernels of two captures")
    if not beside:
        kernels.load(missing)
    laps.end("kernels loaded")
    kernels.identify(missing, stream)
    handles = kernels.handles()
    laps.end("kernels identified")
    known = memory.ranges(session.case.named(), session.pool.id, stream)
    here = {label: (start, end - start) for start, end, label in known}
    places = [here.get(label, (0, 0)) for label, *_ in memories]
    bases = [at * (has >= of) for (at, has), (_, of, _) in zip(places, memories, strict=True)]
    builder = drv.Builder(code, header["kernels"], handles, bases)
    ready = {size: each for size, each in saved.items() if builder.is_complete(each)}
    laps.end("tables")

    def build(threads: int) -> tuple[dict[int, int], dict[str, float]]:
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            made = [*pool.map(builder.build, ready.values())]
        parts = {"s": time.perf_counter() - began, "nodes": sum(nodes for _, nodes, _ in made)}
        parts["instantiation"] = sum(instances for *_, instances in made)
        return {size: each for size, (each, *_) in zip(ready, made, strict=True)}, parts

    built, parts = build(threads=1)
    laps.end("build")
    restored = sum(laps.values()) - laps[NOT_COUNTED]

    def are_equal(size: int, seed: int, other: Callable[[], Any]) -> bool:
        replay = partial(drv.call, "cuGraphLaunch", built[size], stream)
        return session.equal(size, seed, replay, other)

    tried = [size for size in built if are_equal(size, 1, partial(session.case.run, size))]
    laps.end("trials")
    # In memory of their own: the pool's is what the built graphs use.
    others = torch.cuda.MemPool()
    captured = {size: session.capture(size, others) for size in sizes}
    laps.end("all captured, kernels loaded")
    equal = [size for size in built if are_equal(size, 2, captured[size].replay)]
    laps.end("comparing")
    again = {f"again, {threads}": build(threads)[1] for threads in (1, 4, 8)}
    pairs = [*zip(memories, bases, strict=True)]
    of_kernels = zip(header["kernels"], handles, strict=True)
    return {
        "restored_s": restored,
        "graphs": {"of": len(sizes), "built": len(built), "tried": len(tried), "equal": len(equal)},
        "not_equal": sorted(built.keys() - {*equal}),
        "kernels": {"of": len(handles), "captured": found, "found": kernels.found()},
        "absent": [each["identity"][0] for each, handle in of_kernels if not handle],
        "failed": [*kernels.failed.values()],
        "lacking": [label for (label, *_), base in pairs if not base],
        "moved": [sum(base != before for (*_, before), base in pairs), len(pairs)],
        "s": laps,
        "build": {"first": parts, **again},
    }


def measure(name: str, folder: str) -> Iterator[tuple[str, Any]]:
    path = Path(folder, name)
    for how in CAPTURES if name != "compiled" else ():
        yield how, in_fork(captured, name, how)
    yield "saved", in_fork(save, name, path)
    # No fork: it would have the libraries at the addresses of the process that wrote the file.
    command = [sys.executable, "-m", "benchmarks.gpu.saved", folder, name, "after"]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    yield "after", json.loads(lines[-1]) if lines else {"failed": "see stderr"}
    if name != "compiled":
        yield "beside", in_fork(restore, name, path, True)


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    if names[-1] == "after":
        print(json.dumps(restore(names[0], Path(folder, names[0]), beside=False)))
    else:
        print(json.dumps(in_fork(environment, "cuda")), flush=True)
        for name in names:
            for step, result in measure(name, folder):
                print(json.dumps([name, step, result]), flush=True)
