"""Gradients end at a runner: outputs say so when `backward` is there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graphrt import GraphOptions, GraphRunner, InputSpec, Reason
from graphrt.core.base.torch_names import can_mark_unreadable
from graphrt.errors import InvalidInputError
from tests.trust.scenario import WIDTH, X

pytestmark = pytest.mark.filterwarnings("error")


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x)


def runner_of(forward, mode="FULL", capture=True, sizes=(1, 2, 4), check="capture", **options):
    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=list(sizes),
        inputs={"x": X},
        options=GraphOptions(check=check, **options),
    )
    if capture:
        runner.capture()
    return runner


def given(rows=4):
    return torch.randn(rows, WIDTH, requires_grad=True)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("check", ["capture", "first", "sample", "always"])
def test_backward_through_an_output_says_that_gradients_end_at_a_runner(check, captured):
    model, head = Layer(), nn.Linear(WIDTH, 1)
    runner = runner_of(model, check=check, capture=captured)
    for rows in (4, 3, 4, 3, 1, 6, 4):
        x = given(rows)
        out = runner(x=x)
        assert torch.allclose(out, model(x))
        with pytest.raises(RuntimeError, match=r"^graphrt: gradients end at a runner.*\n"):
            (head(out).sum() + x.sum()).backward()
        assert not runner(x=x.detach()).requires_grad
        for around in (torch.no_grad, torch.inference_mode):
            with around():
                assert not runner(x=x).requires_grad
    assert model.weight.grad is None
    head(runner(x=given()).detach()).sum().backward()


@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
def test_autograd_grad_for_an_input_says_that_gradients_end(outputs):
    runner = runner_of(lambda x: x * 2, outputs=outputs)
    x = torch.ones(4, WIDTH, requires_grad=True)
    for _ in range(4):
        with pytest.raises(RuntimeError, match="gradients end"):
            torch.autograd.grad((runner(x=x) + x).sum(), x)


def test_an_output_that_can_have_no_gradient_is_not_marked():
    outputs = runner_of(lambda x: {"view": (x * 2)[:, 1:], "argmax": x.argmax(1)})(x=given())
    flags = {name: each.requires_grad for name, each in outputs.items()}
    assert flags == {"view": True, "argmax": False}


def test_outputs_with_a_gradient_can_be_used_like_eager_outputs():
    model = Layer()
    runner = runner_of(model)
    for _ in range(3):
        out = runner(x=given())
        out.mul_(2)[0].add_(1)
        assert out.requires_grad
        with pytest.raises(RuntimeError, match="detach"):
            out.numpy()
        assert out.detach().numpy().shape == (4, WIDTH)
        with pytest.raises(RuntimeError, match="deepcopy"):
            copy.deepcopy(out)
    # An output is the next step's input.
    out = runner(x=given())
    for _ in range(3):
        expected = model(out.detach())
        out = runner(x=out)
        assert torch.allclose(out, expected)


@pytest.mark.skipif(not can_mark_unreadable, reason="this torch cannot mark a storage")
def test_an_overwritten_output_with_a_gradient_raises():
    runner, x = runner_of(Layer()), given()
    for _ in range(3):
        held = runner(x=x)
    saved = held.pow(2)
    runner(x=x)
    with pytest.raises(RuntimeError, match="OverwrittenOutputError"):
        held + 1
    with pytest.raises(RuntimeError, match="OverwrittenOutputError"):
        saved.sum().backward()


def test_a_step_whose_input_requires_a_gradient_is_replayed():
    runner = runner_of(Layer())
    for rows in (4, 3, 2, 1, 4, 3):
        runner(x=torch.randn(rows, WIDTH))
    for rows in (4, 3):
        assert runner(x=given(rows)).requires_grad
        assert runner.last_dispatch.reason is Reason.HIT
    assert next(runner.graphs.checks.glances.looks)


def test_weights_with_gradients_do_not_mark_outputs():
    runner = runner_of(Layer(), check="always")
    for rows in (4, 3, 4, 3):
        assert runner(x=torch.randn(rows, WIDTH)).numpy().shape == (rows, WIDTH)


def test_with_checks_off_outputs_are_not_marked_as_requiring_gradients():
    runner = runner_of(lambda x: x * 2, check="off")
    for _ in range(3):
        assert not runner(x=given()).requires_grad


def test_nested_inputs_with_a_gradient_mark_the_outputs():
    runner = GraphRunner(
        lambda ids, given: (given["a"]["b"] * 2, given["a"]["c"] + ids[:, None]),
        sizes=[4],
        inputs={
            "ids": InputSpec(torch.int64, ("tokens",)),
            "given": {"a": {"b": X, "c": X}},
        },
    )
    runner.capture()
    ids, b = torch.arange(4), given()
    for needs in (False, True, True, False):
        nested = {"a": {"b": b if needs else b.detach(), "c": torch.randn(4, WIDTH)}}
        first, second = runner(ids=ids, given=nested)
        assert (first.requires_grad, second.requires_grad) == (needs, needs)
    with pytest.raises(InvalidInputError):
        runner(ids=ids, given={"a": {"b": b}})
    with pytest.raises(InvalidInputError):
        runner(ids=ids, given=b)


def test_a_cache_written_by_steps_keeps_no_autograd_graph():
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("cache", torch.zeros(8, WIDTH))

        def forward(self, x):
            self.cache[: x.shape[0]] += self.linear(x)
            return self.cache[: x.shape[0]] * 1

    model = Cached()
    twin = copy.deepcopy(model)
    for captured in (False, True):
        runner = runner_of(model, sizes=[4], capture=captured)
        for _ in range(4):
            x = given()
            out = runner(x=x)
            with torch.no_grad():
                assert torch.allclose(out, twin(x), atol=1e-5)
            assert out.requires_grad
            assert not model.cache.requires_grad and model.cache.grad_fn is None
