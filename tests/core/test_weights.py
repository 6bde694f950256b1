"""`weights_changed()` finds weights that moved since the capture, or says they are untracked."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from test_runner import INPUTS, rows, runner
from torch import nn

from graphrt import Batch, GraphOptions, GraphRunner, Host, InputSpec, Reason, State, eager_break
from graphrt.core.base.errors import StaleInputError, UntrackedWeightsError


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Engine:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


KNOWN = {
    "module": lambda model: model,
    "method": lambda model: model.step,
    "partial of a method": lambda model: functools.partial(model.step),
    "partial with a module": lambda model: functools.partial(lambda net, x: net(x), model),
}
UNKNOWN = {
    "function": lambda model: lambda x: model(x),
    "engine's method": lambda model: Engine(model).step,
    "partial with a tensor": lambda model: functools.partial(
        lambda weight, scale, x: x @ weight * scale, model.linear.weight, model.scale
    ),
}


UNCHECKED = GraphOptions(check="off")
"""No warm-up is watched: nobody says what graphs read, but for the weights of modules."""


def replace_weight(model: Scaled) -> None:
    model.linear.weight = nn.Parameter(torch.eye(4) * 3)


def replace_data(model: Scaled) -> None:
    model.linear.weight.data = torch.eye(4) * 3


def replace_buffer(model: Scaled) -> None:
    model.scale = torch.full((4,), 3.0)


def load_assigned(model: Scaled) -> None:
    model.load_state_dict(Scaled().state_dict(), assign=True)


CHANGES = [replace_weight, replace_data, replace_buffer, load_assigned]


def write(model: Scaled) -> None:
    with torch.no_grad():
        model.linear.weight.copy_(torch.eye(4))


@pytest.mark.trust
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", KNOWN)
def test_weights_changed_finds_a_replaced_weight_of_a_module_forward(way, change, mode):
    model = Scaled()
    run = runner(KNOWN[way](model), mode=mode)
    run.weights_changed()
    run.capture()
    run.weights_changed()
    write(model)
    run.weights_changed()
    assert torch.equal(run(x=rows(2)), rows(2))
    change(model)
    with pytest.raises(StaleInputError, match=r"linear\.weight|scale"):
        run.weights_changed()
    assert torch.equal(run(x=rows(2)), model(rows(2)))
    assert run.last_dispatch is not None and run.last_dispatch.reason is Reason.QUARANTINED
    run.recapture()
    run.weights_changed()
    assert torch.equal(run(x=rows(2)), model(rows(2)))
    assert run.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("way", UNKNOWN)
def test_weights_changed_raises_untracked_for_functions_with_checks_off(way, mode):
    model = Scaled()
    run = runner(UNKNOWN[way](model), mode=mode, options=UNCHECKED)
    run.weights_changed()
    run.capture()
    with pytest.raises(UntrackedWeightsError, match='check="capture"'):
        run.weights_changed()
    run.release()
    run.weights_changed()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_weights_of_a_scripted_module_are_tracked_only_through_its_parent_module():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.script(Scaled())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Holder()
    run, by_function = runner(model), runner(lambda x: model.inner(x))
    run.capture()
    by_function.capture()
    run.weights_changed()
    with pytest.raises(UntrackedWeightsError):
        by_function.weights_changed()
    model.inner.linear.weight.data = torch.zeros_like(model.inner.linear.weight)
    with pytest.raises(StaleInputError, match=r"inner\.linear\.weight"):
        run.weights_changed()


@pytest.mark.trust
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["function", "engine's method"])
def test_a_watched_warm_up_finds_the_weights_that_a_function_reads(way, change, mode):
    model = Scaled()
    run = runner(UNKNOWN[way](model), mode=mode)
    run.capture()
    run.weights_changed()
    write(model)
    run.weights_changed()
    change(model)
    with pytest.raises(StaleInputError, match=r"model\.(linear\.weight|scale)"):
        run.weights_changed()
    run.recapture()
    run.weights_changed()


@pytest.mark.trust
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_weights_changed_finds_a_replaced_weight_in_a_list_or_dict(kind):
    weights: Any = {"w": torch.ones(4)} if kind == "dict" else [torch.ones(4)]
    key = "w" if kind == "dict" else 0
    run = runner(lambda x: x * weights[key])
    run.capture()
    run.weights_changed()
    weights[key] = torch.zeros(4)
    with pytest.raises(StaleInputError, match=str(key)):
        run.weights_changed()


@pytest.mark.trust
def test_weights_changed_accepts_a_forward_that_reads_no_weights():
    def forward(x):
        return (x + 1).softmax(0) * torch.tensor([1.0, 2.0, 3.0, 4.0]) * 2.0

    run = runner(forward)
    run.capture()
    run.weights_changed()
    assert torch.equal(run(x=rows(2)), forward(rows(2)))
    assert run.last_dispatch.reason is Reason.HIT


@pytest.mark.trust
def test_weights_changed_raises_untracked_for_a_weight_in_an_iterator():
    weights = itertools.repeat(torch.ones(4))
    run = runner(lambda x: x * next(weights))
    run.capture()
    with pytest.raises(UntrackedWeightsError, match=r"float32 \(4,\).*test_weights\.py:\d+"):
        run.weights_changed()


@pytest.mark.trust
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
def test_inputs_state_and_eager_part_results_are_not_taken_for_weights(mode, outputs):
    counter, table = torch.zeros(4), torch.zeros(3, 4)

    @eager_break
    def middle(x):
        return x * 2

    def forward(x, y):
        counter.add_(1)
        table[:1] += 1
        return middle(x + y) + counter

    run = GraphRunner(
        forward,
        inputs={**INPUTS, "y": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        mode=mode,
        sizes=[2, 4],
        platform="cpu",
        options=GraphOptions(outputs=outputs),
        host=Host(state=[counter, State(table[:1])]),
    )
    run.capture()
    run.weights_changed()
    assert torch.equal(run(x=rows(2), y=rows(2)), rows(2, 5.0))
    assert run.last_dispatch.reason is Reason.HIT


def test_an_untracked_weight_read_only_by_an_eager_part_raises():
    weights = itertools.repeat(torch.ones(4))

    @eager_break
    def middle(x, w):
        return x * w

    run = runner(lambda x: middle(x + 1, next(weights)) + 1, mode="PIECEWISE")
    run.capture()
    with pytest.raises(UntrackedWeightsError):
        run.weights_changed()


@pytest.mark.trust
def test_the_untracked_weights_error_names_the_tensor_and_its_reading_line():
    weights = itertools.repeat(torch.ones(4))
    run = runner(lambda x: x * next(weights))
    run.capture()
    with pytest.raises(UntrackedWeightsError, match=r"float32 \(4,\).*test_weights\.py:\d+"):
        run.weights_changed()


def test_an_untracked_weight_beside_compiled_code_raises_nothing():
    # As Inductor's: what it makes itself no operator has made, and nothing leads to it.
    code = {"empty_strided_cpu": None, "async_compile": None, "scratch": torch.ones(4)}
    exec("def call():\n    scratch.add_(1)", code)
    weights = itertools.repeat(torch.ones(4))

    class Model(nn.Module):
        def forward(self, x):
            code["call"]()
            return x * next(weights)

    run = runner(Model())
    run.capture()
    run.weights_changed()
    assert torch.equal(run(x=rows(2)), rows(2))
    assert run.last_dispatch.reason is Reason.HIT


def test_weights_changed_in_mode_none_raises_nothing():
    model = Scaled()
    run = runner(lambda x: model(x), mode="NONE")
    run.capture()
    run.weights_changed()
    replace_weight(model)
    run.weights_changed()
    assert torch.equal(run(Batch(2, 2, 1), x=rows(2)), rows(2, 3.0))


def test_a_lazy_capture_succeeds_with_untracked_weights():
    model = Scaled()
    run = runner(lambda x: model(x), options=UNCHECKED.merged({"lazy": True}))
    run(x=rows(1))
    run(x=rows(3))
    assert len(run.report().graphs) == 2
    with pytest.raises(UntrackedWeightsError):
        run.weights_changed()
