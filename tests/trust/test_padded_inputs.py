"""What checks ask about padding rows: their index addresses, and which inputs have padding rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import InputSpec
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.device.registry import get_platform
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.trust.padded_inputs import differing, disturb, index_pads, unused_addresses

SLOTS = InputSpec(torch.int64, ("tokens",), pad=3, index=True)
TABLE = InputSpec(torch.int32, ("reqs", 2), pad=0, index=True)
NOWHERE = InputSpec(torch.int64, ("tokens",), pad=-1, index=True)
X = InputSpec(torch.float32, ("tokens",), pad=3.0)
PAIRS = InputSpec(torch.float32, ("tokens", 2))
COLUMNS = InputSpec(torch.float32, (2, "tokens"))
REQS = InputSpec(torch.int64, ("reqs",))
WHOLE = InputSpec(torch.float32, (3,))


def static(specs: Any, tokens: int = 4, reqs: int = 4) -> StaticInputs:
    return StaticInputs(specs, platform=get_platform("cpu"), tokens=tokens, reqs=reqs, device="cpu")


@pytest.mark.parametrize(
    ("specs", "addresses"),
    [
        ({"x": X}, []),
        ({"x": X, "slots": SLOTS}, [3]),
        ({"slots": SLOTS, "table": TABLE, "more": SLOTS}, [0, 3]),
        ({"nested": {"slots": SLOTS, "nowhere": NOWHERE}}, [-1, 3]),
        ({"pairs": PAIRS}, []),
    ],
)
def test_padding_addresses_are_the_padding_values_of_index_inputs(specs, addresses):
    assert sorted({*index_pads(static(specs).declared).values()}) == addresses


@pytest.mark.parametrize("pad", [None, "repeat"])
def test_an_index_input_spec_without_a_padding_value_is_refused(pad):
    with pytest.raises(InvalidInputError):
        InputSpec(torch.int64, ("tokens",), pad=pad, index=True)


SPECS = {"x": X, "nested": {"slots": SLOTS}, "table": TABLE, "nowhere": NOWHERE}


@pytest.mark.parametrize(
    ("values", "unused"),
    [
        ({}, []),
        ({"x": torch.tensor([3.0])}, []),
        ({"nested": {"slots": torch.tensor([1, 2, 4])}}, [3]),
        ({"nested": {"slots": torch.tensor([1, 3, 4])}}, []),
        ({"nested.slots": torch.tensor([3])}, []),
        ({"table": torch.tensor([[1, 2], [5, 0]], dtype=torch.int32)}, []),
        ({"nowhere": torch.tensor([0, 1])}, []),
        ({"nested": {"slots": torch.tensor([], dtype=torch.int64)}}, [3]),
        ({"nested.slots": torch.tensor([3]), "table": torch.tensor([1])}, [0]),
    ],
)
def test_unused_addresses_omits_padding_addresses_that_a_live_row_holds(values, unused):
    assert unused_addresses(static(SPECS).declared, values) == unused


@pytest.mark.parametrize("live", [1, 2, 3, 4])
def test_disturb_fills_padding_rows_with_the_first_live_row(live):
    inputs = static({"pairs": PAIRS, "columns": COLUMNS, "whole": WHOLE, "slots": SLOTS})
    columns = torch.arange(8.0).view(2, 4)
    views = inputs.layout(4, 4).views
    views["pairs"].copy_(columns.t())
    views["columns"].copy_(columns)
    before = {name: views[name].clone() for name in ("whole", "slots")}
    disturb(inputs.layout(4, 4), live, live)
    expected = columns.clone()
    expected[:, live:] = columns[:, :1]
    assert torch.equal(views["columns"], expected)
    assert torch.equal(views["pairs"], expected.t())
    assert all(torch.equal(views[name], before[name]) for name in before)


def test_disturb_changes_only_rows_within_the_graphs_size():
    inputs = static({"pairs": PAIRS, "reqs": REQS}, tokens=8, reqs=6)
    inputs.buffers["pairs"].copy_(torch.arange(16.0).view(8, 2))
    inputs.buffers["reqs"].copy_(torch.arange(6))
    disturb(inputs.layout(4, 3), 3, 2)
    assert inputs.buffers["pairs"].flatten().tolist() == [0, 1, 2, 3, 4, 5, 0, 1, *range(8, 16)]
    assert inputs.buffers["reqs"].tolist() == [0, 1, 0, 3, 4, 5]


def test_differing_ignores_values_that_belong_to_no_declared_input():
    values = {"table": torch.tensor([[5, 5]], dtype=torch.int32), "unknown": torch.ones(1)}
    declared = static(SPECS).declared
    assert differing(declared, values, ["tokens", "reqs"]) == {"tokens": set(), "reqs": {"table"}}
    assert differing(declared, values, ["tokens"]) == {"tokens": set()}
