"""A model of `torch.compile` is captured like any other; one with CUDA graphs of its own is not."""

from __future__ import annotations

import pytest
import torch

from graphrt import errors, graphed

pytestmark = pytest.mark.cuda


def model_of(width: int) -> torch.nn.Module:
    layers = [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers).eval().requires_grad_(False).cuda()


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiles", ["model", "blocks", "layers of torch"])
def test_a_compiled_model_is_captured_at_sizes_that_it_compiles_apart(compiles):
    """Dynamo compiles size 1 apart, and loads kernels, which waits for the device. Torch's own
    layers it never compiles by themselves, but met graphrt's handlers in them."""
    torch._dynamo.reset()
    width = {"model": 200, "blocks": 208, "layers of torch": 216}[compiles]
    model = model_of(width)
    if compiles == "blocks":
        model = torch.nn.Sequential(Block(width), Block(width)).eval().requires_grad_(False).cuda()
    x = torch.randn(8, width, device="cuda")
    with torch._inductor.utils.fresh_cache():
        if compiles == "model":
            compiled = torch.compile(model)
        else:
            for layer in model:
                layer.compile()
            compiled = model
        fast = graphed(compiled, inputs=(x,), sizes=[1, 2, 8])
        for rows in (1, 2, 3, 8):
            assert fast.runner.plan.mode.name == "FULL"
            torch.testing.assert_close(fast(x[:rows]), model(x[:rows]))
            assert fast.runner.last_dispatch.reason.name == "HIT"
        fast.runner.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_model_that_makes_its_own_graphs_is_refused_by_name(mode):
    torch._dynamo.reset()
    x = torch.randn(8, 96, device="cuda")
    compiled = torch.compile(model_of(96), mode=mode)
    with pytest.raises(errors.CaptureError, match="CUDA graphs of its own") as caught:
        graphed(compiled, inputs=(x,), sizes=[1, 8])
    assert "torch.compile(model)" in str(caught.value)
    torch._dynamo.reset()
    assert graphed(model_of(96), inputs=(x,), sizes=[1, 8])(x[:3]).shape == (3, 96)
