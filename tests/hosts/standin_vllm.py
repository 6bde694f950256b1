"""A stand-in for vLLM where there is none: what graphrt reads and replaces of it, and no more.

`modules(version)` has the shape of 0.24 or of 0.33 in what they differ by.
"""

from __future__ import annotations

import enum
import itertools
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = 3
    FULL_AND_PIECEWISE = 4


@dataclass(frozen=True)
class BatchDescriptor:
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


@dataclass
class ForwardContext:
    attn_metadata: Any
    cudagraph_runtime_mode: CUDAGraphMode
    batch_descriptor: BatchDescriptor | None
    additional_kwargs: dict[str, Any]


@dataclass(frozen=True)
class ExecutionDescriptor:
    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1


class Modules(dict[str, ModuleType]):
    """Modules of the stand-in, by name."""

    def add(self, name: str, **contents: Any) -> ModuleType:
        module = self[name] = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(contents)
        parent, _, last = name.rpartition(".")
        if parent and parent not in self:
            self.add(parent)
        if parent:
            setattr(self[parent], last, module)
        return module


def modules(version: str) -> Modules:
    """The modules of a version."""
    made = Modules()
    made.add("vllm", __version__=version)
    context = _forward_context(made)
    platforms = made.add(
        "vllm.platforms",
        current_platform=None,
        cuda_platform_plugin=lambda: "vllm.platforms.cuda.CudaPlatform",
    )
    counter = SimpleNamespace(num_cudagraph_captured=0)
    made.add("vllm.compilation.counter", compilation_counter=counter)
    allocator = made.add("vllm.distributed.device_communicators.pynccl_allocator", ids=[])
    allocator.set_graph_pool_id = allocator.ids.append
    noop = type("NoopOffloader", (), {})
    offloader = made.add("vllm.model_executor.offloader.base", NoopOffloader=noop, offloader=noop())
    offloader.get_offloader = lambda: offloader.offloader

    @contextmanager
    def graph_capture(device):
        yield SimpleNamespace(stream=None)

    made.add("vllm.distributed.parallel_state", graph_capture=graph_capture)
    wrapper = _wrapper(platforms)
    made.add("vllm.compilation.cuda_graph", CUDAGraphWrapper=wrapper)
    breakable = _breakable(made, platforms)
    _manager(made, context, version, counter, graph_capture)
    _encoder(made, version)
    monitor = made.add("vllm.compilation.monitor", cudagraph_capturing_enabled=True)
    made.add(
        "vllm.envs",
        VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=True,
        VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=5,
    )
    made.add("vllm.lora.model_manager", LoRAModelManager=LoRAModelManager)
    made.add("vllm.lora.worker_manager", LRUCacheWorkerLoRAManager=LRUCacheWorkerLoRAManager)
    runner = made.add(
        "vllm.v1.worker.gpu_model_runner",
        CUDAGraphWrapper=wrapper,
        BreakableCUDAGraphWrapper=breakable,
        graph_capture=graph_capture,
    )
    runner.GPUModelRunner = _runner_v1(runner, context, monitor)
    made.add("vllm.v1.worker.gpu_worker", Worker=_worker())
    _runner(made, context)
    mamba = made.add("vllm.model_executor.layers.mamba.abstract")
    mamba.MambaBase = type("MambaBase", (), {})
    made.add("vllm.config", CUDAGraphMode=CUDAGraphMode)
    made.add("vllm.v1.executor.multiproc_executor", WorkerProc=WorkerProc)
    return made


class LoRAModelManager:
    """Adapters in slots, and the slot of each token."""

    lora_slots = 2

    def __init__(self) -> None:
        self.lora_index_to_id: list[int | None] = [None] * self.lora_slots
        self._last_mapping: Any = None
        self.slots: list[int] = []
        self.written: list[list[int]] = []

    def _set_adapter_mapping(self, mapping: tuple[int, ...]) -> None:
        self.slots = [self.lora_index_to_id.index(each) if each else -1 for each in mapping]
        self.written.append(self.slots)

    def set_adapter_mapping(self, mapping: tuple[int, ...]) -> None:
        if self._last_mapping != mapping:
            self._set_adapter_mapping(mapping)
            self._last_mapping = mapping


class LRUCacheWorkerLoRAManager:
    """The adapters of requests, by number; it has room for those in slots."""

    def __init__(self) -> None:
        self._adapter_manager = LoRAModelManager()

    def add_dummy_lora(self, number: int, rank: int) -> bool:
        self._add(number)
        return True

    def set_active_adapters(self, requests: set[int], mapping: tuple[int, ...]) -> None:
        for number in sorted(requests):
            self._add(number)
        self._adapter_manager.set_adapter_mapping(mapping)

    def _add(self, number: int) -> None:
        slots = self._adapter_manager.lora_index_to_id
        if number not in slots:
            slots[slots.index(None) if None in slots else 0] = number


class WorkerProc:
    """What watches the pipe of the parent process in a worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def monitor_death_pipe(
        self, death_pipe: Any, shutdown_requested: threading.Event
    ) -> threading.Thread | None:
        if death_pipe is None:
            return None

        def monitor() -> None:
            try:
                death_pipe.recv()
            except EOFError:
                shutdown_requested.set()

        thread = threading.Thread(target=monitor, daemon=True)
        thread.start()
        return thread


def _loading_runner() -> type:
    class GPUModelRunner:
        def profile_cudagraph_memory(self):
            return 0

        def capture_model(self):
            return 0

        def reload_weights(self, weights_iterator, is_checkpoint_format=True):
            for name, weight in weights_iterator:
                self.get_model().get_parameter(name).copy_(weight)

        def get_model(self):
            return self.model

    return GPUModelRunner


class Dispatcher:
    """The V1 runner's, of decode steps and of mixed ones."""

    def __init__(self, sizes: list[int], mode: CUDAGraphMode) -> None:
        whole, pieces = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
        self.keys: dict[CUDAGraphMode, dict[int, BatchDescriptor]] = {}
        if mode in (pieces, CUDAGraphMode.FULL_AND_PIECEWISE):
            self.keys[pieces] = {size: BatchDescriptor(size) for size in sizes}
        if mode is not pieces:
            self.keys[whole] = {size: BatchDescriptor(size, size, uniform=True) for size in sizes}

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        return [
            (mode, [keys[size] for size in sorted(keys, reverse=True)])
            for mode, keys in self.keys.items()
        ]

    def dispatch(self, num_tokens, uniform_decode=False):
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            if mode in self.keys and (uniform_decode or mode is CUDAGraphMode.PIECEWISE):
                sizes = [size for size in self.keys[mode] if size >= num_tokens]
                if sizes:
                    return mode, self.keys[mode][min(sizes)]
        return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)


def _runner_v1(module: ModuleType, context: ModuleType, monitor: ModuleType) -> type:
    loading = _loading_runner()

    class GPUModelRunner:
        """The V1 runner: one token of each request, whose `prepare` of metadata is a test's."""

        profile_cudagraph_memory = loading.profile_cudagraph_memory
        reload_weights, get_model = loading.reload_weights, loading.get_model

        def __init__(self, vllm_config, model, prepare):
            compilation = vllm_config.compilation_config
            self.vllm_config, self.prepare = vllm_config, prepare
            sizes = compilation.cudagraph_capture_sizes
            self.cudagraph_dispatcher = Dispatcher(sizes, compilation.cudagraph_mode)
            self.model = module.CUDAGraphWrapper(
                module.CUDAGraphWrapper(model, vllm_config, CUDAGraphMode.PIECEWISE),
                vllm_config,
                CUDAGraphMode.FULL,
            )
            self.input_ids = torch.zeros(max(sizes), dtype=torch.int64)
            self.slot_mapping = torch.zeros(max(sizes), dtype=torch.int64)
            rows = SimpleNamespace(
                cpu=torch.zeros(max(sizes), 1, dtype=torch.int64),
                gpu=torch.zeros(max(sizes), 1, dtype=torch.int64),
            )
            table = SimpleNamespace(block_tables=[SimpleNamespace(block_table=rows)])
            self.input_batch = SimpleNamespace(block_table=table)
            self.block_table = rows

        def capture_model(self):
            monitor.cudagraph_capturing_enabled = True
            with module.graph_capture(device=torch.device("cpu")):
                for mode, descs in self.cudagraph_dispatcher.get_capture_descs():
                    for desc in descs:
                        self._warmup_and_capture(desc, cudagraph_runtime_mode=mode)
            monitor.cudagraph_capturing_enabled = False
            return 0

        def _warmup_and_capture(self, desc, cudagraph_runtime_mode):
            assert monitor.cudagraph_capturing_enabled
            for mode in (CUDAGraphMode.NONE, cudagraph_runtime_mode):
                self._dummy_run(desc, mode)

        def _dummy_run(self, desc, mode):
            tokens = desc.num_tokens
            found, key = self.cudagraph_dispatcher.dispatch(tokens, uniform_decode=desc.uniform)
            assert mode in (CUDAGraphMode.NONE, found) and key == desc
            self.input_ids.zero_()
            self.slot_mapping.fill_(-1)
            self.block_table.gpu[:tokens] = self.block_table.cpu[:tokens]
            self._run(tokens, mode, key)

        def _run(self, tokens, mode, key):
            padded = key.num_tokens
            metadata = self.prepare(self.block_table.gpu[:padded], self.slot_mapping[:padded])
            with context.set_forward_context(metadata, self.vllm_config, padded, mode, key):
                return self.model(self.input_ids[:padded])

        def execute_model(self, scheduler_output, intermediate_tensors=None):
            tokens = scheduler_output.total_num_scheduled_tokens
            mode, key = self.cudagraph_dispatcher.dispatch(tokens, scheduler_output.is_decode)
            self.input_ids[:tokens] = torch.tensor(scheduler_output.token_ids)
            self.block_table.gpu[:tokens] = self.block_table.cpu[:tokens]
            self.slot_mapping[:tokens] = self.block_table.gpu[:tokens, 0]
            self.slot_mapping[tokens:] = -1
            self.block_table.gpu[tokens:] = 0
            self.hidden_states = self._run(tokens, mode, key)[:tokens].clone()

    return GPUModelRunner


def _worker() -> type:
    class Worker:
        def finish_weight_update(self):
            self.finish()

        def compile_or_warm_up_model(self):
            self.model_runner.capture_model()
            self.warm_up()

    return Worker


def _forward_context(made: Modules) -> ModuleType:
    module = made.add("vllm.forward_context", _forward_context=None)
    module.BatchDescriptor, module.ForwardContext = BatchDescriptor, ForwardContext
    module.get_forward_context = lambda: module._forward_context

    def create_forward_context(
        attn_metadata,
        vllm_config,
        dp_metadata=None,
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        batch_descriptor=None,
        additional_kwargs=None,
    ):
        return ForwardContext(
            attn_metadata, cudagraph_runtime_mode, batch_descriptor, additional_kwargs or {}
        )

    @contextmanager
    def override_forward_context(forward_context):
        outer, module._forward_context = module._forward_context, forward_context
        try:
            yield
        finally:
            module._forward_context = outer

    @contextmanager
    def set_forward_context(
        attn_metadata,
        vllm_config,
        num_tokens=None,
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        batch_descriptor=None,
        slot_mapping=None,
    ):
        if num_tokens is not None:
            batch_descriptor = batch_descriptor or BatchDescriptor(num_tokens=num_tokens)
        extra = made["vllm.platforms"].current_platform.set_additional_forward_context(
            attn_metadata=attn_metadata,
            vllm_config=vllm_config,
            dp_metadata=None,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=cudagraph_runtime_mode,
            batch_descriptor=batch_descriptor,
        )
        context = create_forward_context(
            attn_metadata, vllm_config, None, cudagraph_runtime_mode, batch_descriptor, extra
        )
        with override_forward_context(context):
            yield

    module.create_forward_context = create_forward_context
    module.override_forward_context = override_forward_context
    module.set_forward_context = set_forward_context
    return module


def _wrapper(platforms: ModuleType) -> type:
    class CUDAGraphWrapper:
        _all_instances: ClassVar[Any] = weakref.WeakSet()

        def __init__(self, runnable, vllm_config, runtime_mode, cudagraph_options=None):
            self.runnable = runnable

        def unwrap(self):
            return getattr(self.runnable, "unwrap", lambda: self.runnable)()

        @property
        def cudagraph_wrapper(self):
            return self

        @classmethod
        def clear_all_graphs(cls):
            for wrapper in list(cls._all_instances):
                wrapper.clear_graphs()

    return CUDAGraphWrapper


def _breakable(made: Modules, platforms: ModuleType) -> type:
    class BreakableCUDAGraphCapture:
        _tls = threading.local()

        @classmethod
        def current(cls):
            return getattr(cls._tls, "active", None)

    class BreakableCUDAGraphWrapper:
        _all_instances: ClassVar[Any] = weakref.WeakSet()

        def __init__(self, runnable, vllm_config, runtime_mode=None, key_fn=None):
            self.runnable, self.vllm_config = runnable, vllm_config
            self.runtime_mode, self.key_fn = runtime_mode, key_fn
            self.graph_pool = platforms.current_platform.get_global_graph_pool()
            self.entries: dict[Any, Any] = {}
            self._all_instances.add(self)

    def eager_break_during_capture(fn):
        def marked(*args, **kwargs):
            capture = BreakableCUDAGraphCapture.current()
            context = made["vllm.forward_context"]._forward_context
            whole = context and context.cudagraph_runtime_mode is CUDAGraphMode.FULL
            if capture is None or not capture._capturing or whole:
                return fn(*args, **kwargs)
            weak_args, weak_kwargs = args, kwargs
            return capture.add_eager(lambda: fn(*weak_args, **weak_kwargs))

        return marked

    made.add(
        "vllm.compilation.breakable_cudagraph",
        BreakableCUDAGraphCapture=BreakableCUDAGraphCapture,
        BreakableCUDAGraphWrapper=BreakableCUDAGraphWrapper,
        eager_break_during_capture=eager_break_during_capture,
    )
    return BreakableCUDAGraphWrapper


def _manager(
    made: Modules, context: ModuleType, version: str, counter: Any, capturing: Any
) -> None:
    module = made.add("vllm.v1.worker.gpu.cudagraph_utils", torch=torch, graph_capture=capturing)
    pairs = version.startswith("0.24")

    class CudaGraphManager:
        def __init__(self, vllm_config, device, cudagraph_mode, decode_query_len, **options):
            self.vllm_config, self.device = vllm_config, device
            self.pool = made["vllm.platforms"].current_platform.get_global_graph_pool()
            self.graphs: dict[Any, Any] = {}
            self._graphs_captured = False
            self.pairs = pairs
            sizes = sorted(vllm_config.compilation_config.cudagraph_capture_sizes, reverse=True)
            modes = [CUDAGraphMode.FULL]
            if cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE:
                modes.insert(0, CUDAGraphMode.PIECEWISE)
            self._capture_descs = {
                mode: [
                    ExecutionDescriptor(mode, size, size if mode is CUDAGraphMode.FULL else None)
                    for size in sizes
                ]
                for mode in modes
            }

        def capture(self, create_forward_fn, progress_bar_desc=""):
            attn_states = {}
            with module.graph_capture(device=self.device):
                for desc in itertools.chain(*self._capture_descs.values()):
                    made_fn = create_forward_fn(desc, warmup=True)
                    forward, attn_states[desc] = made_fn if pairs else (made_fn, None)
                    forward(CUDAGraphMode.NONE)
                    if desc.cg_mode is CUDAGraphMode.PIECEWISE:
                        forward(CUDAGraphMode.PIECEWISE)
                        continue
                    made_fn = create_forward_fn(desc, warmup=False)
                    forward = made_fn[0] if pairs else made_fn
                    assert desc not in self.graphs
                    graph = module.torch.cuda.CUDAGraph()
                    more = {} if pairs else {"stream": None}
                    with module.torch.cuda.graph(graph, self.pool, **more):
                        forward(CUDAGraphMode.NONE)
                    self.graphs[desc] = graph
                    counter.num_cudagraph_captured += 1
            self._graphs_captured = True
            return attn_states if pairs else None

        def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras):
            for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
                if not self._graphs_captured or (mode.name == "FULL" and not uniform_token_count):
                    continue
                descs = reversed(self._capture_descs.get(mode, []))
                found = [desc for desc in descs if desc.num_tokens >= num_tokens]
                if found:
                    return found[0]
            return ExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)

        def run_fullgraph(self, desc):
            self.graphs[desc].replay()

    module.CudaGraphManager = CudaGraphManager


class ExecuteModelState(NamedTuple):
    input_batch: Any
    attn_metadata: Any
    slot_mappings_by_layer: Any
    hidden_states: torch.Tensor | None
    aux_hidden_states: list[torch.Tensor] | None


def _runner(made: Modules, context: ModuleType) -> None:
    module = made.add("vllm.v1.worker.gpu.model_runner", ExecuteModelState=ExecuteModelState)
    utils, mode = made["vllm.v1.worker.gpu.cudagraph_utils"], CUDAGraphMode

    class ModelCudaGraphManager(utils.CudaGraphManager):
        def run_fullgraph(self, desc):
            super().run_fullgraph(desc)
            return self.hidden_states[: desc.num_tokens]

    loading = _loading_runner()

    class GPUModelRunner:
        """The V2 runner, of decode steps: one token of each request, whose slots in the cache and
        `prepare` of metadata are a test's."""

        lora_config = req_states = None
        supports_mm_inputs = False
        reload_weights, get_model = loading.reload_weights, loading.get_model
        model_state = SimpleNamespace(prepare_inputs=lambda input_batch, req_states: {})

        def __init__(self, vllm_config, model, prepare):
            self.vllm_config, self.model, self.prepare = vllm_config, model, prepare
            sizes = vllm_config.compilation_config.cudagraph_capture_sizes
            self.input_ids = torch.zeros(max(sizes), dtype=torch.int64)
            self.positions = torch.zeros(max(sizes), dtype=torch.int64)
            self.block_tables = SimpleNamespace(
                input_block_tables=[torch.zeros(max(sizes), 1, dtype=torch.int64)]
            )
            self.cudagraph_manager = ModelCudaGraphManager(
                vllm_config, torch.device("cpu"), mode.FULL_DECODE_ONLY, 1
            )

        def profile_cudagraph_memory(self):
            return 0

        def capture_model(self):
            manager, model = self.cudagraph_manager, self.model
            manager.hidden_states = None

            def create_forward_fn(desc, warmup):
                tokens = desc.num_tokens
                metadata = self.prepare(tokens, tokens, for_capture=True)

                def forward_fn(cg_mode):
                    with context.set_forward_context(metadata, self.vllm_config, tokens, cg_mode):
                        hidden = model(
                            input_ids=self.input_ids[:tokens], positions=self.positions[:tokens]
                        )
                    if manager.hidden_states is None:
                        manager.hidden_states = torch.empty_like(hidden)
                    manager.hidden_states[:tokens] = hidden

                return (forward_fn, None) if manager.pairs else forward_fn

            manager.capture(create_forward_fn)
            return 0

        def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
            ids = scheduler_output.token_ids
            desc = self.cudagraph_manager.dispatch(len(ids), len(ids), 1, 0)
            tokens = desc.num_tokens
            self.input_ids[: len(ids)] = torch.tensor(ids)
            self.positions[: len(ids)] += 1
            batch = SimpleNamespace(
                input_ids=self.input_ids[:tokens],
                positions=self.positions[:tokens],
                num_tokens=len(ids),
                num_tokens_after_padding=tokens,
            )
            metadata = self.prepare(len(ids), tokens, for_capture=False)
            if desc.cg_mode is mode.FULL:
                hidden = self.cudagraph_manager.run_fullgraph(desc)
            else:
                with context.set_forward_context(metadata, self.vllm_config, tokens):
                    hidden = self.model(input_ids=batch.input_ids, positions=batch.positions)
            self.execute_model_state = ExecuteModelState(batch, metadata, None, hidden, None)

    module.GPUModelRunner = GPUModelRunner


def _encoder(made: Modules, version: str) -> None:
    module = made.add("vllm.v1.worker.encoder_cudagraph", torch=torch)

    class EncoderCudaGraphManager:
        def _get_graph_set(self, path="default"):
            return self.budget_graphs.setdefault(path, {})

        def capture(self, graph_pool):
            self.graph_pool = graph_pool
            for path, budgets in self.path_token_budgets.items():
                for token_budget in sorted(budgets, reverse=True):
                    if version.startswith("0.24"):
                        self._capture_budget_graph(token_budget, path)
                        continue
                    for axis_keys in itertools.product(*self._capture_axes):
                        self._capture_budget_graph(token_budget, path=path, axis_keys=axis_keys)

        def _capture_budget_graph(self, token_budget, path="default", axis_keys=()):
            values = self.model.prepare_encoder_cudagraph_capture_inputs(
                token_budget, self.max_batch_size, self.max_frames_per_batch, self.device,
                self.dtype, path, *([] if version.startswith("0.24") else [axis_keys]),
            ).values  # fmt: skip
            output = self.model.encoder_cudagraph_forward({**values}, path=path)
            buffer = torch.empty_like(output)
            graph = module.torch.cuda.CUDAGraph()
            with module.torch.cuda.graph(graph, pool=self.graph_pool):
                buffer.copy_(self.model.encoder_cudagraph_forward({**values}, path=path))
            key = (token_budget, axis_keys) if axis_keys else token_budget
            self._get_graph_set(path)[key] = SimpleNamespace(
                graph=graph, input_buffers=values, output_buffer=buffer
            )

        def clear(self):
            for graphs in self.budget_graphs.values():
                graphs.clear()
            self.graph_pool = None

    module.EncoderCudaGraphManager = EncoderCudaGraphManager
