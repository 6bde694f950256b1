"""`opaque`: functions as operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphPool, GraphRunner, InputSpec
from graphrt.compile import OpaqueError, compile_module, opaque
from graphrt.errors import CaptureSyncError


@opaque("graphrt_tests::scaled", mutates=["out"])
def scaled(x: torch.Tensor, factor: float, out: torch.Tensor, twice: bool = False) -> None:
    """Writes x * factor."""
    torch.mul(x, factor * (2 if twice else 1), out=out)


def test_an_opaque_operator_is_called_like_its_function():
    x, out = torch.randn(3), torch.empty(3)
    assert scaled(x, 2.0, out=out) is None
    assert torch.equal(out, x * 2)
    scaled(x, 2.0, out, twice=True)
    assert torch.equal(out, x * 4)
    assert scaled.__doc__ == "Writes x * factor."


def test_an_opaque_operator_is_registered_as_splitting_and_mutating():
    operator = scaled.operator
    assert operator is torch.ops.graphrt_tests.scaled.default
    assert torch.Tag.cudagraph_unsafe in operator.tags
    assert [a.name for a in operator._schema.arguments if a.alias_info] == ["out"]
    with torch._subclasses.FakeTensorMode():
        scaled(torch.empty(3), 1.0, torch.empty(3))


def test_an_opaque_operator_with_splits_false_has_no_splitting_tag():
    @opaque("graphrt_tests::quiet", mutates=["out"], splits=False)
    def quiet(out: torch.Tensor) -> None:
        out.zero_()

    assert torch.Tag.cudagraph_unsafe not in quiet.operator.tags


@pytest.mark.parametrize(
    ("name", "mutates", "text"),
    [
        ("attention", [], "namespace"),
        ("a::b::c", [], "namespace"),
        ("graphrt_tests::new", ["other"], "no argument"),
        ("graphrt_tests::scaled", [], "registered already"),
        ("graphrt_tests::new", [], "shape"),
    ],
)
def test_a_wrong_name_or_argument_of_opaque_is_refused(name, mutates, text):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(OpaqueError, match=text):
        opaque(name, mutates=mutates)(function)


def test_opaque_refuses_a_function_without_type_annotations():
    with pytest.raises(OpaqueError, match="cannot be an operator"):
        opaque("graphrt_tests::untyped", mutates=[])(lambda x: None)


@opaque("graphrt_tests::by_largest", mutates=[], fake=torch.empty_like)
def by_largest(x: torch.Tensor) -> torch.Tensor:
    """Reads a number on the host."""
    return x * x.max().item()


class ByLargest(nn.Module):
    def __init__(self, function=by_largest) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * 2) + 1


def test_a_host_read_in_compiled_code_is_refused_with_advice_that_works():
    """An @eager_break is traced through there, and its capture refused."""

    def runner(model: nn.Module) -> GraphRunner:
        pool = GraphPool("cpu")
        compile_module(model, ["x"], pool=pool)
        inputs = {"x": InputSpec(torch.float32, ("tokens", 8))}
        return GraphRunner(model, mode="PIECEWISE", sizes=[4], inputs=inputs, pool=pool)

    with (
        runner(ByLargest(lambda x: x * x.max().item())) as refused,
        pytest.raises(CaptureSyncError, match=r"compiled code: @graphrt\.opaque"),
    ):
        refused.capture()
    x = torch.randn(4, 8)
    with runner(ByLargest()) as serving:
        serving.capture()
        assert torch.equal(serving(Batch(4), x=x), ByLargest()(x))
