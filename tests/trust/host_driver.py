"""Random changes of real models between steps, each beside an eager twin with the same change.

    python -m tests.trust.host_driver --changes 10000 --seed 0 [--models llama ...] [--taken]

There is no list of changes. A walk of its own goes through everything that a model holds: modules,
parameters, buffers, hooks, configs, containers, classes, and the functions that a forward runs,
with their globals, defaults, closures and constants. A change draws one slot and a new value of a
like type, or undoes an earlier change. The twin is a second model from the same seed, and what both
share is changed once.

A step is wrong if its output is not the twin's. What CPython tells of has to be right at the next
step. Anything else may be late by as many steps as the report says, and not at all after
`weights_changed()`. `--taken` takes all watchers of dicts before, so that nobody tells of anything.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import random
import sys
import types
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from graphrt import GraphRunner, InputSpec
from graphrt.core.base._native_door import NativeWatch
from graphrt.errors import StaleInputError
from tests.trust.host_programs import WIDTH, Net, all_ids_taken

LENGTH = 4
VOCAB = 64
MOST_WRONG = 20
MISSING = object()
ENTERED = "transformers", "tests"
LIBRARIES = "torch", "numpy", "builtins"

Models = tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], InputSpec]
"""What makes a model, its forward, and its input."""


# Models ------------------------------------------------------------------------------------------


def small_net() -> Models:
    spec = InputSpec(torch.float32, ("tokens", WIDTH))
    return Net, lambda model, x: model(x), spec


def family(name: str) -> Models:
    """A tiny model of transformers: for each row the logits of its last token."""
    import transformers

    from tests.models.families import SHARED
    from tests.models.table import DECODERS, ENCODERS

    of = (DECODERS | ENCODERS)[name]
    small = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": VOCAB}
    # Random numbers would be others in padded steps.
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0}
    config_class = getattr(transformers, of.config)
    arguments = {**SHARED, **small, **(still if name in ENCODERS else {}), **of.extra}
    if not {"layer_types", "n_layer"} & of.extra.keys() and name != "glm4_moe":
        arguments["num_hidden_layers"] = 1

    def make() -> nn.Module:
        model: nn.Module = getattr(transformers, of.model)(config_class(**arguments)).eval()
        return model

    given = {} if name in ENCODERS else {"use_cache": False}

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = model(x, **given)[0][:, -1]
        return last

    return make, forward, InputSpec(torch.int64, ("tokens", LENGTH))


FAMILIES = (
    "llama", "qwen3", "phi3", "gpt_neox", "olmo2", "mixtral", "qwen3_moe", "mistral", "gemma2",
    "gemma3", "granite", "glm4_moe", "deepseek_v3", "lfm2", "mamba", "cohere2", "gpt_oss", "falcon",
    "opt", "bloom", "bert", "modernbert",
)  # fmt: skip


# Slots -------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """How slots of a kind are read and set, `MISSING` to empty one; and whether CPython tells of
    a change."""

    get: Callable[[Any, Any], Any]
    set: Callable[[Any, Any, Any], object]
    is_told: bool


def _set_item(holder: Any, key: Any, value: Any) -> None:
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
    "item": Kind(lambda h, k: dict.get(h, k, MISSING), _set_item, True),
    "of class": Kind(lambda h, k: vars(h).get(k, MISSING), _set_of_class, True),
    "global": Kind(
        lambda h, k: h.__globals__.get(k, MISSING),
        lambda h, k, v: _set_item(h.__globals__, k, v),
        True,
    ),
    "element": Kind(lambda h, k: h[k], lambda h, k, v: h.__setitem__(k, v), False),
    "elements": Kind(lambda h, k: [*h], _set_list, False),
    "default": Kind(lambda h, k: h.__defaults__[k], _set_default, False),
    "keyword default": Kind(
        lambda h, k: h.__kwdefaults__.get(k, MISSING),
        lambda h, k, v: _set_item(h.__kwdefaults__, k, v),
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
    "base": Kind(lambda h, k: type(h).__mro__[k], _set_item, False),
    "function": Kind(lambda h, k: _function_in(vars(h)[k]), _set_item, False),
}


class Step(NamedTuple):
    kind: str
    key: Any


Path = tuple[Step, ...]


def text_of(path: Path) -> str:
    return " / ".join(f"{kind} {key!r}" for kind, key in path)


def _function_in(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__func__", value)


def _home(of: Any) -> str:
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
        if value.__code__ in codes and _home(value) in ENTERED:
            yield from _steps_from_function(value)
    elif isinstance(value, type):
        if _home(value) in ENTERED:
            for key, each in vars(value).items():
                if key.startswith("__") and key != "__call__":
                    continue
                yield Step("of class", key), True
                if isinstance(_function_in(each), types.FunctionType):
                    yield Step("function", key), False
    elif hasattr(value, "__dict__") and (
        isinstance(value, nn.Module) or _home(type(value)) in ENTERED
    ):
        if isinstance(value, nn.Module):
            yield Step("class", None), True
        yield from ((Step("attribute", key), True) for key in vars(value))
        for at, base in enumerate(type(value).__mro__):
            if _home(base) in ENTERED:
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
    if hasattr(value, "__dict__") and _home(type(value)) in ENTERED:
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


# The driver --------------------------------------------------------------------------------------


class Change(NamedTuple):
    text: str
    key: str
    is_told: bool
    undo: Callable[[], object]


class Pair:
    """A model and its twin."""

    def __init__(self, make: Callable[[], nn.Module], seed: int) -> None:
        self.models: list[nn.Module] = []
        for _ in range(2):
            torch.manual_seed(seed)
            self.models.append(make())

    def change(self, numbers: random.Random, paths: dict[str, list[Path]], texts: list[str]) -> Any:
        """One change of both, or None where the drawn slot is of a kind that has no other value."""
        ways = [self._set_slot] * 12
        ways += [self._hook, self._shadow, self._write, self._mode, self._rename_key]
        return numbers.choice(ways)(numbers, paths, texts)

    def _set_slot(
        self, numbers: random.Random, paths: dict[str, list[Path]], texts: list[str]
    ) -> Change | None:
        path = numbers.choice(paths[numbers.choice(sorted(paths))])
        *way, (kind, key) = path
        of = KINDS[kind]
        # A parameter, buffer or submodule may also be set as an attribute.
        through = bool(numbers.randrange(2)) and len(way) > 0 and kind == "item"
        through = through and way[-1].key in ("_parameters", "_buffers", "_modules")
        seed = numbers.randrange(1 << 30)
        holders, befores, done = [], [], None
        for model in self.models:
            holder = follow(model, tuple(way))
            if any(holder is each for each in holders):
                continue
            holders.append(holder)
            before = of.get(holder, key)
            value = like(before, random.Random(seed), texts)
            if value is MISSING:
                return None
            if through:
                owner = follow(model, tuple(way[:-1]))
                setattr(owner, key, value)
            else:
                of.set(holder, key, value)
            befores.append(before)
            done = value

        def undo() -> None:
            for holder, before in zip(holders, befores, strict=True):
                of.set(holder, key, before)

        shown = f"{str(befores[0])[:40]!r} -> {str(done)[:40]!r}"
        return Change(f"{text_of(path)}: {shown}", str(key), of.is_told, undo)

    def _module(self, numbers: random.Random) -> tuple[str, list[Any]]:
        name = numbers.choice([name for name, _ in self.models[0].named_modules()])
        return name, [model.get_submodule(name) for model in self.models]

    def _hook(self, numbers: random.Random, *_: Any) -> Change | None:
        name, modules = self._module(numbers)
        factor = round(numbers.uniform(1.5, 3.0), 2)
        how = numbers.choice(["hook", "hook with keywords", "hook before", "hook that looks"])
        handles = []
        for module in modules:
            if how == "hook":
                hook: Any = lambda module, args, out: scaled(out, factor)  # noqa: E731
                handles.append(module.register_forward_hook(hook))
            elif how == "hook with keywords":
                hook = lambda module, args, kwargs, out: scaled(out, factor)  # noqa: E731
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
            elif how == "hook before":
                hook = lambda module, args: tuple(scaled(each, factor) for each in args)  # noqa: E731
                handles.append(module.register_forward_pre_hook(hook))
            else:
                handles.append(module.register_forward_hook(lambda module, args, out: None))

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return Change(f"{how} of {name!r} by {factor}", "hook", True, undo)

    def _shadow(self, numbers: random.Random, *_: Any) -> Change | None:
        """An attribute of the object over one of its class."""
        name, modules = self._module(numbers)
        names = sorted(
            key
            for base in type(modules[0]).__mro__
            if _home(base) in ENTERED
            for key, each in vars(base).items()
            if not key.startswith("__") and isinstance(each, types.FunctionType | int | float)
        )
        key = numbers.choice(["forward", *names])
        seed = numbers.randrange(1 << 30)
        befores = [vars(module).get(key, MISSING) for module in modules]
        for module in modules:
            value = getattr(module, key)
            value = (
                scaled_function(value, 1.5)
                if callable(value)
                else like(value, random.Random(seed), ["a"])
            )
            module.__dict__[key] = value

        def undo() -> None:
            for module, before in zip(modules, befores, strict=True):
                _set_item(module.__dict__, key, before)

        return Change(f"{key} of the object {name!r} over its class", key, True, undo)

    def _write(self, numbers: random.Random, *_: Any) -> Change | None:
        """In place, or all weights anew."""
        factor = round(numbers.uniform(1.5, 3.0), 2)
        how = numbers.choice(["copy_", "load_state_dict", "assign", "set_", "to"])
        befores = [
            {name: each.detach().clone() for name, each in model.state_dict().items()}
            for model in self.models
        ]
        for model in self.models:
            for tensor in model.parameters() if how in ("copy_", "set_") else ():
                other = tensor.detach() * factor
                tensor.copy_(other) if how == "copy_" else tensor.set_(other)
            if how in ("load_state_dict", "assign"):
                others = {
                    name: each * factor if each.is_floating_point() else each.clone()
                    for name, each in model.state_dict().items()
                }
                model.load_state_dict(others, assign=how == "assign")
            elif how == "to":
                model.double().float()

        def undo() -> None:
            for model, before in zip(self.models, befores, strict=True):
                # Another change may have other names in it, or what is no module.
                with contextlib.suppress(Exception):
                    model.load_state_dict(before)

        return Change(f"weights by {how}", how, how not in ("set_", "to"), undo)

    def _mode(self, numbers: random.Random, *_: Any) -> Change | None:
        name, modules = self._module(numbers)
        before = modules[0].training
        for module in modules:
            module.train(not before)
        return Change(
            f"train({not before}) of {name!r}",
            "training",
            True,
            lambda: [module.train(before) for module in modules],
        )

    def _rename_key(
        self, numbers: random.Random, paths: dict[str, list[Path]], texts: list[str]
    ) -> Change | None:
        """A dict of an object replaced by another one with the same in it."""
        name, modules = self._module(numbers)
        befores = [module.__dict__ for module in modules]
        factor = round(numbers.uniform(1.5, 3.0), 2)
        for module in modules:
            other = dict(module.__dict__)
            for key, each in other.items():
                if type(each) is float:
                    other[key] = each * factor
            module.__dict__ = other

        def undo() -> None:
            for module, before in zip(modules, befores, strict=True):
                module.__dict__ = before

        return Change(f"__dict__ of {name!r}", "__dict__", False, undo)


class Driver:
    """Runs programs, each with a model of its own, and keeps what was wrong."""

    def __init__(self, seed: int, models: dict[str, Models]) -> None:
        self.seed, self.models = seed, models
        self.wrong: list[str] = []
        self.counts = Counter[str]()

    def run(self, changes: int, programs: Iterator[int], per_program: int = 40) -> None:
        for number in programs:
            if self.counts["changes"] >= changes or len(self.wrong) >= MOST_WRONG:
                return
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Program(self, number).run(min(per_program, changes - self.counts["changes"]))


class Program:
    def __init__(self, driver: Driver, number: int) -> None:
        self.driver, self.number = driver, number
        self.numbers = random.Random(f"{driver.seed} {number}")
        self.name = self.numbers.choice(sorted(driver.models))
        make, self.forward, self.spec = driver.models[self.name]
        self.pair = Pair(make, self.numbers.randrange(1 << 30))
        self.done: list[Change] = []
        self.said: list[str] = []
        self.is_captured = True
        self.raised: Exception | None = None

    def inputs(self, rows: int | None = None) -> torch.Tensor:
        rows = rows or self.numbers.choice([1, 2, 2, 3])
        if self.spec.dtype is torch.int64:
            return torch.tensor(
                [[self.numbers.randrange(3, VOCAB) for _ in range(LENGTH)] for _ in range(rows)]
            )
        return torch.tensor(
            [[self.numbers.uniform(-1, 1) for _ in range(WIDTH)] for _ in range(rows)]
        )

    def twin(self, x: torch.Tensor) -> torch.Tensor | None:
        """What the twin returns; None if it raises, or goes by random numbers."""
        results = []
        for seed in range(2):
            torch.manual_seed(seed)
            try:
                results.append(self.forward(self.pair.models[1], x))
            except Exception:
                return None
        same = results[0].shape == results[1].shape and torch.equal(
            results[0].nan_to_num(), results[1].nan_to_num()
        )
        return results[0] if same else None

    def step(self, x: torch.Tensor) -> torch.Tensor | None:
        torch.manual_seed(0)
        try:
            return self.runner(x=x)
        except Exception as error:
            self.raised = error
            return None

    def is_equal(self, got: torch.Tensor | None, expected: torch.Tensor) -> bool:
        if got is None or got.shape != expected.shape:
            return False
        return torch.allclose(got, expected, rtol=1e-3, atol=1e-4, equal_nan=True)

    def run(self, changes: int) -> None:
        model, twin = self.pair.models
        forward = self.forward

        def of_model(x: torch.Tensor) -> torch.Tensor:
            return forward(model, x)

        x = self.inputs()
        codes = executed_code(lambda: forward(twin, x))
        paths: dict[str, list[Path]] = {}
        texts = {"gelu", "eager"}
        for path in slots_of(model, codes):
            value = follow(model, path)
            paths.setdefault(f"{path[-1].kind}, {type(value).__name__}", []).append(path)
            if type(value) is str and path[-1].kind in ("attribute", "item"):
                texts.add(value)
        self.driver.counts["slots"] += sum(map(len, paths.values()))
        self.runner: GraphRunner[Any] = GraphRunner(
            of_model,
            mode=self.numbers.choice(["FULL", "PIECEWISE"]),
            sizes=[2],
            inputs={"x": self.spec},
            platform="cpu",
        )
        self.runner.capture()
        try:
            count = 0
            while count < changes and self.is_captured and len(self.driver.wrong) < MOST_WRONG:
                count += self.round(paths, sorted(texts))
        finally:
            while self.done:
                with contextlib.suppress(Exception):
                    self.done.pop().undo()
            self.runner.close()

    def round(self, paths: dict[str, list[Path]], texts: list[str]) -> int:
        """One to three changes, and steps; returns how many changes."""
        numbers, counts = self.numbers, self.driver.counts
        made: list[Change] = []
        for _ in range(numbers.choice([1, 2, 3, 4])):
            change = self._change(paths, texts)
            if change is not None:
                made.append(change)
        if not made:
            return 0
        counts["changes"] += len(made)
        self.said += [each.text for each in made]
        expected = self.twin(self.inputs())
        if expected is None:
            self._check_refused(made)
            return len(made)
        trust = self.runner.report().trust
        is_told = trust.watched > 0 and all(each.is_told for each in made)
        counts["told" if is_told else "looked for"] += len(made)
        if not is_told:
            if numbers.randrange(2):
                with contextlib.suppress(StaleInputError):
                    self.runner.weights_changed()
            else:
                x = self.inputs(rows=2)
                for _ in range(trust.glance_steps + 1):
                    self.step(x)
        for _ in range(3):
            x = self.inputs()
            expected = self.twin(x)
            if expected is None:
                break
            self.raised = None
            got = self.step(x)
            counts["steps"] += 1
            if not self.is_equal(got, expected):
                self._wrong(made, f"{self.raised!r}"[:200] if got is None else "another value")
                break
        self._maybe_recapture()
        return len(made)

    def _change(self, paths: dict[str, list[Path]], texts: list[str]) -> Change | None:
        if self.done and self.numbers.randrange(4) == 0:
            change = self.done.pop(self.numbers.randrange(len(self.done)))
            with contextlib.suppress(Exception):
                change.undo()
            return change._replace(text=f"undone: {change.text}")
        try:
            change = self.pair.change(self.numbers, paths, texts)
        except Exception as error:
            # The slot is gone by another change, or its class refuses the value; for the model and
            # not for its twin never, as they are alike.
            self.driver.counts[f"refused by the model: {type(error).__name__}"] += 1
            return None
        if change is not None:
            self.done.append(change)
        return change

    def _check_refused(self, made: list[Change]) -> None:
        """The twin raises, or goes by random numbers: undo, and the steps are right again."""
        self.driver.counts["raise, or draw"] += 1
        self.step(self.inputs())
        for change in reversed(made):
            with contextlib.suppress(Exception):
                change.undo()
            if change in self.done:
                self.done.remove(change)

    def _maybe_recapture(self) -> None:
        if any(each.status == "quarantined" for each in self.runner.report().trust.trials):
            self.driver.counts["quarantines"] += 1
            self._recapture()

    def _recapture(self) -> None:
        try:
            self.runner.recapture()
        except Exception as error:
            # What a host has changed may make a capture refuse the model.
            self.driver.counts[f"not captured again: {type(error).__name__}"] += 1
            self.is_captured = False

    def _wrong(self, made: list[Change], how: str) -> None:
        harmless = self.runner.report().trust.harmless
        if any(each.key in path for each in made for path in harmless):
            self.driver.counts["left out: harmless three times"] += 1
        else:
            made_text = "; ".join(each.text for each in made)
            self.driver.wrong.append(
                f"program {self.number} ({self.name}), change {len(self.said)}: {made_text}: "
                f"{how}, {self.runner.last_dispatch}"
            )
        self._recapture()


def models_of(names: list[str]) -> dict[str, Models]:
    return {name: small_net() if name == "net" else family(name) for name in names}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", type=int, default=None, help="this program alone")
    parser.add_argument("--models", nargs="+", default=["net", *FAMILIES])
    parser.add_argument("--taken", action="store_true", help="no watcher of dicts is left")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    driver = Driver(given.seed, models_of(given.models))
    programs = itertools.count() if given.program is None else iter([given.program])
    with all_ids_taken() if given.taken else contextlib.nullcontext():
        driver.run(given.changes, programs)
    watched = "dicts are watched" if NativeWatch and not given.taken else "nobody tells"
    print(f"Python {sys.version.split()[0]}, {watched}: {dict(sorted(driver.counts.items()))}")
    for each in driver.wrong:
        print("WRONG", each)
    return len(driver.wrong)


if __name__ == "__main__":
    sys.exit(main())
