"""Finds the cheapest call that replays a recorded operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.thread_mode import ThreadMode
from graphrt.cpu.private_torch import below_autograd, bindings_of, inference_mode, schema_of
from graphrt.cpu.tape.aliases import with_replaced
from graphrt.cpu.tape.operators import Operator, operator_of

_COPY: Callable[..., torch.Tensor] = torch.Tensor.copy_
_COPIES = frozenset({"aten::_to_copy", "aten::clone"})
_BAKED_BYTES = 4096
"""A result up to this size, of an operator without tensor arguments, is kept and copied. Larger
ones would cost memory: a replay computes them."""
_FACTORY_ARGUMENTS = frozenset({"device", "dtype", "layout", "pin_memory"})

REFUSALS = (TypeError, ValueError, RuntimeError, IndexError)
"""Errors by which torch rejects a call that does not exist or fit. Any other error is raised."""

_LARGEST_RANDOM_BYTES = 1 << 20
"""Larger arguments are weights or caches: `agrees` keeps their values."""

_verdicts: dict[tuple[object, ...], bool] = {}
"""An operator, its variant and the shapes of a call -> the answer of `agrees`."""


@dataclass(frozen=True)
class Call:
    """A callable with its arguments, bound at capture."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        return self.fn(*self.args, **self.kwargs)

    def bound(self) -> Callable[[], Any]:
        """The same call without arguments, which costs one C call."""
        return partial(self.fn, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Lowered:
    """How an operator is replayed: `call`, then its results copied into `copies`.

    Each copy is (position in the flattened result, recorded output). `flat` says that the result
    is a tuple or list of tensors with nothing inside; `checked` that a replay compares shapes.
    `kind` names the way, for tests: "in_place", "out", "copy_", "constant" or "again".
    """

    kind: str
    call: Call
    copies: tuple[tuple[int, torch.Tensor], ...] = ()
    flat: bool = False
    checked: bool = False


def replay_guard(*, inference: bool) -> Callable[[], Any]:
    """A factory of context managers, in which calls are tried at capture and issued at replay.

    They are below autograd, as replays on a device are: calls build no autograd graph and count no
    versions of tensors, and a custom operator's kernel is called directly.
    """
    return partial(inference_mode, True) if inference else below_autograd


class _Probe(ThreadMode):
    """Notes the operators that Python calls issue, without executing them: each returns `answer`,
    a result of the right kind."""

    takes_apart = False

    def __init__(self, answer: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answer = answer
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((func, args, kwargs))
        return self.answer


def lower_in_place(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The fastest call that issues a mutating operator; never executes it."""
    reference = Call(op.raw, args, kwargs)
    answer = _mutated(op, args, kwargs)
    for fast in _bindings(op.name):
        for call in _spellings(op, fast, args, kwargs):
            if _same_call(reference, call, answer):
                return call
    return reference


def lower_functional(
    op: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
) -> Lowered | None:
    """A call that computes `results` straight into `outs`, bit for bit; None if there is none.

    Executes the candidates: only for operators that are deterministic and mutate nothing.
    """
    copied = _as_copy(op, args, kwargs, results, outs)
    if copied is not None:
        return copied
    variant = out_variant(op)
    if variant is None or len(variant[1]) != len(outs):
        return None  # some results may be undefined: no tensor stands for them
    out_op, names, dropped = variant
    all_kwargs, kwargs = kwargs, {k: v for k, v in kwargs.items() if k not in dropped}
    if not agrees(op, out_op.raw, names, args, all_kwargs, kwargs, outs):
        return None
    reference = Call(out_op.raw, args, kwargs | dict(zip(names, outs, strict=True)))
    for call in _out_spellings(op, reference, kwargs, outs):
        if _computes(call, results, outs):
            return Lowered("out", call)
    return None


def _as_copy(
    op: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
) -> Lowered | None:
    """A copy of the argument, or of a small result that depends on nothing which can change."""
    if len(outs) != 1:
        return None
    if op.name in _COPIES:
        kind, source = "copy_", args[0]
    elif outs[0].nbytes <= _BAKED_BYTES and not tree.tensors(args, kwargs):
        kind, source = "constant", results[0]
    else:
        return None
    call = Call(_COPY, (outs[0], source))
    return Lowered(kind, call) if _computes(call, results, outs) else None


def _out_spellings(
    op: Operator,
    reference: Call,
    kwargs: dict[str, Any],
    outs: Sequence[torch.Tensor],
) -> Iterator[Call]:
    """Calls that issue the same operator as `reference`, an out variant; the fastest first."""
    out = outs[0] if len(outs) == 1 else tuple(outs)
    for fast in _bindings(op.name):
        call = Call(fast, reference.args, kwargs | {"out": out})
        if _same_call(reference, call, out):
            yield call
    yield reference


def lower_again(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Call:
    """The fastest call that issues a functional operator itself; never executes it."""
    reference = Call(op.raw, args, kwargs)
    for fast in _bindings(op.name):
        call = Call(fast, args, kwargs)
        if _same_call(reference, call, answer):
            return call
    return reference


@cache
def out_variant(op: Operator) -> tuple[Operator, tuple[str, ...], frozenset[str]] | None:
    """The overload of `op` that takes the same arguments and writes into given outputs, or None.

    Also the names of those outputs, and of arguments that it lacks (`dtype`, `device`).
    """
    returns = op.schema.returns
    if not returns or any(str(r.type) != "Tensor" for r in returns):
        return None
    typed = [(a.name, str(a.type)) for a in op.schema.arguments]
    packet = op.func.overloadpacket
    for name in packet.overloads():
        try:
            candidate = getattr(packet, name)
        except (AttributeError, RuntimeError):
            continue  # listed for TorchScript, and not an operator of the dispatcher
        arguments = schema_of(candidate).arguments
        outs = tuple(a.name for a in arguments if a.is_out)
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        dropped = _FACTORY_ARGUMENTS - {name for name, _ in rest}
        if len(outs) == len(returns) and rest == [g for g in typed if g[0] not in dropped]:
            return operator_of(candidate), outs, dropped
    return None


@cache
def _bindings(name: str) -> tuple[Callable[..., Any], ...]:
    namespace, _, short = name.partition("::")
    if namespace != "aten":
        return ()
    in_place = short.endswith("_") and not short.startswith("_")
    return bindings_of(short, in_place=in_place)


def _spellings(
    op: Operator, fast: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Call]:
    names = [a.name for a in op.schema.arguments if a.is_out]
    if names and all(n in kwargs for n in names):
        outs = tuple(kwargs[n] for n in names)
        rest = {k: v for k, v in kwargs.items() if k not in names}
        yield Call(fast, args, rest | {"out": outs[0] if len(outs) == 1 else outs})
    else:
        yield Call(fast, args, kwargs)


def _mutated(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = op.returned_arguments(args, kwargs)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _same_call(reference: Call, call: Call, answer: Any) -> bool:
    """Whether each call issues exactly one operator: the same one, with the same arguments."""
    try:
        with _Probe(answer) as probe:
            reference()
            issued = len(probe.calls)
            call()
    except REFUSALS:
        return False  # this spelling does not exist; the caller tries the next
    return issued == 1 and len(probe.calls) == 2 and _equal(*probe.calls)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return False
        pairs = zip(a, b, strict=True)
    elif type(a) is not type(b):
        return False
    elif isinstance(a, dict):
        if a.keys() != b.keys():
            return False
        pairs = zip(a.values(), map(b.get, a), strict=True)
    elif isinstance(a, float):
        return bool(a.hex() == b.hex())
    else:
        return bool(a is b or a == b)
    # Most pairs are one object: tensors, and arguments that torch's parser passes on unchanged.
    for x, y in pairs:  # noqa: SIM110
        if x is not y and not _equal(x, y):
            return False
    return True


def _computes(call: Call, results: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    before = list(map(identity, outs))
    try:
        call()
    except REFUSALS:
        return False  # not every out variant takes every argument; the operator is run again
    return list(map(identity, outs)) == before and all(map(same_bits, results, outs))


# Whether `out=` variants compute what their operators do, tried on random data --------------------


def agrees(
    op: Operator,
    variant: Callable[..., Any],
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out_kwargs: dict[str, Any],
    outs: Sequence[torch.Tensor],
) -> bool:
    """Whether `variant`, called with `out_kwargs` in place of `kwargs` and outputs like `outs`,
    gives the bits of `op` on random numbers in `args`. Decided once for tensors of these shapes.

    A step is often captured on padding: on zeros a wrong variant may give the right bits.
    """
    key = (op, variant, names, *map(_signature, (args, kwargs)), *map(_signature, outs))
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _verdicts[key] = _try(op, variant, names, args, kwargs, out_kwargs, outs)
    return verdict


def _try(
    op: Operator,
    variant: Callable[..., Any],
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out_kwargs: dict[str, Any],
    outs: Sequence[torch.Tensor],
) -> bool:
    """The answer of `agrees`, by running the operator and its variant."""
    # Drawn from the default generator, these would change the forward's next random numbers.
    generator = torch.Generator("cpu").manual_seed(0)
    randoms = {
        id(t): _random_like(t, generator)
        for t in tree.tensors(args, kwargs)
        if t.dtype.is_floating_point or t.dtype.is_complex
    }
    args = with_replaced(args, randoms)
    buffers = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu") for t in outs]
    before = list(map(identity, buffers))
    try:
        results = tree.tensors(op.raw(*args, **with_replaced(kwargs, randoms)))
        out = dict(zip(names, buffers, strict=True))
        variant(*args, **with_replaced(out_kwargs, randoms), **out)
    except REFUSALS:
        return False  # a replay calls the operator itself and copies its result
    return (
        len(results) == len(buffers)
        and list(map(identity, buffers)) == before
        and all(map(same_bits, results, buffers))
    )


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of the same shape, strides and dtype; `tensor` itself if it is too large, or
    of a kind for which no such tensor is made here."""
    if (
        tensor.layout is not torch.strided
        or tensor.nbytes > _LARGEST_RANDOM_BYTES
        or not tensor.numel()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return tensor
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    numbers = torch.rand(
        extent,
        dtype=torch.complex64 if tensor.dtype.is_complex else torch.float32,
        generator=generator,
        device="cpu",
    )
    return numbers.to(tensor.dtype).as_strided(tensor.size(), tensor.stride())


def _signature(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        return value.dtype, value.size(), value.stride() if strided else value.layout
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((key, _signature(item)) for key, item in value.items())
    return type(value), repr(value)


def identity(t: torch.Tensor) -> tuple[object, ...]:
    """The address and layout of `t`, which an operator that is given it must not change."""
    # linalg.lu_solve marks the output that it is given as conjugated in place of conjugating it.
    return t.data_ptr(), t.dtype, t.size(), t.stride(), t.is_conj(), t.is_neg()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of memory, so that a NaN equals itself."""
    if a.dtype != b.dtype or a.size() != b.size():
        return False
    return torch.equal(tree.octets(a), tree.octets(b))
