"""`verify(nan=True)` and `GraphOptions(find_nan=)`: the first operator that makes a NaN."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, HostArg, InputSpec, UpdatableTask
from graphrt.core.base.errors import InvalidOptionError
from graphrt.observe import NanError, NanWarning


def divided(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    h = h / x.sum(1, keepdim=True)  # of a row of zeros: this line
    return h.relu() + 1


def runner_of(forward: Any, device: str = "cpu", **options: Any) -> GraphRunner:
    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        platform=device,
        options=GraphOptions(**options),
    )
    runner.capture()
    return runner


def zeros_in_row(row: int, rows: int = 4, device: str = "cpu") -> torch.Tensor:
    x = torch.ones(rows, 4, device=device)
    x[row] = 0
    return x


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def test_verify_names_the_first_operator_that_makes_a_nan_and_its_line():
    runner = runner_of(divided)
    assert torch.isfinite(runner.verify(x=torch.ones(4, 4), nan=True)).all()
    with pytest.raises(NanError, match="of arguments without one") as raised:
        runner.verify(x=zeros_in_row(2), nan=True)
    assert raised.value.op == "aten.div.Tensor"
    assert "of a row of zeros: this line" in str(raised.value)
    assert not runner.verify(x=zeros_in_row(2)).isfinite().all()


def test_a_runner_without_checks_finds_it_too():
    runner = runner_of(divided, check="off", find_nan=True, strict=True)
    with pytest.raises(NanError, match=r"aten\.div\.Tensor"):
        runner.verify(x=zeros_in_row(2), nan=True)
    runner(x=zeros_in_row(2))
    with pytest.raises(NanError, match=r"aten\.div\.Tensor"):
        runner(x=torch.ones(4, 4))


def test_padding_of_zeros_is_no_nan_of_the_step():
    runner = runner_of(divided)
    assert runner.verify(x=torch.ones(3, 4), nan=True).shape == (3, 4)


def test_a_nan_that_is_masked_away_is_none_and_the_one_that_stays_is_named():
    def forward(x: torch.Tensor) -> torch.Tensor:
        harmless = torch.where(x == 0, torch.ones_like(x), x / x)
        return harmless + (x - 1).sqrt()  # this one stays

    runner = runner_of(forward)
    assert runner.verify(x=torch.ones(4, 4), nan=True).shape == (4, 4)
    with pytest.raises(NanError) as raised:
        runner.verify(x=zeros_in_row(1), nan=True)
    assert raised.value.op == "aten.sqrt.default"


def test_a_nan_in_an_input_or_a_weight_is_named_as_that():
    weight = torch.ones(4)
    runner = runner_of(lambda x: x * weight)
    x = torch.ones(4, 4)
    x[0, 0] = float("nan")
    with pytest.raises(NanError, match="input 'x'"):
        runner.verify(x=x, nan=True)
    weight[1] = float("nan")
    with pytest.raises(NanError, match=r"there before: in .*float32"):
        runner.verify(x=torch.ones(4, 4), nan=True)


def test_infinities_count_only_when_asked():
    runner = runner_of(lambda x: 1 / x)
    runner.verify(x=zeros_in_row(0), nan=True)
    with pytest.raises(NanError) as raised:
        runner.verify(x=zeros_in_row(0), nan="inf")
    assert raised.value.op == "aten.reciprocal.default"
    with pytest.raises(InvalidOptionError, match="find_nan"):
        GraphOptions(find_nan="yes")  # type: ignore[arg-type]


def test_an_infinity_is_not_called_a_nan_alone():
    x = torch.ones(4, 4)
    x[1] = 0
    with pytest.raises(NanError, match="a NaN or an infinity"):
        runner_of(lambda x: 1 / x).verify(x=x, nan="inf")


@pytest.mark.parametrize("wrong", ["foo", "nan", 1, None])
def test_what_to_look_for_is_true_or_inf(wrong):
    runner = runner_of(divided)
    with pytest.raises(InvalidOptionError, match="nan") as caught:
        runner.verify(x=torch.ones(4, 4), nan=wrong)
    assert 'True, False or "inf"' in str(caught.value)
    with pytest.raises(InvalidOptionError, match="find_nan=True"):
        GraphOptions(find_nan=wrong)


@pytest.mark.parametrize("late", [False, True])
def test_inputs_that_a_step_leaves_out_are_padding(late):
    runner = GraphRunner(
        lambda x, factor: x * factor,
        mode="FULL",
        sizes=[4],
        inputs={
            "x": InputSpec(torch.float32, ("tokens", 4)),
            "factor": InputSpec(torch.float32, ("tokens", 1), pad=1.0, optional=True),
        },
        outputs=("tokens", 4),
        platform="cpu",
        options=GraphOptions(find_nan=late),
    )
    runner.capture()
    x = torch.rand(3, 4)
    for _ in range(2):
        assert torch.equal(runner(x=x) if late else runner.verify(x=x, nan=True), x)


@pytest.mark.parametrize("late", [False, True])
def test_tasks_of_a_padded_step_get_the_host_arguments_of_its_live_rows(late):
    def issue(x: torch.Tensor, out: torch.Tensor, *, lens: list[int]) -> None:
        assert len(lens) == x.shape[0]
        torch.mul(x, lens[0], out=out)

    task = UpdatableTask(
        "scale",
        issue,
        {"lens": HostArg("tokens")},
        at_capture=lambda descriptor: {"lens": [1] * descriptor.num_tokens},
    )

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        task(x, out)
        return out.log()

    runner = runner_of(forward, find_nan=late, strict=late)
    x, updates = torch.ones(3, 4), {"scale": {"lens": [1, 2, 3]}}
    step = runner if late else lambda **step: runner.verify(nan=True, **step)
    assert step(x=x, updates=updates).eq(0).all()
    if late:
        step(x=-x, updates=updates)
    with pytest.raises(NanError) as raised:
        step(x=-x, updates=updates)
    assert raised.value.op == "aten.log.default"


def test_a_step_with_a_nan_is_named_one_step_late_and_once():
    runner = runner_of(divided, find_nan=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NanWarning)
        runner(x=torch.ones(4, 4))
        runner(x=zeros_in_row(1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            runner(x=zeros_in_row(1))
    (only,) = told
    assert only.category is NanWarning and "aten.div.Tensor" in str(only.message)
    assert "this line" in str(only.message) and only.filename == __file__


def test_the_step_runs_again_on_the_state_that_it_had():
    state = torch.ones(4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        state.sub_(x[0])
        return x + state.log()  # of a negative number: this line

    runner = runner_of(forward, find_nan=True, strict=True)
    runner(x=torch.zeros(4, 4))
    out = runner(x=torch.full((4, 4), 2.0))
    assert out.isnan().all()
    with pytest.raises(NanError) as raised:
        runner(x=torch.full((4, 4), -9.0))
    assert raised.value.op == "aten.log.default"
    # The step that raised did not run, and the search has left the state as it was.
    assert state.tolist() == [-1.0] * 4
    # With later state the run would have returned no NaN.
    runner(x=torch.full((4, 4), -9.0))
    assert state.tolist() == [8.0] * 4


def test_rows_of_a_large_cache_are_copied_by_their_index_input():
    cache = torch.zeros(4096, 64)

    def forward(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        rows = cache[slots] + x.repeat(1, 16)
        cache.index_put_((slots,), rows)
        return (rows[:, :4] - 4).sqrt()  # below four: this line

    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[4],
        inputs={
            "x": InputSpec(torch.float32, ("tokens", 4)),
            "slots": InputSpec(torch.int64, ("tokens",), pad=4095, index=True),
        },
        outputs=("tokens", 4),
        platform="cpu",
        options=GraphOptions(find_nan=True, strict=True, state_limit_bytes=1 << 20),
    )
    runner.capture()
    slots = torch.tensor([5, 70, 900, 31])
    runner(x=torch.full((4, 4), 5.0), slots=slots - 5)
    runner(x=torch.full((4, 4), 3.0), slots=slots)
    writes = runner._run._writes[0]  # type: ignore[attr-defined]
    assert not writes._whole and [name for _, name in writes._rows] == ["slots"]
    with pytest.raises(NanError) as raised:
        runner(x=torch.full((4, 4), 9.0), slots=slots)
    assert raised.value.op == "aten.sqrt.default"
    assert cache[slots].eq(3).all()


def test_without_the_option_a_step_is_the_engines_own():
    runner, watched = runner_of(divided), runner_of(divided, find_nan=True)
    assert type(runner._run) is type(runner._engine.entrance())
    assert type(watched._run).__name__ == "NanWatch"


@pytest.mark.cuda
def test_a_nan_of_a_cuda_graph_is_found_without_a_wait():
    runner = runner_of(divided, "cuda", find_nan=True, strict=True)
    runner(x=torch.ones(4, 4, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    # The device has not tested this step when the next one comes: nobody waits, nothing is raised.
    runner(x=zeros_in_row(2, device="cuda"))
    runner(x=torch.ones(4, 4, device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(NanError) as raised:
        runner(x=torch.ones(4, 4, device="cuda"))
    assert raised.value.op == "aten.div.Tensor"
    with pytest.raises(NanError, match="this line"):
        runner.verify(x=zeros_in_row(1, device="cuda"), nan=True)
