"""Random numbers: where they come from, so that several runs draw the same ones.

A run on fewer rows draws fewer numbers, so rows are not what they are with padding, though none is
mixed with another. There each operator that draws does it again at the padded size, from the same
state of the generators, and the live rows of that are what the run goes on with.

1. `Draws.record` calls the operators of the padded run, and notes those that draw.
2. `Draws.repeat` calls those of the run without padding, in the same order.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.thread_mode import unseen
from graphrt.core.base.torch_names import inference_guard
from graphrt.core.capture.operators import facts_of, written


class Generators:
    """Torch's default generators, of the CPU and of one device, Python's and NumPy's, as they were;
    and those that `note` was told of before they were used."""

    def __init__(self, device_type: str) -> None:
        self._known: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []
        self._was: list[Any] = []
        self._noted: dict[int, Any] = {}
        self._keep(torch.get_rng_state, torch.set_rng_state)
        if device_type != "cpu":
            device = torch.get_device_module(device_type)
            if hasattr(device, "get_rng_state"):
                self._keep(device.get_rng_state, device.set_rng_state)
        self._keep(random.getstate, random.setstate)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._keep(numpy.get_state, numpy.set_state)

    def note(self, generator: Any) -> None:
        """Keep a generator of the forward's own as it is now, unless it is kept already: one of
        torch's, Python's or NumPy's."""
        if id(generator) in self._noted:
            return
        self._noted[id(generator)] = generator
        if isinstance(generator, random.Random):
            self._keep(generator.getstate, generator.setstate)
        elif hasattr(generator, "bit_generator"):
            bits = generator.bit_generator
            self._keep(lambda: bits.state, lambda state: setattr(bits, "state", state))
        else:
            self._keep(generator.get_state, generator.set_state)

    def note_given(self, values: Iterable[Any]) -> None:
        """Keep the generators among the arguments of an operator."""
        for value in values:
            if isinstance(value, torch.Generator):
                self.note(value)

    def take(self) -> list[Any]:
        """The states now."""
        return [get() for get, _ in self._known]

    def restore(self, states: Sequence[Any] | None = None) -> None:
        """Let all of them go on from where they were at first, or from what `take` returned."""
        for (_, put), state in zip(
            self._known, self._was if states is None else states, strict=False
        ):
            put(state)

    def _keep(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._known.append((get, put))
        self._was.append(get())


def of_torch(states: Sequence[Any]) -> list[torch.Tensor]:
    """Those of torch's generators."""
    return [state for state in states if isinstance(state, torch.Tensor)]


def of_python(states: Sequence[Any]) -> list[bytes]:
    """Those of Python's and NumPy's generators, to be compared."""
    return [pickle.dumps(state) for state in states if not isinstance(state, torch.Tensor)]


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
            wide = unseen(lambda: _widened((args, dict(kwargs)), draw.shapes))
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
        drawn, facts = draw.func(*args, **kwargs), facts_of(draw.func)
        _take_rows(result, drawn)
        _take_rows([*written(facts, *given)], [*written(facts, args, kwargs)])

    def _drew(self, before: list[Any]) -> bool:
        then, now = of_torch(before), of_torch(self._generators.take())
        return unseen(lambda: not all(map(torch.equal, then, now)))


def _shapes_of(given: Any) -> list[tuple[str, Any]]:
    """The leaves of arguments by their paths, of tensors their shapes."""
    leaves = tree.leaves(given)
    return [(path, each.shape if isinstance(each, torch.Tensor) else each) for path, each in leaves]


def _widened(given: Any, shapes: list[tuple[str, Any]]) -> Any:
    """Arguments of a run of live rows, as long as those of the padded run; padding rows hold the
    last live row. None where that cannot be."""
    if [path for path, _ in tree.leaves(given)] != [path for path, _ in shapes]:
        return None
    wanted = iter(shapes)
    try:
        return tree.map_leaves(lambda leaf: _as_long(leaf, next(wanted)[1]), given)
    except _OtherShape:
        return None


class _OtherShape(Exception):
    """Arguments of two runs are not alike."""


def _as_long(value: Any, wanted: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        if value is not None and type(value) is not type(wanted):
            raise _OtherShape
        # The sizes of new tensors; a generator is the same one.
        return None if value is None else wanted
    if value.dim() != len(wanted):
        raise _OtherShape
    long = value.clone()
    for dim, count in enumerate(wanted):
        have = long.shape[dim]
        if have > count or (have == 0 and count):
            raise _OtherShape
        if have < count:
            rows = torch.arange(count, device=long.device).clamp_(max=have - 1)
            long = long.index_select(dim, rows)
    return long


def _take_rows(own: Any, wide: Any) -> None:
    """Write the first rows of wide tensors into those of a run without padding."""
    for ours, theirs in zip(tree.tensors(own), tree.tensors(wide), strict=True):
        for dim, count in enumerate(ours.shape):
            theirs = theirs.narrow(dim, 0, count)
        with inference_guard(ours.is_inference()):
            ours.copy_(theirs)
