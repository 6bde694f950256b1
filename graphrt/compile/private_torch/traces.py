"""Private names of Dynamo, and of symbolic sizes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from graphrt.compile.private_torch.names import NAMES, private_attribute
from graphrt.compile.private_torch.sources import size_place
from graphrt.core.base.log import logger

_NO_TRACE = "modules cannot be compiled"
_MARK_DYNAMIC = NAMES.declare("torch._dynamo.mark_dynamic", without=_NO_TRACE)
_MARK_UNBACKED = NAMES.declare(
    "torch._dynamo.decorators.mark_unbacked", without="leave dynamic_shapes='unbacked' out"
)
_BYTECODE_HOOK = NAMES.declare(
    "torch._dynamo.convert_frame.register_bytecode_hook", without=_NO_TRACE
)
_TRANSLATOR = NAMES.declare(
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx", without=_NO_TRACE
)
_CONTEXT = NAMES.declare("torch._guards.TracingContext.get", without=_NO_TRACE)
_SHAPES_PATCH = NAMES.declare(
    "torch.fx.experimental._config.patch",
    without="leave dynamic_shapes='backed_size_oblivious' out",
)
_INTERPRET = NAMES.declare("torch.utils._sympy.interp.sympy_interp", without=_NO_TRACE)
_PYTHON = NAMES.declare("torch.utils._sympy.reference.PythonReferenceAnalysis", without=_NO_TRACE)
_FAKE_MODE = NAMES.declare(
    "torch._subclasses.fake_tensor.FakeTensorMode", without="leave compile_sizes out"
)

torch_check: Callable[..., None] = NAMES.take(
    "torch._check", without="two arguments cannot share a batch axis"
)
"""The function itself: Dynamo knows it by identity."""


class SideEffects(Protocol):
    """Dynamo's record of the objects that a forward changes. `variable`s are Dynamo's own objects;
    `keepalive` are the forward's."""

    id_to_variable: Mapping[int, Any]
    keepalive: Sequence[Any]

    def is_modified(self, variable: Any) -> bool: ...


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Trace a dimension as a symbol whose known value is the tensor's size."""
    _MARK_DYNAMIC.find()(tensor, dim)


def mark_unbacked(tensor: torch.Tensor, dim: int, shape_id: str | None = None) -> None:
    """Trace a dimension as a symbol without a value; one symbol for all of a `shape_id`."""
    _MARK_UNBACKED.find()(tensor, dim, shape_id=shape_id)


@contextmanager
def new_code_shown(hook: Callable[[CodeType, CodeType], None]) -> Iterator[None]:
    """`hook` gets the code of each function that Dynamo rewrites in the block, old and new."""
    handle = _BYTECODE_HOOK.find()(hook)
    try:
        yield
    finally:
        handle.remove()


def size_oblivious() -> AbstractContextManager[None]:
    """Symbols of the block are never taken for 0 or 1."""
    block: AbstractContextManager[None] = _SHAPES_PATCH.find()(backed_size_oblivious=True)
    return block


def side_effects() -> SideEffects:
    """The side effects of the forward that is being traced; only inside of a backend."""
    effects: SideEffects = private_attribute(_TRANSLATOR.find()().output, "side_effects", _NO_TRACE)
    return effects


class TraceFacts(NamedTuple):
    """What a trace relies on: relations of sizes, in sympy, with the lines that decide by them; the
    place of each symbol in the arguments (Dynamo's name of a tensor, a dimension); and the code
    that it went through."""

    conditions: Mapping[Any, str]
    places: Mapping[Any, tuple[str, int]]
    codes: tuple[CodeType, ...]


def trace_facts() -> TraceFacts:
    """The facts of this thread's trace up to now; only inside of a backend."""
    context = _CONTEXT.find()()
    env = context.fake_mode.shape_env
    codes = tuple(private_attribute(context, "traced_code", _NO_TRACE) or ())
    if env is None:
        return TraceFacts({}, {}, codes)
    places: dict[Any, tuple[str, int]] = {}
    for symbol, sources in private_attribute(env, "var_to_sources", _NO_TRACE).items():
        for source in sources:
            if place := size_place(source):
                places.setdefault(symbol, place)
    guards = private_attribute(env, "guards", _NO_TRACE)
    return TraceFacts({each.expr: _line_of(each) for each in guards}, places, codes)


def _line_of(guard: Any) -> str:
    """The line of the forward for which a trace relies on a relation of sizes; "" if unknown."""
    # Torch has it as "code  # some/of/the/path.py:1 in forward".
    code, _, place = (getattr(guard.sloc, "maybe_user_loc", None) or "").rpartition("  # ")
    return f"{place.rpartition('/')[2]}: {code}" if code else place


def relied_on(values: Sequence[Any]) -> tuple[Any, ...]:
    """The relations of sizes, in sympy, that a trace relies on by now: the trace that has the
    symbolic sizes of `values`, tensors and numbers. () if no size is symbolic."""
    env = _shape_env(values)
    return () if env is None else tuple(guard.expr for guard in env.guards)


def known_of_sizes(values: Sequence[Any]) -> dict[str, object]:
    """All that the trace of `values` knows of its sizes, as texts: relations, ranges, and relations
    of sizes that data decide, which it only asserts."""
    env = _shape_env(values)
    if env is None:
        return {}
    asserted = private_attribute(env, "deferred_runtime_asserts", _NO_TRACE).values()
    ranges = private_attribute(env, "var_to_range", _NO_TRACE).items()
    return {
        "relations": sorted({str(guard.expr) for guard in env.guards}),
        "asserted": sorted({str(each.expr) for several in asserted for each in several}),
        **{f"range of {symbol}": str(within) for symbol, within in ranges},
    }


def _shape_env(values: Sequence[Any]) -> Any:
    """The shape environment of the symbolic sizes of `values`; None if there are none."""
    sizes = (size for each in values for size in getattr(each, "shape", (each,)))
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    return None if symbolic is None else private_attribute(symbolic.node, "shape_env", _NO_TRACE)


def expressions(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> tuple[Any, Any]:
    """The sympy expression of a size: with the trace's substitutions for symbols, and without."""
    return size.node.expr, private_attribute(size.node, "_expr", _NO_TRACE)


def computed(expression: Any, symbols: Mapping[Any, fx.Proxy]) -> fx.Proxy:
    """Compute an expression of sizes by nodes, in the graph of the proxies of its `symbols`."""
    proxy: fx.Proxy = _INTERPRET.find()(_PYTHON.find(), symbols, expression)
    return proxy


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors that are made in the block have no memory."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode: AbstractContextManager[Any] = _FAKE_MODE.find()(shape_env=ShapeEnv())
    return mode


_LOGGERS = ("torch._guards", "torch._subclasses.fake_tensor")
"""They log an error with its traceback and guards, and torch raises it too."""


@contextmanager
def errors_told_once() -> Iterator[None]:
    """Errors that torch logs in the block, before it raises them, are shown with GRAPHRT_LOG=DEBUG
    only: graphrt raises its own error with the line and the reason."""
    owner = threading.get_ident()

    def is_shown(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR or record.thread != owner:
            return True
        logger.debug("torch: %s", record.getMessage())
        return False

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for each in loggers:
        each.addFilter(is_shown)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_shown)
