"""What an eager part returns beside tensors: the same value as at capture, or a named error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from graphrt import GraphRunner, InputSpec, eager_break
from graphrt.core.base import BakedScalarError


def runner(value: Callable[[], Any]) -> GraphRunner:
    part = eager_break(lambda x: (x + 1, value()))
    made = GraphRunner(
        lambda x: part(x)[0] * 2,
        mode="PIECEWISE",
        sizes=[2],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        platform="cpu",
    )
    made.capture()
    return made


VALUES = [2**40, 0.1, "text", b"bytes", (1, ("a", None)), 1 + 2j, numpy.arange(3)]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_may_be_made_anew_at_every_step(value):
    run = runner(lambda: copy.deepcopy(value) if isinstance(value, numpy.ndarray) else same(value))
    assert torch.equal(run(x=torch.ones(2, 4)), torch.full((2, 4), 4.0))


def same(value: Any) -> Any:
    """An equal object that is another one, where Python can make it."""
    return eval(repr(value))


@pytest.mark.parametrize("value", [numpy.array([1.0, numpy.nan]), float("nan")], ids=repr)
def test_the_same_object_is_the_same_value_though_it_does_not_equal_itself(value):
    run = runner(lambda: value)
    assert torch.equal(run(x=torch.ones(2, 4)), torch.full((2, 4), 4.0))


@pytest.mark.parametrize(
    ("first", "later"), [(3, 4), (3, 3.0), ("a", "b"), (0.0, -0.0), ((1, 2), (1, 3))], ids=repr
)
def test_another_value_than_at_capture_is_named(first, later):
    values = [first]
    run = runner(lambda: values[-1])
    values.append(later)
    with pytest.raises(BakedScalarError, match="another value"):
        run(x=torch.ones(2, 4))
