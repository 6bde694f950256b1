"""Quantized weights, which torch packs into an object of C++: a new state dict is another one."""

from __future__ import annotations

import warnings

import pytest
import torch

from graphrt import GraphRunner, InputSpec, Reason
from graphrt.errors import GraphQuarantinedWarning, StaleInputError

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="needs packed int8 weights"
)


class Int8Linear(torch.nn.Module):
    """As those of `torch.ao.nn.quantized.dynamic`."""

    def __init__(self) -> None:
        super().__init__()
        self.load(torch.randn(8, 8))

    def load(self, weight: torch.Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = torch.quantize_per_tensor(weight, 0.05, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(whole, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.quantized.linear_dynamic(x, self.packed)
        return packed


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Int8Linear(), Int8Linear()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def runner(model: Model) -> GraphRunner:
    captured = GraphRunner(
        model.forward,
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        platform="cpu",
    )
    captured.capture()
    return captured


def test_packed_weights_that_were_replaced_are_named() -> None:
    model = Model()
    run = runner(model)
    run.weights_changed()
    model.layers[1].load(torch.randn(8, 8))
    with pytest.raises(StaleInputError, match=r"layers\[1\]\.packed"):
        run.weights_changed()
    run.recapture()
    run.weights_changed()
    x = torch.randn(4, 8)
    assert torch.equal(run(x=x), model(x))
    assert torch.equal(run(x=x), model(x))


def test_steps_find_packed_weights_that_were_replaced() -> None:
    model = Model()
    run = runner(model)
    for _ in range(20):
        x = torch.randn(4, 8)
        assert torch.equal(run(x=x), model(x))
        assert run.last_dispatch is not None
        assert run.last_dispatch.reason is Reason.HIT
    model.layers[0].load(torch.randn(8, 8))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GraphQuarantinedWarning)
        for _ in range(20):
            run(x=x)
    assert ["layers[0].packed" in str(each.message) for each in said] == [True]
    assert torch.equal(run(x=x), model(x))
    assert run.last_dispatch.reason is Reason.QUARANTINED
