"""Wrong modes, descriptors, pools, devices, hooks and platforms from a host are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import (
    UNCHANGED,
    Batch,
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    HostArg,
    InputSpec,
    Plan,
    UpdatableTask,
    wrapper_class,
)
from graphrt.core.base.errors import PlatformError
from graphrt.cpu import CpuPlatform
from graphrt.errors import (
    InvalidBatchError,
    InvalidInputError,
    InvalidModeError,
    InvalidOptionError,
    MissingUpdateError,
    PoolClosedError,
    PoolError,
    TaskContractError,
)

FULL, D, LAZY = GraphMode.FULL, BatchDescriptor(4), GraphOptions(lazy=True)


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def wrapper_in(pool: GraphPool, options: GraphOptions = LAZY) -> GraphWrapper:
    return GraphWrapper(plus_one, FULL, pool=pool, options=options)


# Contexts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", " full "])
def test_a_forward_context_accepts_its_mode_as_a_name(mode):
    wrapper, x = wrapper_in(GraphPool("cpu")), torch.zeros(4)
    context = ForwardContext(mode, D)
    assert context.mode is FULL and repr(context) == "ForwardContext(FULL, 4 tokens)"
    with context:
        wrapper(x)
    assert list(wrapper.entries) == [D]


@pytest.mark.parametrize(
    "mode", ["FULLY", "FULL_AND_PIECEWISE", GraphMode.FULL_DECODE_ONLY, 3, None]
)
def test_a_forward_context_refuses_a_mode_that_is_no_runtime_mode(mode):
    with pytest.raises(InvalidModeError):
        ForwardContext(mode, D)


def test_capturing_under_a_context_whose_descriptor_is_an_int_is_refused():
    pool = GraphPool("cpu")
    wrapper, x = wrapper_in(pool), torch.zeros(4)
    with ForwardContext(FULL, 4) as context, pytest.raises(InvalidOptionError, match="descriptor"):
        wrapper(x)
    assert not wrapper.entries and pool.captures == 0 and pool.owner is None
    context.descriptor = D
    with context:
        assert wrapper(x).tolist() == [1] * 4


def test_a_wrapper_refuses_a_read_context_that_is_not_callable():
    with pytest.raises(InvalidOptionError, match="read_context"):
        GraphWrapper(plus_one, FULL, pool=GraphPool("cpu"), read_context=5)


# Moving -----------------------------------------------------------------------------------------


def test_a_wrapper_moved_to_another_pool_during_a_session_ends_up_sealed():
    one, other = GraphPool("cpu"), GraphPool("cpu")
    wrapper = wrapper_in(one)
    with one.capture_session():
        wrapper.move_to(other)
        assert wrapper.sealed
    assert wrapper.sealed
    with other.capture_session(), one.capture_session():
        wrapper.move_to(one)
        assert not wrapper.sealed
        wrapper.move_to(other)
        assert not wrapper.sealed
    assert wrapper.sealed


def test_move_to_outside_of_a_session_does_not_seal_the_wrapper():
    wrapper = wrapper_in(GraphPool("cpu"))
    wrapper.move_to(GraphPool("cpu"))
    assert not wrapper.sealed


def test_a_wrapper_with_graphs_may_move_only_to_its_own_pool():
    pool = GraphPool("cpu")
    wrapper = wrapper_in(pool)
    with pool.capture_session():
        with ForwardContext(FULL, D):
            wrapper(torch.zeros(4))
        wrapper.move_to(pool)
        assert not wrapper.sealed
    assert list(wrapper.entries) == [D] and wrapper.sealed
    with pytest.raises(PoolError):
        wrapper.move_to(GraphPool("cpu"))


@pytest.mark.parametrize("pool", [None, 3, "cpu"])
def test_move_to_refuses_an_argument_that_is_no_pool(pool):
    wrapper = wrapper_in(GraphPool("cpu"))
    with pytest.raises(InvalidOptionError, match="'pool'"):
        wrapper.move_to(pool)


def test_move_to_refuses_a_closed_pool():
    own, closed = GraphPool("cpu"), GraphPool("cpu")
    closed.close()
    wrapper = wrapper_in(own)
    with own.capture_session():
        with pytest.raises(PoolClosedError):
            wrapper.move_to(closed)
        assert wrapper.pool is own and not wrapper.sealed


# Pools ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["nope", "", -1, 1, 3, "cpu:1", True, object(), 1.5, 10**30])
def test_a_pool_with_an_invalid_device_raises(device):
    with pytest.raises(InvalidOptionError, match="device"):
        GraphPool("cpu", device=device)


@pytest.mark.parametrize("device", [None, 0, "cpu", "cpu:0", torch.device("cpu", 0)])
def test_a_cpu_pool_accepts_every_spelling_of_the_cpu_device(device):
    assert GraphPool("cpu", device=device).device == torch.device("cpu")


@pytest.mark.parametrize("platform", [3, True, object(), CpuPlatform])
def test_a_pool_or_wrapper_class_of_a_non_platform_raises(platform):
    with pytest.raises(InvalidOptionError, match="'platform'"):
        GraphPool(platform)
    with pytest.raises(InvalidOptionError, match="'platform'"):
        wrapper_class(platform)


def test_an_on_capture_hook_that_is_not_callable_raises_at_the_first_capture():
    pool = GraphPool("cpu")
    pool.on_capture = 3
    with pytest.raises(InvalidOptionError, match="on_capture"), ForwardContext(FULL, D):
        wrapper_in(pool)(torch.zeros(4))


# The contract -----------------------------------------------------------------------------------


class Broken:
    def __get__(self, instance: Any, owner: Any) -> Any:
        raise ZeroDivisionError("no version today")


TAKERS = {
    "GraphPool": GraphPool,
    "Plan": lambda platform: Plan(mode="FULL", sizes=[1], platform=platform),
    "wrapper_class": wrapper_class,
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize("version", [99, 0, None])
def test_a_platform_of_another_contract_version_is_refused(version, take):
    class Other(CpuPlatform):
        contract_version = version

    with pytest.raises(PlatformError, match="contract_version"):
        take(Other())


def test_loading_a_plan_for_a_platform_of_another_contract_version_raises(tmp_path):
    class Other(CpuPlatform):
        contract_version = 99

    Plan(mode="FULL", sizes=[1], platform="cpu").save(tmp_path / "plan.json")
    with pytest.raises(PlatformError):
        Plan.load(tmp_path / "plan.json", platform=Other())


# Dispatches -------------------------------------------------------------------------------------


def plus_one_of(sizes: list[int]) -> GraphRunner:
    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    runner = GraphRunner(plus_one, mode="FULL", sizes=sizes, inputs=inputs, platform="cpu")
    runner.capture()
    return runner


def test_run_padded_eagerly_refuses_a_graph_smaller_than_the_batch():
    """Its rows would be written behind those of the graph, into whatever lies there."""
    runner = plus_one_of([2, 4])
    small = runner.dispatcher.dispatch(Batch(2, 2))
    with pytest.raises(InvalidBatchError, match="the dispatch of a captured graph"):
        runner.run_padded_eagerly(Batch(4, 2), small, {"x": torch.ones(4, 4)})
    out = runner.run_padded_eagerly(Batch(1, 1), small, {"x": torch.ones(1, 4)})
    assert torch.equal(out, torch.full((1, 4), 2.0))


def test_run_padded_eagerly_refuses_the_dispatch_of_another_runner():
    """Its slot is that of another size here."""
    runner, other = plus_one_of([2, 4]), plus_one_of([4, 8])
    dispatch = other.dispatcher.dispatch(Batch(4, 4))
    with pytest.raises(InvalidBatchError, match="the dispatch of a captured graph"):
        runner.run_padded_eagerly(Batch(2, 2), dispatch, {"x": torch.ones(2, 4)})


def padded_eagerly(runner: GraphRunner, batch: Batch, values: Any, updates: Any) -> Any:
    hit = runner.dispatcher.dispatch(batch)
    return runner.run_padded_eagerly(batch, hit, values, updates)


def scaled(issue: Any, workspace: Any = None, options: GraphOptions | None = None) -> GraphRunner:
    """A runner whose forward has one task, which `issue` issues."""
    by = {"by": HostArg(None)}
    task = UpdatableTask(
        "scale", issue, by, at_capture=lambda descriptor: {"by": 1}, workspace=workspace
    )

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        task(x, out)
        return out

    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    return GraphRunner(
        forward, mode="FULL", sizes=[2], inputs=inputs, platform="cpu", options=options
    )


@pytest.mark.parametrize("returned", [None, torch.zeros(1), [1]])
def test_a_workspace_function_that_returns_no_mapping_is_refused_by_its_task(returned):
    runner = scaled(
        lambda x, out, *, by, workspace=None: torch.mul(x, by, out=out),
        workspace=lambda *args, **kwargs: returned,
    )
    with pytest.raises(InvalidOptionError, match=r"workspace\(\) of task 'scale'"):
        runner.capture()


@pytest.mark.parametrize("warmups", [0, 1])
def test_a_task_that_is_called_inside_of_another_ones_issue_is_refused(warmups):
    """On Ascend a bracket inside of a bracket ends torch_npu's launch queue."""
    inner = UpdatableTask(
        "inner",
        lambda x, out, *, by: torch.mul(x, by, out=out),
        {"by": HostArg(None)},
        at_capture=lambda descriptor: {"by": 1},
    )
    options = GraphOptions(warmups=warmups, check="off")
    runner = scaled(lambda x, out, *, by: inner(x, out), options=options)
    for _ in range(2):
        with pytest.raises(TaskContractError, match="'inner' is called inside of another task"):
            runner.capture()


def verified(runner: GraphRunner, batch: Batch, values: Any, updates: Any) -> Any:
    return runner.verify(batch, updates=updates, **values)


@pytest.mark.trust
@pytest.mark.parametrize("call", [padded_eagerly, verified])
def test_unchanged_after_a_failed_call_with_updates_is_refused(call):
    task = UpdatableTask(
        "scale",
        lambda x, out, *, by: torch.mul(x, by, out=out),
        {"by": HostArg(None)},
        at_capture=lambda descriptor: {"by": 1},
    )

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        task(x, out)
        return out

    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    runner = GraphRunner(forward, mode="FULL", sizes=[2], inputs=inputs, platform="cpu")
    runner.capture()
    x, batch = torch.ones(2, 4), Batch(2, 2)
    assert torch.equal(runner(x=x, updates={"scale": {"by": 2}}), x * 2)
    with pytest.raises(InvalidInputError):
        call(runner, batch, {"y": x}, {"scale": {"by": 9}})
    with pytest.raises(MissingUpdateError, match="failed half-way"):
        runner(x=x, updates=UNCHANGED)
