"""Values that are the same at every replay may be read on the host: they follow from Python data
alone. Whatever an input, a weight, or memory of the host's reached may not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphrt import GraphRunner, InputSpec, KeyedGraphs, Reason
from graphrt.errors import CaptureSyncError, RefusedOpError

WEIGHT = torch.tensor([1.0, 2.0])


def _positions(x: torch.Tensor) -> torch.Tensor:
    # As transformers looks for packed sequences in positions that nobody gave.
    positions = torch.arange(x.shape[0]).unsqueeze(0)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    if ((steps != 1).cumsum(-1)[:, -1] == 0).all():
        return x + 1
    return x


def _written_constant(x: torch.Tensor) -> torch.Tensor:
    count = torch.zeros(2)
    count += 1
    count[0] = torch.tensor(5.0)
    return x * count[0].item()


def _mask_on_the_left(x: torch.Tensor) -> torch.Tensor:
    made, mask = x.clone(), torch.zeros(2, dtype=torch.bool)
    mask[1] = True
    made[:, mask] = x[:, mask] * 3
    made[:, [True, False]] = 5.0
    return made


RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "positions": _positions,
    "bool": lambda x: x + 1 if torch.tensor([2, 3]).sum() > 4 else x,
    "item": lambda x: x * torch.full((1,), 7.0).item(),
    "tolist": lambda x: x[:, torch.arange(1, -1, -1).tolist()],
    "index": lambda x: x[: int(torch.tensor(2))],
    "range": lambda x: x * sum(range(torch.tensor(3))),
    "format": lambda x: x * float(f"{torch.tensor(2.5)}"),
    "mask": lambda x: x + x[:, [True, False]] * x[:, torch.tensor([False, True])],
    "mask of a computation": lambda x: x + x[:, torch.arange(2) > 0],
    "mask of two dimensions": lambda x: x * x[:2][torch.eye(2, dtype=torch.bool)],
    "mask on the left": _mask_on_the_left,
    "equal": lambda x: x if torch.equal(torch.ones(2), torch.tensor([1.0, 1.0])) else x * 0,
    "written": _written_constant,
    "a tensor of a tensor": lambda x: x * torch.tensor([torch.tensor(2.0), 3.0]),
}


def _written_by_input(x: torch.Tensor) -> torch.Tensor:
    count = torch.zeros(2)
    count += x[0]
    return x * count[0].item()


def _written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    count = torch.zeros(4)
    count.view(2, 2)[1].copy_(WEIGHT)
    return x * count.max().item()


def _in_a_used_block(x: torch.Tensor) -> torch.Tensor:
    made = torch.arange(2.0) + 1
    made.max().item()
    del made
    made = x[0] + 1
    return x * made.max().item()


def _mask_written_by_input(x: torch.Tensor) -> torch.Tensor:
    mask = torch.tensor([True, False])
    mask[0] = x[0, 0] > 0
    return x[:, mask]


WRONG_MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "input": lambda x: x[x > 0],
    "weight": lambda x: x[:, WEIGHT > 1],
    "beside a constant": lambda x: x[:2][torch.tensor([True, False]), WEIGHT > 1],
    "array": lambda x: x[:, torch.from_numpy(np.array([True, False]))],
    "written by an input": _mask_written_by_input,
}


@pytest.mark.parametrize("forward", WRONG_MASKS.values(), ids=WRONG_MASKS)
def test_indexing_by_a_mask_that_is_no_constant_is_refused(forward) -> None:
    x = torch.ones(3, 2)
    with pytest.raises(RefusedOpError, match="mask"):
        KeyedGraphs().capture(1, lambda: forward(x))


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "input": lambda x: x if x.sum() > 0 else -x,
    "weight": lambda x: x * WEIGHT[0].item(),
    "derived": lambda x: x * (torch.zeros(2) + WEIGHT).tolist()[0],
    "random": lambda x: x * torch.rand(()).item(),
    "empty": lambda x: x * torch.empty(()).item(),
    "array": lambda x: x * torch.frombuffer(bytearray(8), dtype=torch.float32).sum().item(),
    "written by an input": _written_by_input,
    "written through a view": _written_through_a_view,
    "in a used block": _in_a_used_block,
    "numpy": lambda x: x * float(torch.ones(()).numpy()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_host_reads_of_values_that_follow_from_python_data_are_captured(
    name: str, inference: bool
) -> None:
    x = torch.randn(4, 2)
    with torch.inference_mode(inference):
        graph = KeyedGraphs().capture(1, lambda: RIGHT[name](x))
        for _ in range(3):
            x.copy_(torch.randn(4, 2))
            assert torch.equal(graph.replay(), RIGHT[name](x))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_host_reads_of_values_that_may_differ_at_a_replay_are_refused(
    name: str, inference: bool
) -> None:
    x = torch.randn(4, 2)
    with torch.inference_mode(inference), pytest.raises(CaptureSyncError):
        KeyedGraphs().capture(1, lambda: WRONG[name](x))


def test_runner_steps_with_constant_host_reads_are_replayed() -> None:
    runner = GraphRunner(
        _positions,
        inputs={"x": InputSpec(torch.float32, ("tokens", 2))},
        outputs=("tokens", 2),
        mode="FULL",
        sizes=[2, 4],
    )
    runner.capture()
    for count in (1, 2, 3, 4):
        x = torch.randn(count, 2)
        assert torch.equal(runner(x=x), x + 1)
        assert runner.last_dispatch is not None
        assert runner.last_dispatch.reason is Reason.HIT
