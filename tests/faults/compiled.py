"""The same for a module of `graphrt.compile`, whose pieces are captured by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphrt import GraphOptions, GraphPool, Host
from graphrt.compile import compile_module, opaque, support_compile
from tests.faults.scenarios import PIECES
from tests.faults.world import SLOTS, WIDTH, Model, Step, World, work


@opaque("graphrt_faults::doubled", mutates=[], fake=torch.empty_like)
def doubled(x: torch.Tensor) -> torch.Tensor:
    work(x)
    return x * 2


@support_compile(dynamic_dims=["x", "slot"])
class Module(nn.Module):
    """What the model does, as a module that is split in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 1.0 + WIDTH), requires_grad=False)
        self.register_buffer("cache", torch.zeros(SLOTS, WIDTH))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        hidden = doubled(x * self.weight)
        self.cache.index_copy_(0, slot, hidden)
        return hidden + self.cache[slot] * self.steps


class CompiledModel(Model):
    """A model whose forward is a module, compiled."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.module = Module().to(device)
        self.weight, self.cache = self.module.weight, self.module.cache
        self.steps = self.module.steps

    def twin(self) -> Model:
        other = CompiledModel(str(self.weight.device))
        for own, its in zip(self.tensors(), other.tensors(), strict=True):
            its.copy_(own)
        return other

    def __call__(self, x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return self.module(x, slot)


class CompiledCapture(World):
    """`capture()` of a compiled module, by pieces and whole."""

    mode = "FULL_AND_PIECEWISE"

    def make_model(self) -> Model:
        return CompiledModel(self.device)

    def prepare(self) -> None:
        assert isinstance(self.model, CompiledModel)
        pool = GraphPool(self.platform)
        compile_module(self.model.module, pool=pool).ensure_compiled(**self.example())
        self.run = self.runner(
            forward=self.model.module,
            pool=pool,
            pieces="fx",
            mode=self.mode,
            options=GraphOptions(check="off"),
            host=Host(state=(self.model.steps, self.model.cache)),
        )

    def example(self) -> dict[str, torch.Tensor]:
        return {name: each.to(self.device) for name, each in Step(4).values.items()}

    def act(self) -> Any:
        self.run.capture()


class CompiledStep(CompiledCapture):
    """A step of its pieces."""

    halves = PIECES
    mode = "PIECEWISE"

    def prepare(self) -> None:
        super().prepare()
        self.run.capture()
        self.step(self.run, Step(4))

    def act(self) -> Any:
        return self.step(self.run, Step(3, value=9.0))


COMPILED: dict[str, type[World]] = {each.__name__: each for each in (CompiledCapture, CompiledStep)}
