"""Output sizes that do not follow the batch size are refused at capture, for any capture sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_runner import rows, runner

from graphrt import Batch, GraphOptions, GraphRunner, InputSpec, Reason
from graphrt.core.base.errors import OutputError

X = InputSpec(torch.float32, ("tokens", 4))


def captured(forward: Any, sizes: list[int], **options: Any) -> GraphRunner:
    run = runner(forward, sizes=sizes, **{"outputs": None, **options})
    run.capture()
    return run


def rounded_up(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4)) + 1


BENT = {
    "first rows": lambda x: x[:3] + 1,
    "last rows": lambda x: x[-3:] + 1,
    "columns": lambda x: x @ x.new_ones(4, 6)[:, : min(3, x.shape[0])],
    "in a dict": lambda x: {"kept": x + 1, "head": x[:2] * 2},
    "rounded up": rounded_up,
    "top": lambda x: x.sum(1).topk(min(3, x.shape[0])).values,
}


@pytest.mark.parametrize("check", ["capture", "off"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("sizes", [[1, 2, 4, 8], [2, 4, 8], [4, 8], [8], [4, 16]], ids=str)
@pytest.mark.parametrize("name", BENT)
def test_an_output_whose_size_is_capped_or_rounded_at_small_batches_is_refused(
    name, sizes, mode, check
):
    with pytest.raises(OutputError) as caught:
        captured(BENT[name], sizes, mode=mode, options=GraphOptions(check=check))
    assert caught.value.advice


@pytest.mark.parametrize("sizes", [[1, 4], [4, 8], [8]], ids=str)
def test_a_declared_constant_output_size_is_checked_at_a_small_batch(sizes):
    with pytest.raises(OutputError, match="outputs="):
        captured(BENT["first rows"], sizes, outputs=(3, 4))


def test_the_advice_of_a_refused_output_size_works():
    with pytest.raises(OutputError, match="let the caller cut them"):
        captured(BENT["first rows"], [4, 8])
    run = captured(lambda x: x + 1, [4, 8])
    for count in (4, 1, 2, 8):
        assert torch.equal(run(x=rows(count))[:3], rows(min(count, 3), 2.0))
    with pytest.raises(OutputError, match="split it"):
        captured(lambda x: x.repeat_interleave(2, 0), [4, 8])
    run = captured(lambda x: x.repeat_interleave(2, 0).view(-1, 2, 4), [4, 8])
    assert run(x=rows(3)).shape == (3, 2, 4)


STRAIGHT = {
    "rows": (lambda x: x + 1, None),
    "columns of a constant": (lambda x: x @ x.new_ones(4, 3), None),
    "declared": (lambda x: x @ x.new_ones(4, 3), ("tokens", 3)),
    "a second axis, undeclared": (lambda x: (x * 0 + 1) @ (x.t() * 0 + 1), ("tokens",)),
    "three numbers": (lambda x: x.new_ones(3), None),
    "three declared numbers": (lambda x: x.new_ones(3), (3,)),
    "none of any size": (lambda x: x.new_ones(3), (None,)),
}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("sizes", [[1, 2, 4, 8], [4, 8], [8], [6, 12]], ids=str)
@pytest.mark.parametrize("name", STRAIGHT)
@pytest.mark.filterwarnings("error")
def test_outputs_of_proportional_or_constant_size_are_served_by_graphs(name, sizes, mode):
    forward, outputs = STRAIGHT[name]
    run = captured(forward, sizes, mode=mode, outputs=outputs)
    for count in (sizes[-1], 1, 2, 3, 4, 5):
        x = torch.randn(count, 4)
        assert torch.equal(run(x=x), forward(x))
        assert run.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("sizes", [[4, 8], [8]], ids=str)
def test_a_forward_that_fails_at_small_batches_is_served_at_larger_batches(sizes):
    def forward(x):
        if x.shape[0] < 3:
            raise ValueError("too few")
        return x.new_ones(3) + x.sum() * 0

    run = captured(forward, sizes)
    for count in (4, 3, 8):
        assert run(x=rows(count)).shape == (3,)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_running_out_of_memory_while_comparing_output_sizes_raises(error):
    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 4:
            raise error("no room")
        return x + 1

    with pytest.raises(error):
        captured(forward, [4])


@pytest.mark.parametrize("query_len", [2, 3])
def test_output_sizes_of_decode_batches_are_compared_at_whole_requests(query_len):
    seen = []

    def forward(x):
        seen.append(x.shape[0])
        return x.view(-1, query_len, 4)[:2].sum(1)

    with pytest.raises(OutputError):
        captured(
            forward,
            [query_len * 2, query_len * 4],
            mode="FULL_DECODE_ONLY",
            query_lens=[query_len],
            max_num_reqs=4,
        )
    assert all(count % query_len == 0 for count in seen)


def test_capture_next_compares_the_output_sizes_of_later_graphs():
    run = runner(BENT["first rows"], sizes=[2, 4, 8], outputs=None)

    def capture_all():
        while run.capture_next().left:
            pass

    with pytest.raises(OutputError):
        capture_all()
    # What was captured before serves, or nothing: never with wrong rows.
    assert run(Batch(1, 1, 1), x=rows(1)).shape == (1, 4)
