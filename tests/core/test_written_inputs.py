"""Forwards that write into their inputs: batch rows may be written, other inputs may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import GraphRunner, InputSpec
from graphrt.errors import RefusedOpError

ROWS = InputSpec(torch.float32, ("tokens", 4))
SLOTS = InputSpec(torch.int64, ("tokens",), pad=0, index=True)


def runner(forward: Any, **inputs: InputSpec) -> GraphRunner:
    return GraphRunner(forward, mode="FULL", sizes=[1, 2, 4], inputs=inputs, platform="cpu")


def advance(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(0, slots, x)
    return cache.sum(0, keepdim=True) + x * 0


@pytest.mark.trust
def test_a_forward_that_writes_a_cache_given_as_an_input_is_refused() -> None:
    """Every step brings its own, in which nothing of the steps before was written."""
    cache = InputSpec(torch.float32, (8, 4))
    run = runner(advance, x=ROWS, slots=SLOTS, cache=cache)
    with pytest.raises(RefusedOpError, match="writes input 'cache'") as raised:
        run.capture()
    assert raised.value.op == "aten.index_copy_.default"
    assert "test_written_inputs.py" in str(raised.value)
    assert not run.report().graphs


@pytest.mark.trust
def test_a_forward_that_writes_a_view_of_a_batchless_input_is_refused() -> None:
    def forward(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state[1:].add_(1)
        return x + state[1]

    run = runner(forward, x=ROWS, state=InputSpec(torch.float32, (2, 4)))
    with pytest.raises(RefusedOpError, match="writes input 'state'"):
        run.capture()


def test_transposing_a_batchless_input_in_place_is_not_refused_as_a_write() -> None:
    def forward(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x @ table.view(4, 4).t_()

    run = runner(forward, x=ROWS, table=InputSpec(torch.float32, (16,)))
    run.capture()
    for rows in (4, 2, 3):
        x, table = torch.randn(rows, 4), torch.randn(16)
        # Of the same padding: a product of other rows may be rounded otherwise.
        padded = torch.nn.functional.pad(x, (0, 0, 0, rows % 2))
        assert torch.equal(run(x=x, table=table), forward(padded, table.clone())[:rows])


def test_a_batchless_input_may_be_read_while_batch_rows_are_written() -> None:
    def forward(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * table

    # Of other sizes, so that at one of them the table lies where rows lie at another.
    run = runner(forward, x=ROWS, table=InputSpec(torch.float32, (4,)))
    run.capture()
    for rows in (4, 3, 2, 1, 3):
        x, table = torch.randn(rows, 4), torch.randn(4)
        before = x.clone()
        assert torch.equal(run(x=x, table=table), (before + 1) * table)
        # The step's own tensor is only read.
        assert torch.equal(x, before)
