"""State saved and restored around a capture: tensors, rows, or the host's own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, Host, InputSpec, Reason, State, current_context
from graphrt.core.base.errors import InvalidOptionError, StaleInputError, StateTooLargeError
from graphrt.trust.snapshot import StateSnapshot


def test_a_state_snapshot_restores_tensors_in_place_repeatedly():
    tensor, scalar = torch.arange(4.0), torch.tensor(3)
    saved = StateSnapshot("cpu", 1 << 20, declared=[tensor, scalar])
    for _ in range(2):
        tensor.zero_()
        scalar.add_(1)
        saved.restore_memory()
        assert tensor.tolist() == [0, 1, 2, 3]
        assert scalar.item() == 3


def test_a_state_snapshot_of_rows_restores_only_those_rows():
    tensor = torch.arange(4.0)
    saved = StateSnapshot("cpu", 8, declared=[State(tensor[1:3])])
    tensor.fill_(9)
    saved.restore_memory()
    assert tensor.tolist() == [9, 1, 2, 9]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: setattr(tensor, "data", torch.zeros(4)),
        lambda tensor: setattr(tensor, "data", torch.zeros(2, 3)),
        lambda tensor: tensor.unsqueeze_(0),
    ],
    ids=["other memory", "other memory of another shape", "another shape"],
)
def test_restoring_state_with_replaced_memory_or_shape_raises_and_puts_back_its_values(change):
    tensor = torch.arange(4.0)
    saved, place = StateSnapshot("cpu", 1 << 20, declared=[tensor]), tensor.data_ptr()
    tensor.add_(1)
    change(tensor)
    with pytest.raises(StaleInputError, match="other memory"):
        saved.restore_memory()
    assert (tensor.tolist(), tensor.data_ptr()) == ([0, 1, 2, 3], place)


def test_state_with_save_and_restore_functions_uses_them():
    box = [1]
    saved = StateSnapshot(
        "cpu", 0, declared=[State(save=box.copy, restore=lambda old: box.__setitem__(0, old[0]))]
    )
    box[0] = 5
    saved.restore_memory()
    assert box == [1]


def test_state_over_the_limit_is_refused_with_bytes_and_advice():
    with pytest.raises(StateTooLargeError, match="dummy page") as caught:
        StateSnapshot("cpu", 3999, declared=[torch.zeros(1000)])
    assert "4000 bytes" in str(caught.value)


def test_a_state_without_tensor_or_restore_function_raises():
    with pytest.raises(InvalidOptionError):
        State()
    with pytest.raises(InvalidOptionError):
        State(save=lambda: 0)


def test_a_capture_lists_the_input_buffers_as_fixed_memory():
    told = []

    def forward(x):
        capture = current_context().capture
        told.append(x.untyped_storage().data_ptr() in capture.fixed if capture else None)
        return x + 1

    spec = InputSpec(torch.float32, ("tokens", 4))
    run = GraphRunner(forward, mode="FULL", sizes=[2], inputs={"x": spec}, platform="cpu")
    run.capture()
    assert True in told and False not in told


@torch.library.custom_op("graphrt_tests::advance", mutates_args=())
def advance(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Writes `count`, which its schema does not say."""
    count.detach().numpy()[...] += 1
    return x + count


@pytest.mark.parametrize("kind", ["tensor", "functions"])
@pytest.mark.parametrize("level", ["off", "capture", "first", "always"])
def test_declared_state_advances_once_a_step_whatever_is_checked(level: Any, kind: str) -> None:
    """A trial runs the forward several times, and so does `verify()`."""
    count = torch.zeros(1)
    functions = State(save=count.clone, restore=count.copy_)
    runner: Any = GraphRunner(
        lambda x: torch.ops.graphrt_tests.advance(x, count),
        mode="FULL",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 2))},
        outputs=("tokens", 2),
        host=Host(state=[count if kind == "tensor" else functions]),
        options=GraphOptions(check=level),
        platform="cpu",
    )
    runner.capture()
    assert count.item() == 0
    for call, step in ((runner, 1), (runner, 2), (runner.verify, 3), (runner, 4)):
        assert torch.equal(call(x=torch.ones(3, 2)), torch.full((3, 2), step + 1.0))
        assert count.item() == step
        assert runner.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("level", ["capture", "always"])
def test_declared_state_advances_once_in_an_eager_step_beside_padding(level: Any) -> None:
    """At `always` such a step runs twice, to see which rows it reads."""
    count, cache = torch.zeros(1), torch.zeros(9, 2)

    def forward(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache[at] = x
        return torch.ops.graphrt_tests.advance(x, count)

    runner: Any = GraphRunner(
        forward,
        mode="FULL",
        sizes=[2, 4],
        inputs={
            "x": InputSpec(torch.float32, ("tokens", 2)),
            "at": InputSpec(torch.int64, ("tokens",), index=True, pad=8),
        },
        outputs=("tokens", 2),
        host=Host(state=[count]),
        options=GraphOptions(check=level),
        platform="cpu",
    )
    runner.capture()
    for step, rows in enumerate((3, 6, 3, 6), start=1):
        runner(x=torch.ones(rows, 2), at=torch.arange(rows))
        assert count.item() == step
