"""Models whose graphs are saved: a Llama of 1B shape, a mixture of experts, compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experts import Experts
from benchmarks.gpu.kernels import softcap
from benchmarks.llama import CONFIGS, Config, Llama, flash
from graphrt import GraphOptions, GraphRunner

CONTEXT = 64


@dataclass
class Case:
    """A forward over static inputs that writes a static output."""

    model: nn.Module
    forward: Any
    inputs: dict[str, Tensor]
    output: Tensor
    sizes: list[int]
    """From the largest to the smallest."""

    def run(self, size: int) -> None:
        views = {name: each[:size] for name, each in self.inputs.items()}
        self.output[:size].copy_(self.forward(**views))

    def fill(self, size: int, seed: int) -> None:
        """Seeded inputs of one step."""
        for name, value in self.model.inputs(size + seed).items():  # type: ignore[operator]
            self.inputs[name][:size] = value[:size].to(self.output.device)

    def named(self) -> dict[str, Tensor]:
        """Every tensor that outlives a step and that a graph may read or write."""
        inputs = {f"input {name}": each for name, each in self.inputs.items()}
        return {**self.model.state_dict(keep_vars=True), **inputs, "output": self.output}

    def state(self) -> list[Tensor]:
        """KV caches."""
        return [each for name, each in self.model.named_buffers() if "layers" in name]

    def runner(self, check: Any) -> GraphRunner[Tensor]:
        return GraphRunner(
            self.forward,
            mode="FULL_DECODE_ONLY",
            sizes=sorted(self.sizes),
            inputs=self.model.input_specs(),  # type: ignore[operator]
            outputs=("tokens", self.output.shape[1]),
            max_num_reqs=self.sizes[0],
            options=GraphOptions(check=check),
        )


def case(name: str, device: str = "cuda", most: int = 256) -> Case:
    config = Config(32000, 2048, 8192, 2, 32, 8, 64) if name == "compiled" else CONFIGS["1b"]
    model: Any
    if name == "moe":
        model, vocab = Experts(device), 4096
        forward: Any = model
    else:
        model = Llama(config, max_batch=most, context=CONTEXT, device=device)
        model.attention, vocab = flash, config.vocab_size
        forward = torch.compile(model, dynamic=True)
        if name == "llama":
            forward = lambda **inputs: softcap(model(**inputs))  # noqa: E731
    inputs = {
        key: torch.zeros_like(each, device=device) for key, each in model.inputs(most).items()
    }
    output = torch.zeros(most, vocab, dtype=torch.bfloat16, device=device)
    return Case(model, forward, inputs, output, [*range(most, 7, -8), 4, 2, 1])
