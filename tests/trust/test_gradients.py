"""Gradients end at a runner: outputs that would have had one say so when `backward` is there."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from graphrt import GraphOptions, GraphRunner, InputSpec, Reason, eager_break
from graphrt.core.base.torch_names import can_mark_unreadable
from graphrt.errors import InvalidInputError
from tests.trust.scenario import WIDTH, X

pytestmark = pytest.mark.filterwarnings("error")


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x)


class Model(nn.Module):
    """Returns what has a gradient, and what has none, by each of torch's ways to that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(6, WIDTH))

    def forward(self, x):
        hidden = self.linear(x)
        with torch.no_grad():
            quiet = self.other(x) + hidden
        filled = torch.zeros_like(hidden)
        filled[:, :2] = hidden[:, :2]
        return {
            "hidden": hidden,
            "again": hidden,
            "view": hidden[:, 1:],
            "filled": filled,
            "detached": hidden.detach() * 2,
            "data": hidden.data + 1,
            "quiet": quiet,
            "argmax": hidden.argmax(-1),
            "positive": hidden > 0,
            "like": torch.ones_like(hidden),
            "of_input": x * 2,
            "no_input": self.table[: x.shape[0]] * 1,
            "list": [hidden.relu(), hidden.sum(-1, keepdim=True).expand(-1, 2)],
        }


class Frozen(Model):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


def runner_of(forward, mode="FULL", capture=True, sizes=(1, 2, 4), check="sample", **options):
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


def flags(outputs):
    found = {}
    for name, value in outputs.items():
        for place, each in enumerate(value if isinstance(value, list) else [value]):
            found[name, place] = each.requires_grad
    return found


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("model", [Model, Frozen])
@pytest.mark.parametrize("needs_input", [False, True])
def test_the_outputs_that_eager_gives_a_gradient_are_those_that_require_one(
    model, mode, captured, needs_input
):
    forward = model()
    # No eager break in it, which is said.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = runner_of(forward, mode, captured)
    for rows in (4, 3, 4, 3, 1, 6):
        x = torch.randn(rows, WIDTH, requires_grad=needs_input)
        if rows > 4:
            x = x.detach()
        expected = forward(x)
        outputs = runner(x=x)
        assert flags(outputs) == flags(expected), rows
        for name, value in expected.items():
            for ours, theirs in zip(
                *(each if isinstance(each, list) else [each] for each in (outputs[name], value)),
                strict=True,
            ):
                assert torch.allclose(ours, theirs), (rows, name)
        assert outputs["hidden"] is outputs["again"]
        assert outputs["hidden"].data_ptr() == outputs["view"].data_ptr() - 4
        with torch.no_grad():
            assert not any(flags(runner(x=x)).values())


@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
def test_backward_says_that_gradients_end_at_the_runner(outputs):
    model, head = Layer(), nn.Linear(WIDTH, 1)
    runner = runner_of(model, outputs=outputs)
    x = torch.randn(4, WIDTH)
    for _ in range(4):
        loss = head(runner(x=x)).sum()
        with pytest.raises(RuntimeError, match=r"^graphrt\.errors\.GradientError: .*\n"):
            loss.backward()
    assert model.weight.grad is None
    head(runner(x=x).detach()).sum().backward()
    with torch.no_grad():
        features = runner(x=x)
    head(features.clone()).sum().backward()


def test_the_gradient_of_an_input_is_missed():
    runner = runner_of(lambda x: x * 2)
    x = torch.ones(4, WIDTH, requires_grad=True)
    for _ in range(4):
        with pytest.raises(RuntimeError, match="GradientError"):
            torch.autograd.grad((runner(x=x) + x).sum(), x)
        assert not runner(x=x.detach()).requires_grad


def test_frozen_weights_have_no_gradient():
    model = Layer()
    runner = runner_of(model)
    x = torch.randn(4, WIDTH)
    assert runner(x=x).requires_grad
    model.requires_grad_(False)
    assert not runner(x=x).requires_grad
    assert not runner(x=x).requires_grad


def test_outputs_with_a_gradient_are_used_as_those_of_eager_are():
    model = Layer()
    runner = runner_of(model)
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        out = runner(x=x)
        out.mul_(2)[0].add_(1)
        assert out.requires_grad
        with pytest.raises(RuntimeError, match="detach"):
            out.numpy()
        assert out.detach().numpy().shape == (4, WIDTH)
        with pytest.raises(RuntimeError, match="deepcopy"):
            copy.deepcopy(out)
    # An output is the next step's input.
    out = runner(x=x)
    for _ in range(3):
        expected = model(out.detach())
        out = runner(x=out)
        assert torch.allclose(out, expected)


@pytest.mark.skipif(not can_mark_unreadable, reason="this torch cannot mark a storage")
def test_outputs_with_a_gradient_expire():
    runner, x = runner_of(Layer()), torch.randn(4, WIDTH)
    for _ in range(3):
        held = runner(x=x)
    saved = held.pow(2)
    runner(x=x)
    with pytest.raises(RuntimeError, match="OverwrittenOutputError"):
        held + 1
    with pytest.raises(RuntimeError, match="OverwrittenOutputError"):
        saved.sum().backward()


def test_weights_take_no_step_of_lower_levels_off_the_plain_hit():
    for check in ("off", "capture", "first"):
        runner = runner_of(Layer(), check=check)
        for _ in range(3):
            for rows in (4, 3):
                assert runner(x=torch.randn(rows, WIDTH)).numpy().shape == (rows, WIDTH)
        assert next(runner.graphs.checks.glances.looks)


LOWER = ["capture", "first"]


@contextmanager
def counted_runs(forward):
    """How often a forward runs in Python."""
    counts, run = [], forward.forward
    forward.forward = lambda **inputs: counts.append(1) or run(**inputs)
    try:
        yield counts
    finally:
        del forward.forward


@pytest.mark.parametrize("check", LOWER)
@pytest.mark.parametrize("tried", [False, True])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE", None])
def test_of_an_input_that_requires_a_gradient_every_level_says_that_it_ends(mode, tried, check):
    forward = Frozen() if mode is None else Model()
    forward.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = runner_of(forward, mode or "FULL", check=check)
    if tried:
        for rows in (4, 3, 2, 1, 4, 3):
            runner(x=torch.randn(rows, WIDTH))
    for rows in (4, 3, 4, 3, 1, 6, 4):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        expected, outputs = forward(x), runner(x=x)
        assert flags(outputs) == flags(expected), rows
        torch.testing.assert_close(
            {name: value for name, value in outputs.items() if name != "list"},
            {name: value for name, value in expected.items() if name != "list"},
        )
        loss = (outputs["of_input"].sum() + x.sum()) if mode else x.sum()
        with pytest.raises(RuntimeError, match="GradientError") if mode else nullcontext():
            loss.backward()
        outputs = runner(x=x.detach())
        assert not any(flags(outputs).values())
        for around in (torch.no_grad, torch.inference_mode):
            with around():
                assert not any(flags(runner(x=x)).values())
    if tried and mode == "FULL":
        assert next(runner.graphs.checks.glances.looks) is not None
        with counted_runs(forward) as runs:
            for rows in (4, 3):
                # What counts the runs is a change of the host's, and tried.
                runner(x=torch.randn(rows, WIDTH))
            runs.clear()
            for rows in (4, 3, 4):
                x = torch.randn(rows, WIDTH, requires_grad=True)
                assert runner(x=x)["of_input"].requires_grad
                assert runner.last_dispatch.reason is Reason.HIT
        assert not runs  # a replay, marked


@pytest.mark.parametrize("check", LOWER)
def test_weights_are_not_what_an_input_of_lower_levels_stands_for(check):
    model = Model()
    runner = runner_of(model, check=check)
    x = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(3):
        outputs = runner(x=x)
        assert outputs["of_input"].requires_grad and outputs["hidden"].requires_grad
        assert not any(flags(runner(x=x.detach())).values())


def test_nothing_is_said_where_nothing_is_checked():
    runner = runner_of(lambda x: x * 2, check="off")
    for _ in range(3):
        assert not runner(x=torch.ones(4, WIDTH, requires_grad=True)).requires_grad


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_state_advances_once_in_a_step_that_finds_out(mode):
    state, part = torch.zeros(8, WIDTH), eager_break(lambda x: x * 1)

    def forward(x):
        state[: len(x)] += x.detach()
        return part(x) + state[: len(x)]

    runner = runner_of(forward, mode, sizes=[4], check="capture")
    want = torch.zeros(8, WIDTH)
    for turn in range(6):
        x = torch.randn(4, WIDTH, requires_grad=turn > 2)
        want[:4] += x.detach()
        out = runner(x=x)
        torch.testing.assert_close(out.detach(), x.detach() + want[:4])
        torch.testing.assert_close(state, want)
        assert out.requires_grad is (turn > 2)


def test_nested_inputs_and_those_without_a_gradient():
    runner = GraphRunner(
        lambda ids, given: (given["a"]["b"] * 2, given["a"]["c"] + ids[:, None]),
        sizes=[4],
        inputs={
            "ids": InputSpec(torch.int64, ("tokens",)),
            "given": {"a": {"b": X, "c": X}},
        },
    )
    runner.capture()
    ids, b = torch.arange(4), torch.randn(4, WIDTH, requires_grad=True)
    for needs in (False, True, True, False):
        given = {"a": {"b": b if needs else b.detach(), "c": torch.randn(4, WIDTH)}}
        first, second = runner(ids=ids, given=given)
        assert (first.requires_grad, second.requires_grad) == (needs, False)
    with pytest.raises(InvalidInputError):
        runner(ids=ids, given={"a": {"b": b}})
    with pytest.raises(InvalidInputError):
        runner(ids=ids, given=b)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_steps_without_gradients_find_out_nothing(around):
    runner = runner_of(Layer())
    with around():
        for _ in range(3):
            assert not runner(x=torch.randn(4, WIDTH)).requires_grad
    assert runner(x=torch.randn(4, WIDTH)).requires_grad


def test_a_cache_keeps_no_graph_of_gradients():
    """The run that finds out leaves no graph of gradients in a cache, and writes it once."""

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
            x = torch.randn(4, WIDTH)
            out = runner(x=x)
            with torch.no_grad():
                assert torch.allclose(out, twin(x), atol=1e-5)
            assert out.requires_grad
            assert not model.cache.requires_grad and model.cache.grad_fn is None
