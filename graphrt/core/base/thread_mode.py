"""Two ways to see the operators of one thread: a dispatch mode, which changes only its stack and
costs microseconds an operator, and a dispatch key, which costs only at operators that write."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch

from graphrt.core.base import torch_names as private
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import RefusedOpError
from graphrt.core.base.torch_names import count_dispatch_modes, dispatch_modes, has_kernel

T = TypeVar("T")


class ThreadMode(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that is nothing but an entry on the stack of its thread.

    Entering a mode the ordinary way also sets flags of the whole process, which two threads that
    capture, or update tasks, at once would leave set.
    """

    takes_apart = True
    """Whether `handle` gets the parts of composite operators, and never one as a whole."""

    @private.untraced
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `handle` under autocast and dispatch keys with which operators compute what they do
        without a mode."""
        cast = _cast_inside(func)
        if cast:
            with private.as_it_was_called():
                cast = [*filter(torch.is_autocast_enabled, cast)]
        if cast and func.name() in _UNKNOWN:
            raise RefusedOpError(
                f"under autocast the dtype of {func} depends on its caller, which a graph lacks",
                op=str(func),
                advice="call it inside of torch.autocast(..., enabled=False)",
            )
        excluded = private.conjugation_resolved(private.excluded_keys().raw_repr())
        with private.dispatch_keys(private.included_keys(), excluded):
            for kind in cast:  # until the guard ends
                torch.set_autocast_enabled(kind, True)
            if self.takes_apart and is_taken_apart(func):
                result = self.take_apart(func, args, kwargs or {})
            else:
                result = self.handle(func, types, args, kwargs or {})
        if cast:
            # A torch.autocast that the forward entered caches casts. A graph that records the whole
            # operator would read casts that were made inside of it.
            torch.clear_autocast_cache()
        return result

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator of this thread, which is to be called."""
        raise NotImplementedError

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Lets Dynamo compile with the mode on the stack; a tape records the call as a whole.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import all of Dynamo at the first operator

    def __enter__(self) -> Any:
        private.push_dispatch_mode(self)
        return self

    def __exit__(self, *exc: object) -> None:
        private.pop_dispatch_mode()

    def around(self, function: Callable[[], T]) -> T:
        """Call `function` with this mode innermost; whatever interrupts it, the mode is left."""
        depth = count_dispatch_modes()
        try:
            private.push_dispatch_mode(self)
            result = function()
            private.pop_dispatch_mode()
            return result
        except BaseException:  # in place of `@undoing`: a trial enters many modes
            while count_dispatch_modes() > depth:
                private.pop_dispatch_mode()
            raise

    def take_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Issue what a composite operator is made of under this mode, from inside its handler.

        Under inference mode torch hands it over as a whole. Called as a whole, its parts would be
        seen by no mode, and autocast would not reach them.
        """
        name = func.name()
        # Torch itself notes that the whole is a view; it must not note so of the parts.
        if has_kernel(name, "ADInplaceOrView"):
            with self:
                return private.run_composite(func, args, kwargs)
        with private.as_it_was_called():
            # Autocast has cast the arguments of an operator that it has a kernel for, and casts
            # nothing in its parts.
            for key, kind in _AUTOCAST.items():
                if has_kernel(name, key) and torch.is_autocast_enabled(kind):
                    torch.set_autocast_enabled(kind, False)
            with self:
                return private.run_composite(func, args, kwargs)


_AUTOCAST = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda", "AutocastPrivateUse1": "privateuseone"}
"""dispatch key of autocast's kernels -> the kind of device that they are for"""
_BUILT_IN = frozenset({"aten", "prim", "prims"})
_CALLED_BY = {"aten::_trilinear": "aten::bilinear"}
"""Built-in operators whose kernels call others, and what calls them: where autocast has a kernel
for that, such as for `bilinear` on CUDA, it has cast already, and leaves the rest alone."""
_UNKNOWN = {"aten::linalg_pinv.atol_rtol_tensor"}
"""Called by `linalg.pinv` and by `pinverse`, of which autocast has a kernel for one."""


@cache
def is_taken_apart(func: Any) -> bool:
    """Whether an operator has no kernel of its own on any device; not a higher-order one."""
    if getattr(func, "_schema", None) is None:
        return False
    name = func.name()
    try:
        return has_kernel(name, "CompositeImplicitAutograd") and not any(
            has_kernel(name, key) for key in ("CPU", "CUDA", "PrivateUse1")
        )
    except RuntimeError:
        # One of TorchScript's, such as prim::device, of which the dispatcher knows nothing.
        return False


@cache
def _cast_inside(func: Any) -> list[str]:
    """The kinds of device on which autocast casts in the operators that this one calls, as it has
    no kernel for this one. In a mode's handler it is off, and would not."""
    if getattr(func, "_schema", None) is None:
        return []
    name = func.name()
    if func.namespace in _BUILT_IN and name not in _CALLED_BY and name not in _UNKNOWN:
        return []
    name = _CALLED_BY.get(name, name)
    return [kind for key, kind in _AUTOCAST.items() if not has_kernel(name, key)]


def without_gradients(function: Callable[[], T]) -> T:
    """Call `function` without a graph of gradients; whatever interrupts it, the caller's setting
    is restored, which `torch.no_grad()` cannot promise."""
    if not torch.is_grad_enabled():
        return function()
    try:
        torch.set_grad_enabled(False)
        result = function()
        torch.set_grad_enabled(True)
        return result
    except BaseException:  # in place of `@undoing`, for speed: steps come here
        torch.set_grad_enabled(True)
        raise


@undoing
def where_asked(function: Callable[[], T], undo: Undo, gradients: bool, inference: bool) -> T:
    """Call `function`, to which torch reports `gradients` and `inference` mode as on or off. No
    graph of gradients is made either way."""
    undo.later(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
    if inference is not torch.is_inference_mode_enabled():
        undo.enter(private.inference_guard(inference))
    undo.enter(private.below_autograd())
    torch.set_grad_enabled(gradients)
    return function()


def without_kept_casts(undo: Undo) -> None:
    """Until `undo`: autocast caches no casts, and its cache is empty. It would cache a cast of each
    weight as long as it is on. That cast does not change when the weight is written, and if a
    capture has made it, it is in the graph's memory. Where autocast is off nothing is changed: one
    that is entered inside empties the cache at its end."""
    # Asked both ways: autocast can be turned on without being entered.
    if not autocast_depth() and not any(map(torch.is_autocast_enabled, _AUTOCAST.values())):
        return
    undo.later(partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()))
    torch.set_autocast_cache_enabled(False)
    undo.later(torch.clear_autocast_cache)
    torch.clear_autocast_cache()


def autocast_depth() -> int:
    """How often autocast was entered. Torch tells that only by counting up, and down again. Both
    calls are made from C: an interrupt between them would leave autocast entered, which would then
    keep its casts for ever."""
    up = iter(torch.autocast_increment_nesting, None)
    down = iter(torch.autocast_decrement_nesting, None)
    _, depth = next(zip(up, down, strict=False))
    return depth


def set_for_capture(undo: Undo) -> None:
    """Until `undo`: no graph of gradients, and `without_kept_casts`."""
    undo.later(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
    torch.set_grad_enabled(False)
    without_kept_casts(undo)


def unseen(function: Callable[[], T]) -> T:
    """Call `function` where no dispatch mode, autograd nor inference mode sees what it does.

    Mostly none of them is on, and to find that out is far cheaper than to leave them.
    """
    if (
        count_dispatch_modes() == 0
        and not torch.is_inference_mode_enabled()
        and not torch.is_grad_enabled()
    ):
        return function()
    return _without_modes(function, everything=True)


@undoing
def _without_modes(function: Callable[[], T], undo: Undo, *, everything: bool = False) -> T:
    """Call `function` without dispatch modes; with `everything` also without autograd and inference
    mode."""
    undo.enter(private.without_dispatch_modes())
    if not everything:
        return function()
    with private.inference_guard(False):
        torch.set_grad_enabled(False)  # until the guard ends, which restores that too
        return function()


def outside_modes(function: Callable[[], T]) -> T:
    """Call `function` with all dispatch modes off. Inference mode stays on, which `unseen` leaves:
    updated tasks of a replay write tensors that were made in inference mode."""
    if count_dispatch_modes() == 0:
        return function()
    return _without_modes(function)


FREE_KEYS = "TESTING_ONLY_"
"""Prefix of the dispatch keys that torch leaves free. They are above autograd, autocast and
transforms, so that none of them is disturbed."""
_free_keys: dict[Any, Any] = {}
"""dispatch key that graphrt uses -> the library that holds its fallback"""
WATCH_KEY = f"{FREE_KEYS}GenericMode"
"""The key by which writes are watched in place of a mode."""


@cache
def free_key(name: str) -> Any:
    """A dispatch key that torch leaves free. For an operator without a kernel of this key C++ goes
    on to the next key."""
    key = private.key_named(name)
    library = _free_keys[key] = private.kernel_library("IMPL", "_", name)
    library.fallback(name, torch.library.fallthrough_kernel, False)
    # Higher-order operators are in Python, and do not use that fallback.
    private.fallthrough_of_new_ones.append(key)
    for operator in private.higher_order_operators.values():
        operator.fallthrough(key)
    return key


def without_free_keys(function: Callable[[], T]) -> T:
    """Call `function` without the dispatch keys that `free_key` has taken: as in a thread that
    captures nothing."""
    included = private.included_keys()
    # A copy: another thread may take one meanwhile.
    for key in [*_free_keys]:
        included = included.remove(key)
    with private.dispatch_keys(included, private.excluded_keys()):
        return function()


watch_key = partial(free_key, WATCH_KEY)


def is_watched() -> bool:
    """Whether somebody sees the operators of this thread: a dispatch mode, or by `watch_key`."""
    return count_dispatch_modes() > 0 or private.is_included(watch_key())


def remove_dispatch_mode(mode: ThreadMode) -> None:
    """Leave `mode`; modes that were entered after it stay as they are."""
    stack = dispatch_modes()
    if mode not in stack:
        return
    above = stack[stack.index(mode) + 1 :]
    for _ in range(len(above) + 1):
        private.pop_dispatch_mode()
    for other in above:
        private.push_dispatch_mode(other)
