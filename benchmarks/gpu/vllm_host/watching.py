"""What is read off vLLM from outside: its captures, and the replays of all graphs."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any


class Capture:
    """What `capture_model` of the engine that is made says."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.bytes = 0
        self.reserved = 0
        self.graphs = 0
        self.profiled_bytes: int | None = None
        self.profile_seconds: float | None = None

    def watch(self) -> None:
        import torch
        from vllm.compilation.counter import compilation_counter
        from vllm.v1.worker import gpu_model_runner as v1
        from vllm.v1.worker.gpu import model_runner as v2

        for runner in (v1.GPUModelRunner, v2.GPUModelRunner):
            original = runner.capture_model

            def capture_model(host: Any, *args: Any, _original: Any = original, **kw: Any) -> Any:
                torch.cuda.empty_cache()
                reserved = torch.cuda.memory_reserved()
                before, began = compilation_counter.num_cudagraph_captured, time.perf_counter()
                size = _original(host, *args, **kw)
                self.seconds = time.perf_counter() - began
                torch.cuda.empty_cache()
                # Of this process, unlike what vLLM measures.
                self.reserved = torch.cuda.memory_reserved() - reserved
                self.bytes = size
                self.graphs = compilation_counter.num_cudagraph_captured - before
                return size

            runner.capture_model = capture_model

    def profile_too(self) -> None:
        """Have vLLM profile the memory of graphs, though the size of its cache is given."""
        from vllm.v1.worker.gpu_worker import Worker

        original = Worker.determine_available_memory

        def determine(worker: Any) -> Any:
            found = original(worker)
            # Of the first engine alone: it destroys the graphs of all that there are.
            Worker.determine_available_memory = original
            began = time.perf_counter()
            self.profiled_bytes = worker.model_runner.profile_cudagraph_memory()
            self.profile_seconds = time.perf_counter() - began
            return found

        Worker.determine_available_memory = determine

    def take(self) -> dict[str, Any]:
        taken = {
            "seconds": round(self.seconds, 3),
            "mib": round(self.bytes / 2**20, 1),
            "reserved_mib": round(self.reserved / 2**20, 1),
            "graphs": self.graphs,
            "profiled_mib": None
            if self.profiled_bytes is None
            else round(self.profiled_bytes / 2**20, 1),
            "profile_s": self.profile_seconds and round(self.profile_seconds, 2),
        }
        self.seconds, self.bytes, self.graphs = 0.0, 0, 0
        self.profiled_bytes = self.profile_seconds = None
        return taken


class Replays:
    """Counts the replays of all graphs of CUDA."""

    def __init__(self) -> None:
        import torch

        self.count = 0
        original = torch.cuda.CUDAGraph.replay

        def replay(graph: Any) -> None:
            self.count += 1
            original(graph)

        torch.cuda.CUDAGraph.replay = replay
        self.restore = lambda: setattr(torch.cuda.CUDAGraph, "replay", original)


@contextlib.contextmanager
def steps_stamped() -> Iterator[list[int]]:
    """The time at the end of each step of the engine."""
    from vllm.v1.engine.llm_engine import LLMEngine

    ends: list[int] = []
    step = LLMEngine.step

    def stamped(self: Any) -> Any:
        outputs = step(self)
        ends.append(time.perf_counter_ns())
        return outputs

    LLMEngine.step = stamped
    try:
        yield ends
    finally:
        LLMEngine.step = step
