"""Static inputs: a runner's buffers, filled and padded for every step.

1. `layout` says where the inputs of a size are: a graph reads them there.
2. `fill` has an `InputTransport` bring a step's live rows there and write the padding rows.

Values are not checked beforehand. Where using one raises, `DeclaredInputs.check` names the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from graphrt.core.base.errors import GraphRTError, InvalidBatchError
from graphrt.core.base.option_values import refused
from graphrt.core.base.torch_names import tensor_guards
from graphrt.core.batch.descriptor import Batch, checked_batch
from graphrt.core.device.platform import Platform
from graphrt.core.inputs.declared import DeclaredInputs, flat_of
from graphrt.core.inputs.layout import MOST_GUARDS, InputLayout, Lazy, lazy_of
from graphrt.core.inputs.transport import InputTransport, Slab, StagedCopy

_CACHED_LAYOUTS = 1024
"""The most sizes whose layouts are kept: eager runs at any other size would add one each."""

LiveShape = tuple[str, torch.dtype, Lazy, torch.Size]
"""An input by name: its dtype, what tells lazy bits, and its live shape."""


@final
class InputSlot(dict[str, torch.Tensor]):
    """Host memory for the inputs of `batch`: `slot[name]` is the live rows of an input, by its
    (dotted) name, as a CPU tensor, which holds padding until it is written.

    `runner(slot)` runs the step of what is written there. The host may keep the input slot, and
    write and run it again; padding is graphrt's.
    """

    def __init__(self, batch: Batch, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.batch = batch


class StaticInputs:
    """The buffers of all inputs of a runner. Nested mappings of specs become dotted names.

    The inputs share one slab. At each size they are packed one after the other, so that one copy
    brings all that come from the host, padding included.
    """

    def __init__(
        self,
        specs: Mapping[str, Any],
        *,
        platform: Platform,
        tokens: int,
        reqs: int,
        device: Any,
        fetched: bool = False,
    ) -> None:
        """`fetched` says that graphs may fetch their inputs, where the platform can."""
        self.declared = DeclaredInputs(specs)
        self.declared.check_fits(platform, tokens, reqs)
        self.tokens = tokens
        self.reqs = reqs
        dtypes = {name: spec.dtype for name, spec in self.declared.specs.items()}
        # Inputs of a dtype that has gradients.
        self.graded = [n for n, of in dtypes.items() if of.is_floating_point or of.is_complex]
        # (tokens, requests) -> where the inputs of a batch of this size are.
        self._layouts: dict[tuple[int, int], InputLayout] = {}
        # torch's guards of inputs that were lent to eager steps, the last first.
        self.plain: list[Callable[..., bool]] = []
        self._plain_made = 0
        # (tokens, requests) -> what `live_shapes` has answered.
        self._live_shapes: dict[tuple[int, int], list[LiveShape]] = {}
        nbytes = InputLayout(self.declared.specs, tokens, reqs).nbytes
        with torch.inference_mode(False):
            # Rounded up: a device moves whole vectors, the last of which may pass the end.
            buffer = torch.zeros(-(-nbytes // 256) * 256, dtype=torch.uint8, device=device)
        slab = Slab(buffer, nbytes, len(self.declared.specs))
        self.transport: InputTransport = (
            platform.new_input_transport(slab, fetched) if nbytes else None
        ) or (InputTransport(slab) if buffer.is_cpu else StagedCopy(slab, platform))
        self.reset()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers by name, at the largest size; at other sizes they are at other addresses."""
        return self.layout(self.tokens, self.reqs).views

    def with_gradients(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """Those of a step's inputs that require a gradient."""
        flat = dict(flat_of(values)) if self.declared.nested else values
        required = []
        for name in self.graded:
            value = flat.get(name)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                required.append(value)
        return required

    def layout(self, tokens: int, reqs: int) -> InputLayout:
        """Where the inputs of a batch of this size are."""
        layout = self._layouts.get((tokens, reqs))
        if layout is None:
            layout = InputLayout(self.declared.specs, tokens, reqs)
            layout.place(self.transport.slab.buffer)
            layout.fetch = self.transport.fetch_of(layout.nbytes)
            if len(self._layouts) >= _CACHED_LAYOUTS:
                self._layouts.clear()
            self._layouts[tokens, reqs] = layout
        return layout

    def fill(
        self,
        values: Mapping[str, Any],
        layout: InputLayout,
        tokens: int,
        reqs: int,
        stream: Any = None,
        in_graph: bool = False,
    ) -> None:
        """Copy a step's live rows into the buffers and pad them up to the size of `layout`.

        `stream` is the current one, on platforms that have streams. With `in_graph` the graph that
        is launched next fetches them, and the caller then calls `ring.launched()`.

        Everything is checked before anything is written; raises `InvalidInputError`.
        """
        # No check comes first, as each step would pay for it: a wrong value raises when it is used.
        try:
            if self.declared.nested:
                values = dict(flat_of(values))
            if len(values) != len(self.declared.specs):
                self.declared.check_names(values)
            moves = layout.known.get((tokens, reqs)) or layout.moves(tokens, reqs)
            self.transport.fill(values, moves, stream, in_graph)
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
            self.declared.check(values, tokens, reqs, error)
            raise

    def completed(
        self, batch: Batch | None, values: Mapping[str, Any]
    ) -> tuple[Batch | None, Mapping[str, Any]]:
        """A step's batch and inputs, with padding in the place of the optional inputs that it has
        not. Raises `InvalidInputError` and `InvalidBatchError`."""
        optional = self.declared.optional
        if not optional:
            return batch, values
        flat = {n: v for n, v in flat_of(values) if v is not None or n not in optional}
        missing = optional - flat.keys()
        if missing:
            live = self.nest(flat)
            batch = batch_of(self, live) if batch is None else checked_batch(batch)
            rows = batch.num_tokens, reqs_of(self, batch, live or None)
            for name in missing:
                flat[name] = self.declared.specs[name].padding(*rows)
        return batch, self.nest(flat)

    def slot(self, batch: Batch) -> InputSlot:
        """Host memory for the live rows of a batch. Raises `InvalidBatchError`."""
        batch = checked_batch(batch)
        rows = batch.num_tokens, reqs_of(self, batch, None)
        specs = self.declared.specs.items()
        return InputSlot(batch, {name: spec.padding(*rows) for name, spec in specs})

    def nest(self, flat: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the forward, by their dotted names, as nested dicts again."""
        if not self.declared.nested:
            return flat
        nested: dict[str, Any] = {}
        for name, value in flat.items():
            *parents, leaf = name.split(".")
            inner = nested
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[leaf] = value
        return nested

    def copies(self, values: Mapping[str, Any], tokens: int, reqs: int) -> dict[str, torch.Tensor]:
        """Copies of a step's inputs by (dotted) name, where the buffers are: for a step that no
        graph serves. Raises `InvalidInputError`."""
        return self.copied(self.declared.check(values, tokens, reqs))

    def copied(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of tensors where the buffers are."""
        device = self.transport.slab.device
        return {
            name: value.detach().to(device, copy=True, memory_format=torch.contiguous_format)
            for name, value in inputs.items()
        }

    def live_shapes(self, tokens: int, reqs: int) -> list[LiveShape]:
        """All inputs as of a batch of this size."""
        rows = self._live_shapes.get((tokens, reqs))
        if rows is None:
            if len(self._live_shapes) >= _CACHED_LAYOUTS:
                self._live_shapes.clear()
            rows = self._live_shapes[tokens, reqs] = [
                (name, spec.dtype, lazy_of(spec.dtype), torch.Size(spec.sizes(tokens, reqs)))
                for name, spec in self.declared.specs.items()
            ]
        return rows

    def expect_plain(self, tensors: list[torch.Tensor]) -> None:
        """Remember inputs of an eager step that were all lent: of these types, dtypes, devices and
        strides, with any number of rows where that is their first dimension."""
        if not tensor_guards or self._plain_made >= MOST_GUARDS:
            return
        self._plain_made += 1
        sizes: list[list[int | None]] = []
        for tensor, spec in zip(tensors, self.declared.specs.values(), strict=True):
            axis, dim = spec.batch_axis()
            sizes.append([*tensor.shape])
            # Of one row the stride may be any.
            if axis is not None and dim == 0 and tensor.shape[0] > 1:
                sizes[-1][0] = None
        strides = [[*tensor.stride()] for tensor in tensors]
        guard = tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self.plain = [guard.check, *self.plain[:1]]

    def padded_copies(
        self, values: Mapping[str, Any], tokens: int, reqs: int, rows: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """As `copies`, padded to `rows` of tokens and requests, which the buffers may have no room
        for. Raises `InvalidInputError`."""
        copies = self.copies(values, tokens, reqs)
        layout = InputLayout(self.declared.specs, *rows)
        device = self.transport.slab.device
        layout.place(torch.zeros(max(layout.nbytes, 1), dtype=torch.uint8, device=device))
        for move in layout.moves(tokens, reqs).fields:
            move.live.copy_(copies[move.field.name])
            move.pad_on_device()
        return layout.views

    def reset(self, layout: InputLayout | None = None) -> None:
        """Make every row of `layout`, by default of the largest one, a padding row. The ring is
        settled, so that the next step does not wait for captures."""
        if self.transport.ring is not None:
            self.transport.ring.settle()
        for field in (layout or self.layout(self.tokens, self.reqs)).fields:
            field.view.fill_(field.pad)


def batch_of(inputs: StaticInputs, values: Mapping[str, Any]) -> Batch:
    """The batch that the shapes of a step's inputs describe."""
    tokens, reqs = inputs.declared.infer(values)
    # Only this much is certain: with as many tokens as requests, each has exactly one.
    return Batch(tokens, reqs, 1 if reqs is not None and tokens == reqs else None)


def reqs_of(inputs: StaticInputs, batch: Batch, values: Mapping[str, Any] | None) -> int:
    """How many requests a batch has, by itself or by its inputs: these are None for an input slot,
    which is made before them."""
    if batch.num_reqs is not None:
        return batch.num_reqs
    if batch.query_len:
        return batch.num_tokens // batch.query_len
    if values is None and "reqs" in inputs.declared.by_axis:
        what = "an input slot is made before inputs say how many requests the batch has"
        advice = "Batch(num_tokens, num_reqs)"
        raise refused(what, batch, "num_reqs, or query_len", advice, InvalidBatchError)
    reqs = None if values is None else inputs.declared.infer(values)[1]
    return min(batch.num_tokens, inputs.reqs) if reqs is None else reqs


def wrong_requests(reqs: int, most: int) -> GraphRTError:
    """The error for a batch of no requests, or of more than the `most` rows of the graph that was
    chosen without them."""
    what = "the batch has more requests than its graph has rows for, or none"
    advice = "Batch(num_tokens, num_reqs) with the live requests of the step"
    return refused(what, reqs, f"1 to {most}", advice, InvalidBatchError)
