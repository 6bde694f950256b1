"""Random numbers of a padded run, which the run without padding is given too.

A run on fewer rows draws fewer numbers, so rows are not what they are with padding, though none is
mixed with another. Here each operator that draws does it again at the padded size, from the same
state of the generators, and the live rows of that are what the run goes on with.

1. `Draws.record` calls the operators of the padded run, and notes those that draw.
2. `Draws.repeat` calls those of the run without padding, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphrt.core.base.thread_mode import unseen
from graphrt.core.base.torch_names import inference_guard
from graphrt.core.trust.generators import Generators
from graphrt.core.trust.watching.operators import facts_of, written


class _Draw(NamedTuple):
    """One operator that has drawn: its arguments, of tensors the shapes, and what puts the
    generators where they were before it."""

    func: Any
    shapes: Any
    put_back: Callable[[], None]


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
        put_back, before = self._generators.now(), self._generators.of_torch()
        shapes = _shapes_of((args, dict(kwargs)))
        result = func(*args, **kwargs)
        if self._drew(before):
            self._found.append(_Draw(func, shapes, put_back))
        return result

    def repeat(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator that may draw, in a run on the live rows alone."""
        draw = self._found[self._next] if self._next < len(self._found) else None
        if draw is not None:
            unseen(draw.put_back)
        wide = None if draw is None else unseen(lambda: _widened((args, dict(kwargs)), draw.shapes))
        before = self._generators.of_torch()
        result = func(*args, **kwargs)
        if not self._drew(before):
            return result
        self._next += 1
        if draw is None or wide is None or draw.func is not func:
            self.lost = True
            return result

        facts = facts_of(func)
        more_args, more_kwargs = wide

        def again() -> None:
            draw.put_back()
            found = func(*more_args, **more_kwargs)
            _take_rows(result, found)
            _take_rows([*written(facts, args, kwargs)], [*written(facts, more_args, more_kwargs)])

        unseen(again)
        return result

    def _drew(self, before: list[torch.Tensor]) -> bool:
        now = self._generators.of_torch()
        return unseen(lambda: not all(map(torch.equal, before, now)))


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


def _widened(value: Any, wanted: Any) -> Any:
    """Arguments of a run of live rows, as long as those of the padded run; padding rows hold the
    last live row. None where that cannot be."""
    if isinstance(value, torch.Tensor):
        if value.dim() != len(wanted):
            return None
        found = value.clone()
        for dim, count in enumerate(wanted):
            have = found.shape[dim]
            if have > count or (have == 0 and count):
                return None
            if have < count:
                rows = torch.arange(count, device=found.device).clamp_(max=have - 1)
                found = found.index_select(dim, rows)
        return found
    if isinstance(value, list | tuple):
        if len(value) != len(wanted):
            return None
        found_items = [_widened(*pair) for pair in zip(value, wanted, strict=True)]
        lost = any(f is None and v is not None for f, v in zip(found_items, value, strict=True))
        return None if lost else type(value)(found_items)
    if isinstance(value, dict):
        if value.keys() != wanted.keys():
            return None
        found_named = {name: _widened(each, wanted[name]) for name, each in value.items()}
        lost = any(found_named[name] is None and value[name] is not None for name in value)
        return None if lost else found_named
    # The sizes of new tensors; a generator is the same one.
    return wanted if type(value) is type(wanted) else None


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
