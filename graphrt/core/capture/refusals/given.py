"""Tensors that a captured call is given, and host work inside of it, which no replay does again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphrt.core.base import PageableCopyError, RefusedOpError, tree
from graphrt.core.capture.refusals.source import user_source

_COPIES = ("aten.copy_.default", "aten._to_copy.default")


class Given:
    """What a graph on a device must leave alone: the shape and the memory of the caller's tensors,
    the numbers in those that lie on the host, and the host's generator.

    `own` says that the tensors were made for the call, which may then give them any shape; `bake`
    that numbers of the host may be those of the capture for ever.
    """

    def __init__(
        self, values: Any, device_type: str, *, own: bool = False, bake: bool = False
    ) -> None:
        tensors = [t for t in tree.tensors(values) if t.layout is torch.strided]
        self._on_device = device_type != "cpu"
        self._kept = [] if own else tensors
        refuses = self._on_device and not bake
        self._on_host = [t for t in tensors if refuses and t.device.type == "cpu" and t.numel()]
        self._hosts = set(map(_memory, self._on_host))
        self._lifts_later = False
        self._places: list[object] = []
        self._generator: torch.Tensor | None = None
        self._looked = self._drew = False

    def __bool__(self) -> bool:
        """Whether operators have to be looked at: where other threads run, only they tell whose
        draws have moved the host's generator."""
        return bool(self._hosts) or (self._on_device and threading.active_count() > 1)

    def lift(
        self, is_constant: Callable[[torch.Tensor], bool] | None, *, later: bool = False
    ) -> None:
        """Leave tensors that are constants to the capture, which lifts them; `later` says that it
        does not, and that the next try will."""
        if is_constant is not None:
            self._hosts -= {_memory(each) for each in self._on_host if is_constant(each)}
        self._lifts_later = later

    def begin(self) -> None:
        """A segment begins."""
        self._places = list(map(tree.identity, self._kept))
        self._generator = torch.default_generator.get_state() if self._on_device else None
        self._looked = self._drew = False

    def end(self) -> None:
        """A segment ends; raises `RefusedOpError` for what a replay of it would not do again."""
        for tensor, before in zip(self._kept, self._places, strict=True):
            if tree.identity(tensor) != before:
                raise RefusedOpError(
                    "the forward gives a tensor of its caller another shape or other memory, which "
                    "no replay repeats",
                    got=f"now {tensor.dtype} {tuple(tensor.shape)}",
                    advice="change a view of it: x.unsqueeze(0), x.view(...)",
                )
        before_it, self._generator = self._generator, None
        ours = self._drew or not self._looked
        if (
            before_it is not None
            and ours
            and not torch.equal(before_it, torch.default_generator.get_state())
        ):
            raise RefusedOpError(
                "random numbers were drawn on the host: every replay would have those of the "
                "capture",
                advice="draw them on the device (device=...), or in an eager break",
            )

    def check(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `RefusedOpError` if an operator reads or writes a tensor of the caller's that lies
        on the host, or `PageableCopyError` where a try that lifts constants may take it; views of
        it are made, and pinned memory is copied. Notes draws on the host."""
        self._looked = True
        self._drew = self._drew or _draws_on_host(func, args, kwargs)
        if not self._hosts or _makes_a_view(func):
            return
        for tensor in tree.tensors((args, kwargs)):
            on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
            if on_host and _memory(tensor) in self._hosts and not _is_copied(func, tensor):
                refused = PageableCopyError if self._lifts_later else RefusedOpError
                raise refused(
                    "an argument lies on the host: every replay would have its numbers of the "
                    "capture, and none would write it",
                    op=str(func),
                    got=f"{tensor.dtype} {tuple(tensor.shape)}",
                    source=str(user_source() or "") or None,
                    advice="give the forward a tensor of the device, or a Python number that is "
                    "part of what the graph is for",
                )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_copied(func: Any, tensor: torch.Tensor) -> bool:
    """Whether an operator copies pinned memory, which every replay does anew."""
    return str(func) in _COPIES and tensor.is_pinned()


def _makes_a_view(func: Any) -> bool:
    """Whether an operator returns what it is given, unread."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in schema.returns)


def _draws_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws from the host's generator, and not from a device's."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    given = [tensor.device.type for tensor in tree.tensors((args, kwargs))]
    asked = kwargs.get("device")
    devices = given or ["cpu" if asked is None else torch.device(asked).type]
    return "cpu" in devices
