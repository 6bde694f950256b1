"""Bugs that random programs found in watching runs, in trials and in restoring state."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

from graphrt import GraphOptions, GraphPool, GraphRunner, Host, InputSpec, eager_break
from graphrt.core.base import thread_mode
from graphrt.core.base.errors import BreakError, OutputError, RefusedOpError, StaleInputError
from graphrt.errors import GraphQuarantinedWarning

X = {"x": InputSpec(torch.float32, ("tokens", 8))}


def runner_of(forward, *, check="capture", mode="FULL", sizes=(4,), host=None, breaks=()):
    options = GraphOptions(check=check, breaks=breaks)
    return GraphRunner(
        forward,
        mode=mode,
        sizes=list(sizes),
        inputs=X,
        platform="cpu",
        options=options,
        host=host,
        pool=GraphPool("cpu"),
    )


@pytest.mark.parametrize("check", ["off", "capture", "always"])
def test_autocast_reaches_composite_operators_under_inference_mode(check):
    weight = torch.randn(8, 4)
    forward = lambda x: torch.einsum("ti,ij->tj", x, weight)  # noqa: E731
    runner = runner_of(forward, check=check)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        runner.capture()
        for _ in range(3):
            x = torch.randn(4, 8)
            assert torch.equal(runner(x=x), forward(x))
            assert runner.last_dispatch.reason.name == "HIT"


@torch.library.custom_op("graphrt_tests::multiplying", mutates_args=())
def multiplying(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).float()


@multiplying.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("graphrt_tests::cast_for", mutates_args=())
def cast_for(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


cast_for.register_autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("check", ["off", "capture"])
@pytest.mark.parametrize("name", ["custom", "custom, with a rule", "bilinear"])
def test_autocast_reaches_the_body_of_an_operator(name, check, inference):
    weight, cube = torch.randn(8, 4), torch.randn(3, 8, 8)
    body = {
        "custom": lambda x: multiplying(x, weight),
        "custom, with a rule": lambda x: cast_for(x, weight),
        "bilinear": lambda x: torch.nn.functional.bilinear(x, x, cube),
    }[name]

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return body(x)

    runner = runner_of(forward, check=check)
    with torch.inference_mode(inference), torch.no_grad():
        runner.capture()
        for _ in range(3):
            x = torch.randn(4, 8)
            assert torch.equal(runner(x=x), forward(x))
            assert runner.last_dispatch.reason.name == "HIT"


def test_autocast_on_cuda_leaves_the_inner_operator_of_bilinear_alone():
    # On CUDA it widens what bilinear is given, and leaves its parts alone.
    assert "cuda" not in thread_mode._cast_inside(torch.ops.aten._trilinear.default)


@pytest.mark.parametrize("check", ["off", "capture"])
@pytest.mark.parametrize("inverse", [torch.linalg.pinv, torch.pinverse])
def test_a_pseudo_inverse_under_autocast_is_refused_at_capture(inverse, check):
    matrix = torch.randn(6, 5)

    def forward(x):
        return x[:, :6] @ inverse(matrix).T

    runner = runner_of(forward, check=check)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad(), autocast, pytest.raises(RefusedOpError, match="depends on its caller"):
        runner.capture()
    with torch.no_grad():
        runner.capture()
        x = torch.randn(4, 8)
        assert torch.equal(runner(x=x), forward(x))


@pytest.mark.parametrize("check", ["off", "capture"])
def test_autocast_inside_the_forward_holds_under_inference_mode(check):
    weight = torch.randn(8, 4)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.matmul(x[:, None], weight)

    runner = runner_of(forward, check=check)
    with torch.inference_mode():
        runner.capture()
        for _ in range(3):
            x = torch.randn(4, 8)
            assert torch.equal(runner(x=x), forward(x))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("check", ["off", "capture"])
@pytest.mark.parametrize("name", ["attention", "linear", "matmul", "layer_norm", "einsum"])
def test_operators_inside_an_operator_cast_by_autocast_match_eager(name, check, mode):
    weight = torch.randn(8, 8)
    forward = {
        "attention": lambda x: F.scaled_dot_product_attention(*[x.sign().view(-1, 2, 4)] * 3),
        "linear": lambda x: F.linear(x[:, None], weight),
        "matmul": lambda x: torch.matmul(x[:, None], weight),
        "layer_norm": lambda x: F.layer_norm(x @ weight, (8,)),
        "einsum": lambda x: torch.einsum("ti,ij->tj", x, weight),
    }[name]
    runner = runner_of(forward, check=check)
    with mode(), torch.autocast("cpu", torch.bfloat16):
        runner.capture()
        for _ in range(3):
            x = torch.randn(4, 8)
            assert torch.equal(runner(x=x), forward(x))


def test_a_break_is_found_inside_of_a_composite_operator_under_inference_mode():
    weight = torch.randn(8, 4)
    runner = runner_of(
        lambda x: torch.matmul(x, weight), check="off", mode="PIECEWISE", breaks=("aten::mm",)
    )
    with torch.inference_mode():
        runner.capture()
        x = torch.randn(4, 8)
        assert torch.equal(runner(x=x), x @ weight)
    wrapper = runner.graphs.owners()[0]
    assert any(
        "Eager" in type(part).__name__ for entry in wrapper.entries.values() for part in entry.parts
    )


def test_after_a_failed_padded_trial_random_numbers_continue_as_in_an_unpadded_step():
    runner = runner_of(lambda x: torch.randn(x.shape[0], 8) + x.mean(0), sizes=(8,))
    runner.capture()
    torch.manual_seed(3)
    with pytest.warns(GraphQuarantinedWarning):
        got = runner(x=torch.ones(7, 8)).clone()
    after = torch.randn(2)
    torch.manual_seed(3)
    assert torch.equal(got, torch.randn(7, 8) + 1)
    assert torch.equal(after, torch.randn(2))


def test_a_capture_that_fails_draws_no_random_numbers():
    def forward(x):
        return torch.randn(x.shape[0], 8) + x if x.shape[0] > 1 else torch.randn(8)

    runner = runner_of(forward, sizes=(1, 3))
    torch.manual_seed(3)
    with pytest.raises(OutputError):
        runner.capture()
    after = torch.randn(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.randn(2))


def test_declared_state_is_put_back_though_a_capture_is_refused_for_moved_state():
    moved, counted = torch.zeros(8), torch.zeros(8)

    def forward(x):
        moved.data = moved + 1
        counted.add_(1)
        return x + counted

    runner = runner_of(forward, host=Host(state=[moved, counted]))
    with pytest.raises(StaleInputError):
        runner.capture()
    assert torch.equal(moved, torch.zeros(8)) and torch.equal(counted, torch.zeros(8))


def test_state_rebound_to_new_memory_by_the_forward_is_put_back_and_named():
    state = torch.zeros(8)

    def forward(x):
        state.data = state + 1
        return x + state

    runner = runner_of(forward)
    runner.capture()
    assert torch.equal(state, torch.zeros(8))
    with pytest.warns(GraphQuarantinedWarning, match="puts another one in its place"):
        runner(x=torch.zeros(4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2, 4):
            assert torch.equal(runner(x=torch.zeros(4, 8)), torch.full((4, 8), float(step)))


def test_a_local_tensor_of_the_forward_may_be_set_to_other_memory():
    def forward(x):
        own = x.detach()
        own.set_(x + 1)
        return own * 2

    runner = runner_of(forward, check="off")
    runner.capture()
    x = torch.randn(4, 8)
    assert torch.equal(runner(x=x), (x + 1) * 2)


@pytest.mark.parametrize("in_part", [False, True])
def test_writing_state_returned_by_an_eager_part_is_refused(in_part):
    state = torch.zeros(4, 8)

    @eager_break
    def part(x):
        return state[0]

    @eager_break
    def other(row):
        row.add_(1)

    def forward(x):
        row = part(x)
        other(row) if in_part else row.add_(1)
        return x + row

    runner = runner_of(forward, mode="PIECEWISE", check="off", host=Host(state=[state]))
    with pytest.raises(BreakError, match="others hold"):
        runner.capture()
    assert torch.equal(state, torch.zeros(4, 8))


def test_a_fresh_output_of_an_eager_part_may_be_written_in_place():
    @eager_break
    def part(x):
        return x * 2

    runner = runner_of(lambda x: part(x).add_(1), mode="PIECEWISE")
    runner.capture()
    x = torch.randn(4, 8)
    assert torch.equal(runner(x=x), x * 2 + 1)


@pytest.mark.parametrize("of", ["its own", "an input", "a view of an input"])
@pytest.mark.parametrize("how", ["data", "shape"])
@pytest.mark.parametrize("where", ["in the part", "behind it"])
def test_a_tensor_passed_to_an_eager_part_may_not_change_its_memory_or_shape(of, how, where):
    def change(y):
        if how == "data":
            y.data = y.data * 2
        else:
            y.unsqueeze_(-1)

    @eager_break
    def part(y):
        if where == "in the part":
            change(y)
        return y.flatten(1) + 1

    def forward(x):
        y = {"its own": x * 3, "an input": x, "a view of an input": x[:, 1:]}[of]
        out = part(y)
        if where == "behind it":
            change(y)
        return out, y * 2

    runner = runner_of(forward, mode="PIECEWISE", check="off")
    if where == "behind it" and of == "its own":
        # The part has an alias of pool memory, as it was at its call.
        runner.capture()
        for _ in range(3):
            x = torch.randn(4, 8)
            for got, expected in zip(runner(x=x), forward(x.clone()), strict=True):
                assert torch.equal(got, expected)
        return
    with pytest.raises(RefusedOpError, match="no replay repeats"):
        runner.capture()


@pytest.mark.parametrize("check", ["off", "capture", "always"])
def test_a_forward_that_reshapes_an_input_starts_each_run_from_the_inputs_own_shape(check):
    cache = torch.zeros(4, 8)

    def forward(x):
        # State: so a warm-up runs twice, and so does a trial.
        cache[: x.shape[0]] = x
        x.set_(x.t().clone())
        return x + 1

    runner = runner_of(forward, check=check)
    runner.capture()
    for _ in range(4):
        x = torch.randn(4, 8)
        assert torch.equal(runner(x=x.clone()), x.t() + 1)
        assert torch.equal(cache, x)
        assert runner.last_dispatch.reason.name == "HIT"


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("check", ["off", "capture", "always"])
def test_a_step_whose_input_requires_a_gradient_may_write_a_view_of_unbind(check, mode):
    """A forward with gradients may not: replays and eager steps have none."""

    def forward(x):
        _, second = x[:, :2].unbind(1)
        second.mul_(2)
        return second.clone()

    runner = runner_of(forward, check=check, mode=mode)
    runner.capture()
    for rows, reason in ((4, "HIT"), (3, "HIT"), (6, "TOO_LARGE"), (4, "HIT")):
        x = torch.randn(rows, 8)
        with pytest.raises(RuntimeError, match="Output 1 of Unbind"):
            forward(x.clone().requires_grad_() * 1)
        expected = forward(x.clone())
        assert torch.equal(runner(x=x.requires_grad_() * 1), expected)
        assert runner.last_dispatch.reason.name == reason


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("check", ["off", "capture", "always"])
def test_an_input_that_is_written_may_lose_an_expanded_view_to_set_(check, mode):
    """What `set_` takes counts as written: its elements overlap, and are put back all the same."""

    def forward(x):
        x.index_add_(1, torch.tensor([1]), x[:, :1].clone())
        wide = x.unsqueeze(1).expand(x.shape[0], 2, 8)
        wide.set_(wide.clone())
        return wide + 1, x

    runner = runner_of(forward, check=check, mode=mode)
    with torch.inference_mode():
        runner.capture()
        for rows in (4, 3, 4):
            x = torch.randn(rows, 8)
            expected, own = forward(x.clone()), x.clone()
            assert all(map(torch.equal, runner(x=own), expected))
            assert runner.last_dispatch.reason.name == "HIT"
