"""From a seed to a program that runs eagerly at every size."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

import torch

from tests.fuzz.effects import TAKES_MEMORY
from tests.fuzz.groups import GROUPS
from tests.fuzz.operators import Template
from tests.fuzz.program import (
    CACHE_ROWS,
    Program,
    Setup,
    Statement,
    Step,
)
from tests.fuzz.worlds import Worlds

_DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "int32", "bool", "complex64"]
_TRIES = 12


def grown(seed: int) -> Program:
    """The program of a seed; the same on every machine with the same torch."""
    rng = random.Random(seed)
    setup = _setup(rng)
    program = Program(seed, (), ("one", "x"), setup)
    worlds = Worlds(program.specs(), setup.gradients)
    # Where nothing is watched and tried, nobody finds that state gets other memory.
    is_tried = not setup.wrapper and setup.check != "off" and setup.warmups > 0
    names = [name for name, _ in setup.inputs if name != "slots"]
    growing = _Growing(rng, worlds, names, is_tried=is_tried)
    body = []
    for _ in range(rng.choice((1, 2, 3, 4, 6, 8, 12))):
        statement = growing.part() if rng.random() < 0.18 else growing.statement()
        if statement is not None:
            body.append(statement)
    return Program(seed, tuple(body), growing.returns(), setup)


class _Growing:
    """The names at hand, and what is made of them."""

    def __init__(
        self, rng: random.Random, worlds: Worlds, names: list[str], *, is_tried: bool
    ) -> None:
        self._rng = rng
        self._worlds = worlds
        self._inputs = list(names)
        self._names = list(names)
        self._is_tried = is_tried
        self._count = 0
        self._parts = 0

    def statement(self) -> Statement | None:
        """A line that runs; None after many that do not."""
        rng = self._rng
        groups = list(GROUPS)
        for _ in range(_TRIES):
            group = rng.choices(groups, [GROUPS[each][0] for each in groups])[0]
            template = rng.choice(GROUPS[group][1])
            if template is TAKES_MEMORY and not self._is_tried:
                continue
            code = self._filled(template)
            if code is None:
                continue
            results = [f"v{self._count + at}" for at in range(template.results)]
            line = f"{', '.join(results)} = {code}" if results else code
            line = self._inside(line)
            if self._worlds.run(line, results):
                self._count += len(results)
                self._names += results
                return Statement(tuple(line.split("\n")))
        return None

    def part(self) -> Statement | None:
        """An eager part and the line that calls it."""
        rng = self._rng
        values = [self._pick(lambda _: True) for _ in range(rng.choice((1, 1, 2)))]
        if None in values:
            return None
        name, before = f"part{self._parts}", (self._names, self._count)
        arguments = [f"p{self._parts}_{at}" for at in range(len(values))]
        for argument, value in zip(arguments, values, strict=True):
            self._worlds.define(f"{argument} = {value}")
        self._names = list(arguments)
        inner = [self.statement() for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        lines = [line for each in inner if each is not None for line in each.lines]
        if any("slots" in line for line in lines):
            arguments, values = [*arguments, "slots"], [*values, "slots"]
        made = self._names[-1]
        first = arguments[0]
        form = rng.choice(("one", "one", "one", "list", "dict", "same", "argument", "view", "none"))
        gives, takes = {
            "one": (made, "{0} = {call}"),
            "list": (f"[{made}, {made} * 2]", "{0}, {1} = {call}"),
            "dict": (f"{{'a': {made}, 'b': None}}", "{0} = {call}['a']"),
            "same": (f"({made}, {made})", "{0}, {1} = {call}"),
            "argument": (f"({first}, {made}.clone())", "{0}, {1} = {call}"),
            "view": (f"{first}[:, 1:]", "{0} = {call}"),
            "none": ("None", "{call}"),
        }[form]
        self._names, _ = before
        self._parts += 1
        results = [f"v{self._count + at}" for at in range(takes.count("{") - 1)]
        call = takes.format(*results, call=f"{name}({', '.join(map(str, values))})")
        define = ["@eager_break", f"def {name}({', '.join(arguments)}):"]
        if any("count +=" in line for line in lines):
            return None
        define += [f"    {line}" for line in (*lines, f"return {gives}")]
        if not self._worlds.run("\n".join([*define, call]), results):
            return None
        self._count += len(results)
        self._names += results
        return Statement((call,), tuple(define))

    def returns(self) -> tuple[str, ...]:
        """The form of what is returned, and what is in it."""
        rng = self._rng
        rows = [name for name in self._names if self._worlds.has_rows(name)]
        picked = [rows[-1] if rows else self._names[-1]]
        # What nothing is made of would be seen by nobody.
        made = self._names[len(self._inputs) :]
        picked += rng.sample(made, min(len(made), rng.choice((0, 1, 3, 5, 8))))
        if rng.random() < 0.2:
            picked.append(rng.choice(self._inputs))
        extra = rng.random()
        if extra < 0.06:
            picked.append(rng.choice(("None", "3", "'text'", "1.5")))
        elif extra < 0.12:
            picked.append(rng.choice(("x[:, 1:3]", "x[:, 0]", "w0", "b0[2:]", "s0", "w2", "x.t()")))
        elif extra < 0.14:
            picked.append(rng.choice(("x.shape[0]", "x.shape[1]")))
        forms = ("tuple", "list", "dict", "pair", "fields", "nested", "twice")
        form = "one" if len(picked) == 1 and rng.random() < 0.7 else rng.choice(forms)
        return (form, *picked)

    def _inside(self, line: str) -> str:
        """Now and then in a block that changes how operators run."""
        if self._rng.random() > 0.04:
            return line
        block = self._rng.choice(
            (
                "torch.no_grad()",
                "torch.enable_grad()",
                "torch.autocast('cpu', torch.bfloat16)",
                "torch.inference_mode()",
            )
        )
        return f"with {block}:\n    {line}"

    def _filled(self, template: Template) -> str | None:
        """The code with its holes filled; None where nothing fits."""
        filled: dict[str, str] = {}
        for _, hole, _, _ in string.Formatter().parse(template.code):
            if hole is None or hole in filled:
                continue
            value = self._hole(hole, filled)
            if value is None:
                return None
            filled[hole] = value
        return template.code.format(**filled)

    def _hole(self, hole: str, filled: dict[str, str]) -> str | None:
        rng = self._rng
        if hole == "dtype":
            return f"torch.{rng.choice(_DTYPES)}"
        kind = hole[0]
        if kind == "k":
            return str(rng.choice((-1.5, -0.5, 0.0, 0.25, 1.0, 2.0)))
        if kind == "n":
            return str(rng.choice((-1, 0, 1, 1, 2)))
        if kind == "d":
            return str(rng.choice((-1, -1, -1, 1)))
        if kind == "w":
            return rng.choice(("w0", "w0", "w1", "w2.t()", "h0", "w0.t()", "w0[:, ::2]"))
        if kind == "g" and rng.random() < 0.9:
            shape, dtype = self._shape(filled["f"]), self._dtype(filled["f"])
            picked = self._pick(lambda t: tuple(t.shape) == shape and t.dtype == dtype)
            return picked or filled["f"]
        return self._pick(_KINDS[kind])

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._worlds.sizes(name)[0]

    def _dtype(self, name: str) -> torch.dtype:
        return self._worlds.value(name).dtype

    def _pick(self, fits: Callable[[torch.Tensor], bool]) -> str | None:
        names = [name for name in self._names if fits(self._worlds.value(name))]
        if not names:
            return None
        return names[-1] if self._rng.random() < 0.4 else self._rng.choice(names)


def _is_float(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point


_KINDS: dict[str, Callable[[torch.Tensor], bool]] = {
    "f": _is_float,
    "g": _is_float,
    "m": lambda value: _is_float(value) and value.dim() == 2,
    "q": lambda value: _is_float(value) and value.dim() == 3,
    "i": lambda value: value.dtype is torch.int64,
    "b": lambda value: value.dtype is torch.bool,
    "c": lambda value: value.dtype.is_complex,
    "t": lambda _: True,
}


def _setup(rng: random.Random) -> Setup:
    """How a program is captured and run."""
    wrapper = rng.random() < 0.25
    pad = rng.choice(("", "", ', pad="repeat"', ", pad=3"))
    inputs = [("x", f'InputSpec(torch.float32, ("tokens", 8){pad})')]
    dtype = rng.choice(("float32", "bfloat16", "float64", "float16", "complex64", "int32"))
    for name, share, text in (
        ("y", 0.5, f'InputSpec(torch.{dtype}, ("tokens", 8))'),
        ("q", 0.3, 'InputSpec(torch.float32, ("tokens", 2, 4))'),
        ("ids", 0.5, 'InputSpec(torch.int64, ("tokens",))'),
        ("mask", 0.2, 'InputSpec(torch.bool, ("tokens", 8))'),
        ("slots", 1, f'InputSpec(torch.int64, ("tokens",), pad={CACHE_ROWS}, index=True)'),
        ("r", 0.12, 'InputSpec(torch.float32, ("reqs", 8))'),
    ):
        if rng.random() < share:
            inputs.append((name, text))
    container = ""
    if wrapper and rng.random() < 0.6:
        container = rng.choice(("list", "tuple", "dict", "pair"))
        if len(inputs) == 3 and rng.random() < 0.5:
            container = "fields"
    elif rng.random() < 0.1:
        container = "dict"
    sizes = tuple(sorted(rng.sample((1, 2, 3, 4, 8, 12), rng.choice((1, 2, 2, 3)))))
    mode = rng.choice(("FULL", "FULL", "PIECEWISE", "PIECEWISE", "FULL_AND_PIECEWISE"))
    if mode == "FULL_AND_PIECEWISE":
        # A runner takes its inputs in dicts alone.
        wrapper, container = False, "dict" if container else ""
    modes = ("no_grad", "no_grad", "grad", "inference")
    gradients = rng.choice(modes)
    check = rng.choice(("off", "off", "capture", "capture", "first", "always", "sample"))
    if wrapper:
        check = rng.choice(("off", "capture", "always"))
    warmups = rng.choice((1, 1, 1, 2, 0))
    return Setup(
        wrapper=wrapper,
        mode=mode,
        sizes=sizes,
        inputs=tuple(inputs),
        steps=_steps(rng, sizes, wrapper),
        check=check,
        outputs=rng.choice(("pool", "pool", "static", "clone")),
        lazy=wrapper or rng.random() < 0.15,
        gradients=gradients,
        capture_gradients=gradients if rng.random() < 0.8 else rng.choice(modes),
        autocast=rng.random() < 0.08,
        declare_state=check == "off" or warmups == 0 or rng.random() < 0.3,
        breaks=rng.choice(((), (), (), ("aten::mm", "aten::add.Tensor"), ("aten::relu",))),
        container=container,
        copies=2 if rng.random() < 0.12 else 1,
        recapture_at=rng.randrange(2, 6) if rng.random() < 0.1 else -1,
        chain=rng.random() < 0.1,
        spoil=rng.random() < 0.3,
        warmups=warmups,
    )


def _steps(rng: random.Random, sizes: tuple[int, ...], wrapper: bool) -> tuple[Step, ...]:
    steps = []
    for _ in range(rng.choice((5, 6, 8))):
        seed = rng.randrange(1, 1000)
        tokens = rng.choice(sizes) if wrapper or rng.random() < 0.3 else rng.randint(1, sizes[-1])
        if not wrapper and rng.random() < 0.06:
            tokens = sizes[-1] + 1
        decode = rng.random() < 0.5
        steps.append(Step(tokens, tokens if decode else rng.randint(1, tokens), seed, decode))
    return tuple(steps)
