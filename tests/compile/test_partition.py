"""Partitions as Inductor calls them, with plain functions in place of its code (it partitions code
for GPUs only: see test_compile_cuda.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt import GraphOptions, GraphPool, GraphRunner, InputSpec, current_context
from graphrt.compile import CompileError, CompileOptions, opaque
from graphrt.compile.pieces.compiler import uncaptured
from graphrt.compile.pieces.partition import Partition, Partitioned, collecting, partitions
from graphrt.compile.pieces.wrapping import Wrapping
from graphrt.core.base.errors import (
    BreakError,
    GraphQuarantinedWarning,
    OutputError,
    RefusedOpError,
)

X = {"x": InputSpec(torch.float32, ("tokens", 4))}


def add_one(args: list[Any]) -> tuple[torch.Tensor, ...]:
    (x,) = args
    args.clear()  # as Inductor's code does
    return (x + 1,)


def runner(
    between: Callable[[torch.Tensor], torch.Tensor],
    second: Callable[[list[Any]], Any] = add_one,
    more: Callable[[], list[Any]] = list,
    splitting: frozenset[str] = frozenset(),
    after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda y, _: y,
) -> GraphRunner:
    """x + 1, what is `between`, and the second partition."""
    first, last = Partition(add_one), Partition(second)

    def run(x: torch.Tensor) -> torch.Tensor:
        (y,) = first([x])
        z = between(y)
        (output,) = last([z, *more()])
        return after(output, z)

    pool = GraphPool("cpu")
    code = Partitioned(run, [first, last])
    code.capture_in(Wrapping(pool, GraphOptions(), current_context), splitting)
    return GraphRunner(
        lambda x: code(x),
        inputs=X,
        outputs=("tokens", 4),
        mode="PIECEWISE",
        sizes=[2, 4],
        pool=pool,
        pieces="inductor",
    )


def test_a_tensor_that_moves_at_every_step_is_copied_into_the_next_partition():
    kept = []

    def between(y: torch.Tensor) -> torch.Tensor:
        kept.append(torch.empty(len(y), 4))
        return y * 2

    with runner(between) as run:
        run.capture()
        for rows in (4, 2, 3, 4):
            x = torch.randn(rows, 4)
            assert torch.equal(run(x=x), (x + 1) * 2 + 1)


def test_a_write_of_a_partition_into_its_input_is_visible_outside():
    def doubled_in_place(args: list[Any]) -> tuple[torch.Tensor, ...]:
        (z,) = args
        z.mul_(2)
        return (z + 1,)

    with runner(lambda y: y * 3, doubled_in_place, after=lambda y, z: y * 0 + z) as run:
        run.capture()
        for _ in range(3):
            x = torch.randn(4, 4)
            assert torch.equal(run(x=x), (x + 1) * 3 * 2)


def test_a_step_that_gives_a_partition_another_number_than_at_capture_runs_eagerly():
    number = [3]
    with runner(lambda y: y * 2, lambda args: (args[0] + args[1],), lambda: list(number)) as run:
        run.capture()
        run(x=torch.zeros(4, 4))
        number[0] = 4
        with pytest.warns(GraphQuarantinedWarning, match="another number"):
            assert run(x=torch.zeros(4, 4))[0, 0] == 6
        number[0] = 3
        assert run(x=torch.zeros(4, 4))[0, 0] == 5


def test_a_partition_given_a_different_shape_than_at_capture_raises():
    rows = [4]
    with runner(lambda y: (y * 2)[: rows[0]]) as run:
        run.capture()
        rows[0] = 1
        with pytest.raises((BreakError, OutputError)):
            run(x=torch.zeros(4, 4))
        rows[0] = 4
        assert torch.equal(run(x=torch.zeros(4, 4)), torch.full((4, 4), 3.0))


def test_a_partition_input_with_overlapping_elements_is_refused():
    with runner(lambda y: (y[:1] * 2).expand(len(y), 4)) as run, pytest.raises(CompileError):
        run.capture()


@opaque("graphrt_tests::inside", mutates=[], fake=torch.empty_like)
def inside(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_splitting_operator_inside_of_a_partition_is_an_error():
    operator = inside.operator  # type: ignore[attr-defined]
    named = frozenset({"graphrt_tests::inside"})
    run = runner(lambda y: y, lambda args: (operator(args[0]),), splitting=named)
    with run, pytest.raises(RefusedOpError):
        run.capture()


def test_partitions_are_right_after_a_failed_step_and_after_a_recapture():
    fails = [False]

    def between(y: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise ValueError("boom")
        return y * 2

    x = torch.randn(4, 4)
    with runner(between) as run:
        run.capture()
        fails[0] = True
        with pytest.raises(ValueError, match="boom"):
            run(x=x)
        fails[0] = False
        assert torch.equal(run(x=x), (x + 1) * 2 + 1)
        run.recapture()
        assert torch.equal(run(x=x), (x + 1) * 2 + 1)


def test_partitions_compiled_in_another_thread_are_not_collected():
    from torch._inductor import utils

    hook: Any = utils._unstable_customized_partition_wrapper
    assert hook.wrapper is None
    with collecting(["ns::op"]) as partitions_here:
        ours = hook.wrapper(add_one, SimpleNamespace(partition_index=0))
        others: list[Any] = []
        thread = threading.Thread(
            target=lambda: others.append(hook.wrapper(add_one, SimpleNamespace(partition_index=0)))
        )
        thread.start()
        thread.join()
        assert partitions_here == [ours] and others == [add_one]
    assert hook.wrapper is None


def test_a_size_without_partitioned_code_is_refused_at_capture_and_served_without_a_graph():
    forward = uncaptured(torch.fx.symbolic_trace(lambda x: x + 1))
    step = GraphRunner(lambda x: forward(x), inputs=X, outputs=("tokens", 4), sizes=[4])
    with pytest.raises(CompileError, match="not right for a batch of this size"):
        step.capture()
    x = torch.randn(8, 4)
    assert torch.equal(forward(x), x + 1)


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        ({}, "cuda", ""),
        ({"use_inductor_graph_partition": True}, "cuda", "backend 'eager'"),
        ({"use_inductor_graph_partition": True, "backend": "inductor"}, "cpu", "'cpu'"),
        ({"use_inductor_graph_partition": True, "backend": "inductor"}, "npu", "'npu'"),
        ({"use_inductor_graph_partition": True, "splitting_ops": []}, "cuda", ""),
    ],
)
def test_partitions_are_declined_with_a_reason_for_backend_or_device(given, device, reason):
    wanted, why = partitions(CompileOptions(**given), device)
    assert not wanted
    assert (reason in why) if reason else why == ""
