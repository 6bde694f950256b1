"""Autocast and other settings that a forward changes: no piece may end while one is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import CompileError
from graphrt.compile.private_torch.operators import autocast_calls, inference_mode_calls
from graphrt.core.base.thread_mode import autocast_depth
from graphrt.core.base.torch_names import (
    attention_kernels,
    attention_order,
    set_attention_kernels,
    set_attention_order,
)
from graphrt.core.capture.refusals import Refusal

_OTHER_SETTING = Refusal(
    CompileError,
    "the forward enters another setting of torch around a splitting operator, which a replay runs "
    "by itself",
    expected="settings that are as around the forward where an operator splits it",
    advice="enter it in the body of the operator, or around the whole forward",
)


def drop_inference_mode(graph: fx.Graph) -> None:
    """Remove inference mode from a graph: it runs without gradients anyway, and a compiler that
    fails inside of that mode leaves the thread unable to run any operator."""
    for node in reversed(graph.nodes):
        if node.target in inference_mode_calls():
            graph.erase_node(node)


def check_settings(graph: fx.Graph, is_splitting: Callable[[fx.Node], bool]) -> None:
    """Raise `CompileError` for a splitting operator where another setting of torch is on than
    around the forward, autocast too: a replay runs the operator alone."""
    calls = [node for node in graph.nodes if _sets(node)]
    # If the forward calls a function more than once, the last call restores what it found.
    last = {node.target: _call_text(node) for node in calls}
    times = Counter(node.target for node in calls)
    # Function that sets, or node that enters autocast -> node.
    changed: dict[Any, fx.Node] = {}
    enters, leaves = autocast_calls()
    for node in graph.nodes:
        if node.target is enters:
            changed[node] = node
        elif node.target is leaves:
            changed.pop(node.all_input_nodes[0], None)
        elif _sets(node):
            if times[node.target] == 1 or _call_text(node) != last[node.target]:
                changed[node.target] = node
            else:
                changed.pop(node.target, None)
        elif changed and is_splitting(node):
            entered = next(iter(changed.values())).format_node()
            raise _OTHER_SETTING(f"{entered} before {node.format_node()}")


def restoring_settings(run: Callable[..., Any], graph: fx.Graph) -> Callable[..., Any]:
    """`run`, which restores autocast and other settings that it changes if it raises: traced code
    has no `finally`."""
    kinds = {str(node.args[0]) for node in _enters(graph)}
    recorders = [_settings_now] if any(map(_sets, graph.nodes)) else []
    if kinds:
        recorders.append(partial(_autocast_now, kinds))
    if not recorders:
        return run

    @wraps(run)
    def restoring(*args: Any, **kwargs: Any) -> Any:
        restore = [record() for record in recorders]
        try:
            return run(*args, **kwargs)
        except BaseException:  # `undoing` by hand, as every step comes through here
            for each in restore:
                each()
            raise

    return restoring


def _autocast_now(kinds: Collection[str]) -> Callable[[], None]:
    """A function that restores the present autocast of these types of devices."""
    before = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    ]
    cached, depth = torch.is_autocast_cache_enabled(), autocast_depth()

    def restore() -> None:
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)
        for _ in range(autocast_depth() - depth):
            torch.autocast_decrement_nesting()
        if depth == 0:
            torch.clear_autocast_cache()

    return restore


def _settings_now() -> Callable[[], None]:
    """A function that restores all other settings to their present values."""
    dtype = torch.get_default_dtype()
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    kernels, order = attention_kernels(), attention_order()

    def restore() -> None:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        set_attention_kernels(kernels)
        set_attention_order(order)

    return restore


def _sets(node: fx.Node) -> bool:
    """Whether a node calls a function of torch that changes a setting. Gradients do not count:
    compiled code never has any."""
    if node.op != "call_function" or node.users:
        return False
    name = str(getattr(node.target, "__name__", ""))
    module = str(getattr(node.target, "__module__", None))
    return (
        module.partition(".")[0] == "torch"
        and (name.startswith(("set_", "_set_", "use_")) or node.target is set_attention_kernels)
        and name not in ("_set_grad_enabled", "set_grad_enabled")
    )


def _call_text(node: fx.Node) -> str:
    """A call as text: its target and arguments, with each argument that is a node as its call."""

    def text(value: object) -> str:
        if isinstance(value, fx.Node):
            return _call_text(value)
        if isinstance(value, list | tuple):
            return str([text(each) for each in value])
        return repr(value)

    return f"{node.target}({text(node.args)}, {text([*node.kwargs.items()])})"


def _enters(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is autocast_calls()[0]]
