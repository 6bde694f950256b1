"""What a model holds that a host can change: a walk to all of it, and other values of like types.

`slots_of` gives the ways from a model to its slots, `follow` goes one of them, and `KINDS` reads
and sets a slot. `like` makes another value. The walk is not graphrt's, and leaves out libraries.
"""

from __future__ import annotations

import copy
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

MISSING = object()
ENTERED = "transformers", "tests"


class Kind(NamedTuple):
    """How slots of a kind are read and set, `MISSING` to empty one; and whether CPython tells of
    a change."""

    get: Callable[[Any, Any], Any]
    set: Callable[[Any, Any, Any], object]
    is_told: bool


def set_item(holder: Any, key: Any, value: Any) -> None:
    if value is MISSING:
        holder.pop(key, None)
    else:
        holder[key] = value


def _set_attribute(holder: Any, key: str, value: Any) -> None:
    if value is MISSING:
        vars(holder).pop(key, None)
    else:
        setattr(holder, key, value)


def _set_of_class(holder: type, key: str, value: Any) -> None:
    if value is not MISSING:
        setattr(holder, key, value)
    elif key in vars(holder):
        delattr(holder, key)


def _set_default(holder: Any, at: int, value: Any) -> None:
    before = holder.__defaults__
    holder.__defaults__ = (*before[:at], value, *before[at + 1 :])


def _set_list(holder: Any, key: None, value: Any) -> None:
    holder[:] = value


KINDS = {
    "attribute": Kind(lambda h, k: vars(h).get(k, MISSING), _set_attribute, True),
    "item": Kind(lambda h, k: dict.get(h, k, MISSING), set_item, True),
    "of class": Kind(lambda h, k: vars(h).get(k, MISSING), _set_of_class, True),
    "global": Kind(
        lambda h, k: h.__globals__.get(k, MISSING),
        lambda h, k, v: set_item(h.__globals__, k, v),
        True,
    ),
    "element": Kind(lambda h, k: h[k], lambda h, k, v: h.__setitem__(k, v), False),
    "elements": Kind(lambda h, k: [*h], _set_list, False),
    "default": Kind(lambda h, k: h.__defaults__[k], _set_default, False),
    "keyword default": Kind(
        lambda h, k: h.__kwdefaults__.get(k, MISSING),
        lambda h, k, v: set_item(h.__kwdefaults__, k, v),
        True,
    ),
    "closure": Kind(
        lambda h, k: h.__closure__[k].cell_contents,
        lambda h, k, v: setattr(h.__closure__[k], "cell_contents", v),
        False,
    ),
    "code": Kind(lambda h, k: h.__code__, lambda h, k, v: setattr(h, "__code__", v), False),
    "memory": Kind(lambda h, k: h.detach(), lambda h, k, v: setattr(h, "data", v), False),
    "class": Kind(lambda h, k: type(h), lambda h, k, v: setattr(h, "__class__", v), False),
    # Only ways on, never set.
    "base": Kind(lambda h, k: type(h).__mro__[k], set_item, False),
    "function": Kind(lambda h, k: function_in(vars(h)[k]), set_item, False),
}


class Step(NamedTuple):
    kind: str
    key: Any


Path = tuple[Step, ...]


def text_of(path: Path) -> str:
    return " / ".join(f"{kind} {key!r}" for kind, key in path)


def function_in(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__func__", value)


def home_of(of: Any) -> str:
    return str(getattr(of, "__module__", "")).partition(".")[0]


def executed_code(run: Callable[[], object]) -> set[types.CodeType]:
    codes = set()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return codes


def slots_of(model: nn.Module, codes: set[types.CodeType]) -> list[Path]:
    """The ways to all slots that a model reaches, objects of libraries left out; of functions
    those whose code is among `codes`."""
    paths: list[Path] = []
    seen: set[int] = set()
    # What is seen is kept alive, so that the ids stay its own.
    queue: deque[tuple[Path, Any]] = deque([((), model)])
    kept = []
    while queue:
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        for step, is_slot in _steps_from(value, codes):
            try:
                inner = KINDS[step.kind].get(value, step.key)
            except (ValueError, IndexError, AttributeError):
                continue
            if is_slot:
                paths.append((*path, step))
            if step.kind not in ("elements", "memory", "class", "code"):  # the same, or anew
                queue.append(((*path, step), inner))
    return paths


def _steps_from(value: Any, codes: set[types.CodeType]) -> Iterator[tuple[Step, bool]]:
    if isinstance(value, torch.Tensor):
        yield Step("memory", None), value.numel() > 0
    elif isinstance(value, dict):
        yield from (
            (Step("item", key), True) for key in [*dict.keys(value)] if isinstance(key, str | int)
        )
    elif isinstance(value, list):
        yield Step("elements", None), True
        yield from ((Step("element", at), True) for at in range(min(len(value), 8)))
    elif isinstance(value, types.FunctionType):
        if value.__code__ in codes and home_of(value) in ENTERED:
            yield from _steps_from_function(value)
    elif isinstance(value, type):
        if home_of(value) in ENTERED:
            for key, each in vars(value).items():
                if key.startswith("__") and key != "__call__":
                    continue
                yield Step("of class", key), True
                if isinstance(function_in(each), types.FunctionType):
                    yield Step("function", key), False
    elif hasattr(value, "__dict__") and (
        isinstance(value, nn.Module) or home_of(type(value)) in ENTERED
    ):
        if isinstance(value, nn.Module):
            yield Step("class", None), True
        yield from ((Step("attribute", key), True) for key in vars(value))
        for at, base in enumerate(type(value).__mro__):
            if home_of(base) in ENTERED:
                yield Step("base", at), False


def _steps_from_function(value: types.FunctionType) -> Iterator[tuple[Step, bool]]:
    yield Step("code", None), True
    for at in range(len(value.__defaults__ or ())):
        yield Step("default", at), True
    for key in value.__kwdefaults__ or ():
        yield Step("keyword default", key), True
    for at in range(len(value.__closure__ or ())):
        yield Step("closure", at), True
    for name in value.__code__.co_names:
        inner = value.__globals__.get(name)
        if inner is not None and not isinstance(inner, types.ModuleType):
            yield Step("global", name), True


def follow(model: nn.Module, path: Path) -> Any:
    value: Any = model
    for kind, key in path:
        value = KINDS[kind].get(value, key)
    return value


# Values ------------------------------------------------------------------------------------------


class Scaled:
    """Calls `inner`, and multiplies what floats it returns."""

    def __init__(self, inner: Callable[..., Any], factor: float) -> None:
        self.inner, self.factor = inner, factor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.inner(*args, **kwargs), self.factor)


def scaled(value: Any, factor: float) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * factor
    if type(value) in (tuple, list):
        return type(value)(scaled(each, factor) for each in value)
    return value * factor if type(value) is float else value


def scaled_function(inner: Callable[..., Any], factor: float) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return scaled(inner(*args, **kwargs), factor)

    return call


def like(value: Any, numbers: random.Random, texts: list[str]) -> Any:
    """A value of a like type that is another one; `MISSING` where nobody knows any."""
    factor = round(numbers.uniform(1.5, 3.0), 2)
    if value is MISSING:
        return numbers.choice([0.5, 2, True, "added"])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) and type(value) is int:
        return numbers.choice([value + 1, value * 2, value - 1])
    if isinstance(value, float):
        return value * factor + 0.1
    if isinstance(value, str):
        return numbers.choice(texts)
    if value is None:
        return numbers.choice([1, 0.5, True])
    if isinstance(value, torch.Tensor):
        return _like_tensor(value, factor)
    if isinstance(value, torch.dtype):
        return torch.float64 if value is not torch.float64 else torch.float32
    if isinstance(value, nn.Module):
        inner = copy.deepcopy(value)
        for each in inner.parameters():
            each.data.mul_(factor)
        return inner
    if isinstance(value, property):
        return property(scaled_function(value.fget, factor))
    if isinstance(value, staticmethod):
        return staticmethod(scaled_function(value.__func__, factor))
    if isinstance(value, classmethod):
        return classmethod(scaled_function(value.__func__, factor))
    if isinstance(value, type):
        return _like_class(value, factor)
    if isinstance(value, types.CodeType):
        return _like_code(value, factor)
    if isinstance(value, types.FunctionType):
        return scaled_function(value, factor)
    if callable(value) and not hasattr(value, "__dict__"):
        return numbers.choice([scaled_function, Scaled])(value, factor)
    if type(value) in (tuple, list, set, frozenset, deque):
        return type(value)(_like_items([*value], numbers, texts))
    if isinstance(value, dict):
        return _like_dict(value, numbers, texts)
    if hasattr(value, "__dict__") and home_of(type(value)) in ENTERED:
        other = copy.copy(value)
        keys = sorted(key for key, each in vars(other).items() if type(each) in (int, float, bool))
        if keys:
            key = numbers.choice(keys)
            setattr(other, key, like(getattr(other, key), numbers, texts))
        return other
    return MISSING


def _like_tensor(value: torch.Tensor, factor: float) -> torch.Tensor:
    with torch.no_grad():
        if value.dtype is torch.bool:
            other = ~value
        elif value.is_floating_point():
            other = value * factor + 0.01
        else:
            other = value.flip(-1) if value.dim() else value + 1
    if isinstance(value, nn.Parameter):
        return nn.Parameter(other, requires_grad=value.requires_grad)
    return other.contiguous()


def _like_class(value: type, factor: float) -> type:
    names: dict[str, Any] = {"__module__": __name__}
    if issubclass(value, nn.Module):
        forward: Any = value.forward
        names["forward"] = scaled_function(forward, factor)
    return type(value)(value.__name__, (value,), names)


def _like_code(value: types.CodeType, factor: float) -> types.CodeType:
    constants = [*value.co_consts]
    for at, each in enumerate(constants):
        if type(each) is float:
            constants[at] = each * factor
            break
        if type(each) is int and each not in (0, 1):
            constants[at] = each + 1
            break
    return value.replace(co_consts=tuple(constants), co_name=value.co_name)


def _like_items(items: list[Any], numbers: random.Random, texts: list[str]) -> list[Any]:
    how = numbers.choice(["replace", "append", "pop", "turn round"])
    if how == "append" or not items:
        return [*items, items[-1] if items else 1]
    if how == "pop":
        return items[:-1]
    if how == "turn round":
        return items[::-1]
    at = numbers.randrange(len(items))
    other = like(items[at], numbers, texts)
    return items if other is MISSING else [*items[:at], other, *items[at + 1 :]]


def _like_dict(value: dict[Any, Any], numbers: random.Random, texts: list[str]) -> dict[Any, Any]:
    other: dict[Any, Any] = copy.copy(value)
    keys = [*other]
    how = numbers.choice(["replace", "add", "pop"])
    if how == "add" or not keys:
        other["added"] = 1
    elif how == "pop":
        other.pop(numbers.choice(keys))
    else:
        key = numbers.choice(keys)
        changed = like(other[key], numbers, texts)
        if changed is not MISSING:
            other[key] = changed
    return other
