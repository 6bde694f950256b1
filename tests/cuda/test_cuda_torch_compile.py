"""A model of `torch.compile` is captured like any other; one with CUDA graphs of its own is not."""

from __future__ import annotations

import pytest
import torch

from graphrt import errors, graphed

pytestmark = pytest.mark.cuda


def model_of(width: int) -> torch.nn.Module:
    layers = [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers).eval().requires_grad_(False).cuda()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_a_compiled_model_is_captured_at_sizes_that_it_compiles_apart(regional):
    """Dynamo compiles size 1 apart, and loads kernels, which waits for the device."""
    torch._dynamo.reset()
    model = model_of(200 + 8 * regional)
    x = torch.randn(8, model[0].in_features, device="cuda")
    with torch._inductor.utils.fresh_cache():
        if regional:
            for layer in model:
                layer.compile()
            compiled = model
        else:
            compiled = torch.compile(model)
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
