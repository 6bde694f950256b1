"""A mixture of experts, with seeded random weights made on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphrt import InputSpec


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

    def input_specs(self) -> dict[str, InputSpec]:
        return {"ids": InputSpec(torch.int64, ("tokens",))}

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
