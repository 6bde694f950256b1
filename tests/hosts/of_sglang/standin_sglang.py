"""A stand-in for SGLang where there is none: what graphrt reads and replaces of it, and no more.

`modules(version)` are its modules by name. `Engine` steps a small model as SGLang's model runner
does: by a decode runner with a Full backend, or eagerly. All of it runs on a CPU.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PREFIX = "sglang.srt.model_executor."
FULL = PREFIX + "runner_backend.full_cuda_graph_backend"
BREAKABLE = PREFIX + "runner_backend.breakable_cuda_graph_backend"
BREAKS = PREFIX + "runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
CONTEXT = PREFIX + "forward_context"
MODEL_RUNNER = PREFIX + "model_runner"
DECODE = PREFIX + "runner.decode_cuda_graph_runner"

# Their functions are in modules of SGLang: a walk treats these by their names.
_CONTEXT_CODE = """
from contextlib import contextmanager

_current = None

class ForwardContext:
    __slots__ = ("attn_backend",)
    def __init__(self, attn_backend):
        self.attn_backend = attn_backend

def has_forward_context():
    return _current is not None

def get_forward_context():
    return _current

@contextmanager
def forward_context(context):
    global _current
    before, _current = _current, context
    try:
        yield
    finally:
        _current = before
"""

_BREAKS_CODE = """
_current_capture_var = None

def eager_on_graph(enable, capture_stub=None):
    def decorator(inner):
        def wrapper(*args, **kwargs):
            if _current_capture_var is not None:
                return (capture_stub or inner)(*args, **kwargs)
            return inner(*args, **kwargs)

        return wrapper if enable else inner

    return decorator
"""


@dataclass(frozen=True)
class ShapeKey:
    size: int


class Device:
    """Stands for `torch.cuda`, and notes what is called."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append("synchronize")


class Group:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def barrier(self) -> None:
        self.log.append("barrier")


class Backend:
    def __init__(self, runner: Any, *, enable_memory_saver: bool = False) -> None:
        self._device_module, self._tp_group = runner.device_module, runner.model_runner.tp_group
        self._graphs: dict[Any, Any] = {}
        self._pool: Any = None
        self._memory_saver_adapter = SimpleNamespace(enabled=enable_memory_saver)

    @contextmanager
    def capture_session(self, stream: Any):
        self._pool = "the pool of all runners"
        yield

    @contextmanager
    def replay_session(self):
        yield

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._graphs

    def cleanup(self) -> None:
        self._graphs.clear()


class FullCudaGraphBackend(Backend):
    def __init__(self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False) -> None:
        super().__init__(cuda_graph_runner, enable_memory_saver=enable_memory_saver)

    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
        self._device_module.log.append("own capture")
        self._graphs[shape_key] = forward_fn, self._tp_group, self._pool

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return super().can_run(forward_batch, shape_key)

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        return self._graphs[shape_key][0]()

    def cleanup(self) -> None:
        super().cleanup()


class BreakableCudaGraphBackend(Backend):
    def __init__(
        self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False, debug_eager=False
    ) -> None:
        super().__init__(cuda_graph_runner, enable_memory_saver=enable_memory_saver)
        self._debug_eager = debug_eager

    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
        self._device_module.log.append("own capture")
        self._graphs[shape_key] = forward_fn, self._tp_group, self._pool, self._debug_eager

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        return self._graphs[shape_key][0]()

    def cleanup(self) -> None:
        super().cleanup()


class DecodeCudaGraphRunner:
    """As SGLang's: buffers of the largest batch, a graph for each of `capture_bs`."""

    capture_bs = (1, 4, 8)
    captured_req_width = 1

    def __init__(self, model_runner: Any, backend: Any, context: ModuleType, **options: Any):
        self.model_runner, self._context = model_runner, context
        self.device_module = model_runner.device
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(8, dtype=torch.int64),
            positions=torch.zeros(8, dtype=torch.int64),
            seq_lens=torch.ones(8, dtype=torch.int64),
        )
        self.enable_pdmux = options.pop("enable_pdmux", False)
        model_runner.device = "cpu"
        self.backend = backend(self, **options)

    @staticmethod
    def _pad_to_bucket(raw_size: int, buckets: Any) -> int:
        return next(size for size in buckets if size >= raw_size)

    def _capture_graph_size(self, *, bs: int, num_tokens: int) -> int:
        return bs

    def _views(self, size: int) -> Any:
        return SimpleNamespace(**{k: each[:size] for k, each in vars(self.buffers).items()})

    def capture(self) -> None:
        with self.backend.capture_session(None):
            for size in reversed(self.capture_bs):
                self.capture_one_shape(size)

    def capture_one_shape(self, size: int) -> None:
        forward_batch, model = self._views(size), self.model_runner.model

        def run_once():
            return model(forward_batch.input_ids, forward_batch.positions)

        log = self.device_module.log
        self.model_runner.attn_backend.forward_metadata = forward_batch.seq_lens
        with self._context.forward_context(
            self._context.ForwardContext(self.model_runner.attn_backend)
        ):
            self.backend.capture_one(ShapeKey(size), run_once, None, lambda: log.append("hook"))

    def can_run_graph(self, forward_batch: Any) -> bool:
        # A backend's `can_run` is not asked: batches are padded.
        return len(forward_batch.input_ids) <= max(self.capture_bs)

    def load_batch(self, forward_batch: Any) -> None:
        self.raw_num_token = len(forward_batch.input_ids) * self.captured_req_width
        self.size = self._pad_to_bucket(self.raw_num_token, self.capture_bs)
        for name, buffer in vars(self.buffers).items():
            buffer[: self.raw_num_token].copy_(getattr(forward_batch, name))
        self.model_runner.attn_backend.forward_metadata = self._views(self.size).seq_lens

    def execute(self, forward_batch: Any) -> torch.Tensor:
        with self.backend.replay_session():
            self.load_batch(forward_batch)
            output = self.backend.replay(ShapeKey(self.size), forward_batch)
        return output[: self.raw_num_token].clone()


class ModelRunner:
    """As SGLang's: a context and metadata for each step, and a graph or none."""

    mambaish_config = None

    def __init__(self, model: torch.nn.Module, log: list[str], context: ModuleType) -> None:
        self.model, self.device, self.tp_group = model, Device(log), Group(log)
        self.server_args = SimpleNamespace(pp_size=1, tp_size=1, dp_size=1)
        self.attn_backend = SimpleNamespace(forward_metadata=torch.zeros(0), free_pages=[0])
        self.decode: Any = None
        self._context = context

    def forward(self, forward_batch: Any) -> Any:
        # SGLang's scheduler changes lists that its attention backend leads to at each step.
        self.attn_backend.free_pages = [*self.attn_backend.free_pages, 0]
        with self._context.forward_context(self._context.ForwardContext(self.attn_backend)):
            can_run = self.decode is not None and self.decode.can_run_graph(forward_batch)
            logits = (self.decode.execute if can_run else self.eager)(forward_batch)
        return SimpleNamespace(logits=logits, can_run_graph=can_run)

    def eager(self, forward_batch: Any) -> torch.Tensor:
        self.attn_backend.forward_metadata = forward_batch.seq_lens
        with self._context.forward_context(self._context.ForwardContext(self.attn_backend)):
            return self.model(forward_batch.input_ids, forward_batch.positions)


def batch(size: int, seed: int = 0) -> Any:
    """A decode batch of so many requests."""
    draws = torch.Generator().manual_seed(100 * seed + size)
    positions = torch.randint(1, 50, (size,), generator=draws)
    return SimpleNamespace(
        input_ids=torch.randint(16, (size,), generator=draws),
        positions=positions,
        seq_lens=positions + 1,
        batch_size=size,
        forward_mode=SimpleNamespace(name="DECODE"),
    )


def modules(version: str) -> dict[str, ModuleType]:
    """New modules, by name."""
    made: dict[str, ModuleType] = {}

    def add(name: str, **contents: Any) -> ModuleType:
        module = made[name] = ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made.get(parent) or add(parent), last, module)
        return module

    add("sglang", __version__=version)
    add(FULL, FullCudaGraphBackend=_fresh(FullCudaGraphBackend))
    add(BREAKABLE, BreakableCudaGraphBackend=_fresh(BreakableCudaGraphBackend))
    for name, code in ((BREAKS, _BREAKS_CODE), (CONTEXT, _CONTEXT_CODE)):
        exec(compile(code, name, "exec"), vars(add(name)))
    add(MODEL_RUNNER, ModelRunner=_own(ModelRunner))
    decode = add(DECODE, DecodeCudaGraphRunner=_own(DecodeCudaGraphRunner))
    decode.BreakableCudaGraphBackend = made[BREAKABLE].BreakableCudaGraphBackend
    return made


def _fresh(base: type) -> type:
    """A subclass, whose `super()` goes on to work."""
    return type(base.__name__, (base,), {"__module__": "sglang"})


def _own(base: type) -> type:
    """A copy: what graphrt replaces in it is gone with it."""
    names = {name: each for name, each in vars(base).items() if name not in _OF_EVERY_CLASS}
    return type(base.__name__, base.__bases__, names)


_OF_EVERY_CLASS = ("__dict__", "__weakref__")
