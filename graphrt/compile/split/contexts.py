"""Autocast and other settings that a forward changes: no piece ends while one is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import CompileError
from graphrt.compile.private_torch.operators import autocast_calls, inference_mode_calls
from graphrt.compile.split.effects import written
from graphrt.compile.split.groups import Roles, is_allocation
from graphrt.compile.trace.sizes import value_of
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
_WRITTEN_UNDER_AUTOCAST = Refusal(
    CompileError,
    "the forward writes a parameter under autocast with a splitting operator in it",
    expected="parameters that stay as they are while autocast is on",
    advice="write it outside of autocast, or make it a buffer",
)


def drop_inference_mode(graph: fx.Graph) -> None:
    """Remove inference mode from a graph: it runs without gradients anyway, and a compiler that
    fails inside of that mode leaves the thread unable to run any operator."""
    for node in reversed(graph.nodes):
        if node.target in inference_mode_calls():
            graph.erase_node(node)


def close_autocast(
    graph: fx.Graph, is_splitting: Callable[[fx.Node], bool], roles: Roles
) -> Callable[[fx.Node], bool]:
    """Give each piece nodes of its own that enter and leave the autocast around it, splitting
    operators too. Returns `is_splitting` for these nodes as well.

    A replay runs a splitting operator alone, without the autocast that the piece before it entered
    at its capture. And no compiler takes a context as an argument of a piece.
    """
    if not _enters(graph):
        return is_splitting
    contexts = _Contexts(graph, is_splitting)
    free = roles.numbers | roles.views | roles.elements
    for node in list(graph.nodes):
        if node.op == "output":
            contexts.close(0)
        elif not contexts.defer(node) and node not in free and _computes(node):
            contexts.enter_before(node)
            contexts.check(
                {*written(node), *roles.roots(n for n in written(node) if n in free)}, node
            )
    for node in reversed(contexts.replaced):
        graph.erase_node(node)
    return lambda node: contexts.sides[node] if node in contexts.sides else is_splitting(node)


def check_settings(graph: fx.Graph, is_splitting: Callable[[fx.Node], bool]) -> None:
    """Raise `CompileError` for a splitting operator where another setting of torch is on than
    around the forward: a replay runs the operator alone."""
    calls = [node for node in graph.nodes if _sets(node)]
    # If the forward calls a function more than once, the last call restores what it found.
    last = {node.target: _call_text(node) for node in calls}
    times = Counter(node.target for node in calls)
    changed: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if _sets(node):
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


class _Contexts:
    """Makes nodes that enter and leave autocast within pieces, for the nodes `replaced`."""

    def __init__(self, graph: fx.Graph, is_splitting: Callable[[fx.Node], bool]) -> None:
        self.sides: dict[fx.Node, bool] = {}
        """A node that was made -> whether it is with the splitting operators."""
        self.replaced: list[fx.Node] = []
        self._graph = graph
        self._is_splitting = is_splitting
        self._enter, self._exit = autocast_calls()
        # The forward's nodes whose autocast is on at the present node, the outermost first.
        self._open_in_forward: list[fx.Node] = []
        # Node of the forward that enters autocast -> how many nodes of pieces were made for it.
        self._entries: Counter[fx.Node] = Counter()
        # The same node -> a node that writes a weight under it.
        self._writers: dict[fx.Node, fx.Node] = {}
        # What the present piece has open: (the forward's node, the piece's copy of it).
        self._open_in_piece: list[tuple[fx.Node, fx.Node]] = []
        # The last operator, behind which contexts are left, and whether it is a splitting one.
        self._last: fx.Node | None = None
        self._side = False

    def defer(self, node: fx.Node) -> bool:
        """Note a node that enters or leaves autocast, until an operator needs it; else False."""
        if node.target is self._enter:
            self._open_in_forward.append(node)
        elif node.target is self._exit:
            self._open_in_forward.remove(node.all_input_nodes[0])
        else:
            return False
        self.replaced.append(node)
        return True

    def enter_before(self, node: fx.Node) -> None:
        """Enter, before a node, the contexts that the forward has open there; leave all others."""
        side = self._is_splitting(node)
        kept = _common_prefix([each for each, _ in self._open_in_piece], self._open_in_forward)
        self.close(kept if side is self._side else 0)
        self._side = side
        with self._graph.inserting_before(node):
            for each in self._open_in_forward[len(self._open_in_piece) :]:
                entry = self._graph.node_copy(each)
                self.sides[entry] = side
                self._entries[each] += 1
                self._open_in_piece.append((each, entry))
        self._last = node

    def check(self, changed: set[fx.Node], node: fx.Node) -> None:
        """Raise `CompileError` where a weight is written inside of autocast that has to be entered
        more than once: autocast keeps the cast of a weight until it is left."""
        # Autocast keeps casts of leaves only. Views are left out: their `is_leaf` may raise.
        values = [value_of(each) for each in changed if each.op in ("placeholder", "get_attr")]
        if any(isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf for v in values):
            self._writers.update(dict.fromkeys(self._open_in_forward, node))
        for each in self._open_in_forward:
            if self._entries[each] > 1 and each in self._writers:
                raise _WRITTEN_UNDER_AUTOCAST(self._writers[each].format_node())

    def close(self, kept: int) -> None:
        """Leave all contexts but the first `kept`, right after the last node that needed them."""
        while len(self._open_in_piece) > kept:
            assert self._last is not None
            _, entry = self._open_in_piece.pop()
            with self._graph.inserting_after(self._last):
                self._last = self._graph.call_function(self._exit, (entry,))
            self.sides[self._last] = self._side


def _enters(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is autocast_calls()[0]]


def _computes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module") and not is_allocation(node)


def _common_prefix(one: Sequence[fx.Node], other: Sequence[fx.Node]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] is other[count]:
        count += 1
    return count
