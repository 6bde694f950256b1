"""Generates the same tokens three ways, and counts dispatches, launches and time of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from examples.mla_decode.host import Host, Workload
from examples.mla_decode.model import MlaConfig
from graphrt import AttentionSupport, Batch, GraphRunner
from graphrt.attention import AttentionBackend, AttentionStep, SdpaAttention
from graphrt.errors import VerificationError

WAYS = {
    "eager": ("NONE", True),
    "declaration withheld": ("FULL_AND_PIECEWISE", False),
    "declared": ("FULL_AND_PIECEWISE", True),
}
"""The requested mode, and whether the backend declares its support."""


def counted(kind: type[AttentionBackend], *, declared: bool) -> Any:
    """The class `kind`, counting the layers whose attention Python called.

    Without `declared` its support is NEVER.
    """

    class Counted(kind):  # type: ignore[valid-type, misc]
        dispatches = 0

        def get_cudagraph_support(self) -> AttentionSupport:
            return super().get_cudagraph_support() if declared else AttentionSupport.NEVER

        def run(
            self, step: AttentionStep, query: Tensor, caches: tuple[Tensor, ...], out: Tensor
        ) -> None:
            self.dispatches += 1
            super().run(step, query, caches, out)

    return Counted


class Launches:
    """`Host(around_graph=)` of a runner: counts the graphs that it replays."""

    def __init__(self) -> None:
        self.count = 0

    def before_capture(self) -> None:
        pass

    def end_of_capture(self) -> None:
        pass

    def before_replay(self) -> None:
        self.count += 1


@dataclass(frozen=True)
class StepRecord:
    """One step. `host_us` is the time of the runner's call, and `step_ms` includes the wait for the
    device, which was idle before."""

    mode: str
    attention_dispatches: int
    graph_launches: int
    host_us: float
    step_ms: float


@dataclass(frozen=True)
class Result:
    """One way of running the same steps.

    `tokens` is int64 [batch, steps * query_len]. `difference` names a replay that differed from the
    same padded step run eagerly. `device_calls` are the launches, copies and fills of one decode
    step as the profiler counts them, None without a GPU.
    """

    way: str
    mode: str
    resolution: tuple[str, ...]
    capture_s: float
    pool_bytes: int | None
    prompts: StepRecord
    steps: tuple[StepRecord, ...]
    difference: str | None
    tokens: Tensor
    device_calls: dict[str, int] | None = None


class Meter:
    """Runs steps one at a time, each with a record of its own."""

    def __init__(
        self, runner: GraphRunner, attention: Any, launches: Launches, device: str
    ) -> None:
        self.runner, self.attention, self.launches = runner, attention, launches
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.records: list[StepRecord] = []
        self.repeat: Callable[[], Tensor]

    def __call__(self, batch: Batch, inputs: dict[str, Tensor], query_len: int | None) -> Tensor:
        self.repeat = lambda: self.runner(batch, **inputs)
        self.attention.dispatches = self.launches.count = 0
        self.wait()
        started = time.perf_counter()
        logits = self.runner(batch, **inputs)
        enqueued = time.perf_counter()
        self.wait()
        ended = time.perf_counter()
        self.records.append(
            StepRecord(
                self.runner.last_dispatch.mode.name,
                self.attention.dispatches,
                self.launches.count,
                (enqueued - started) * 1e6,
                (ended - started) * 1e3,
            )
        )
        return logits


def run(config: MlaConfig, work: Workload, device: str, backend: str) -> list[Result]:
    """Run all ways in turn, with one model and cache; `backend` is "triton" or "sdpa"."""
    host = Host(config, work, device)
    with ExitStack() as runners:
        found = [run_way(host, backend, way, runners) for way in WAYS]
        if device != "cuda":
            return [result for result, _ in found]
        # Last, because steps after a profiler may be slower.
        return [replace(result, device_calls=device_calls(repeat)) for result, repeat in found]


def run_way(
    host: Host, backend: str, way: str, runners: ExitStack
) -> tuple[Result, Callable[[], Tensor]]:
    """Capture, prove every step, then measure every step; also returns a repeat of the last one."""
    mode, declared = WAYS[way]
    attention, launches = new_attention(host, backend, declared), Launches()
    runner = runners.enter_context(host.runner(mode, attention, launches))
    runner.capture()
    proven, difference = prove(host, runner)
    meter = Meter(runner, attention, launches, host.device)
    tokens = host.generate(meter)
    if difference is None and not torch.equal(tokens, proven):
        difference = "the measured steps generated other tokens than the proven ones"
    report = runner.report()
    prompts, *steps = meter.records
    result = Result(
        way,
        runner.mode.name,
        tuple(
            f"{step.before.name} -> {step.after.name} ({step.rule}): {step.why}"
            for step in runner.plan.resolution.steps
        ),
        report.capture_s,
        report.pool_bytes,
        prompts,
        tuple(steps),
        difference,
        tokens.cpu(),
    )
    return result, meter.repeat


def new_attention(host: Host, backend: str, declared: bool) -> Any:
    work = host.work
    shape = host.model.config.shape(work.page_size)
    if backend == "sdpa":
        return counted(SdpaAttention, declared=declared)(shape)
    # Triton is an optional dependency.
    from graphrt.attention import TritonAttention

    return counted(TritonAttention, declared=declared)(
        shape,
        max_num_reqs=work.max_num_reqs,
        max_query_len=work.query_len,
        device=host.device,
    )


def prove(host: Host, runner: GraphRunner) -> tuple[Tensor | None, str | None]:
    """Generate, each replay compared with eager of the same padding: tokens, or the difference."""
    try:
        return host.generate(lambda batch, inputs, query_len: runner.verify(batch, **inputs)), None
    except VerificationError as error:
        return None, str(error)


def device_calls(step: Callable[[], Tensor]) -> dict[str, int]:
    """How often a step calls the driver or the runtime to launch, copy or fill."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return {
        event.key: event.count
        for event in profile.key_averages()
        if event.key.startswith(("cuda", "cuLaunch", "cuMem"))
        and any(what in event.key for what in ("Launch", "Memcpy", "Memset"))
    }
