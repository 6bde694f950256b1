"""Random changes of real models between steps, each beside an eager twin with the same change.

    python -m tests.trust.host_driver --changes 10000 --seed 0 [--jobs 2] [--json FILE]
        [--models llama ...] [--taken]

There is no list of changes. A walk of its own goes through everything that a model holds: modules,
parameters, buffers, hooks, configs, containers, classes, and the functions that a forward runs,
with their globals, defaults, closures and constants. A change draws one slot and a new value of a
like type, or undoes an earlier change. The twin is a second model from the same seed, and what both
share is changed once.

1. A program makes a model and its twin, walks once, and captures one graph.
2. A round makes one to four changes, and then steps. What CPython tells of has to be right at the
   next step, anything else after `weights_changed()`, or after as many steps as the report says.
3. A graph in quarantine is captured again. A change that makes eager raise, draw random numbers or
   return NaN alone is undone: nothing would be seen behind it.

A step is wrong if its output has other bits than the twin's, on the rows alone or padded as graphs
pad them, or if it returns where eager raises. `--taken` takes all watchers of dicts before, so that
nobody tells of anything.

If torch ends the process, its stack is printed: attention without heads of keys divides by zero on
a CPU of torch 2.11.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path as File
from typing import Any, NamedTuple

import torch
from torch import default_generator, nn

from graphrt import GraphRunner, InputSpec, Reason
from graphrt.core.base._native_door import NativeWatch
from graphrt.errors import GraphRTError, StaleInputError
from graphrt.types import TrialRecord
from tests.trust.host_programs import WIDTH, Net, all_ids_taken
from tests.trust.host_slots import (
    ENTERED,
    KINDS,
    MISSING,
    Path,
    executed_code,
    follow,
    home_of,
    like,
    scaled,
    scaled_function,
    set_item,
    slots_of,
    text_of,
)

LENGTH = 4
VOCAB = 64
SIZE = 2
PER_PROGRAM = 40
MOST_WRONG = 20
MOST_TRIALS = 12

Models = tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], InputSpec]
"""What makes a model, its forward, and its input."""


# Models ------------------------------------------------------------------------------------------


def small_net() -> Models:
    spec = InputSpec(torch.float32, ("tokens", WIDTH))
    return Net, lambda model, x: model(x), spec


def family(name: str, *, layers: int = 1, width: int = 16) -> Models:
    """A tiny model of transformers: for each row the logits of its last token."""
    import transformers

    from tests.models.families import SHARED
    from tests.models.table import DECODERS, ENCODERS

    of = (DECODERS | ENCODERS)[name]
    config_class = getattr(transformers, of.config)
    small = {"hidden_size": width, "intermediate_size": 32, "vocab_size": VOCAB}
    # Random numbers would be others in padded steps.
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0}
    arguments = {**SHARED, **small, **(still if name in ENCODERS else {}), **of.extra}
    arguments["n_layer" if "n_layer" in of.extra else "num_hidden_layers"] = layers
    if "layer_types" in of.extra:
        arguments["layer_types"] = arguments["layer_types"][:layers]
    if "first_k_dense_replace" in of.extra:
        arguments["first_k_dense_replace"] = layers - 1

    def make() -> nn.Module:
        model: nn.Module = getattr(transformers, of.model)(config_class(**arguments)).eval()
        return model

    uncached = {} if name in ENCODERS else {"use_cache": False}

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = model(x, **uncached)[0][:, -1]
        return last

    return make, forward, InputSpec(torch.int64, ("tokens", LENGTH))


FAMILIES = (
    "llama", "qwen3", "phi3", "gpt_neox", "olmo2", "mixtral", "qwen3_moe", "mistral", "gemma2",
    "gemma3", "granite", "glm4_moe", "deepseek_v3", "lfm2", "mamba", "cohere2", "gpt_oss", "falcon",
    "opt", "bloom", "bert", "modernbert",
)  # fmt: skip


# The driver --------------------------------------------------------------------------------------


class Change(NamedTuple):
    kind: str
    text: str
    key: str
    is_told: bool
    undo: Callable[[], object]


class Pair:
    """A model and its twin."""

    def __init__(self, make: Callable[[], nn.Module], seed: int) -> None:
        self.models: list[nn.Module] = []
        for _ in range(2):
            default_generator.manual_seed(seed)
            self.models.append(make())
        # The slots that other models have too, as they were: undone changes may leave others.
        self._shared: dict[tuple[int, str, str], Callable[[], object]] = {}

    def close(self) -> None:
        for restore in self._shared.values():
            restore()

    def each(self, act: Callable[[nn.Module], object]) -> None:
        """Also where it raises half-way in the first: a change is half done in both, or in none."""
        errors = []
        for model in self.models:
            try:
                act(model)
            except Exception as error:
                errors.append(error)
        if len(errors) == 1:
            raise AssertionError("a model and its twin are not alike") from errors[0]

    def change(self, numbers: random.Random, paths: dict[str, list[Path]], texts: list[str]) -> Any:
        """One change of both, or None where the drawn slot is of a kind that has no other value."""
        ways = [self._set_slot] * 12
        ways += [self._hook, self._shadow, self._write, self._mode, self._replace_dict]
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
        if len(holders) == 1:
            restore = partial(of.set, holders[0], key, befores[0])
            self._shared.setdefault((id(holders[0]), kind, str(key)), restore)

        def undo() -> None:
            for holder, before in zip(holders, befores, strict=True):
                of.set(holder, key, before)

        shown = f"{str(befores[0])[:40]!r} -> {str(done)[:40]!r}"
        return Change(kind, f"{text_of(path)}: {shown}", str(key), of.is_told, undo)

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

        return Change("hook", f"{how} of {name!r} by {factor}", "hook", True, undo)

    def _shadow(self, numbers: random.Random, *_: Any) -> Change | None:
        """An attribute of the object over one of its class."""
        name, modules = self._module(numbers)
        names = sorted(
            key
            for base in type(modules[0]).__mro__
            if home_of(base) in ENTERED
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
                set_item(module.__dict__, key, before)

        text = f"{key} of the object {name!r} over its class"
        return Change("over its class", text, key, True, undo)

    def _write(self, numbers: random.Random, *_: Any) -> Change | None:
        """In place, or all weights anew."""
        factor = round(numbers.uniform(1.5, 3.0), 2)
        how = numbers.choice(["copy_", "load_state_dict", "assign", "set_", "to"])
        befores = [
            {name: each.detach().clone() for name, each in model.state_dict().items()}
            for model in self.models
        ]

        def write(model: nn.Module) -> None:
            if how in ("copy_", "set_"):
                for tensor in model.parameters():
                    other = tensor.detach() * factor
                    tensor.copy_(other) if how == "copy_" else tensor.set_(other)
            elif how == "to":
                model.double().float()
            else:
                others = {
                    name: each * factor if each.is_floating_point() else each.clone()
                    for name, each in model.state_dict().items()
                }
                model.load_state_dict(others, assign=how == "assign")

        def undo() -> None:
            for model, before in zip(self.models, befores, strict=True):
                # Another change may have other names in it, or what is no module.
                with contextlib.suppress(Exception):
                    model.load_state_dict(before)

        self.each(write)
        return Change("weights", f"weights by {how}", how, how not in ("set_", "to"), undo)

    def _mode(self, numbers: random.Random, *_: Any) -> Change | None:
        name, modules = self._module(numbers)
        before = modules[0].training

        def train(mode: bool) -> None:
            self.each(lambda model: model.get_submodule(name).train(mode))

        train(not before)
        text = f"train({not before}) of {name!r}"
        return Change("train()", text, "training", True, partial(train, before))

    def _replace_dict(
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

        return Change("__dict__", f"__dict__ of {name!r}", "__dict__", False, undo)


class Driver:
    """Runs programs, each with a model of its own, and keeps what was wrong."""

    def __init__(self, seed: int, models: dict[str, Models]) -> None:
        self.seed, self.models = seed, models
        self.wrong: list[str] = []
        # Errors of captures that are not graphrt's.
        self.raw: list[str] = []
        self.counts = Counter[str]()
        self.outcomes: dict[str, Counter[str]] = {}
        self.latest = 0
        """The most steps of one round that returned the old value, where nobody tells."""
        self._began = time.monotonic()

    def run(self, changes: int, programs: Iterator[int], minutes: float = float("inf")) -> None:
        for number in programs:
            left = changes - self.counts["changes"]
            if left <= 0 or self.is_over or self.seconds > minutes * 60:
                break
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Program(self, number).run(min(PER_PROGRAM, left))

    @property
    def is_over(self) -> bool:
        return len(self.wrong) >= MOST_WRONG

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def note(self, made: list[Change], outcome: str) -> None:
        """The outcome of a round is that of each change in it."""
        for change in made:
            self.outcomes.setdefault(change.kind, Counter())[outcome] += 1
            self.counts["changes"] += 1
            if self.counts["changes"] % 250 == 0:
                count, seconds = self.counts["changes"], self.seconds
                rate = f"{count / seconds:.1f} a second"
                found = f"{len(self.wrong)} wrong, {len(self.raw)} captures failed otherwise"
                print(f"{count} changes, {rate}, {found}", flush=True)

    def summary(self) -> dict[str, Any]:
        return {
            "changes": self.counts["changes"],
            "seconds": round(self.seconds),
            "latest": self.latest,
            "outcomes": dict(sorted(sum(self.outcomes.values(), Counter()).items())),
            "kinds": {kind: dict(each) for kind, each in sorted(self.outcomes.items())},
            "counts": dict(sorted(self.counts.items())),
            "raw": self.raw,
            "wrong": self.wrong,
        }


class Program:
    def __init__(self, driver: Driver, number: int) -> None:
        self.driver, self.number = driver, number
        self.numbers = random.Random(f"{driver.seed} {number}")
        self.name = self.numbers.choice(sorted(driver.models))
        make, self.forward, self.spec = driver.models[self.name]
        self.pair = Pair(make, self.numbers.randrange(1 << 30))
        self.done: list[Change] = []
        self.changes = 0
        self.is_captured = True
        self.raised: Exception | None = None

    def inputs(self, rows: int) -> torch.Tensor:
        if self.spec.dtype is torch.int64:
            return torch.tensor(
                [[self.numbers.randrange(3, VOCAB) for _ in range(LENGTH)] for _ in range(rows)]
            )
        return torch.tensor(
            [[self.numbers.uniform(-1, 1) for _ in range(WIDTH)] for _ in range(rows)]
        )

    # Steps ---------------------------------------------------------------------------------------

    def eager(self, x: torch.Tensor, *, of: int = 1, seed: int = 0) -> torch.Tensor:
        default_generator.manual_seed(seed)
        return self.forward(self.pair.models[of], x)

    def step(self, x: torch.Tensor) -> torch.Tensor | None:
        default_generator.manual_seed(0)
        self.raised = None
        try:
            return self.runner(x=x)
        except Exception as error:
            self.raised = error
            return None

    def is_right(self, got: torch.Tensor | None, x: torch.Tensor, of: int = 1) -> bool:
        """Whether these are the twin's bits: of the live rows, or of the rows that a graph has."""
        if same_bits(got, self.eager(x, of=of)):
            return True
        padding = torch.full_like(x, self.spec.pad_value)[:1].expand(max(SIZE - len(x), 0), -1)
        if len(padding) and same_bits(got, self.eager(torch.cat([x, padding]), of=of)[: len(x)]):
            return True
        if got is not None and torch.allclose(got, self.eager(x, of=of), 1e-3, 1e-4, True):
            self.driver.counts["rounding"] += 1
            notes = [note for each in self.records for note in each.notes]
            return bool(notes)
        return False

    @property
    def records(self) -> list[TrialRecord]:
        return [*self.runner.graphs.checks.records.values()]

    @property
    def is_quarantined(self) -> bool:
        return any(each.status == "quarantined" for each in self.records)

    # A program -----------------------------------------------------------------------------------

    def run(self, changes: int) -> None:
        model, twin = self.pair.models
        forward = self.forward

        def of_model(x: torch.Tensor) -> torch.Tensor:
            return forward(model, x)

        x = self.inputs(SIZE)
        codes = executed_code(lambda: forward(twin, x))
        self.paths: dict[str, list[Path]] = {}
        texts = {"gelu", "eager"}
        for path in slots_of(model, codes):
            value = follow(model, path)
            self.paths.setdefault(f"{path[-1].kind}, {type(value).__name__}", []).append(path)
            if type(value) is str and path[-1].kind in ("attribute", "item"):
                texts.add(value)
        self.texts = sorted(texts)
        self.driver.counts["slots"] += sum(map(len, self.paths.values()))
        self.driver.counts["programs"] += 1
        self.runner: GraphRunner[Any] = GraphRunner(
            of_model,
            mode=self.numbers.choice(["FULL", "PIECEWISE"]),
            sizes=[SIZE],
            inputs={"x": self.spec},
            platform="cpu",
        )
        try:
            self._capture(self.runner.capture)
            while self.changes < changes and self.is_captured and not self.driver.is_over:
                self.round()
        finally:
            self._undo_all()
            self.pair.close()
            self.runner.close()

    def round(self) -> None:
        """One to four changes, and steps."""
        made = []
        for _ in range(self.numbers.choice([1, 2, 3, 4])):
            change = self._change()
            if change is not None:
                made.append(change)
        self.changes += len(made)
        if made:
            self.driver.note(made, self._outcome(made))

    def _change(self) -> Change | None:
        if self.done and self.numbers.randrange(4) == 0:
            change = self.done.pop(self.numbers.randrange(len(self.done)))
            with contextlib.suppress(Exception):
                change.undo()
            return change._replace(text=f"undone: {change.text}")
        try:
            change = self.pair.change(self.numbers, self.paths, self.texts)
        except AssertionError:
            raise
        except Exception as error:
            # The slot is gone by another change, or its class refuses the value; for the model and
            # not for its twin never, as they are alike.
            self.driver.counts[f"refused by the model: {type(error).__name__}"] += 1
            return None
        if change is not None:
            self.done.append(change)
        return change

    def _outcome(self, made: list[Change]) -> str:
        x = self.inputs(SIZE)
        try:
            expected, drawn = self.eager(x), self.eager(x, seed=1)
        except Exception:
            self._check_raises(made, x)
            self._undo(made)
            return "eager raises"
        if not isinstance(expected, torch.Tensor) or not same_bits(expected, drawn):
            self.step(x)
            self._undo(made)
            return "eager draws random numbers"
        tried = sum(each.steps for each in self.records)
        if not self._check(made, x):
            outcome = "wrong"
        elif self.is_quarantined:
            outcome = "quarantine"
            self._recapture()
        else:
            is_tried = sum(each.steps for each in self.records) > tried
            outcome = "trial" if is_tried else "no trial"
        if expected.isnan().all():
            self._undo(made)
        return outcome

    def _is_told(self, made: list[Change]) -> bool:
        is_told = self.runner.graphs.checks.reads.host.watched > 0 and all(
            each.is_told for each in made
        )
        self.driver.counts["told" if is_told else "looked for"] += len(made)
        return is_told

    def _check(self, made: list[Change], x: torch.Tensor) -> bool:
        """Whether steps are right after changes with which eager raises nothing."""
        if not self._is_told(made):
            if self.numbers.randrange(2):
                self._ask()
            else:
                self._await(x)
        rows = [SIZE, *self.numbers.choices([1, SIZE, SIZE + 1], k=2)]
        # A change that made no difference to the results of one step is tried at more of them. The
        # last step is a replay.
        for rows_now in itertools.chain(rows, itertools.repeat(SIZE, MOST_TRIALS)):
            tried = sum(each.steps for each in self.records)
            x = self.inputs(rows_now)
            got = self.step(x)
            self.driver.counts["steps"] += 1
            try:
                is_right = self.is_right(got, x)
            except Exception:
                # Of other rows, or other tokens, eager raises.
                is_right = got is None
            if not is_right:
                self._wrong(made, x, got)
                return False
            rows = rows[1:]
            if not rows and (got is None or sum(each.steps for each in self.records) == tried):
                break
        return True

    def _ask(self) -> None:
        if self.numbers.randrange(2):
            with contextlib.suppress(StaleInputError):
                self.runner.weights_changed()
            return
        captures = self.runner.pool.captures
        try:
            self.runner.recapture(only_outdated=True)
        except Exception as error:
            # As in `_capture`: without a graph, steps are eager ones.
            self.driver.counts[f"not captured again: {type(error).__name__}"] += 1
        else:
            again = self.runner.pool.captures > captures
            self.driver.counts["outdated" if again else "not outdated"] += 1

    def _await(self, x: torch.Tensor) -> None:
        """As many steps as the report says that a change is found late."""
        late = 0
        # Of several inputs: trials of one and the same show no more than the first of them.
        pairs = [(x, self.eager(x))]
        for _ in range(MOST_TRIALS):
            other = self.inputs(SIZE)
            with contextlib.suppress(Exception):  # of other tokens eager raises
                pairs.append((other, self.eager(other)))
        turns = itertools.cycle(pairs)
        for _ in range(self.runner.graphs.checks.reads.rounds + 1):
            other, expected = next(turns)
            late += not same_bits(self.step(other), expected)
            self.driver.counts["steps"] += 1
            if self.runner.last_dispatch.reason is Reason.QUARANTINED:
                break
        self.driver.counts["late steps"] += late
        self.driver.counts["rounds found late"] += late > 0
        self.driver.latest = max(self.driver.latest, late)

    def _check_raises(self, made: list[Change], x: torch.Tensor) -> None:
        """A step raises as eager does."""
        if not self._is_told(made):
            self._ask()
        got = self.step(x)
        if got is not None:
            self._wrong(made, x, got)

    def _undo(self, made: list[Change]) -> None:
        """Undo changes, and check that the steps are right again."""
        for change in reversed(made):
            with contextlib.suppress(Exception):
                change.undo()
            if change in self.done:
                self.done.remove(change)

    def _undo_all(self) -> None:
        self._undo([*self.done])

    def _recapture(self) -> None:
        """Capture again what is in quarantine, with all changes, or without them."""
        if not self._capture(self.runner.recapture):
            self._undo_all()
            self.is_captured = self._capture(self.runner.recapture)

    def _capture(self, capture: Callable[[], None]) -> bool:
        """Capture, and make the step that is a trial in any case: the next one shows whether a
        change was seen. False if what a host has changed makes graphrt refuse the model."""
        try:
            capture()
        except Exception as error:
            self.driver.counts[f"not captured: {type(error).__name__}"] += 1
            if not isinstance(error, GraphRTError):
                self.driver.raw.append(f"program {self.number} ({self.name}): {error!r}"[:300])
            return False
        x = self.inputs(SIZE)
        got = self.step(x)
        if not self.is_right(got, x):
            self._note_wrong("captured", x, got)
        self.driver.counts["captures"] += 1
        if self.is_quarantined:
            self.driver.counts["in quarantine from the capture on"] += 1
            return False
        return True

    def _wrong(self, made: list[Change], x: torch.Tensor, got: torch.Tensor | None) -> None:
        harmless = self.runner.graphs.checks.harmless
        # Its last name: `self.config.alpha`.
        ends = [re.compile(rf"\b{re.escape(each.key)}\W*$") for each in made]
        if any(end.search(path) for end in ends for path in harmless):
            self.driver.counts["left out: harmless three times"] += 1
        else:
            self._note_wrong("; ".join(each.text for each in made), x, got)
        self._recapture()

    def _note_wrong(self, made: str, x: torch.Tensor, got: torch.Tensor | None) -> None:
        how = "a wrong value" if got is not None else f"{self.raised!r}"[:300]
        with contextlib.suppress(Exception):
            if not same_bits(self.eager(x, of=0), self.eager(x)):
                how += ", the model itself is no more like its twin"
        text = f"program {self.number} ({self.name}), change {self.changes}: {made}: {how}, "
        self.driver.wrong.append(text + f"{self.runner.last_dispatch}")
        print("WRONG", self.driver.wrong[-1], flush=True)


def same_bits(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(one[~nan], other[~nan])


def models_of(names: list[str]) -> dict[str, Models]:
    """By name; most families are small ones."""
    models = {}
    for name in names:
        if name == "net":
            models[name] = small_net()
            continue
        for at in range(5):
            models[f"{name} {at}"] = family(name)
        models[f"{name}, two layers"] = family(name, layers=2, width=32)
    return models


def merged(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for summary in summaries:
        for key, value in summary.items():
            if key in ("latest", "seconds"):
                whole[key] = max(whole.get(key, 0), value)
            elif isinstance(value, dict):
                whole[key] = merged([whole.get(key, {}), value])
            else:
                whole[key] = whole[key] + value if key in whole else value
    return whole


def run_jobs(jobs: int, changes: int, arguments: list[str]) -> dict[str, Any]:
    """Run parts in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        files = [File(folder, f"{job}.json") for job in range(jobs)]
        command = [sys.executable, "-m", "tests.trust.host_driver", *arguments]
        command += ["--changes", str(-(-changes // jobs)), "--jobs", str(jobs)]
        parts = [
            subprocess.Popen([*command, "--part", str(job), "--json", str(file)])
            for job, file in enumerate(files)
        ]
        try:
            for part in parts:
                part.wait()
        finally:
            for part in parts:
                part.kill()
        return merged([*map(_summary_in, files, parts)])


def _summary_in(file: File, part: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a part has written. One that was ended before is as bad as a wrong change."""
    if file.exists():
        summary: dict[str, Any] = json.loads(file.read_text())
        return summary
    return {"wrong": [f"part {file.stem} has ended with {part.returncode} and no summary"]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no more programs"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", type=int, default=None, help="this program alone")
    parser.add_argument("--models", nargs="+", default=["net", *FAMILIES])
    parser.add_argument("--taken", action="store_true", help="no watcher of dicts is left")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--part", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=File, default=None, help="where the summary is written")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    torch.set_num_threads(1)
    if options.jobs > 1 and options.part is None:
        same = ["--seed", str(options.seed), "--minutes", str(options.minutes)]
        same += ["--models", *options.models, *(["--taken"] if options.taken else [])]
        summary = run_jobs(options.jobs, options.changes, same)
    else:
        programs = itertools.count(options.part or 0, options.jobs)
        if options.program is not None:
            programs = iter([options.program])
        driver = Driver(options.seed, models_of(options.models))
        with all_ids_taken() if options.taken else contextlib.nullcontext():
            driver.run(options.changes, programs, options.minutes)
        summary = driver.summary()
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1))
    if options.part is None:
        watched = "dicts are watched" if NativeWatch and not options.taken else "nobody tells"
        print(f"Python {sys.version.split()[0]}, {watched}: {json.dumps(summary, indent=1)}")
    return len(summary["wrong"])


if __name__ == "__main__":
    sys.exit(main())
