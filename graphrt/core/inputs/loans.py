"""Inputs of an eager step that its forward reads in the caller's memory.

Copies of the inputs would cost a step without a graph more than a small forward. An input is lent
if a copy of it would be no different, and nobody but the forward writes its memory meanwhile. After
the run `end` and `kept` tell what the forward did with it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import VerificationError
from graphrt.core.base.thread_mode import unseen
from graphrt.core.base.torch_names import storage_use_count
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.declared import flat_of
from graphrt.core.inputs.layout import Lazy
from graphrt.core.inputs.spec import LOWEST_ADDRESS

_Tensor = torch.Tensor


class Loans:
    """The inputs of one step that its forward is given as they are."""

    def __init__(self, inputs: StaticInputs, held: Collection[int]) -> None:
        """Memory of the storages with the numbers `held` is not lent: graphs use it too."""
        self._inputs = inputs
        self._held = held
        # For each input that is lent its name, the caller's tensor, its version, the number of its
        # storage, and how many tensors used that.
        self._lent: list[tuple[str, torch.Tensor, int, int, int]] = []
        # The arguments in their place.
        self._aliases: list[torch.Tensor] = []

    def arguments(
        self, values: Mapping[str, Any], tokens: int, reqs: int
    ) -> dict[str, torch.Tensor] | None:
        """The arguments of the forward by (dotted) name: aliases of inputs that are lent, copies of
        others. None if an input is wrong."""
        inputs, slab = self._inputs, self._inputs.transport.slab
        found: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        try:
            if inputs.declared.nested:
                values = dict(flat_of(values))
            rows = inputs.live_shapes(tokens, reqs)
            if len(values) != len(rows):
                return None
            tensors = [values[name] for name, _, _, _ in rows]
            # In one call, where inputs are like earlier ones that were lent.
            are_plain = any(check(*tensors) for check in inputs.plain)
            for value, (name, dtype, lazy, shape) in zip(tensors, rows, strict=True):
                if value.shape != shape or not (
                    are_plain or (type(value) is _Tensor and value.dtype is dtype)
                ):
                    return None
                storage, address = value.untyped_storage(), value.data_ptr()
                key = storage._cdata
                if address < LOWEST_ADDRESS:
                    return None  # freed, or empty: a copy of freed memory would end the process
                if (
                    (are_plain or self._is_plain(value, lazy))
                    and not slab.low <= address < slab.high
                    # What runners hand out, and memory of the CPU's pools, is not resizable.
                    and storage.resizable()
                    and key not in self._held
                ):
                    uses = storage_use_count(key)
                    found[name] = alias = value.detach()
                    self._lent.append((name, value, value._version, key, uses))
                    self._aliases.append(alias)
                else:
                    # In its place: a forward of `**inputs` may go by their order.
                    found[name] = others[name] = value
            if others:
                found.update(unseen(partial(inputs.copied, others)))
            elif not are_plain:
                inputs.expect_plain(tensors)
            return found
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError):
            return None

    def _is_plain(self, value: torch.Tensor, lazy: Lazy) -> bool:
        """Whether a copy of an input would have its properties."""
        return (
            value.device == self._inputs.transport.slab.device
            and not value.requires_grad
            and not value.is_inference()
            and value.is_contiguous()
            and (lazy is None or not lazy(value))
        )

    def end(self, outputs: Any, stop: Callable[[dict[str, int]], None], *, clones: bool) -> Any:
        """After the run: its outputs for the caller, all as clones or only those that share memory
        with an input. Calls `stop` and raises `VerificationError` if the forward has written an
        input."""
        # `x.t_()` counts as a version too. An alias of a written input is named beside it.
        written = [
            name
            for (name, value, version, _, _), alias in zip(self._lent, self._aliases, strict=True)
            if value._version != version and alias.stride() == value.stride()
        ]
        if written:
            stop({})
            raise VerificationError(
                f"the forward has written input {', '.join(map(repr, written))}, the caller's own "
                "tensor, which the runs of capture() have not",
                got="a write in place in an eager step; later ones have copies of their inputs",
                expected="a forward that writes none of its inputs",
                advice=f"{written[0]} = {written[0]}.clone() in the forward, before it is written",
            )
        keys = {key for _, _, _, key, _ in self._lent}

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            is_plain = type(tensor) is _Tensor and tensor.layout is torch.strided
            key = tensor.untyped_storage()._cdata if is_plain else tree.storage_key(tensor)
            return tensor.clone() if clones or key in keys else tensor.detach()

        return tree.map_leaves(apart, outputs)

    def kept(self) -> dict[str, int] | None:
        """Once nobody has the arguments and the outputs of the run: the inputs that something
        still holds, by name, with the number of their storage. None unless any was held, if only
        until garbage was collected."""
        self._aliases.clear()
        if all(storage_use_count(key) <= uses for _, _, _, key, uses in self._lent):
            return None
        gc.collect()  # a cycle may hold it, which nobody reaches
        return {n: key for n, _, _, key, uses in self._lent if storage_use_count(key) > uses}
