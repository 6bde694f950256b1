"""The memory that graphs read and write in place of a cache that grows.

1. `shapes_of` reads the shapes of one token's keys, values and states off a cache that transformers
   has filled in a short eager run: no family is known by name.
2. `Memory` allocates them for `rows + 1` sequences: the last one is the row that padding writes.
3. Layers that slide may have a `window` of positions alone: position `p` is at `p % window`.

Keys and values are laid out as (row, position, head, width). So a step writes them by one index
write, and graphrt can save the rows of a trial alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphrt.compile.split.define import opaque
from graphrt.errors import CaptureError


@dataclass(frozen=True)
class LayerShape:
    """One layer's memory for one row: examples that have its shapes, dtypes and device."""

    keys: torch.Tensor | None = None
    """(1, heads, positions, width), as are the values."""
    values: torch.Tensor | None = None
    conv: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Convolution states by transformers' index of them, as are the recurrent ones."""
    recurrent: Mapping[int, torch.Tensor] = field(default_factory=dict)
    slides: bool = False
    """Whether attention looks at the last positions alone."""


def shapes_of(cache: Any) -> list[LayerShape]:
    """The shapes of a cache that a run of one row has filled.

    Raises `CaptureError` for a layer of another kind than keys and values or states.
    """
    from transformers.cache_utils import (
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionLayer,
    )

    shapes = []
    for layer in cache.layers:
        kind = type(layer)
        has_keys = kind in (
            DynamicLayer,
            DynamicSlidingWindowLayer,
            LinearAttentionAndFullAttentionLayer,
        )
        has_states = kind in (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
        if not (has_keys or has_states):
            raise CaptureError(
                "the model keeps its past in a cache that with_graphs() cannot serve",
                got=f"a layer of {kind.__name__}",
                expected="DynamicLayer, DynamicSlidingWindowLayer or LinearAttentionLayer",
                advice="leave with_graphs() out for this model",
            )
        filled = has_keys and layer.is_initialized
        shapes.append(
            LayerShape(
                layer.keys if filled else None,
                layer.values if filled else None,
                _filled(layer.conv_states) if has_states else {},
                _filled(layer.recurrent_states) if has_states else {},
                slides=kind is DynamicSlidingWindowLayer,
            )
        )
    return shapes


def _filled(states: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    return {index: state for index, state in states.items() if state is not None}


def first_rows(memory: torch.Tensor, size: int) -> torch.Tensor:
    """The memory of the first rows.

    A trace uses a batch size that no other size equals, perhaps more rows than there are: a slice
    would end at the last one.
    """
    if torch.compiler.is_compiling():
        return memory.as_strided((size, *memory.shape[1:]), memory.stride())
    return memory[:size]


def write(
    memory: torch.Tensor, rows: torch.Tensor, places: torch.Tensor | None, states: torch.Tensor
) -> None:
    """Write states of each row, at the positions `places` `(tokens,)`; None: states have none.

    Compiled code calls an operator: graphrt sees which rows an operator writes and saves these
    alone, but sees no write inside of Inductor's kernels.
    """
    if torch.compiler.is_compiling():
        _kept_write(memory, rows, places, states)
    else:
        _write(memory, rows, places, states)


def _write(
    memory: torch.Tensor, rows: torch.Tensor, places: torch.Tensor | None, states: torch.Tensor
) -> None:
    if places is None:
        memory.index_copy_(0, rows, states)
    else:
        memory.index_put_((rows[:, None], places), states)


_kept_write = opaque("graphrt_transformers::write", mutates=["memory"])(_write)


class LayerMemory:
    """The memory of one layer for sequences of `length` tokens; the last row is padding's."""

    def __init__(self, shape: LayerShape, rows: int, length: int, window: int | None) -> None:
        self.has_keys = shape.keys is not None
        self.length = length
        self.window = window if self.has_keys and shape.slides else None
        """How many positions it keeps; None: all."""
        if shape.keys is not None and shape.values is not None:
            self.keys = _positions(shape.keys, rows + 1, self.window or length)
            self.values = _positions(shape.values, rows + 1, self.window or length)
        self.conv = {index: _states(state, rows + 1) for index, state in shape.conv.items()}
        self.recurrent = {
            index: _states(state, rows + 1) for index, state in shape.recurrent.items()
        }

    def states(self) -> list[torch.Tensor]:
        return [*self.conv.values(), *self.recurrent.values()]

    def tensors(self) -> list[torch.Tensor]:
        return [*([self.keys, self.values] if self.has_keys else []), *self.states()]


def _positions(like: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    return like.new_zeros((rows, length, like.shape[1], like.shape[3]))


def _states(like: torch.Tensor, rows: int) -> torch.Tensor:
    return like.new_zeros((rows, *like.shape[1:]))


class Memory:
    """Keys, values and states of all layers, and the mask of padding before prompts."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        rows: int,
        length: int,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        """Layers that slide keep `window` positions; None: all."""
        self.rows, self.length = rows, length
        self.layers = [LayerMemory(shape, rows, length, window) for shape in shapes]
        # Positions that sliding layers keep; None: all.
        self.window = next((layer.window for layer in self.layers if layer.window), None)
        self.has_keys = any(layer.has_keys for layer in self.layers)
        self.mask = torch.ones((rows + 1, length), dtype=torch.int64, device=device)

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        return sum(each.numel() * each.element_size() for each in self._tensors())

    def clear(self) -> None:
        """Write zeros everywhere.

        A masked position has no weight, but 0 times NaN is NaN: a sequence that had one would spoil
        all later ones.
        """
        for each in self._tensors():
            each.zero_()
        # A row of padding without any position to look at is NaN: experts are then chosen by NaN.
        self.mask[:, 0].fill_(1)

    def set_mask(self, rows: int, length: int, mask: torch.Tensor | None) -> None:
        """Which of the first positions of the first rows hold tokens."""
        target = self.mask[:rows, :length]
        if mask is None:
            target.fill_(1)
        else:
            target.copy_(mask)

    def _tensors(self) -> list[torch.Tensor]:
        return [self.mask, *(each for layer in self.layers for each in layer.tensors())]
