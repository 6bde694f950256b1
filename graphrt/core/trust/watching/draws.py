"""Random numbers of a padded run, which the run without padding is given too.

A run on fewer rows draws fewer numbers, so rows are not what they are with padding, though none is
mixed with another. Here each operator that draws does it again at the padded size, from the same
state of the generators, and the live rows of that are what the run goes on with.

1. `Draws.record` calls the operators of the padded run, and notes those that draw.
2. `Draws.repeat` calls those of the run without padding, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphrt.core.base import inference_guard, unseen
from graphrt.core.trust.generators import Generators, of_torch
from graphrt.core.trust.watching.operators import facts_of, written


class _Draw(NamedTuple):
    """One operator that has drawn: its arguments, of tensors the shapes, and the states of
    the generators before it."""

    func: Any
    shapes: Any
    before: list[Any]


class Draws:
    """What one padded run has drawn; `lost` says that another run has drawn otherwise."""

    def __init__(self, generators: Generators) -> None:
        self._generators = generators
        self._found: list[_Draw] = []
        self._next = 0
        self.lost = False

    def like(self, other: Draws) -> bool:
        """Whether two runs have drawn as many numbers, in the same order."""
        ours, theirs = ([each[:2] for each in own._found] for own in (self, other))
        return ours == theirs

    def record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator that may draw, in the padded run."""
        draw = _Draw(func, _shapes_of((args, dict(kwargs))), self._generators.take())
        result = func(*args, **kwargs)
        if self._drew(draw.before):
            self._found.append(draw)
        return result

    def repeat(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator that may draw, in a run on the live rows alone."""
        draw = self._found[self._next] if self._next < len(self._found) else None
        wide = None
        if draw is not None:
            unseen(lambda: self._generators.restore(draw.before))
            # Before the call: it may write what it is given.
            wide = unseen(lambda: _widened_or_none((args, dict(kwargs)), draw.shapes))
        before = self._generators.take()
        result = func(*args, **kwargs)
        if not self._drew(before):
            return result
        self._next += 1
        if draw is None or wide is None or draw.func is not func:
            self.lost = True
        else:
            unseen(lambda: self._again(draw, wide, result, (args, kwargs)))
        return result

    def _again(self, draw: _Draw, wide: Any, result: Any, given: tuple[Any, Any]) -> None:
        """Draw as many as the padded run has, and take the live rows of it."""
        self._generators.restore(draw.before)
        args, kwargs = wide
        found, facts = draw.func(*args, **kwargs), facts_of(draw.func)
        _take_rows(result, found)
        _take_rows([*written(facts, *given)], [*written(facts, args, kwargs)])

    def _drew(self, before: list[Any]) -> bool:
        then, now = of_torch(before), of_torch(self._generators.take())
        return unseen(lambda: not all(map(torch.equal, then, now)))


def draws_numbers(func: Any) -> bool:
    """Whether an operator says that it may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _shapes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, list | tuple):
        return [_shapes_of(each) for each in value]
    if isinstance(value, dict):
        return {name: _shapes_of(each) for name, each in value.items()}
    return value


class _OtherShape(Exception):
    """Arguments of two runs are not alike."""


def _widened_or_none(value: Any, wanted: Any) -> Any:
    try:
        return _widened(value, wanted)
    except _OtherShape:
        return None


def _widened(value: Any, wanted: Any) -> Any:
    """Arguments of a run of live rows, as long as those of the padded run; padding rows hold the
    last live row. Raises `_OtherShape` where that cannot be."""
    if isinstance(value, torch.Tensor):
        return _with_rows(value, wanted)
    if isinstance(value, list | tuple | dict):
        names = value.keys() if isinstance(value, dict) else range(len(value))
        if names != (wanted.keys() if isinstance(value, dict) else range(len(wanted))):
            raise _OtherShape
        found = {name: _widened(value[name], wanted[name]) for name in names}
        return found if isinstance(value, dict) else type(value)(found.values())
    if value is not None and type(value) is not type(wanted):
        raise _OtherShape
    # The sizes of new tensors; a generator is the same one.
    return None if value is None else wanted


def _with_rows(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A copy of `tensor` of this shape, whose last rows are repeated."""
    if tensor.dim() != len(shape):
        raise _OtherShape
    found = tensor.clone()
    for dim, count in enumerate(shape):
        have = found.shape[dim]
        if have > count or (have == 0 and count):
            raise _OtherShape
        if have < count:
            rows = torch.arange(count, device=found.device).clamp_(max=have - 1)
            found = found.index_select(dim, rows)
    return found


def _take_rows(own: Any, wide: Any) -> None:
    """Write the first rows of wide tensors into those of a run without padding."""
    if isinstance(own, torch.Tensor):
        for dim, count in enumerate(own.shape):
            wide = wide.narrow(dim, 0, count)
        with inference_guard(own.is_inference()):
            own.copy_(wide)
    elif isinstance(own, list | tuple):
        for pair in zip(own, wide, strict=True):
            _take_rows(*pair)
