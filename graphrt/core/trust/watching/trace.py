"""What a run of a forward did, operator by operator, so that two runs can be compared."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphrt.core.base.thread_mode import unseen
from graphrt.core.capture.source import Source

LIFT_FRESH = torch.ops.aten.lift_fresh.default
"""What every tensor made from Python data, or from a NumPy array, goes through."""

_AS_THEY_ARE = (int, bool, str, type(None), torch.dtype)
_SHORT = 64
"""A tensor of Python data with at most so many values is described by them, a larger one by a sum
of its bytes."""


class Op(NamedTuple):
    """One operator: its overload, and what describes its arguments, tensors not by their values."""

    func: Any
    arguments: tuple[object, ...]

    def __str__(self) -> str:
        return str(self.func)


class At(NamedTuple):
    """A tensor from outside, which a graph finds at this address at every replay."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Of(NamedTuple):
    """A tensor that the run itself made."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Values(NamedTuple):
    """A tensor that was made of Python data."""

    values: str

    def __str__(self) -> str:
        return self.values


class Trace(list[Op]):
    """The operators of one run, in their order; the rest is by their places in it.

    `constants` are those that made a tensor of Python data that was used, `constants_of_parts` such
    ones of eager parts, which are made anew at every replay; `sums` are of the live rows of
    results, where somebody asked for them.
    """

    def __init__(
        self,
        ops: Iterable[Op] = (),
        *,
        keeps_sources: bool = False,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """`rows` are all rows and the live ones, where sums are wanted."""
        super().__init__(ops)
        self.keeps_sources = keeps_sources
        self.rows = rows
        self.sources: list[Source | None] = []
        self.sums: list[torch.Tensor | None] = []
        self.constants: set[int] = set()
        self.constants_of_parts: set[int] = set()

    def note_sum(self, result: Any) -> None:
        """Note the sum over the live rows of a result that has all rows, without waiting for the
        device."""
        assert self.rows is not None
        rows, live = self.rows
        if (
            not isinstance(result, torch.Tensor)
            or result.dim() == 0
            or result.shape[0] != rows
            or result.layout is not torch.strided
            or result.is_complex()
        ):
            self.sums.append(None)
        else:
            self.sums.append(unseen(lambda: result.detach()[:live].to(torch.float64).abs().sum()))

    def at_source(self, found: tuple[int, str] | None) -> str:
        """What was found at a place, with the line of code there; "" for None."""
        if found is None:
            return ""
        place, text = found
        source = self.sources[place] if place < len(self.sources) else None
        return text if source is None else f"{text} at {source}"

    def first_mixed(self, alone: Trace, rounding: float) -> tuple[int, str] | None:
        """The first operator whose live rows are not what they are in a run without padding."""
        end = len(self)
        if [op.func for op in self] != [op.func for op in alone]:
            found = first_difference(self, alone, same_size=False)
            end = end if found is None else found[0]
        for place, (ours, theirs) in enumerate(zip(self.sums[:end], alone.sums, strict=False)):
            if ours is None or theirs is None:
                continue
            a, b = ours.item(), theirs.item()
            if abs(a - b) > rounding * max(abs(a), abs(b)) or (a != a) != (b != b):
                end = place
                break
        return (end, str(self[end])) if end < len(self) else None

    def first_other_data(self, then: Trace, *, has_parts: bool) -> tuple[str, str] | None:
        """What this run made a tensor of that an earlier one of the same size made of other Python
        data, and used: the data now, and then. With `has_parts` those of eager parts do not
        count."""
        for place, (ours, theirs) in enumerate(zip(self, then, strict=False)):
            if ours.func is not theirs.func:
                return None
            if ours.func is not LIFT_FRESH or ours.arguments == theirs.arguments:
                continue
            is_used = place in self.constants or place in then.constants
            if is_used and not (has_parts and place in self.constants_of_parts):
                told = self if self.keeps_sources else then
                return told.at_source((place, str(ours.arguments[0]))), str(theirs.arguments[0])
        return None


def arguments_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Mapping[int, object]
) -> tuple[Any, ...]:
    """The arguments of one operator as two runs can compare them; `tensors` are those among them,
    `At` or `Of`, by `id`."""
    found = []
    for each in (*args, *kwargs.items()):
        if type(each) in _AS_THEY_ARE:
            found.append(each)
        else:
            found.append(tensors.get(id(each)) or _described(each, tensors))
    return tuple(found)


def _described(value: Any, tensors: Mapping[int, object]) -> object:
    if isinstance(value, torch.Tensor):
        return tensors[id(value)]
    if isinstance(value, list | tuple):
        return tuple(_described(each, tensors) for each in value)
    if isinstance(value, float | complex):
        return repr(value)  # nan is not equal to itself, and 0.0 is equal to -0.0
    return value if isinstance(value, _AS_THEY_ARE) else repr(value)


def made_of_data(tensor: torch.Tensor) -> object:
    """What describes a tensor that was made of Python data."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return Of(tuple(tensor.shape), tensor.dtype)
    if tensor.numel() <= _SHORT:
        return Values(repr(tensor.tolist()))
    at_hand = tensor.detach().to("cpu").contiguous()
    data = ctypes.string_at(at_hand.data_ptr(), at_hand.numel() * at_hand.element_size())
    return Values(f"{tuple(tensor.shape)} values, CRC {zlib.crc32(data):08x}")


def first_difference(now: Trace, then: Trace, *, same_size: bool) -> tuple[int, str] | None:
    """The first operator that a graph's run did otherwise, as its place and what differs; None.

    Between runs of two sizes only what does not follow from the size is compared: operators,
    fractions, texts, and where memory from outside is.
    """
    for place, (ours, theirs) in enumerate(zip(now, then, strict=False)):
        if ours.func is not theirs.func:
            return place, f"{ours} where the graph has {theirs}"
        if ours.arguments == theirs.arguments:
            continue
        if same_size or not _alike(ours.arguments, theirs.arguments):
            return place, f"{ours}{_text(ours, theirs, same_size)}"
    if len(now) != len(then):
        longer = now if len(now) > len(then) else then
        return min(len(now), len(then)), f"{longer[min(len(now), len(then))]}: only one has it"
    return None


def first_other(now: Trace, captured: Sequence[Any]) -> tuple[int, str] | None:
    """The first operator that a run issued otherwise than a capture, whose operators are known by
    their overloads alone, as its place and in words; None where they are the same."""
    for place, (ours, theirs) in enumerate(zip(now, captured, strict=False)):
        if ours.func is not theirs:
            return place, f"{ours} where the capture has {theirs}"
    if len(now) == len(captured):
        return None
    place = min(len(now), len(captured))
    if len(now) > place:
        return place, f"{now[place]}, which the capture has not"
    return place, f"none where the capture has {captured[place]}"


def _text(ours: Op, theirs: Op, same_size: bool) -> str:
    for mine, other in zip(ours.arguments, theirs.arguments, strict=False):
        if mine != other and (same_size or not _alike(mine, other)):
            return f": {_short(mine)} where the graph has {_short(other)}"
    return ""


def _short(value: object) -> str:
    if isinstance(value, At):
        return f"a tensor {value.shape} at {value.address:#x}"
    if isinstance(value, Of):
        return f"a tensor {value.shape} of {value.dtype}"
    return str(value)[:80]


def _alike(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, At) and isinstance(theirs, At):
        return ours.address == theirs.address
    if isinstance(ours, Of | Values) or type(ours) is int:
        return type(ours) is type(theirs)
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and not isinstance(ours, At):
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    return bool(ours == theirs)
