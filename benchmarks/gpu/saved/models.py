"""Models whose graphs are saved: a Llama of 1B shape, a mixture of experts, compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from benchmarks.llama import CONFIGS, Config, Llama

CONTEXT = 64


@triton.jit
def _softcap(x, out, count, cap, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < count).to(tl.float32) / cap
    value = cap * (2 / (1 + tl.exp(-2 * value)) - 1)
    tl.store(out + at, value.to(out.dtype.element_ty), at < count)


def softcap(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _softcap[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), 30.0, BLOCK=1024)
    return out


def flash(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor,
    rows: Tensor, columns: Tensor, visible: Tensor,
) -> Tensor:  # fmt: skip
    """FlashAttention over the whole context of each row: it takes no mask."""
    tokens = len(query)
    keys[rows, :, columns] = key
    values[rows, :, columns] = value
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            query[:, :, None], keys[:tokens], values[:tokens], enable_gqa=True
        )
    return out.reshape(tokens, -1)


class Experts(nn.Module):
    """Layers of a mixture of experts: two of sixteen for each token, by grouped products."""

    def __init__(self, device: str, layers: int = 8, width: int = 1024, experts: int = 16) -> None:
        super().__init__()
        random = torch.Generator(device).manual_seed(0)

        def new(*shape: int) -> nn.Parameter:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return nn.Parameter(made.normal_(0, 0.03, generator=random), requires_grad=False)

        self.embedding = new(4096, width)
        self.routers = nn.ParameterList(new(experts, width) for _ in range(layers))
        self.up = nn.ParameterList(new(experts, width, 2 * width) for _ in range(layers))
        self.down = nn.ParameterList(new(experts, width, width) for _ in range(layers))
        self.register_buffer("numbers", torch.arange(experts, device=device))
        self.experts = experts

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(tokens)
        return {"ids": torch.randint(4096, (tokens,), generator=random)}

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding[ids]
        for router, up, down in zip(self.routers, self.up, self.down, strict=True):
            weights, chosen = F.linear(hidden, router).float().softmax(-1).topk(2)
            flat, order = chosen.flatten().sort(stable=True)
            ends = (flat[:, None] == self.numbers).sum(0).cumsum(0).to(torch.int32)
            inner, gate = torch._grouped_mm(hidden[order // 2], up, offs=ends).chunk(2, -1)
            products = torch._grouped_mm((F.silu(gate) * inner).contiguous(), down, offs=ends)
            back = torch.empty_like(products).index_copy_(0, order, products)
            mixed = (back.view(*chosen.shape, -1).float() * weights[..., None]).sum(1)
            hidden = hidden + mixed.to(hidden.dtype)
        return F.linear(hidden, self.embedding)


@dataclass
class Case:
    """A forward over static inputs that writes a static output."""

    model: nn.Module
    forward: Any
    inputs: dict[str, Tensor]
    output: Tensor
    sizes: list[int]

    def run(self, size: int) -> None:
        self.output[:size].copy_(
            self.forward(**{name: each[:size] for name, each in self.inputs.items()})
        )

    def named(self) -> dict[str, Tensor]:
        """Every tensor that outlives a step and that a graph may read or write."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return (
            tensors
            | {f"input {name}": each for name, each in self.inputs.items()}
            | {"output": self.output}
        )

    def state(self) -> list[Tensor]:
        return [
            each for name, each in self.model.named_buffers() if "keys" in name or "values" in name
        ]


def case(name: str, device: str, most: int) -> Case:
    sizes = [size for size in [1, 2, 4, *range(8, 257, 8)] if size <= most]
    model: Any
    if name == "moe":
        model, vocab = Experts(device), 4096
        forward: Any = model
    else:
        config = CONFIGS["1b"] if name == "llama" else Config(32000, 2048, 8192, 4, 32, 8, 64)
        model, vocab = (
            Llama(config, max_batch=most, context=CONTEXT, device=device),
            config.vocab_size,
        )
        model.attention = flash
        forward = torch.compile(model, dynamic=True)
        if name == "llama":
            forward = lambda **inputs: softcap(model(**inputs))  # noqa: E731
    inputs = {
        name: torch.zeros_like(each, device=device) for name, each in model.inputs(most).items()
    }
    output = torch.zeros(most, vocab, dtype=torch.bfloat16, device=device)
    return Case(model, forward, inputs, output, sizes)


def fill(case: Case, size: int, seed: int) -> None:
    """Seeded inputs of one step."""
    for name, value in case.model.inputs(size + seed).items():
        case.inputs[name][:size] = value[:size].to(case.output.device)
