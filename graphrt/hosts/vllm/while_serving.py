"""Captures beside vLLM's steps: `GRAPHRT_VLLM_CAPTURE=while-serving`.

1. `capture_model` captures the largest and the smallest graph of each mode; then vLLM is ready.
2. Before a step one further graph, or one set of pieces, is captured: the one that most batches
   have missed. After one of d seconds with a share of 0.1 the next waits 9 d. Time without captures
   is not saved up.
3. A batch whose graph is missing runs by the next larger one of its kind.
4. vLLM's dummy runs write what steps read: buffers of inputs, and pinned memory that a copy of the
   step before may still read. So the device is synchronized before a capture and after it. Slots
   are -1 in dummy runs, so no page is written. Block tables are of the null block meanwhile: layers
   with a state, such as Mamba, write the blocks that these name. Adapters of LoRA stay: dummy
   runs get slots and no dummy adapters.
5. vLLM sizes its KV cache first. Captures take no more than its own estimate for graphs, or leave
   150 MiB free where it has none (the V2 runner, a cache of a given size).

Limits: nothing is captured while no request is running. vLLM's workspace stays locked: if it grew,
graphs that are there would read freed memory. `why_not` names what captures all at the start.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from graphrt import BatchDescriptor, GraphMode
from graphrt import current_platform as device_platform
from graphrt.core.base.option_values import shown
from graphrt.core.runner.graph_table import DroppedGraph
from graphrt.errors import GraphRTError, ResourceExhaustedError, UnsupportedHostError
from graphrt.hosts.vllm.log import logger
from graphrt.hosts.vllm.pools import Pools

SWITCH = "GRAPHRT_VLLM_CAPTURE"
SHARE = "GRAPHRT_VLLM_CAPTURE_SHARE"

_FREE_BYTES = 150 << 20
"""vLLM's own reserve beside its KV cache."""
_TRIES = 2
"""Captures of one graph that may fail, as by a thread that synchronizes the device."""


def share_asked() -> float | None:
    """The share of time for captures beside steps; None to capture all at the start. Raises
    `UnsupportedHostError` for other values of the two variables."""
    when, text = os.environ.get(SWITCH) or "at-start", os.environ.get(SHARE) or "0.1"
    if when not in ("at-start", "while-serving"):
        raise UnsupportedHostError(
            f"{SWITCH} says when vLLM's graphs are captured",
            got=shown(when),
            expected="at-start or while-serving",
            advice=f"{SWITCH}=while-serving",
        )
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UnsupportedHostError(
            f"{SHARE} is a share of the time",
            got=shown(text),
            expected="more than 0 and at most 1",
            advice=f"{SHARE}=0.1",
        )
    return share if when == "while-serving" else None


def why_not(vllm_config: Any, *, is_v2: bool) -> str:
    """What this engine has for which all graphs are captured at the start; "" without."""
    parallel = vllm_config.parallel_config
    found = {
        "tensor parallelism": parallel.tensor_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "expert parallelism": getattr(parallel, "enable_expert_parallel", False),
        "pipeline parallelism": getattr(parallel, "pipeline_parallel_size", 1) > 1,
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "micro-batches": parallel.use_ubatching,
        "a KV connector": getattr(vllm_config, "kv_transfer_config", None) is not None,
        "a speculator of the V2 runner": is_v2 and vllm_config.speculative_config is not None,
    }
    return ", ".join(name for name, is_there in found.items() if is_there)


class Graph(NamedTuple):
    """A graph, or a set of pieces, by vLLM's mode and descriptor."""

    mode: Any
    descriptor: Any

    @property
    def tokens(self) -> int:
        """Its size."""
        return int(self.descriptor.num_tokens)

    @property
    def kind(self) -> Graph:
        """All but its size."""
        return Graph(self.mode, replace(self.descriptor, num_tokens=0, num_reqs=None))

    @property
    def reported(self) -> tuple[GraphMode, BatchDescriptor]:
        """Its name in the report."""
        return GraphMode[self.mode.name], BatchDescriptor(self.tokens, self.descriptor.num_reqs)

    def __str__(self) -> str:
        return f"{self.mode.name} for {self.tokens} tokens"


def ends(graphs: Iterable[Graph]) -> list[Graph]:
    """The largest and the smallest graph of each kind, in their order."""
    kinds: dict[Graph, list[Graph]] = {}
    for graph in graphs:
        kinds.setdefault(graph.kind, []).append(graph)
    found = {
        end(each, key=lambda graph: graph.tokens) for each in kinds.values() for end in (min, max)
    }
    return [graph for each in kinds.values() for graph in each if graph in found]


def of_modes(graphs: Iterable[Graph]) -> dict[Any, list[Any]]:
    """The descriptors of each mode."""
    found: dict[Any, list[Any]] = {}
    for graph in graphs:
        found.setdefault(graph.mode, []).append(graph.descriptor)
    return found


class Plan:
    """The graphs of one of vLLM's dispatchers: those that are there, and those that are not."""

    def __init__(
        self, owner: Any, every: Iterable[tuple[Any, Any]], capture: Callable[[Graph], object]
    ) -> None:
        """`owner` dispatches to graphs of `every` mode and its descriptors; `capture` captures
        one."""
        self.owner = owner
        self.capture = capture
        graphs = [Graph(mode, each) for mode, descriptors in every for each in descriptors]
        self.there = ends(graphs)
        # Those that are not there, and why they will never be; "" if they may.
        self.absent = {graph: "" for graph in graphs if graph not in self.there}
        self.wanted: Counter[Graph] = Counter()
        self.failed: Counter[Graph] = Counter()

    @property
    def left(self) -> list[Graph]:
        """Those to capture."""
        return [graph for graph, reason in self.absent.items() if not reason]

    def turn(self, graph: Graph) -> tuple[int, int]:
        """The least comes first."""
        return self.failed[graph], -self.wanted[graph]

    def instead(self, graph: Graph, may_run: Callable[[Any], bool] = bool) -> Graph | None:
        """The graph for a batch that vLLM dispatched to `graph`; None if none serves it."""
        if graph not in self.absent:
            return graph
        self.wanted[graph] += 1
        larger = [
            each
            for each in self.there
            if each.tokens > graph.tokens and each.kind == graph.kind and may_run(each.descriptor)
        ]
        return min(larger, key=lambda each: each.tokens, default=None)


class WhileServing:
    """The captures that this process makes beside vLLM's steps."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self.share = 0.1
        """The share of time for captures."""
        self._plans: list[Plan] = []
        # Whether vLLM serves and graphs are left, the time of the next capture, the longest one.
        self._goes_on = False
        self._next_s = 0.0
        self._longest_s = 0.0
        self._capturing = False
        # vLLM's estimate of all graphs; None without. What captures took, and the most of one.
        self._estimate: int | None = None
        self._used, self._most = 0, 1 << 20

    @property
    def missing(self) -> list[tuple[GraphMode, BatchDescriptor]]:
        """Graphs to come."""
        return [graph.reported for plan in self._plans for graph in plan.left]

    @property
    def dropped(self) -> list[DroppedGraph]:
        """Graphs that will not come."""
        absent = [each for plan in self._plans for each in plan.absent.items()]
        return [DroppedGraph(*graph.reported, reason) for graph, reason in absent if reason]

    @property
    def _counts(self) -> str:
        there = sum(len(plan.there) for plan in self._plans)
        absent = sum(len(plan.absent) for plan in self._plans)
        return f"{there} of {there + absent} graphs"

    def forget(self) -> None:
        """Capture nothing any more: vLLM captures again, or all graphs were destroyed."""
        self._goes_on = False
        while self._plans:
            del self._plans.pop().owner.dispatch

    # In place of vLLM's functions ----------------------------------------------------------------

    def around_profile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`profile_cudagraph_memory`: what it returns is left free beside the KV cache."""

        @functools.wraps(original)
        def profile(*args: Any, **kwargs: Any) -> Any:
            estimate = original(*args, **kwargs)
            if importlib.import_module("vllm.envs").VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
                self._estimate = estimate or None
            return estimate

        return profile

    def around_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Worker.compile_or_warm_up_model`, after which vLLM serves requests."""

        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._goes_on = bool(self._plans)
            if self._goes_on:
                text = "graphrt: ready with %s; others follow beside steps, in %.0f %% of the time"
                logger.info(text, self._counts, self.share * 100)
            return result

        return start

    def around_capture_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`GPUModelRunner.capture_model`. The V1 runner asks its dispatcher for what to capture;
        managers of the V2 runner know it: see `around_manager`."""

        @functools.wraps(original)
        def capture_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            self.forget()
            dispatcher = getattr(runner, "cudagraph_dispatcher", None)
            reason = why_not(runner.vllm_config, is_v2=dispatcher is None)
            if reason:
                logger.info("graphrt: all graphs are captured at the start, as there is %s", reason)
            if dispatcher is None or reason:
                self._used = original(runner, *args, **kwargs)
                return self._used
            capture = partial(_capture_v1, runner)
            plan = Plan(dispatcher, dispatcher.get_capture_descs(), capture)
            dispatcher.get_capture_descs = lambda: [*of_modes(plan.there).items()]
            try:
                self._used = original(runner, *args, **kwargs)
            finally:
                del dispatcher.get_capture_descs
            own = dispatcher.dispatch

            def dispatch(*args: Any, **kwargs: Any) -> Any:
                graph = Graph(*own(*args, **kwargs))
                # A wrapper runs eagerly what it does not have.
                return tuple(graph if self._capturing else plan.instead(graph) or graph)

            self._begin(plan, dispatch)
            return self._used

        return capture_model

    def around_manager(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`CudaGraphManager.capture`."""

        @functools.wraps(original)
        def capture(manager: Any, *args: Any, **kwargs: Any) -> Any:
            if why_not(manager.vllm_config, is_v2=True):
                return original(manager, *args, **kwargs)

            def capture_some(graphs: Iterable[Graph]) -> Any:
                with _swapped(manager, "_capture_descs", of_modes(graphs)):
                    return original(manager, *args, **kwargs)

            plan = Plan(manager, manager._capture_descs.items(), partial(_capture_v2, capture_some))
            result = capture_some(plan.there)
            own = manager.dispatch

            def may_run(descriptor: Any) -> bool:
                return not getattr(manager.graphs.get(descriptor), "in_quarantine", False)

            def dispatch(*args: Any, **kwargs: Any) -> Any:
                found = own(*args, **kwargs)
                graph = plan.instead(Graph(found.cg_mode, found), may_run)
                if graph is not None:
                    return graph.descriptor
                with _swapped(manager, "_graphs_captured", False):
                    return own(*args, **kwargs)

            self._begin(plan, dispatch)
            return result

        return capture

    def around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`GPUModelRunner.execute_model`."""

        @functools.wraps(original)
        def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._goes_on and time.perf_counter() >= self._next_s:
                has_tokens = scheduler_output.total_num_scheduled_tokens > 0
                if has_tokens and not kwargs.get("dummy_run", False):
                    self._capture_next(runner)
            return original(runner, scheduler_output, *args, **kwargs)

        return execute_model

    # Captures ------------------------------------------------------------------------------------

    def _begin(self, plan: Plan, dispatch: Callable[..., Any]) -> None:
        """Let the owner of a plan dispatch by `dispatch` as long as graphs are absent."""
        if plan.absent:
            plan.owner.dispatch = dispatch
            self._plans.append(plan)

    def _capture_next(self, runner: Any) -> None:
        """Capture one graph, before a step."""
        free = _free_bytes()
        left = free - _FREE_BYTES if self._estimate is None else self._estimate - self._used
        if left < self._most:
            whose = "that are free" if self._estimate is None else "of vLLM's estimate"
            got = f"{max(left, 0) >> 20} MiB {whose} are left, and one took {self._most >> 20}"
            self._stop(got)
            return
        waiting = [(plan, graph) for plan in self._plans for graph in plan.left]
        plan, graph = min(waiting, key=lambda each: each[0].turn(each[1]))
        began_s = time.perf_counter()
        self._capturing = True
        try:
            with self._as_at_start(runner, graph):
                plan.capture(graph)
            plan.there.append(graph)
            del plan.absent[graph]
        except (ResourceExhaustedError, torch.OutOfMemoryError) as error:
            self._stop(str(error))
        except (GraphRTError, RuntimeError, AssertionError) as error:
            plan.failed[graph] += 1
            logger.warning("graphrt: %s was not captured beside steps: %s", graph, error)
            if plan.failed[graph] == _TRIES:
                plan.absent[graph] = str(error)
        finally:
            self._capturing = False
            seconds = time.perf_counter() - began_s
            self._longest_s = max(self._longest_s, seconds)
            self._next_s = began_s + seconds / self.share
            grown = max(free - _free_bytes(), 0)
            self._used, self._most = self._used + grown, max(self._most, grown)
        text = "graphrt: %s took %.0f ms beside steps, %s"
        logger.info(text, graph, seconds * 1e3, self._counts)
        if self._goes_on and not self.missing:
            self._end()

    @contextmanager
    def _as_at_start(self, runner: Any, graph: Graph) -> Iterator[None]:
        """vLLM as it is in `capture_model`, with no request in its buffers, and back."""
        synchronize = device_platform().synchronize
        monitor = importlib.import_module("vllm.compilation.monitor")
        synchronize()
        with (
            torch.inference_mode(),
            _null_blocks(runner, graph.tokens, synchronize),
            _adapters_kept(getattr(runner, "lora_manager", None)),
            _swapped(monitor, "cudagraph_capturing_enabled", True),
            self._pools.session(None, is_told=False),
        ):
            yield

    def _stop(self, reason: str) -> None:
        """Capture no more, for lack of memory."""
        for plan in self._plans:
            plan.absent.update(dict.fromkeys(plan.left, reason))
        logger.warning("graphrt: no more graphs are captured beside steps: %s", reason)
        self._end()

    def _end(self) -> None:
        text = "graphrt: captures beside steps are over, with %s; the longest took %.0f ms"
        logger.info(text, self._counts, self._longest_s * 1e3)
        self._goes_on = False
        for plan in [each for each in self._plans if not each.absent]:
            del plan.owner.dispatch
            self._plans.remove(plan)
        self._pools.on_end()


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def _capture_v1(runner: Any, graph: Graph) -> None:
    runner._warmup_and_capture(graph.descriptor, cudagraph_runtime_mode=graph.mode)


def _capture_v2(capture_some: Callable[[list[Graph]], object], graph: Graph) -> None:
    """Capture without vLLM's bar of progress, and on the stream of steps: another one would take
    a workspace of cuBLAS, and vLLM makes one for each session."""
    module = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    with (
        _swapped(module, "is_global_first_rank", lambda: False),
        _swapped(module, "graph_capture", lambda device: nullcontext()),
    ):
        capture_some([graph])


@contextmanager
def _null_blocks(runner: Any, rows: int, synchronize: Callable[[], object]) -> Iterator[None]:
    """Block tables of the null block alone, in so many rows that a dummy run reads."""
    batch, were = getattr(runner, "input_batch", None), []
    if batch is None:
        # Those of the device: the V2 runner fills them at each step.
        tables = runner.block_tables.input_block_tables
    else:
        tables = [each.block_table.cpu[:rows] for each in batch.block_table.block_tables]
        were = [table.clone() for table in tables]
    try:
        for table in tables:
            table.zero_()
        yield
    finally:
        # Tables of the host are copied to the device without a wait.
        synchronize()
        for table, was in zip(tables, were, strict=False):
            table.copy_(was)


@contextmanager
def _adapters_kept(manager: Any) -> Iterator[None]:
    """Let dummy runs write which slot of LoRA a token has, and no adapter: vLLM's dummy adapters
    would take the slots, and the numbers, of those of live requests."""
    if manager is None:
        yield
        return
    adapters = manager._adapter_manager
    numbers = [*range(1, adapters.lora_slots + 1)]

    def set_active_adapters(requests: Any, mapping: Any) -> None:
        with _swapped(adapters, "lora_index_to_id", numbers):
            adapters._set_adapter_mapping(mapping)

    manager.add_dummy_lora = lambda *args, **kwargs: False
    manager.set_active_adapters = set_active_adapters
    try:
        yield
    finally:
        del manager.add_dummy_lora, manager.set_active_adapters
        # The next step writes those of its own tokens, even if they look the same.
        adapters._last_mapping = None


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    was = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, was)
