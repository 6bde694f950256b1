"""SGLang's marked functions (`eager_on_graph`) as graphrt's eager breaks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from graphrt import eager_break
from graphrt.hosts.sglang.versions import CELLS
from graphrt.lowlevel import current_capture


def breaking(marked: Any) -> Callable[..., Any]:
    """A function that SGLang has marked: a break in captures of graphrt's, else as SGLang has it.
    Of its closure graphrt takes the function itself, and what stands for it in a capture."""
    cells = dict(zip(marked.__code__.co_freevars, marked.__closure__, strict=True))
    stub, inner = (cells[name].cell_contents for name in CELLS)
    at_break = eager_break(inner, capture_stub=stub)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        capture = current_capture()
        if capture is None or not capture.breakable:
            return marked(*args, **kwargs)
        return at_break(*args, **kwargs)

    return call


def marking(eager_on_graph: Callable[..., Any], code: CodeType) -> Callable[..., Any]:
    """`eager_on_graph` for functions that are marked from now on."""

    @functools.wraps(eager_on_graph)
    def mark(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        decorator = eager_on_graph(*args, **kwargs)

        def decorated(inner: Callable[..., Any]) -> Any:
            marked = decorator(inner)
            return breaking(marked) if _is_marked(marked, code) else marked

        return decorated

    return mark


def marked_functions(code: CodeType) -> Iterator[tuple[Any, str, Any]]:
    """(module, name, function) of what SGLang's modules have marked so far."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "sglang":
            for name, value in list(vars(module).items()):
                if _is_marked(value, code):
                    yield module, name, value


def _is_marked(value: Any, code: CodeType) -> bool:
    return isinstance(value, FunctionType) and value.__code__ is code
