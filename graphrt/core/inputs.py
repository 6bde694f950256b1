"""Static inputs: buffers at fixed addresses, filled and padded for every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphrt.core.errors import InvalidInputError

_CACHED_TAILS = 4096
"""Views of padding rows that an input keeps; beyond so many they are made anew."""


class Axis(NamedTuple):
    """A batch axis in a shape: "tokens" or "reqs", with a constant added ("reqs+1")."""

    name: str
    extra: int

    @classmethod
    def parse(cls, text: str) -> Axis:
        """From text like "tokens" or "reqs+1"; raises `InvalidInputError`."""
        name, _, extra = text.replace(" ", "").partition("+")
        if name not in ("tokens", "reqs") or (extra and not extra.isdigit()):
            raise InvalidInputError(
                "unknown batch axis in a shape",
                got=repr(text),
                expected='"tokens", "reqs", "reqs+1" or an int',
            )
        return cls(name, int(extra or 0))

    def size(self, tokens: int, reqs: int) -> int:
        return (tokens if self.name == "tokens" else reqs) + self.extra


@dataclass(frozen=True)
class InputSpec:
    """One input of a forward: its dtype, its shape with named batch axes, and its padding.

    `pad` is the value of padding rows, or "repeat" (the last live row) or "keep" (whatever was
    there). `index=True` marks what kernels use as an address (slot mappings, block tables): its
    padding must point where nothing live is, so "keep" is refused.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    pad: int | float | bool | str = 0
    index: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.pad, str) and self.pad not in ("repeat", "keep"):
            raise InvalidInputError(
                "unknown padding", got=repr(self.pad), expected='a number, "repeat" or "keep"'
            )
        if self.index and isinstance(self.pad, str):
            raise InvalidInputError(
                "padding rows of an index input cannot hold old or live values: they would read "
                "and write live memory",
                got=f"pad={self.pad!r}, index=True",
                expected="a pad value that reads and writes nothing live",
                advice="pad=-1 if the kernel skips it, or the slot of a dummy page",
            )
        axes = [place for place, size in enumerate(self.shape) if isinstance(size, str)]
        for place in axes:
            Axis.parse(str(self.shape[place]))
        if len(axes) > 1:
            raise InvalidInputError(
                "an input has at most one batch axis", got=self.shape, expected="one of them named"
            )


class StaticInput:
    """One buffer at the largest size, with the views of it that steps have used."""

    def __init__(self, name: str, spec: InputSpec, tokens: int, reqs: int, device: Any) -> None:
        self.name = name
        self.spec = spec
        self.axis: Axis | None = None
        self.dim = 0
        for dim, size in enumerate(spec.shape):
            if isinstance(size, str):
                self.axis, self.dim = Axis.parse(size), dim
        shape = [s if isinstance(s, int) else Axis.parse(s).size(tokens, reqs) for s in spec.shape]
        pad = 0 if isinstance(spec.pad, str) else spec.pad
        # Steps write it, in inference mode and outside of it.
        with torch.inference_mode(False):
            self.buffer = torch.full(shape, pad, dtype=spec.dtype, device=device)
        self._pad = pad
        self._on_device = self.buffer.device.type != "cpu"
        self._views: dict[int, torch.Tensor] = {}
        self._tails: dict[tuple[int, int], torch.Tensor] = {}

    def view(self, tokens: int, reqs: int) -> torch.Tensor:
        """The rows that a batch of this size uses."""
        if self.axis is None:
            return self.buffer
        rows = self.axis.size(tokens, reqs)
        found = self._views.get(rows)
        if found is None:
            found = self._views[rows] = self.buffer.narrow(self.dim, 0, rows)
        return found

    def fill(
        self, value: torch.Tensor, tokens: int, reqs: int, to_tokens: int, to_reqs: int
    ) -> None:
        """Copy the live rows in and pad up to the captured size; raises `InvalidInputError`."""
        live = self.view(tokens, reqs)
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype is not self.spec.dtype
            or value.shape != live.shape
        ):
            raise self._mismatch(value, live)
        if value.requires_grad:
            value = value.detach()
        if value.data_ptr() != live.data_ptr():
            # A pinned source may be written again by the host while a copy from it is under way.
            asynchronous = self._on_device and value.device.type == "cpu" and not value.is_pinned()
            live.copy_(value, non_blocking=asynchronous)
        elif value.stride() != live.stride():
            live.copy_(value.clone())
        if self.axis is not None:
            self._pad_rows(self.axis.size(tokens, reqs), self.axis.size(to_tokens, to_reqs))

    def reset(self) -> None:
        """Make every row a padding row."""
        self.buffer.fill_(self._pad)

    def _pad_rows(self, live: int, padded: int) -> None:
        # At every step anew: the forward, or `bind`, may have written the padding rows.
        pad = self.spec.pad
        if padded <= live or pad == "keep":
            return
        rows = self._tails.get((live, padded))
        if rows is None:
            rows = self.buffer.narrow(self.dim, live, padded - live)
            if len(self._tails) < _CACHED_TAILS:
                self._tails[live, padded] = rows
        if pad == "repeat":
            rows.copy_(self.buffer.narrow(self.dim, live - 1, 1))
        else:
            rows.fill_(self._pad)

    def _mismatch(self, value: Any, live: torch.Tensor) -> InvalidInputError:
        if not isinstance(value, torch.Tensor):
            return InvalidInputError(
                f"input {self.name!r} is no tensor",
                got=type(value).__name__,
                expected=f"a tensor of {self.spec.dtype}",
                advice=f"torch.tensor({self.name}, dtype={self.spec.dtype})",
            )
        if value.dtype is not self.spec.dtype:
            return InvalidInputError(
                f"input {self.name!r} has the wrong dtype",
                got=value.dtype,
                expected=self.spec.dtype,
                advice=f"{self.name}.to({self.spec.dtype}), or change its InputSpec",
            )
        return InvalidInputError(
            f"input {self.name!r} has the wrong shape",
            got=tuple(value.shape),
            expected=f"{tuple(live.shape)} from {self.spec.shape}",
            advice="pass the live rows only; graphrt pads them",
        )


class StaticInputs:
    """All inputs of a runner. Nested mappings of specs become dotted names."""

    def __init__(
        self, specs: Mapping[str, Any], *, tokens: int, reqs: int, device: Any = None
    ) -> None:
        self.nested = any(isinstance(spec, Mapping) for spec in specs.values())
        self._items = [StaticInput(name, spec, tokens, reqs, device) for name, spec in _flat(specs)]
        self.tokens = tokens
        self.reqs = reqs
        self._names = {item.name for item in self._items}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The whole buffers by name."""
        return {item.name: item.buffer for item in self._items}

    def views(self, tokens: int, reqs: int) -> dict[str, torch.Tensor]:
        """The buffers' rows for a batch of this size, by (dotted) name."""
        return {item.name: item.view(tokens, reqs) for item in self._items}

    def fill(
        self,
        values: Mapping[str, Any],
        tokens: int,
        reqs: int,
        to_tokens: int,
        to_reqs: int,
    ) -> None:
        """Copy a step's live rows into the buffers and pad them up to the captured size."""
        if self.nested:
            values = dict(_flat(values))
        if len(values) != len(self._items):
            self.check_names(values)
        for item in self._items:
            try:
                value = values[item.name]
            except KeyError:
                self.check_names(values)
                raise
            item.fill(value, tokens, reqs, to_tokens, to_reqs)

    def flat(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A step's inputs by (dotted) name; raises `InvalidInputError` for wrong names."""
        found = dict(_flat(values))
        self.check_names(found)
        return found

    def reset(self) -> None:
        """Make every row of every buffer a padding row."""
        for item in self._items:
            item.reset()

    def check_names(self, values: Mapping[str, Any]) -> None:
        """Raise `InvalidInputError` for missing or unknown input names."""
        missing = sorted(self._names - values.keys())
        unknown = sorted(values.keys() - self._names)
        if missing or unknown:
            raise InvalidInputError(
                "the step's inputs are not the declared ones",
                got=f"missing {missing}, unknown {unknown}",
                expected=sorted(self._names),
                advice="declare every input of the forward in inputs= and pass each of them",
            )

    def infer(self, values: Mapping[str, Any]) -> tuple[int, int | None]:
        """Tokens and requests as the shapes of the inputs say; None where they say nothing."""
        found: dict[str, int] = {}
        flat = dict(_flat(values)) if self.nested else values
        self.check_names(flat)
        for item in self._items:
            value = flat[item.name]
            if item.axis is None:
                continue
            if not isinstance(value, torch.Tensor) or value.dim() != item.buffer.dim():
                raise item._mismatch(value, item.buffer)
            rows = value.shape[item.dim] - item.axis.extra
            if found.setdefault(item.axis.name, rows) != rows:
                raise InvalidInputError(
                    f"the inputs disagree on the number of {item.axis.name}",
                    got=f"{rows} by {item.name!r}",
                    expected=found[item.axis.name],
                )
        reqs = found.get("reqs")
        return found.get("tokens", reqs or 0), reqs


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested dicts again, which is how the forward gets them."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return nested


def _flat(specs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, spec in specs.items():
        if isinstance(spec, Mapping):
            yield from _flat(spec, f"{prefix}{name}.")
        else:
            yield prefix + name, spec
