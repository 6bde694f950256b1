"""Static inputs: addresses stay, live rows are copied, padding rows are always clean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphrt import InputSpec
from graphrt.core.errors import InvalidInputError
from graphrt.core.inputs import StaticInputs, nest

SPECS = {
    "ids": InputSpec(torch.int64, ("tokens",), pad=7),
    "mrope": InputSpec(torch.int64, (3, "tokens"), pad=-1),
    "table": InputSpec(torch.int32, ("reqs", 2), pad=0, index=True),
    "starts": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
    "loose": InputSpec(torch.float32, ("tokens", 2), pad="keep"),
}


def values(tokens: int, reqs: int) -> dict[str, torch.Tensor]:
    return {
        "ids": torch.arange(1, tokens + 1),
        "mrope": torch.arange(3 * tokens).reshape(3, tokens),
        "table": torch.ones(reqs, 2, dtype=torch.int32),
        "starts": torch.arange(reqs + 1, dtype=torch.int32),
        "loose": torch.ones(tokens, 2),
    }


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=1, max_size=6))
def test_after_any_steps_live_rows_are_live_and_padding_rows_are_padding(steps):
    inputs = StaticInputs(SPECS, tokens=8, reqs=4)
    addresses = {name: buffer.data_ptr() for name, buffer in inputs.buffers.items()}
    for tokens, reqs in steps:
        given_values = values(tokens, reqs)
        inputs.fill(given_values, tokens, reqs, 8, 4)
        views = inputs.views(8, 4)
        assert {name: view.data_ptr() for name, view in views.items()} == addresses
        assert torch.equal(views["ids"][:tokens], given_values["ids"])
        assert (views["ids"][tokens:] == 7).all()
        assert torch.equal(views["mrope"][:, :tokens], given_values["mrope"])
        assert (views["mrope"][:, tokens:] == -1).all()
        assert (views["table"][reqs:] == 0).all()
        assert (views["starts"][reqs:] == reqs).all()


def test_an_input_that_lives_in_its_buffer_is_not_copied():
    inputs = StaticInputs({"ids": SPECS["ids"]}, tokens=8, reqs=8)
    own = inputs.views(3, 3)["ids"]
    own.copy_(torch.tensor([4, 5, 6]))
    version = own._version
    inputs.fill({"ids": own}, 3, 3, 3, 3)
    assert own._version == version
    assert own.tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ids": torch.zeros(3, dtype=torch.int32)}, "torch.int32"),
        ({"ids": torch.zeros(4, dtype=torch.int64)}, r"\(4,\)"),
        ({"ids": torch.zeros(1, dtype=torch.int64)}, r"\(1,\)"),
        ({"table": torch.zeros(2, 3, dtype=torch.int32)}, r"\(2, 3\)"),
        ({"mrope": torch.zeros(2, 3, dtype=torch.int64)}, r"\(2, 3\)"),
        ({"extra": torch.zeros(3)}, "extra"),
        ({"ids": None}, "ids"),
    ],
)
def test_a_bad_input_is_a_named_error_and_the_next_fill_works(change, text):
    inputs = StaticInputs(SPECS, tokens=8, reqs=4)
    wrong = {**values(3, 2), **change}
    wrong = {name: value for name, value in wrong.items() if value is not None}
    with pytest.raises(InvalidInputError, match=text):
        inputs.fill(wrong, 3, 2, 8, 4)
    inputs.fill(values(3, 2), 3, 2, 8, 4)
    assert inputs.views(8, 4)["ids"].tolist() == [1, 2, 3, 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": ("rows",)},
        {"shape": ("tokens", "reqs")},
        {"shape": ("tokens-1",)},
        {"shape": ("tokens",), "pad": "zero"},
        {"shape": ("tokens",), "pad": "keep", "index": True},
    ],
)
def test_a_bad_spec_is_a_named_error(arguments):
    with pytest.raises(InvalidInputError):
        InputSpec(torch.int64, **arguments)


def test_sizes_are_read_off_the_shapes():
    inputs = StaticInputs(SPECS, tokens=8, reqs=4)
    assert inputs.infer(values(5, 3)) == (5, 3)
    with pytest.raises(InvalidInputError, match="disagree"):
        inputs.infer({**values(5, 3), "ids": torch.zeros(4, dtype=torch.int64)})


def test_nested_inputs_keep_their_structure():
    specs = {"ids": SPECS["ids"], "stage": {"hidden": InputSpec(torch.float32, ("tokens", 2))}}
    inputs = StaticInputs(specs, tokens=4, reqs=4)
    step = {"ids": torch.tensor([1, 2]), "stage": {"hidden": torch.ones(2, 2)}}
    inputs.fill(step, 2, 2, 4, 4)
    seen = nest(inputs.views(4, 4))
    assert seen["stage"]["hidden"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
