"""What names one captured graph, and what a host knows about one step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from graphrt.core.base import InvalidBatchError, count_of, items_of, shown
from graphrt.core.batch.modes import GraphMode


class _Named(NamedTuple):
    num_tokens: int
    num_reqs: int | None
    uniform: bool
    has_lora: bool
    num_active_loras: int
    query_len: int | None
    bounds: tuple[int, ...]
    variant: Hashable


_new_tuple = tuple.__new__
_INTS = frozenset({int})


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
        if (
            type(num_tokens) is not int
            or (num_reqs is not None and type(num_reqs) is not int)
            or (query_len is not None and type(query_len) is not int)
            or type(num_active_loras) is not int
        ):
            num_tokens = count_of("num_tokens", num_tokens, error=InvalidBatchError)
            num_reqs = checked_count("num_reqs", num_reqs)
            query_len = checked_count("query_len", query_len)
            num_active_loras = count_of(
                "num_active_loras", num_active_loras, error=InvalidBatchError
            )
        if not plain_bounds(bounds):
            bounds = checked_bounds(bounds)
        variant = checked_variant(variant)
        uniform = _checked_flag("uniform", uniform)
        has_lora = _checked_flag("has_lora", has_lora) or num_active_loras > 0
        if num_tokens < 1:
            raise InvalidBatchError(
                "a descriptor needs at least one token",
                got=num_tokens,
                expected=">= 1",
                advice="BatchDescriptor(num_tokens=1)",
            )
        if num_reqs is not None and num_reqs < 1:
            raise InvalidBatchError(
                "num_reqs must be positive, or None for any",
                got=num_reqs,
                expected=">= 1",
                advice="num_reqs=None",
            )
        if num_active_loras < 0:
            raise InvalidBatchError(
                "num_active_loras cannot be negative",
                got=num_active_loras,
                expected=">= 0",
                advice="num_active_loras=0",
            )
        if query_len is not None and query_len < 1:
            raise InvalidBatchError(
                "query_len must be positive, or None for none",
                got=query_len,
                expected=">= 1",
                advice="query_len=1",
            )
        if uniform and query_len is None:
            if num_reqs is None or num_tokens % num_reqs:
                raise InvalidBatchError(
                    "a uniform descriptor needs its query length",
                    got=f"{num_tokens} tokens, {num_reqs} reqs",
                    expected="query_len, or num_tokens divisible by num_reqs",
                    advice="query_len=1, or uniform=False for requests of any length",
                )
            query_len = num_tokens // num_reqs
        if uniform and query_len is not None and num_tokens % query_len:
            raise InvalidBatchError(
                "a uniform descriptor holds whole requests",
                got=f"{num_tokens} tokens, query length {query_len}",
                expected="num_tokens divisible by query_len",
                advice=f"num_tokens={max(num_tokens // query_len, 1) * query_len}, or a descriptor "
                "without query_len, uniform=False",
            )
        return _new_tuple(
            cls,
            (
                num_tokens,
                num_reqs,
                uniform,
                has_lora,
                num_active_loras,
                query_len,
                bounds,
                variant,
            ),
        )

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> BatchDescriptor:  # type: ignore[override]
        # What `_replace` goes through, which would check nothing.
        return cls(*iterable)

    @property
    def serves(self) -> tuple[Hashable, ...]:
        """What batches have to be for graphs of one size, beside their lengths."""
        return self.has_lora, self.num_active_loras, self.bounds, self.variant

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What descriptors have in common whose forward runs the same code, whatever their size."""
        return *self.serves, self.uniform, self.query_len

    @property
    def lora_capacity(self) -> float:
        """The most active LoRAs this graph serves; infinite for `has_lora` without a count."""
        if self.num_active_loras:
            return self.num_active_loras
        return float("inf") if self.has_lora else 0

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
    num_tokens: int
    num_reqs: int | None
    query_len: int | None
    bounds: tuple[int, ...]
    num_active_loras: int
    variant: Hashable
    exclude: frozenset[GraphMode]


_NO_MODES: frozenset[GraphMode] = frozenset()


class Batch(_Fields):
    """What the host knows about this step; a tuple, because one is built for every step.

    `num_tokens` (at least 1) and `num_reqs` (None: unknown) count what is live. `query_len` is the
    tokens of each request when all have equally many, else None; one that the counts contradict is
    taken for None. `bounds` are what this step needs of a graph's bounds, in their order.
    `num_active_loras` and `variant` are as in the descriptor. `exclude` holds runtime modes that
    must not serve this batch (cascade attention: FULL).

    The counts are ints, or integers of NumPy or in tensors, which become ints here. Raises
    `InvalidBatchError` for others; what the rest holds is looked at when it is dispatched.
    """

    __slots__ = ()

    def __new__(
        cls,
        num_tokens: int,
        num_reqs: int | None = None,
        query_len: int | None = None,
        bounds: tuple[int, ...] = (),
        num_active_loras: int = 0,
        variant: Hashable = None,
        exclude: frozenset[GraphMode] = _NO_MODES,
    ) -> Batch:
        if (
            type(num_tokens) is not int
            or (num_reqs is not None and type(num_reqs) is not int)
            or (query_len is not None and type(query_len) is not int)
        ):
            num_tokens = count_of("num_tokens", num_tokens, error=InvalidBatchError)
            num_reqs = checked_count("num_reqs", num_reqs)
            query_len = checked_count("query_len", query_len)
        return _new_tuple(
            cls, (num_tokens, num_reqs, query_len, bounds, num_active_loras, variant, exclude)
        )

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Batch:  # type: ignore[override]
        # As above: a batch of 9.0 tokens equals one of 9, and would be told what that was.
        return cls(*iterable)


def plain_bounds(bounds: object) -> bool:
    """Whether bounds are a tuple of ints."""
    return type(bounds) is tuple and _INTS.issuperset(map(type, bounds))


def checked_count(name: str, value: object) -> int | None:
    """A count as an int, or None; raises `InvalidBatchError` for anything else."""
    return None if value is None else count_of(name, value, error=InvalidBatchError)


def checked_bounds(bounds: object) -> tuple[int, ...]:
    """Bounds as a tuple of ints; raises `InvalidBatchError` for anything else."""
    listed = items_of("bounds", bounds, "(4096,)", InvalidBatchError)
    return tuple(count_of("a bound", bound, error=InvalidBatchError) for bound in listed)


def checked_variant(variant: Hashable) -> Hashable:
    """The variant itself; raises `InvalidBatchError` where it cannot be hashed."""
    try:
        hash(variant)
    except TypeError as error:
        raise InvalidBatchError(
            "a variant must be hashable, to tell two graphs apart by it",
            got=shown(variant),
            expected="a string, an int, or a tuple of them",
            advice="name the variant with a string",
        ) from error
    return variant


def _checked_flag(name: str, value: object) -> bool:
    if str(getattr(value, "dtype", "")).endswith("bool"):
        return bool(value)
    if not isinstance(value, bool):
        raise InvalidBatchError(
            f"{name} is a flag",
            got=shown(value),
            expected="True or False",
            advice=f"{name}=False",
        )
    return value
