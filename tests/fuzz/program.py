"""What a program is: its statements, how it is captured, and the steps it runs."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from graphrt import InputSpec, eager_break
from tests.fuzz.prelude import Fields, Pair, tensor

CACHE_ROWS = 24
"""Rows of the cache that are somebody's; the one behind them is the padding's."""
WEIGHTS = (
    "w0 = tensor((8, 8), torch.float32, 1, device)",
    "w1 = tensor((8, 4), torch.float32, 2, device)",
    "w2 = torch.nn.Parameter(tensor((4, 8), torch.float32, 3, device), requires_grad={grad})",
    "w3 = tensor((3, 8, 8), torch.float32, 4, device)",
    "b0 = tensor((8,), torch.float32, 5, device)",
    "k0 = tensor((2, 2, 3), torch.float32, 6, device)",
    "k1 = tensor((2, 1, 3), torch.float32, 7, device)",
    "k2 = tensor((8, 8, 3), torch.float32, 8, device)",
    "h0 = tensor((8, 8), torch.bfloat16, 9, device)",
)
STATE = (
    "s0 = tensor((8,), torch.float32, 11, device)",
    "table = tensor((16, 8), torch.float32, 12, device)",
    f"cache = tensor(({CACHE_ROWS} + 1, 8), torch.float32, 13, device)",
    "ring = tensor((4, 8), torch.float32, 14, device)",
    "buf = tensor((64, 8), torch.float32, 15, device)",
    "count = torch.zeros((), dtype=torch.int64, device=device)",
    "z0 = tensor((8,), torch.complex64, 16, device)",
)
WEIGHT_NAMES = tuple(line.split(" = ")[0] for line in WEIGHTS)
STATE_NAMES = tuple(line.split(" = ")[0] for line in STATE)


@dataclass(frozen=True)
class Statement:
    """Lines of a forward; `part` are the lines of the eager part that they call, if any."""

    lines: tuple[str, ...]
    part: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step: its live rows, and the seed of its values. `decode` says a token a request."""

    tokens: int
    reqs: int
    seed: int
    decode: bool = False


@dataclass(frozen=True)
class Setup:
    """How a program is captured and run; the defaults are the simplest."""

    wrapper: bool = False
    mode: str = "FULL"
    sizes: tuple[int, ...] = (4,)
    inputs: tuple[tuple[str, str], ...] = (("x", 'InputSpec(torch.float32, ("tokens", 8))'),)
    steps: tuple[Step, ...] = (Step(4, 4, 1), Step(4, 4, 2), Step(4, 4, 3))
    check: str = "off"
    outputs: str = "pool"
    lazy: bool = False
    gradients: str = "no_grad"
    capture_gradients: str = "no_grad"
    autocast: bool = False
    mixes_rows: bool = False
    declare_state: bool = True
    breaks: tuple[str, ...] = ()
    container: str = ""
    copies: int = 1
    recapture_at: int = -1
    chain: bool = False
    spoil: bool = False
    warmups: int = 1


@dataclass(frozen=True)
class Program:
    """A seed, the statements of a forward, the expression it returns, and its setup."""

    seed: int
    body: tuple[Statement, ...]
    returns: tuple[str, ...]
    setup: Setup = field(default_factory=Setup)

    def with_setup(self, **changes: Any) -> Program:
        return replace(self, setup=replace(self.setup, **changes))

    def source(self) -> str:
        """The function `make(device)`, which builds a forward and its state anew."""
        grad = self.setup.gradients == "grad"
        used = "\n".join(line for each in self.body for line in (*each.lines, *each.part))
        used += "\n".join(self.returns)
        lines = ["def make(device='cpu'):"]
        kept = [
            line
            for line, name in zip((*WEIGHTS, *STATE), (*WEIGHT_NAMES, *STATE_NAMES), strict=True)
            if name in used
        ]
        lines += [f"    {line.format(grad=grad)}" for line in kept]
        names = [name for name in STATE_NAMES if name in used]
        lines.append(f"    state = {{{', '.join(f'{name!r}: {name}' for name in names)}}}")
        for each in self.body:
            lines += [f"    {line}" for line in each.part]
        lines.append(f"    def forward({', '.join(name for name, _ in self.arguments())}):")
        if any(name in STATE_NAMES for name in _augmented(used)):
            lines.append("        nonlocal count")
        lines += [f"        {line}" for line in self.unpacked()]
        for each in self.body:
            lines += [f"        {line}" for line in each.lines]
        lines.append(f"        return {self.returned()}")
        held = ", ".join(line.split(" = ")[0] for line in kept)
        lines.append(f"    return forward, state, [{held}]")
        return "\n".join(lines) + "\n"

    def arguments(self) -> list[tuple[str, str]]:
        """The arguments of the forward with their specs; what a container holds is one of them."""
        inputs = list(self.setup.inputs)
        return [*inputs[:1], ("rest", "")] if self.setup.container else inputs

    def unpacked(self) -> list[str]:
        """The lines that take a container of inputs apart."""
        names = [name for name, _ in self.setup.inputs[1:]]
        kind = self.setup.container
        if kind == "fields":
            return [
                f"{name} = rest.{at}" for name, at in zip(names, ("left", "right"), strict=False)
            ]
        if kind == "dict":
            return [f"{name} = rest[{name!r}]" for name in names]
        return [f"{name} = rest[{at}]" for at, name in enumerate(names)] if kind else []

    def returned(self) -> str:
        """The expression that the forward returns: first its form, then what is in it."""
        form, *items = self.returns
        a, b = items[0], items[-1]
        forms = {
            "one": a,
            "tuple": f"({', '.join(items)},)",
            "list": f"[{', '.join(items)}]",
            "dict": "{" + ", ".join(f"'o{at}': {item}" for at, item in enumerate(items)) + "}",
            "pair": f"Pair({a}, {b})",
            "fields": f"Fields({a}, {b})",
            "nested": f"{{'a': [{a}, ({', '.join(items)},)], 'b': Fields({b})}}",
            "twice": f"({a}, {a})",
        }
        return forms[form]

    def specs(self) -> dict[str, InputSpec]:
        """The specs of the inputs, by name."""
        return {name: eval(text, _GLOBALS) for name, text in self.setup.inputs}


_GLOBALS: dict[str, Any] = {
    "F": F,
    "Fields": Fields,
    "InputSpec": InputSpec,
    "Pair": Pair,
    "eager_break": eager_break,
    "tensor": tensor,
    "torch": torch,
}


def names_at_hand() -> dict[str, Any]:
    """The globals of a program."""
    return dict(_GLOBALS)


def built(program: Program, device: str) -> tuple[Any, dict[str, torch.Tensor], list[torch.Tensor]]:
    """A forward of the program, its state, and all tensors that it holds. Weights are state too: a
    program may write them through a view."""
    source = program.source()
    name = f"program_{program.seed}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = names_at_hand()
    exec(compile(source, name, "exec"), scope)
    forward, state, held = scope["make"](device)
    own = {id(tensor) for tensor in state.values()}
    weights = [tensor for tensor in held if id(tensor) not in own]
    state |= {f"weight {number}": tensor for number, tensor in enumerate(weights)}
    return forward, state, held


def _augmented(text: str) -> list[str]:
    return [name for name in STATE_NAMES if f"{name} += " in text]
