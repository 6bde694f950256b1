"""`DeclaredInputs`: what a host declares of a forward's arguments. A step's values are checked
against it; and it says what padding rows hold, which trials need to know."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from graphrt.core.base.errors import GraphRTError, InvalidBatchError, InvalidInputError
from graphrt.core.base.option_values import MOST, check_kind, refused, shown
from graphrt.core.device.platform import Platform
from graphrt.core.inputs.spec import Inputs, InputSpec, check_value, specs_of

_LARGE_BYTES = 1 << 30
"""Buffers up to 1 GiB fit nearly everywhere: for larger ones the device is asked how much memory it
has."""
_RESERVED = {"agreed", "metadata", "self", "updates"}
"""Names of arguments that a call of a runner, or of a wrapper, takes itself."""


class DeclaredInputs:
    """The specs of `inputs=` by (dotted) name, against which each step's values are checked. Raises
    `InvalidInputError` for what are no specs."""

    def __init__(self, specs: Mapping[str, Any]) -> None:
        self.specs = dict(_specs(specs, "", "inputs="))
        # Whether an argument of the forward is a dict of inputs.
        self.nested = any(isinstance(spec, Mapping) for spec in specs.values())
        self.optional = frozenset(name for name, spec in self.specs.items() if spec.optional)
        """The inputs that a step may leave out."""
        self.by_axis: dict[str, frozenset[str]] = {"tokens": frozenset()}
        """"tokens" or "reqs" -> the inputs with that batch axis, which have padding rows. "reqs"
        is missing if no input has it."""
        for name, spec in self.specs.items():
            axis, _ = spec.batch_axis()
            if axis is not None:
                self.by_axis[axis.counts] = self.by_axis.get(axis.counts, frozenset()) | {name}

    def check_names(self, values: Mapping[str, Any], *, completed: bool = True) -> None:
        """Raise `InvalidInputError` for missing or unknown input names. Optional ones may be
        missing before a step is `completed`."""
        may_lack = frozenset() if completed else self.optional
        missing = sorted(self.specs.keys() - values.keys() - may_lack)
        unknown = sorted(values.keys() - self.specs.keys())
        if missing or unknown:
            raise InvalidInputError(
                "the step's inputs are not the declared ones",
                got=f"missing {missing}, unknown {unknown}",
                expected=sorted(self.specs),
                advice="pass each declared input by its name, and nothing else; one that steps may "
                "lack is declared with optional=True and its pad",
            )

    def check(
        self,
        values: Mapping[str, Any],
        tokens: int | None,
        reqs: int | None,
        error: Exception | None = None,
    ) -> dict[str, Any]:
        """A step's inputs by (dotted) name; raises `InvalidInputError` for names, dtypes and shapes
        that are not the declared ones, and for tensors that have no rows in memory.

        `tokens` and `reqs` are the live ones, None if they are not known; `error` is what using the
        inputs raised, if they were used.
        """
        check_kind("inputs", values, Mapping, optional=False)
        flat = dict(flat_of(values))
        self.check_names(flat, completed=tokens is not None)
        for name, value in flat.items():
            spec = self.specs[name]
            live = None if tokens is None or reqs is None else spec.sizes(tokens, reqs)
            check_value(name, spec, value, live, error)
        return flat

    def infer(self, values: Mapping[str, Any]) -> tuple[int, int | None]:
        """Tokens and requests, from the inputs' shapes; requests are None if no shape has them."""
        counts: dict[str, int] = {}
        try:
            flat = dict(flat_of(values)) if self.nested else values
            self.check_names(flat, completed=False)
            for name, spec in self.specs.items():
                axis, dim = spec.batch_axis()
                if axis is None or name not in flat:
                    continue
                rows = flat[name].shape[dim] - axis.extra
                if counts.setdefault(axis.counts, rows) != rows:
                    raise InvalidInputError(
                        f"the inputs disagree on the number of {axis.name}",
                        got=f"{rows} by {name!r}",
                        expected=counts[axis.counts],
                        advice=f"pass {counts[axis.counts] + axis.extra} rows of {name!r} in "
                        f"dimension {dim}, as the inputs before it have",
                    )
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            # A value is no tensor, or has too few dimensions: `check` raises, and names it.
            self.check(values, None, None, error)
            raise
        if not counts:
            raise InvalidBatchError(
                "the shapes of the inputs do not say how large the batch is",
                got=f"no batch axis in any of {sorted(self.specs)}",
                expected="the batch itself",
                advice="runner(Batch(num_tokens, num_reqs), ...)",
            )
        reqs = counts.get("reqs")
        return counts.get("tokens", reqs or 0), reqs

    def check_fits(self, platform: Platform, tokens: int, reqs: int) -> None:
        """Raise `InvalidInputError` for buffers that no device has the memory for, or not this one:
        a system that promises more than it has would end the process instead."""
        sizes = {
            name: math.prod(spec.sizes(tokens, reqs)) * spec.dtype.itemsize
            for name, spec in self.specs.items()
        }
        needed, most = sum(sizes.values()), MOST
        if _LARGE_BYTES < needed <= MOST:
            figures = platform.memory_figures()
            most = MOST if figures is None else figures.total_bytes
        if needed > most:
            largest = max(sizes, key=lambda name: sizes[name])
            raise InvalidInputError(
                f"the buffers of the inputs need more memory than there is, {largest!r} most",
                got=f"{shown(needed)} bytes for {shown(tokens)} tokens and {shown(reqs)} requests",
                expected=f"at most {most}",
                advice="a smaller largest size (sizes, max_num_tokens, max_num_reqs), or shape",
            )


def _specs(specs: object, prefix: str, where: str) -> Iterator[tuple[str, InputSpec]]:
    """(dotted name, spec) of each input in a mapping, whose own name is `prefix`; raises
    `InvalidInputError` for anything else, which errors say is at `where`."""
    if not isinstance(specs, Mapping) or not specs:
        raise _wrong_inputs(
            where, specs, "at least one name with its InputSpec, or a tensor like it"
        )
    for name, spec in specs.items():
        if not isinstance(name, str) or not name or "." in name:
            raise _wrong_inputs(where, name, "names of arguments, without a dot")
        if not prefix and name in _RESERVED:
            raise _wrong_inputs(where, name, f"other names than {sorted(_RESERVED)}")
        if isinstance(spec, Mapping):
            yield from _specs(spec, f"{prefix}{name}.", f"inputs= at {prefix}{name}")
        elif isinstance(spec, InputSpec):
            yield prefix + name, spec
        else:
            raise _wrong_inputs(f"inputs= at {prefix}{name}", spec, "an InputSpec")


def with_specs(inputs: Inputs) -> Any:
    """`inputs`, with an `InputSpec` in the place of each tensor. Raises `InvalidInputError` for
    tensors of which it cannot be told which dimension has the rows."""
    tensors = _tensors_of(inputs)
    specs = specs_of(tensors, 'InputSpec.of({}, ("rows", None)) in its place') if tensors else {}
    return _replaced(inputs, specs, "") if tensors else inputs


def _tensors_of(inputs: object) -> dict[str, torch.Tensor]:
    """The tensors among (nested) inputs, by dotted name."""
    flat = flat_of(inputs) if isinstance(inputs, Mapping) else ()
    return {name: value for name, value in flat if isinstance(value, torch.Tensor)}


def _replaced(inputs: Mapping[str, Any], specs: Mapping[str, InputSpec], prefix: str) -> Any:
    return {
        name: _replaced(value, specs, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else specs.get(f"{prefix}{name}", value)
        for name, value in inputs.items()
    }


def check_forward(forward: Callable[..., Any], specs: Mapping[str, Any]) -> None:
    """Raise `InvalidInputError` unless `forward` takes what `inputs=` names, by name, and needs
    nothing else; one that does not tell what it takes is called as it is."""
    call: Any = forward
    if isinstance(forward, type) and issubclass(forward, torch.nn.Module):
        raise InvalidInputError(
            "the forward is a class, and not an instance of it",
            got=f"class {forward.__name__}",
            expected="an instance",
            advice=f"pass an instance: {forward.__name__}(...) in place of {forward.__name__}",
        )
    if isinstance(forward, torch.nn.Module) and type(forward).__call__ is torch.nn.Module.__call__:
        if vars(forward).get("_forward_pre_hooks"):
            return  # they may pass it something else
        call = forward.forward
    try:
        # Behind a decorator there is another signature than the one that is called.
        signature = inspect.signature(call, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**dict.fromkeys(specs))
    except TypeError as error:
        called = getattr(call, "__qualname__", type(call).__name__)
        raise InvalidInputError(
            f"the forward cannot be called with what inputs= names: {error}",
            got=f"inputs= names {', '.join(specs)}",
            expected=f"the arguments of {called}{signature}",
            advice="name in inputs= what the forward takes by name, and bind the rest: "
            "functools.partial(forward, name=...)",
        ) from None


def flat_of(specs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted names and what is there."""
    for name, spec in specs.items():
        if isinstance(spec, Mapping):
            yield from flat_of(spec, f"{prefix}{name}.")
        else:
            # A dict that is no mapping of inputs may have any key.
            yield f"{prefix}{name}" if prefix else name, spec


def _wrong_inputs(where: str, value: object, expected: str) -> GraphRTError:
    example = 'inputs={"input_ids": InputSpec(torch.int64, ("tokens",))}'
    advice = f"{example}; a mapping in it is an argument that is a dict"
    what = f"{where} must map names to InputSpec"
    return refused(what, value, expected, advice, InvalidInputError)
