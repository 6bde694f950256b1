"""`InputSlot`: where the inputs of one step are written in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch

from graphrt.core.base.errors import InputSlotError, InvalidInputError, Uncopied
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import shown
from graphrt.core.batch.descriptor import Batch
from graphrt.core.dispatch.reasons import Agreed


def arrays_of(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
    """Tensors as numpy arrays over the same memory, where there are any."""
    arrays = _Arrays()
    for name, tensor in tensors.items():
        with suppress(RuntimeError, TypeError):  # no numpy, or a dtype that it lacks
            arrays[name] = tensor.numpy()
    return MappingProxyType(arrays)


class _Arrays(dict[str, Any]):
    """Says what is wrong where one is asked for that there is not."""

    def __missing__(self, name: str) -> Any:
        raise InvalidInputError(
            f"there is no numpy array of input {shown(name)}",
            got=sorted(self),
            expected="numpy, and an input of a dtype that it has",
            advice="slot[name] is the tensor",
        )


@public("graphrt")
class InputSlot(Mapping[str, torch.Tensor], Uncopied):
    """Where the host writes the inputs of one step, of `batch`, in place: `slot[name]` is the live
    rows of an input, by its (dotted) name, as a CPU tensor, `slot.numpy[name]` as an array.

    All of it is to be written, as what is there is an earlier step's; padding is graphrt's. Then
    `runner(slot)` runs the step, and the slot is used up. It is given up when its runner makes
    another one, runs another step by a graph or captures one: used after that it raises
    `InputSlotError`, and what is written to it after that, unseen, may be read by a later step.
    """

    _holds = "memory of its runner's"
    _instead = (
        "runner.slot(batch) for each step; {name: rows.clone() for name, rows in slot.items()}"
    )
    __slots__ = (
        "_tensors",
        "agreed",
        "batch",
        "layout",
        "maker",
        "moves",
        "numpy",
        "place",
        "planned",
        "turn",
        "used",
    )

    def __init__(
        self,
        views: tuple[dict[str, torch.Tensor], Mapping[str, Any]],
        place: Any,
        layout: Any,
        moves: Any,
        turn: int,
    ) -> None:
        """Made by `GraphRunner.slot`, for the `moves` of a `layout`. `place` is how the transport
        that lent the memory knows it. Without a layout the slot is memory of its own, for steps
        with more rows than the buffers have."""
        self._tensors, self.numpy = views
        self.place = place
        self.layout = layout
        self.moves = moves
        self.turn = turn
        self.used = False
        self.batch: Batch
        self.maker: object = None
        # The dispatch, and the `PreparedStep` of its graph, as of the making of the slot.
        self.planned: tuple[Any, object] | None = None
        self.agreed: Agreed | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __setitem__(self, name: str, value: object) -> None:
        raise InvalidInputError(
            "a slot is memory to write, which nothing can take the place of",
            got=f"slot[{name!r}] = ...",
            expected=f"the rows written to slot[{name!r}]",
            advice=f"slot[{name!r}].copy_(value), or slot.numpy[{name!r}][:] = array",
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"InputSlot({self.batch}, {sorted(self._tensors)})"

    def use(self, turn: int) -> None:
        """Use it up; raises `InputSlotError` if it was, or is given up by now."""
        if self.used:
            raise InputSlotError(
                "a slot was used twice",
                got=shown(self),
                expected="a slot of its own for every step",
                advice="runner.slot(batch) before each step",
            )
        self.used = True
        self.check(turn)

    def check(self, turn: int) -> None:
        """Raise `InputSlotError` if the slot is given up: what was written there may be gone."""
        if self.turn != turn:
            raise InputSlotError(
                "a slot was given up before it was used: its runner has made another one, run "
                "another step, or captured since",
                got=shown(self),
                expected="the runner's last slot",
                advice="runner.slot(batch), write it, runner(slot), one step after the other",
            )


def agreed_too_late(slot: InputSlot) -> InputSlotError:
    """The error of a step of a slot with another graph than the slot was made for."""
    return InputSlotError(
        "ranks agree on the graph of a slot before it is made: its inputs lie where that graph is",
        got=f"agreed= beside {slot!r}",
        expected="agreed= where the slot is made",
        advice="runner(runner.slot(batch, agreed=...))",
    )
