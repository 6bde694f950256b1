"""A plugin of SGLang's that a benchmark's engine loads: it records steps, holds the queue back, and
seeds defects. GRAPHRT_BENCH_STEPS is a path; files beside it tell what to do.

- `PATH.hold` has a number: the scheduler begins no batch until so many requests wait.
- `PATH.record` is there: each step's mode, requests, tokens, and a hash of its logits are a line.
- `PATH.tell` is there: reports and memory are written to `PATH.told`.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.sglang_host.turns import VARIABLE, in_turn

_captures: list[dict[str, Any]] = []


def install() -> None:
    """Entry point of `sglang.srt.plugins`."""
    path = os.environ.get("GRAPHRT_BENCH_STEPS")
    if not path:
        return
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    files = {name: Path(f"{path}.{name}") for name in ("hold", "record", "tell", "told", "steps")}
    defect = os.environ.get("GRAPHRT_BENCH_DEFECT", "")
    forward, plan = ModelRunner.forward, Scheduler.get_next_batch_to_run
    count = 0

    def recorded(runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if defect == "number" and count == 60:
            for layer in runner.model.model.layers:
                layer.bench_scale = 0.5
        rows, tokens = batch.batch_size, len(batch.input_ids)
        output = forward(runner, batch, *args, **kwargs)
        if files["record"].exists():
            logits = getattr(output.logits_output, "next_token_logits", None)
            found = None
            if logits is not None:
                raw = logits[: tokens if logits.shape[0] >= tokens else rows].float()
                found = hashlib.sha256(raw.cpu().numpy().tobytes()).hexdigest()[:16]
            with files["steps"].open("a") as log:
                step = batch.forward_mode.name, rows, tokens, output.can_run_graph, found
                log.write(json.dumps(step) + "\n")
        return output

    def held(scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
        if files["tell"].exists():
            _tell(files["told"])
            files["tell"].unlink()
        if files["hold"].exists():
            if len(scheduler.waiting_queue) < int(files["hold"].read_text()):
                return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
            files["hold"].unlink()
        return plan(scheduler, running_batch=running_batch, last_batch=last_batch)

    ModelRunner.forward, Scheduler.get_next_batch_to_run = recorded, held
    for runner in (DecodeCudaGraphRunner, PrefillCudaGraphRunner):
        runner.capture = _measured(runner.capture)
    if defect == "slot":
        DecodeCudaGraphRunner.load_batch = _without_positions(DecodeCudaGraphRunner.load_batch)
    if defect == "number":
        _scaled_layers()


def _measured(original: Callable[..., None]) -> Callable[..., None]:
    def capture(runner: Any) -> None:
        import torch

        if os.environ.get("GRAPHRT_BENCH_DEFECT") == "number":
            for layer in runner.model_runner.model.model.layers:
                layer.bench_scale = 1.0
        told: dict[str, Any] = {"runner": type(runner).__name__}
        with in_turn(Path(os.environ["GRAPHRT_BENCH_STEPS"]).stem):
            for turn in ("", "again_") if VARIABLE in os.environ else ("",):
                if turn:
                    # The first time kernels are compiled: engines of the same model have them then.
                    runner.backend.cleanup()
                torch.cuda.synchronize()
                began, before = time.perf_counter(), torch.cuda.memory_reserved()
                original(runner)
                torch.cuda.synchronize()
                told[f"{turn}seconds"] = round(time.perf_counter() - began, 3)
                told[f"{turn}mib"] = round((torch.cuda.memory_reserved() - before) / 2**20, 1)
        _captures.append(told)

    return capture


def _tell(path: Path) -> None:
    import torch

    told: dict[str, Any] = {"captures": _captures}
    told["allocated_mib"] = round(torch.cuda.memory_allocated() / 2**20, 1)
    told["reserved_mib"] = round(torch.cuda.memory_reserved() / 2**20, 1)
    if os.environ.get("GRAPHRT_SGLANG") == "1":
        import graphrt.hosts.sglang

        report = graphrt.hosts.sglang.report()
        told["report"] = str(report)
        told["failures"] = [str(each.failure) for each in report.trust.trials if each.failure]
    path.write_text(json.dumps(told))


def _without_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """A defect: the positions of a step stay those of the capture."""

    def load_batch(runner: Any, *args: Any, **kwargs: Any) -> Any:
        before = runner.buffers.positions.clone()
        result = original(runner, *args, **kwargs)
        runner.buffers.positions.copy_(before)
        return result

    return load_batch


def _scaled_layers() -> None:
    """A defect: layers read a Python number that changes after the captures."""
    from sglang.srt.models.llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, residual = original(layer, *args, **kwargs)
        return hidden * getattr(layer, "bench_scale", 1.0), residual

    LlamaDecoderLayer.forward = forward
