"""Results of eager parts: plain values stay as at capture, and tensors are new at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

from graphrt import GraphOptions, GraphRunner, InputSpec, Reason, eager_break
from graphrt.core.base.errors import (
    BreakError,
    CaptureError,
    GraphQuarantinedWarning,
    SideDoorError,
)
from graphrt.core.capture.recorder import Bridges


def captured(forward: Callable[..., Any], mode: str = "PIECEWISE", **more: Any) -> GraphRunner:
    made = GraphRunner(
        forward,
        mode=mode,
        sizes=[2],
        platform="cpu",
        **{"inputs": {"x": InputSpec(torch.float32, ("tokens", 4))}, **more},
    )
    made.capture()
    return made


def runner(value: Callable[[], Any]) -> GraphRunner:
    part = eager_break(lambda x: (x + 1, value()))
    return captured(lambda x: part(x)[0] * 2)


VALUES = [2**40, 0.1, "text", b"bytes", (1, ("a", None)), 1 + 2j, numpy.arange(3)]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_an_eager_part_may_return_an_equal_new_value_at_every_step(value):
    run = runner(lambda: copy.deepcopy(value) if isinstance(value, numpy.ndarray) else same(value))
    assert torch.equal(run(x=torch.ones(2, 4)), torch.full((2, 4), 4.0))


def same(value: Any) -> Any:
    """An equal object that is another one, where Python can make it."""
    return eval(repr(value))


@pytest.mark.parametrize("value", [numpy.array([1.0, numpy.nan]), float("nan")], ids=repr)
def test_an_eager_part_may_return_the_same_nan_object_at_every_step(value):
    run = runner(lambda: value)
    assert torch.equal(run(x=torch.ones(2, 4)), torch.full((2, 4), 4.0))


@pytest.mark.parametrize(
    ("first", "later"), [(3, 4), (3, 3.0), ("a", "b"), (0.0, -0.0), ((1, 2), (1, 3))], ids=repr
)
def test_a_step_whose_eager_part_returns_another_value_than_at_capture_runs_eagerly(first, later):
    values = [first]
    run = runner(lambda: values[-1])
    values.append(later)
    with pytest.warns(GraphQuarantinedWarning, match="another value"):
        assert torch.equal(run(x=torch.ones(2, 4)), torch.full((2, 4), 4.0))
    assert run.last_dispatch.reason is Reason.QUARANTINED


@pytest.mark.parametrize("shape", [(4,), (2, 4), (1, 1)], ids=str)
def test_an_expanded_result_of_an_eager_part_has_eager_values_in_replays(shape):
    part = eager_break(lambda x: (x.sum() + 1).expand(shape))
    run = captured(lambda x: x + part(x).sum())
    for value in (1.0, 3.0):
        x = torch.full((2, 4), value)
        assert torch.equal(run(x=x), x + (8 * value + 1) * torch.ones(shape).sum())


def test_results_at_the_same_break_share_a_buffer_of_the_largest_size():
    bridges, large = Bridges(), torch.ones(3, 8)
    first = bridges.buffer((0, 0), large)
    assert first.untyped_storage().nbytes() == large.nbytes
    turned = bridges.buffer((1, 0), large.t())
    assert turned.stride() == (1, 8) and turned.untyped_storage().nbytes() == large.nbytes
    assert bridges.buffer((0, 0), torch.ones(3, 4)).data_ptr() == first.data_ptr()
    assert bridges.buffer((0, 1), large).data_ptr() != first.data_ptr()
    assert bridges.buffer((0, 0), torch.ones(4, 8)).data_ptr() != first.data_ptr()


def test_a_tensor_stored_by_an_eager_part_is_allowed_in_full_but_refused_piecewise():
    held: list[torch.Tensor] = []

    @eager_break
    def part(x):
        held[:] = [x + 1]

    def forward(x):
        part(x)
        return held[0] * 2

    run = captured(forward, mode="FULL")
    for value in (1.0, 3.0):
        x = torch.full((2, 4), value)
        assert torch.equal(run(x=x), (x + 1) * 2)
    with pytest.raises(SideDoorError, match="did not return"):
        captured(forward)


def test_a_wrapper_subclass_stored_by_an_eager_part_is_refused_by_its_inner_tensors():
    held: list[TwoTensor] = []

    @eager_break
    def part(x):
        held[:] = [TwoTensor(x, x + 1) * 2]
        return held[0].a + held[0].b

    run = captured(lambda x: part(x) * 2)
    x = torch.full((2, 4), 3.0)
    assert torch.equal(run(x=x), (x * 2 + (x + 1) * 2) * 2)
    with pytest.raises(SideDoorError, match="did not return"):
        captured(lambda x: part(x) + held[0].b)


# Transforms --------------------------------------------------------------------------------------


TRANSFORMS = [torch.vmap, torch.func.functionalize, lambda f: lambda x: torch.func.vjp(f, x)[0]]


@pytest.mark.parametrize("warmups", [0, 1])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["vmap", "functionalize", "vjp"])
def test_an_eager_part_inside_a_torch_func_transform_is_refused(transform, warmups):
    part = eager_break(lambda x: x + 1)
    with pytest.raises(CaptureError, match="inside of a transform"):
        captured(lambda x: transform(part)(x * 2), options=GraphOptions(warmups=warmups))


def test_an_eager_part_may_run_vmap_over_another_eager_part():
    inner = eager_break(lambda x: x + 1)
    outer = eager_break(lambda x: torch.vmap(inner)(x))
    run = captured(lambda x: outer(x * 2))
    for value in (1.0, 3.0):
        assert torch.equal(run(x=torch.full((2, 4), value)), torch.full((2, 4), value * 2 + 1))


# Settings that the forward enters around an eager part -------------------------------------------


@contextmanager
def dtype_is(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def attribute_is(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


REFUSED = {
    "attention": lambda: sdpa_kernel([SDPBackend.MATH]),
    "dtype": lambda: dtype_is(torch.float64),
    "deterministic": deterministic,
    "precision": lambda: attribute_is(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "mode": lambda: BaseTorchFunctionMode(),
}


def test_autocast_around_an_eager_part_is_active_in_replays_and_ends_after_an_error():
    def settings() -> bool:
        return torch.is_autocast_enabled("cpu")

    def around() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    seen: list[bool] = []
    fails = False

    @eager_break
    def part(x):
        seen.append(settings())
        if fails:
            raise ZeroDivisionError
        return x + 1

    def forward(x):
        with around():
            y = part(x)
        return y * 2

    before = settings()
    run = captured(forward)
    with around():
        entered = settings()
    run(x=torch.ones(2, 4))  # tried, with all that Python knows put back
    seen.clear()
    assert entered != before
    assert torch.equal(run(x=torch.ones(2, 4)), torch.full((2, 4), 4.0))
    assert seen == [entered] and settings() == before
    fails = True
    with pytest.raises(ZeroDivisionError):
        run(x=torch.ones(2, 4))
    assert settings() == before


def _on_meta(part: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    with torch.device("meta"):
        return part(x)


@pytest.mark.parametrize("name", REFUSED)
def test_torch_settings_around_an_eager_part_that_replays_cannot_enter_are_refused(name):
    part = eager_break(lambda x: x + 1)

    def forward(x):
        with REFUSED[name]():
            y = part(x)
        return y * 2

    with pytest.raises(CaptureError, match="setting"):
        captured(forward)
    with pytest.raises(CaptureError, match="default device"), torch.device("cpu"):
        captured(lambda x: _on_meta(part, x))
    x = torch.ones(2, 4)
    with REFUSED[name]():
        assert torch.equal(captured(lambda x: part(x) * 2)(x=x), torch.full((2, 4), 4.0))


def test_an_eager_part_that_returned_a_tensor_twice_may_return_two_tensors_later():
    """Both had one place in the graph: its first reader read the second result."""

    @eager_break
    def part(x):
        first = x + 1
        return first, (first if bool((x == 0).all()) else x * 10)

    def forward(x):
        first, second = part(x * 1)
        return first * 2, second * 3

    run = captured(forward)
    for x in (torch.zeros(2, 4), torch.ones(2, 4), torch.zeros(2, 4)):
        outputs = run(x=x)
        assert all(map(torch.equal, outputs, forward(x)))


def test_an_eager_part_that_returned_its_argument_may_not_return_its_conjugate_later():
    """It lies at the same place: readers in the graph would take the argument for it."""
    part = eager_break(lambda x: x.conj() if bool((x.real > 0).all()) else x)
    inputs = {"x": InputSpec(torch.complex64, ("tokens", 4))}
    run = captured(lambda x: part(x * 1) + 0, inputs=inputs, options=GraphOptions(check="off"))
    x = torch.full((2, 4), -1 + 1j)
    assert torch.equal(run(x=x), x)
    with pytest.raises(BreakError):
        run(x=-x)


def test_a_graph_that_writes_a_tensor_an_eager_part_returned_twice_is_refused():
    def twice(x):
        y = x + 1
        return y, y

    part = eager_break(twice)

    def forward(x):
        first, second = part(x * 1)
        return first.add_(1) * second

    with pytest.raises(BreakError):
        captured(forward)
