"""Save the graphs of a model, or build them from a file and compare with captured ones.

PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python3 -m benchmarks.gpu.saved save llama FILE
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python3 -m benchmarks.gpu.saved load llama FILE
"""

from __future__ import annotations

import bisect
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from benchmarks.common import environment
from benchmarks.gpu.saved import driver as drv
from benchmarks.gpu.saved import memory, models

MOST = 256
IDENTITY = "name", "traits", "layout", "origin"


def origins() -> dict[int, str]:
    """Function -> hash of the Triton kernel that it is: many of these have the same name."""
    compiled = [each for each in gc.get_objects() if type(each).__name__ == "CompiledKernel"]
    return {
        function: f"triton {each.hash}"
        for each in compiled
        if isinstance(function := getattr(each, "function", None), int)
    }


class Session:
    """One process: a model, a stream, a pool, and the graphs that it captures."""

    def __init__(self, name: str) -> None:
        self.driver = drv.Driver()
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        torch.set_grad_enabled(False)
        self.case = models.case(name, "cuda", MOST)
        self.pool = torch.cuda.MemPool()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if name == "compiled":
            for size in self.case.sizes:
                self.warm_up(size)

    def warm_up(self, size: int) -> None:
        self.case.run(size)
        torch.cuda.synchronize()

    def capture(self, size: int, pool: Any = None, mode: Any = None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin((pool or self.pool).id, capture_error_mode="thread_local")
        if mode is None:
            self.case.run(size)
        else:
            with mode:
                self.case.run(size)
        graph.capture_end()
        graph.instantiate()
        return graph

    def run(self, size: int, seed: int, replay: Any) -> list[torch.Tensor]:
        """Inputs of a seed, one replay; returns copies of the output and of the model's caches,
        which are put back."""
        models.fill(self.case, size, seed)
        state = self.case.state()
        before = [each.clone() for each in state]
        self.case.output.fill_(-7)
        replay()
        torch.cuda.synchronize()
        found = [self.case.output.clone(), *(each.clone() for each in state)]
        for each, old in zip(state, before, strict=True):
            each.copy_(old)
        return found

    def digest(self, size: int, replay: Any) -> float:
        return float(self.run(size, 1, replay)[0][:size].double().abs().sum())

    def ranges(self, pool: Any = None) -> list[memory.Range]:
        return memory.ranges(self.case.named(), (pool or self.pool).id, self.stream.cuda_stream)


def timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def save(name: str, path: str) -> dict[str, Any]:
    session = Session(name)
    sizes = sorted(session.case.sizes, reverse=True)
    session.warm_up(sizes[0])

    def capture_all(warms_up: bool) -> None:
        for size in sizes:
            if warms_up:
                session.warm_up(size)
            session.graphs[size] = session.capture(size)

    cold = timed(lambda: capture_all(False))
    warm = timed(lambda: capture_all(True))
    # Once more, from an empty pool, for the file: with the operators noted.
    pool, written, calls = torch.cuda.MemPool(), {}, dict[int, dict[int, Any]]()
    for size in sizes:
        mode = None if name == "compiled" else memory.Operators(session.stream.cuda_stream)
        written[size] = session.capture(size, pool, mode)
        calls[size] = {} if mode is None else dict(mode.of_nodes())
    known, of_triton = session.ranges(pool), origins()
    reader = drv.Reader(session.driver, memory.places(known), lambda each: of_triton.get(each, ""))
    graphs, refused = {}, Counter[str]()
    for size, graph in written.items():
        try:
            graphs[size] = reader.read(graph.raw_cuda_graph())
        except drv.Unsupported as error:
            refused[str(error)] += 1
            continue
        for node, call in calls[size].items():
            if graphs[size]["kinds"][node] == drv.KERNEL:
                kernel = reader.kernels[graphs[size]["kernels"][node]]
                kernel.setdefault("operator", call)
    header = {
        "memories": [(label, end - start) for start, end, label in known],
        "kernels": reader.kernels,
        "sizes": [*graphs],
        "lengths": {part: [len(each[part]) for each in graphs.values()] for part in drv.PARTS},
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    parts = {part: np.concatenate([each[part] for each in graphs.values()]) for part in drv.PARTS}
    np.savez(path, header=text, **parts)
    kinds = Counter(kind for each in graphs.values() for kind in each["kinds"].tolist())
    used = Counter(which for each in graphs.values() for _, which in each["attribute_of"].tolist())
    links = [each["edge_kinds"].reshape(-1, 8)[:, 2] for each in graphs.values()]
    return {
        "captured_s": cold,
        "captured_with_warm_ups_s": warm,
        "refused": dict(refused),
        "nodes": {str(kind): count for kind, count in kinds.items()},
        "edges": sum(map(len, links)),
        "programmatic_edges": int(sum(each.sum() for each in links)),
        "attributes": {str(which): count for which, count in used.items()},
        "kernels": len(reader.kernels),
        "memories": len(known),
        "bytes": os.path.getsize(path),
        "digests": {size: session.digest(size, graph.replay) for size, graph in written.items()},
    }


class Kernels:
    """The functions of this process, by what identifies them."""

    def __init__(self, session: Session, of_triton: bool) -> None:
        self.driver, self.known = session.driver, dict[str, int]()
        self._of_triton = origins() if of_triton else {}
        self._launches = dict[int, drv.KernelParameters]()

    def key(self, *identity: Any) -> str:
        return json.dumps(identity)

    def add(self, functions: Iterable[int]) -> None:
        for function in functions:
            parts = self.driver.name_of(function), self.driver.traits(function)
            key = self.key(*parts, self.driver.layout(function), self._of_triton.get(function, ""))
            self.known.setdefault(key, function)

    def of_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        launches = {
            drv.function_of(each) or 0: each for each in drv.launches(graph.raw_cuda_graph())
        }
        new = launches.keys() - self._launches.keys()
        self._launches |= launches
        self.add(new)

    def enumerated(self, names: set[str]) -> None:
        """Add what lies beside known kernels and has one of these names."""
        if not names:
            return
        beside = {
            each for launch in self._launches.values() for each in self.driver.siblings(launch)
        }
        self.add([each for each in beside if self.driver.name_of(each) in names])

    def by_operators(self, operators: Iterable[dict[str, Any]]) -> list[str]:
        """Add the kernels of operators, captured together and never run; returns what failed."""
        calls, failed = [], []
        for each in operators:
            try:
                calls.append((each["name"], memory.prepared(each)))
            except (ValueError, TypeError) as error:
                failed.append(f"{each['name']}: {error}"[:200])
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(torch.cuda.MemPool().id, capture_error_mode="thread_local")
        for name, call in calls:
            try:
                call()
            except (RuntimeError, NotImplementedError) as error:
                failed.append(f"{name}: {error}"[:200])
        graph.capture_end()
        self.of_graph(graph)
        return failed


def differences(
    mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray], labels: Any, kernels: Any
) -> dict[str, Any]:
    """What a saved graph has otherwise than the same one captured here, by kernel."""
    found: dict[str, Any] = {"nodes": [len(mine["kinds"]), len(theirs["kinds"])]}
    if found["nodes"][0] != found["nodes"][1] or len(mine["blob"]) != len(theirs["blob"]):
        return found
    found["launch"] = int((mine["launch"] != theirs["launch"]).any(1).sum())
    found["edges"] = bool((mine["edges"] == theirs["edges"]).all())
    places = [
        {int(at): (label[int(which)], int(offset)) for at, which, offset in each["relocations"]}
        for each, label in zip((mine, theirs), labels, strict=True)
    ]
    words = mine["blob"].view(np.uint64) != theirs["blob"].view(np.uint64)
    starts, apart = mine["starts"].tolist(), Counter[str]()
    for at in sorted(
        {8 * int(index) for index in np.flatnonzero(words)} | {*places[0]} | {*places[1]}
    ):
        here, there = places[0].get(at), places[1].get(at)
        if (here is None or here != there) and not (here == there and not words[at // 8]):
            node = bisect.bisect_right(starts, at) - 1
            name = kernels[mine["kernels"][node]]["name"][:60]
            raw = [hex(int(each["blob"].view(np.uint64)[at // 8])) for each in (mine, theirs)]
            apart[f"{name} +{at - starts[node]}: {here} {there} {raw}"] += 1
    found["words"] = sum(apart.values())
    found["first"] = [each for each, _ in apart.most_common(12)]
    return found


def load(name: str, path: str) -> dict[str, Any]:
    session = Session(name)
    driver, sizes = session.driver, sorted(session.case.sizes, reverse=True)
    session.warm_up(sizes[0])
    took: dict[str, float] = {}
    began = last = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal last
        torch.cuda.synchronize()
        now = time.perf_counter()
        took[what], last = now - last, now

    with np.load(path, allow_pickle=False) as file:
        parts = {key: file[key] for key in file.files}
    header = json.loads(parts.pop("header").tobytes())
    graphs: dict[int, dict[str, np.ndarray]] = {size: {} for size in header["sizes"]}
    for part, lengths in header["lengths"].items():
        ends = np.cumsum(lengths).tolist()
        for size, length, end in zip(graphs, lengths, ends, strict=True):
            graphs[size][part] = parts[part][end - length : end]
    lap("read")
    memory.map_pool(session.pool, dict(header["memories"]))
    lap("map memory")
    for size in (sizes[0], sizes[-1]):
        session.graphs[size] = session.capture(size)
    lap("two captures")
    saved = header["kernels"]
    kernels = Kernels(session, any(each["origin"] for each in saved))
    for graph in session.graphs.values():
        kernels.of_graph(graph)
    wanted = [kernels.key(*(each[part] for part in IDENTITY)) for each in saved]
    found = {"captured": sum(key in kernels.known for key in wanted)}
    lap("kernels of two graphs")
    missing = {
        json.dumps(each["operator"]): each["operator"]
        for key, each in zip(wanted, saved, strict=True)
        if key not in kernels.known and "operator" in each
    }
    failed = kernels.by_operators(missing.values()) if missing else []
    found["by operator"] = sum(key in kernels.known for key in wanted) - sum(found.values())
    lap("kernels by operator")
    kernels.enumerated(
        {each["name"] for key, each in zip(wanted, saved, strict=True) if key not in kernels.known}
    )
    found["enumerated"] = sum(key in kernels.known for key in wanted) - sum(found.values())
    absent = [
        each["name"] for key, each in zip(wanted, saved, strict=True) if key not in kernels.known
    ]
    lap("kernels enumerated")
    functions = drv.function_table(saved, [kernels.known.get(key) for key in wanted])
    drv.allow_shared(driver, functions, list(graphs.values()))
    here = {label: (start, end - start) for start, end, label in session.ranges()}
    names = [label for label, _ in header["memories"]]
    lacking = {
        label: (size, here.get(label, (0, 0))[1])
        for label, size in header["memories"]
        if here.get(label, (0, 0))[1] < size
    }
    bases = np.array([here.get(label, (0, 0))[0] for label in names], np.uint64)
    built, reasons = {}, Counter[str]()
    for size, each in graphs.items():
        used = {names[index] for index in each["relocations"][:, 1].tolist()}
        if not functions["handle"][each["kernels"][each["kinds"] == drv.KERNEL]].all():
            reasons["a kernel is absent"] += 1
        elif used & lacking.keys():
            reasons[f"memory: {sorted(used & lacking.keys())}"] += 1
        else:
            built[size] = drv.Built(driver, each, functions, bases)
    lap("build")
    stream = session.stream.cuda_stream
    for each in built.values():
        driver("cuGraphUpload", each.executable, stream)
    lap("upload")
    total = time.perf_counter() - began

    def replay(each: drv.Built) -> Any:
        return lambda: driver("cuGraphLaunch", each.executable, stream)

    known = session.ranges()
    labels = names, [label for *_, label in known]
    reader = drv.Reader(driver, memory.places(known), lambda each: "")
    compared: dict[int, Any] = {}
    for size, each in session.graphs.items():
        try:
            here_too = reader.read(each.raw_cuda_graph())
            compared[size] = differences(graphs[size], here_too, labels, saved)
        except drv.Unsupported as error:  # padding of arguments may have any old address
            compared[size] = str(error)
    mine = {
        (size, seed): session.run(size, seed, replay(each))
        for size, each in built.items()
        for seed in (1, 2)
    }
    last = time.perf_counter()
    # In memory of their own: the pool's is what the built graphs use.
    others = torch.cuda.MemPool()
    captured = {size: session.capture(size, others) for size in sizes}
    lap("all captured, warm")
    apart = {}
    for (size, seed), results in mine.items():
        theirs = session.run(size, seed, captured[size].replay)
        if not all(torch.equal(a, b) for a, b in zip(results, theirs, strict=True)):
            apart[size] = float((results[0] - theirs[0]).abs().max())
    return {
        "graphs": len(sizes),
        "built": len(built),
        "equal": len(built.keys() - apart.keys()),
        "apart": apart,
        "not_built": dict(reasons),
        "kernels": found,
        "absent": absent,
        "operators": len(missing),
        "operators_failed": failed[:5],
        "differences": compared,
        "memories_lacking": lacking,
        "took_s": took,
        "restored_s": total,
        "digests": {size: session.digest(size, replay(each)) for size, each in built.items()},
    }


if __name__ == "__main__":
    what, name, path = sys.argv[1:4]
    result = {"save": save, "load": load}[what](name, path)
    print(json.dumps({"model": name, "what": what, "environment": environment("cuda"), **result}))
