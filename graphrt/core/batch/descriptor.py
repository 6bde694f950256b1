"""`BatchDescriptor` names one captured graph; `Batch` is a host's knowledge of one step; an
`Axis` is a dimension of inputs and outputs that grows with a step's tokens or requests.

A model without tokens (images, latents, features) has rows: the same axis by another name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

from graphrt.core.base.errors import InvalidBatchError, InvalidInputError
from graphrt.core.base.option_values import (
    MOST,
    check_hashable,
    count_of,
    items_of,
    nearest,
    refused,
    shown,
)
from graphrt.core.batch.modes import GraphMode

NOT_FOUND = (IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""Errors of comparing, hashing or looking up a batch with wrong fields: a tensor as variant."""
NO_MODES: frozenset[GraphMode] = frozenset()
_NO_BOUNDS: tuple[int, ...] = ()
# For a check in C that all items of a tuple are ints.
_INTS = frozenset({int})
_new_tuple = tuple.__new__
_count = partial(count_of, error=InvalidBatchError)


def _call_of(fields: BatchDescriptor | Batch) -> str:
    """The call that makes a descriptor or a batch, without the arguments that are defaults."""
    defaults: Any = type(fields).__new__.__defaults__
    named = zip(fields._fields[1:], fields[1:], defaults, strict=True)
    # A count may be one that Python refuses to print.
    texts = {name: shown(v) if type(v) is int else repr(v) for name, v, d in named if v != d}
    others = "".join(f", {name}={text}" for name, text in texts.items())
    return f"{type(fields).__name__}({shown(fields.num_tokens)}{others})"


class _Named(NamedTuple):
    """The fields of a `BatchDescriptor`, whose docstring describes them."""

    num_tokens: int
    num_reqs: int | None
    uniform: bool
    has_lora: bool
    num_active_loras: int
    query_len: int | None
    bounds: tuple[int, ...]
    variant: Hashable


class BatchDescriptor(_Named):
    """The shape that one graph was captured for; a tuple, because one is built for every batch that
    no graph serves.

    `num_tokens` and `num_reqs` are padded; `num_reqs` None means any number of requests. `uniform`
    graphs serve batches whose requests all have `query_len` tokens. `num_active_loras` is the most
    LoRA adapters the graph can serve; `has_lora` without a count means any number. `bounds` are
    integers baked into kernels, such as the longest context: the graph serves batches whose bounds
    are not larger; () means unbounded. `variant` is anything hashable that the host needs to tell
    two graphs apart.

    Raises `InvalidBatchError` for numbers that no batch can have.
    """

    __slots__ = ()

    def __new__(
        cls,
        num_tokens: int,
        num_reqs: int | None = None,
        uniform: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        query_len: int | None = None,
        bounds: tuple[int, ...] = (),
        variant: Hashable = None,
    ) -> BatchDescriptor:
        num_tokens = _count("num_tokens", num_tokens, least=1)
        num_reqs = None if num_reqs is None else _count("num_reqs", num_reqs, least=1)
        query_len = None if query_len is None else _count("query_len", query_len, least=1)
        num_active_loras = _count("num_active_loras", num_active_loras, least=0)
        bounds, variant = checked_bounds(bounds), checked_variant(variant)
        uniform = _checked_flag("uniform", uniform)
        has_lora = _checked_flag("has_lora", has_lora) or num_active_loras > 0
        if uniform:
            if query_len is None and num_reqs is not None and num_tokens % num_reqs == 0:
                query_len = num_tokens // num_reqs
            if query_len is None or num_tokens % query_len:
                raise InvalidBatchError(
                    "num_tokens of a uniform descriptor is no multiple of its query length",
                    got=f"{num_tokens} tokens, {num_reqs} reqs, query length {query_len}",
                    expected="a query length that num_tokens is a multiple of",
                    advice="query_len=1, or uniform=False for requests of any length",
                )
        fields = num_tokens, num_reqs, uniform, has_lora, num_active_loras, query_len
        return _new_tuple(cls, (*fields, bounds, variant))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> BatchDescriptor:  # type: ignore[override]
        # `_replace` calls this, and the inherited one checks nothing.
        return cls(*iterable)

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """All fields but the size: the forward of one kind runs the same code."""
        return self[2:]

    @property
    def lora_capacity(self) -> float:
        """The most active LoRAs this graph serves; infinite for `has_lora` without a count."""
        if self.num_active_loras:
            return self.num_active_loras
        return float("inf") if self.has_lora else 0

    __repr__ = _call_of

    def __str__(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.num_reqs is not None:
            parts.append(f"{self.num_reqs} reqs")
        if self.uniform:
            parts.append(f"uniform q={self.query_len}")
        if self.has_lora:
            parts.append(f"loras<={self.num_active_loras or 'any'}")
        if self.bounds:
            parts.append(f"bounds<={','.join(map(str, self.bounds))}")
        if self.variant is not None:
            parts.append(f"variant={self.variant!r}")
        return " ".join(parts)


class _Fields(NamedTuple):
    """The fields of a `Batch`, whose docstring describes them."""

    num_tokens: int
    num_reqs: int | None
    query_len: int | None
    bounds: tuple[int, ...]
    num_active_loras: int
    variant: Hashable
    exclude: frozenset[GraphMode]


class Batch(_Fields):
    """What the host knows about this step; a tuple, because one is built for every step.

    `num_tokens` (at least 1) and `num_reqs` (None: unknown) count what is live. `query_len` is the
    tokens of each request when all have equally many, else None; one that the counts contradict is
    taken for None. `bounds` are what this step needs of a graph's bounds, in their order.
    `num_active_loras` and `variant` are as in the descriptor. `exclude` holds runtime modes that
    must not serve this batch (cascade attention: FULL).

    The counts are ints, or integers of NumPy or in tensors, which become ints here. Raises
    `InvalidBatchError` for others. Counts that no int64 holds are refused where the batch is used
    (a check here would make each batch a fifth slower). What the rest holds is looked at when it
    is dispatched, but not where an equal batch was: one of `bounds=(512.0,)` has the answer of
    `(512,)`.
    """

    __slots__ = ()

    def __new__(
        cls,
        num_tokens: int,
        num_reqs: int | None = None,
        query_len: int | None = None,
        bounds: tuple[int, ...] = _NO_BOUNDS,
        num_active_loras: int = 0,
        variant: Hashable = None,
        exclude: frozenset[GraphMode] = NO_MODES,
    ) -> Batch:
        if (
            type(num_tokens) is not int
            or (num_reqs is not None and type(num_reqs) is not int)
            or (query_len is not None and type(query_len) is not int)
            or type(num_active_loras) is not int
        ):
            num_tokens = _count("num_tokens", num_tokens)
            num_reqs = None if num_reqs is None else _count("num_reqs", num_reqs)
            query_len = None if query_len is None else _count("query_len", query_len)
            num_active_loras = _count("num_active_loras", num_active_loras)
        return _new_tuple(
            cls, (num_tokens, num_reqs, query_len, bounds, num_active_loras, variant, exclude)
        )

    __repr__ = _call_of

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Batch:  # type: ignore[override]
        # `_replace` calls this. Unchecked, a batch of 9.0 tokens would have the answer of one of 9.
        return cls(*iterable)


# All code of core that has to know every field of a batch is from here on. A new one comes last,
# with a default; it is named in `checked_batch`, and if graphs differ by it in `example_of` and
# `idle_batch_of`, and in `Ladders` (dispatch/ladders.py), which choose by it.


def checked_batch(batch: object) -> Batch:
    """Return `batch` with its bounds as ints. Raises `InvalidBatchError` for an object that is no
    `Batch`, for a batch without tokens, and for counts that no int64 holds."""
    if not isinstance(batch, Batch):
        raise InvalidBatchError(
            "a step's batch is no Batch",
            got=type(batch).__name__,
            expected="a Batch, or nothing where the inputs' shapes say everything",
            advice="runner(Batch(num_tokens, num_reqs), input_ids=...): inputs are passed by name",
        )
    tokens, reqs, query_len, bounds, loras, variant, _ = batch
    if variant is not None and type(variant) is not str:
        checked_variant(variant)
    # Counts are ints already: nothing makes a `Batch` but its constructor.
    if bounds is not _NO_BOUNDS and checked_bounds(bounds) is not bounds:
        batch = batch._replace(bounds=checked_bounds(bounds))
    # By comparisons: a call of `max` is a tenth of a new batch's dispatch.
    if tokens > MOST or (reqs or 0) > MOST or (query_len or 0) > MOST or loras > MOST:
        for name, count in zip(Batch._fields, (tokens, reqs, query_len, 0, loras), strict=False):
            _count(name, count or 0)
    if tokens < 1:
        advice = "Batch(num_tokens) with the live tokens of the step"
        if tokens == 0:
            advice = "skip the step when nothing is scheduled"
        what, expected = "a batch needs at least one token", "num_tokens >= 1"
        raise refused(what, tokens, expected, advice, InvalidBatchError)
    return batch


def live_query_len(batch: Batch) -> int | None:
    """How many tokens each request has where that is one number."""
    query_len, reqs = batch.query_len, batch.num_reqs
    if query_len is None or query_len < 1:
        return None
    whole = batch.num_tokens // query_len if reqs is None else reqs
    return query_len if whole * query_len == batch.num_tokens else None


def settled(batch: Batch) -> Batch:
    """A checked batch with `num_reqs` where it follows from tokens and query length, and without a
    query length that the counts contradict."""
    if batch.query_len is None:
        return batch
    query_len = live_query_len(batch)
    if query_len is None:
        return batch._replace(query_len=None)
    if batch.num_reqs is None:
        return batch._replace(num_reqs=batch.num_tokens // query_len)
    return batch


def descriptor_of(batch: Batch) -> BatchDescriptor:
    """The descriptor of a batch, checked and settled, that no graph serves. `BatchDescriptor(...)`
    would check all fields again, which takes as long as the dispatch."""
    tokens, reqs, query_len, bounds, loras, variant, _ = batch
    if reqs is not None and reqs < 1:
        reqs = None
    if loras < 0:
        loras = 0
    fields = tokens, reqs, query_len is not None, loras > 0, loras, query_len, bounds, variant
    return _new_tuple(BatchDescriptor, fields)


def room_for_reqs(descriptor: BatchDescriptor, most: int) -> int:
    """The requests that the graph of a descriptor has rows for, `most` being the most of any. Every
    request has a token, so a graph for any number of requests needs no more rows."""
    return descriptor.num_reqs or min(descriptor.num_tokens, most)


def example_of(descriptor: BatchDescriptor, room: int) -> Batch:
    """A batch that the graph of a descriptor serves, with padding rows if there may be some. Where
    the graph serves any number of requests it has half of those that there is `room` for."""
    reqs, query_len = descriptor.num_reqs, descriptor.query_len
    if descriptor.uniform and query_len is not None:
        reqs = max(descriptor.num_tokens // query_len - 1, 1)
        tokens = reqs * query_len
    else:
        tokens = max(descriptor.num_tokens - 1, 1)
        reqs = min(reqs or max(room // 2, 1), tokens)
        query_len = None
    loras, variant = descriptor.num_active_loras, descriptor.variant
    return Batch(tokens, reqs, query_len, descriptor.bounds, loras, variant)


def idle_batch_of(descriptor: BatchDescriptor) -> Batch:
    """One request of padding, which the graph of a descriptor serves."""
    query_len, variant = descriptor.query_len, descriptor.variant
    return Batch(query_len or 1, 1, query_len, descriptor.bounds, variant=variant)


def unpadded(batch: Batch) -> BatchDescriptor:
    """The descriptor of any batch that no graph serves."""
    return descriptor_of(settled(checked_batch(batch)))


def checked_bounds(bounds: object) -> tuple[int, ...]:
    """Bounds as a tuple of ints; raises `InvalidBatchError` for anything else."""
    if type(bounds) is tuple and _INTS.issuperset(map(type, bounds)):
        return bounds
    listed = items_of("bounds", bounds, "(4096,)", InvalidBatchError)
    return tuple(_count("a bound", bound) for bound in listed)


def checked_variant(variant: Hashable) -> Hashable:
    """The variant itself; raises `InvalidBatchError` where it cannot be hashed."""
    check_hashable("a variant", variant, InvalidBatchError)
    return variant


def _checked_flag(name: str, value: object) -> bool:
    """A flag of Python, of NumPy or in a tensor, as a bool; raises `InvalidBatchError`."""
    if str(getattr(value, "dtype", "")).endswith("bool"):
        return bool(value)
    if not isinstance(value, bool):
        what, advice = f"{name} is a flag", f"{name}=False"
        raise refused(what, value, "True or False", advice, InvalidBatchError)
    return value


AXES = ("tokens", "rows", "reqs")
"""The names that users write."""

_AXIS = re.compile(r"\s*(\w+?)\s*(?:\+\s*(\d{1,18})\s*)?")


class Axis(NamedTuple):
    """A batch axis in a shape, with a constant added: "tokens", "rows", "reqs" or "reqs+1"."""

    name: str
    extra: int = 0

    @classmethod
    def parse(cls, text: object, names: Collection[str] | None = AXES) -> Axis:
        """From text like "tokens" or "reqs+1"; any name if `names` is None.

        Raises `InvalidInputError`.
        """
        allowed = None
        if names is not None:
            listed = items_of("names", names, '("tokens", "reqs")', InvalidInputError)
            allowed = [name for name in listed if isinstance(name, str)]
        match = _AXIS.fullmatch(text) if isinstance(text, str) else None
        if match is None or (allowed is not None and match[1] not in allowed):
            meant = nearest(match[1] if match else text, allowed or AXES)
            extra = f"+{match[2]}" if match and match[2] else ""
            right = f'"{meant}{extra}"' if meant else '("tokens",), or ("reqs", 64) for rows of 64'
            what = "unknown batch axis in a shape"
            expected = '"tokens", "rows", "reqs", "reqs+1" or an int'
            raise refused(what, text, expected, right, InvalidInputError)
        return cls(match[1], int(match[2] or 0))

    @property
    def counts(self) -> Literal["tokens", "reqs"]:
        """The count of a `Batch` that it grows with; "rows" are its tokens."""
        return "reqs" if self.name == "reqs" else "tokens"

    def size(self, tokens: int, reqs: int) -> int:
        """The size of a dimension of this axis in a batch of so many tokens and requests."""
        return (reqs if self.name == "reqs" else tokens) + self.extra

    def __str__(self) -> str:
        return f"{self.name}+{self.extra}" if self.extra else self.name
