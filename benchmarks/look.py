"""What a look at a forward's Python side costs, and which changes it names.

    python3 -m benchmarks.look [--blocks 15]

The model has 215 modules at 15 blocks, a config, a table outside of modules and a list. The time is
that of `runner.look()` where nothing has changed: the best of 200. Then each of eight changes is
made, and named by a look. Exits with 1 if a look names a change wrongly.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from graphrt import GraphRunner, InputSpec

WIDTH = 8
TABLE = {"bias": torch.zeros(WIDTH)}
"""A tensor that no module holds."""


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.scaling = config, 0.5
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(torch.sigmoid(q * k * self.scaling * self.config.factor) * v)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.attention, self.gated = Attention(config), Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.gated(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(factor=2.0, names=["a", "b"])
        self.scales = [1.0, 2.0]
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(blocks))
        self.norm = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scales[1] + TABLE["bias"]
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


def replaced(model: Any) -> None:
    forward = Norm.forward
    Norm.forward = lambda self, x: 2 * forward(self, x)  # type: ignore[method-assign]


Change = tuple[str, Callable[[Any], object]]

CHANGES: tuple[Change, ...] = (
    ("blocks[3].attention.scaling", lambda m: setattr(m.blocks[3].attention, "scaling", 0.25)),
    ("blocks[3].gated.up.weight", lambda m: setattr(m.blocks[3].gated.up, "weight", moved())),
    ("blocks[3].gated.act", lambda m: setattr(m.blocks[3].gated, "act", nn.GELU())),
    ("_forward_hooks", lambda m: m.blocks[3].register_forward_hook(lambda *args: None)),
    ("config.factor", lambda m: setattr(m.config, "factor", 3.0)),
    ("Norm.forward", replaced),
    ("global TABLE['bias']", lambda m: TABLE.update(bias=torch.ones(WIDTH))),
    ("scales[1]", lambda m: m.scales.__setitem__(1, 3.0)),
)
"""The end of the name of what changes, and the change."""


def moved() -> nn.Parameter:
    return nn.Parameter(torch.ones(WIDTH, WIDTH))


def runner_of(model: Model) -> GraphRunner[Any]:
    inputs = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}
    runner = GraphRunner[Any](model, inputs=inputs, sizes=[4], mode="FULL", platform="cpu")
    runner.capture()
    return runner


def best_us(call: Callable[[], object], times: int = 200) -> float:
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return min(took) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=15)
    blocks = parser.parse_args().blocks
    wrong = 0
    forward, bias = Norm.forward, TABLE["bias"]
    model = Model(blocks)
    runner = runner_of(model)
    us = best_us(runner.look)
    print(f"{len([*model.modules()])} modules: {us:.0f} us a look that finds nothing")
    runner.release()
    for name, change in CHANGES:
        model = Model(blocks)
        runner = runner_of(model)
        change(model)
        named = str(runner.look())
        wrong += name not in named
        print(f"{name}: {named}")
        Norm.forward, TABLE["bias"] = forward, bias  # type: ignore[method-assign]
        runner.release()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
