"""`OpaqueAttention`: a backend as one operator, for models that are compiled."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from graphrt.attention.backend import AttentionBackend, AttentionStep, once_a_step
from graphrt.core.base.errors import InvalidInputError, InvalidOptionError
from graphrt.core.base.option_values import shown
from graphrt.core.capture.guard import operator_break

_LIBRARY: Any = torch.library.Library("graphrt", "FRAGMENT")  # type: ignore[no-untyped-call]
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_LIBRARY.define(
    "attend(Tensor query, Tensor[] caches, Tensor block_table, Tensor context_lens, "
    "Tensor? query_start_loc, Tensor(a!) out, str layer) -> ()",
    tags=() if _UNSAFE is None else (_UNSAFE,),
)

_by_name: weakref.WeakValueDictionary[str, OpaqueAttention] = weakref.WeakValueDictionary()

# Marks the name of a copy. The operator raises for it; a compiler could not trace a `raise` here.
_COPY = "\0copy"


class OpaqueAttention:
    """Calls `backend` through the operator `graphrt::attend`, which compilers do not look into.

    It is a splitting operator of `graphrt.compile`: in one graph with the rest under FULL, eager
    between pieces. The backend's step is begun at the first call of every step. A copy cannot be
    called while the original is alive and owns the name: make an `OpaqueAttention` for it.
    """

    def __init__(self, backend: AttentionBackend, name: str = "attention") -> None:
        """`name` is baked into compiled code, so it must be the same in every process.

        Raises `InvalidOptionError` for a name that is in use.
        """
        if name in _by_name:
            # An earlier one of that name may be garbage that waits for the collector.
            gc.collect()
        if name in _by_name:
            raise InvalidOptionError(
                "two attention backends have one name",
                got=shown(name),
                expected="a name for each backend that is in use",
                advice='OpaqueAttention(backend, name="draft")',
            )
        self.backend = backend
        self.name = name
        self._owns_name = True
        _by_name[name] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name != "_owns_name"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._owns_name = _by_name.setdefault(self.name, self) is self

    def __call__(
        self,
        query: torch.Tensor,
        *caches: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start_loc: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as `AttentionBackend.attend`, with the step's metadata as `begin` takes it, which
        must be the same in all layers of a step.

        Raises `InvalidOptionError` for a copy, as its name belongs to the original.
        """
        if out is None:
            out = query.new_empty(query.shape[0], query.shape[1], self.backend.shape.value_dim)
        # For a copy the operator raises: see `_refuse_copy`.
        layer = self.name if self._owns_name else self.name + _COPY
        _call(query, list(caches), block_table, context_lens, query_start_loc, out, layer)
        return out

    def step(
        self,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start_loc: torch.Tensor | None,
    ) -> AttentionStep:
        """The step that is under way, begun once for all layers."""
        backend = self.backend

        def begin() -> AttentionStep:
            begun = backend.begin(block_table, context_lens, query_start_loc=query_start_loc)
            return backend.live_step(begun)

        return once_a_step(self, begin)


@operator_break
def _call(
    query: torch.Tensor,
    caches: list[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    layer: str,
) -> None:
    """The operator, with a break around it: inside of it no segment can end for a break."""
    torch.ops.graphrt.attend(query, caches, block_table, context_lens, query_start_loc, out, layer)


def _attend(
    query: torch.Tensor,
    caches: list[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    layer: str,
) -> None:
    registered = _by_name.get(layer)
    if registered is None:
        _refuse_copy(layer)
        raise InvalidInputError(
            "compiled code asks for an attention backend that is not there",
            got=shown(layer),
            expected=", ".join(map(repr, _by_name)) or "an OpaqueAttention of that name",
            advice="make it before the model is called, and keep a reference to it",
        )
    step = registered.step(block_table, context_lens, query_start_loc)
    registered.backend.attend(step, query, *caches, out=out)


def _fake(*args: Any) -> None:
    """The result is written in place."""
    _refuse_copy(args[-1])


def _refuse_copy(layer: str) -> None:
    if layer.endswith(_COPY):
        raise InvalidOptionError(
            "the name of a copied attention backend belongs to the original",
            got=f"a copy of OpaqueAttention(..., {layer.removesuffix(_COPY)!r})",
            expected="an OpaqueAttention of its own for the copy, with another name",
            advice='copy.attention = OpaqueAttention(backend, name="draft")',
        )


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("graphrt::attend", _fake, lib=_LIBRARY)
