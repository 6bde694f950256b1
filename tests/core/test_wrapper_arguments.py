"""Arguments of a host's own wrapper must be the tensors and values of the capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt import (
    UNCHANGED,
    Batch,
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    HostArg,
    InputSpec,
    UpdatableTask,
    eager_break,
    forward_context,
)
from graphrt.core.base.errors import StaleInputError
from graphrt.cpu import CPUGraphWrapper

LEVELS = ("off", "capture", "first", "sample", "always")
D4 = BatchDescriptor(4)
D8 = BatchDescriptor(8)


@pytest.fixture(autouse=True)
def _no_level_of_the_process(monkeypatch):
    monkeypatch.delenv("GRAPHRT_CHECK", raising=False)


def wrapper(
    function: Callable[..., Any] = lambda x, *others, **more: x + 1, level: str = "capture"
) -> CPUGraphWrapper:
    options = GraphOptions(lazy=True, check=level)
    return CPUGraphWrapper(function, GraphMode.FULL, pool=GraphPool("cpu"), options=options)


def call(wrapped: CPUGraphWrapper, *args: Any, of: BatchDescriptor = D4, **kwargs: Any) -> Any:
    with forward_context("FULL", of):
        return wrapped(*args, **kwargs)


def at_step(level: str, moved_at: int) -> bool:
    """Whether another tensor at the replay of this number, 1 the first, is named at a level."""
    wrapped, x = wrapper(level=level), torch.ones(4)
    call(wrapped, x)
    for _ in range(moved_at - 1):
        call(wrapped, x)
    try:
        call(wrapped, torch.ones(4))
    except StaleInputError:
        return True
    return False


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("moved_at", [1, 2, 70])
def test_the_check_level_decides_at_which_replays_a_moved_argument_is_found(level, moved_at):
    expected = level in ("sample", "always") or (moved_at == 1 and level != "off")
    assert at_step(level, moved_at) is expected


def test_graphrt_check_in_the_environment_sets_the_check_level_of_wrappers(monkeypatch):
    monkeypatch.setenv("GRAPHRT_CHECK", "off")
    assert not at_step("always", 1)
    monkeypatch.setenv("GRAPHRT_CHECK", "always")
    assert at_step("off", 5)


def test_the_first_replay_of_each_descriptor_compares_its_arguments():
    wrapped, x, other = wrapper(), torch.ones(4), torch.ones(4)
    for of in (D4, D8):
        call(wrapped, x, of=of)
    call(wrapped, x, of=D4)
    call(wrapped, other, of=D4)
    with pytest.raises(StaleInputError, match="8 tokens"):
        call(wrapped, other, of=D8)


def test_a_moved_argument_raises_at_each_replay_until_the_captured_argument_returns():
    wrapped, x = wrapper(), torch.ones(4)
    call(wrapped, x)
    for _ in range(3):
        with pytest.raises(StaleInputError):
            call(wrapped, torch.ones(4))
    x.fill_(5)
    assert call(wrapped, x).tolist() == [6.0] * 4


def test_the_first_replay_after_a_recapture_compares_its_arguments():
    wrapped, x = wrapper(), torch.ones(4)
    call(wrapped, x)
    call(wrapped, x)
    wrapped.drop(D4)
    call(wrapped, x)
    with pytest.raises(StaleInputError):
        call(wrapped, torch.ones(4))


BASE = torch.ones(16)
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another tensor": torch.clone,
    "another shape": lambda x: x[:3],
    "other strides": lambda x: BASE[:8:2],
    "another part": lambda x: BASE[1:5],
    "another dtype": lambda x: x.view(torch.int32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_argument_with_another_address_shape_stride_or_dtype_is_refused(change):
    wrapped, x = wrapper(), BASE[:4]
    call(wrapped, x)
    with pytest.raises(StaleInputError, match=r"argument \[0\]\[0\]"):
        call(wrapped, CHANGES[change](x))


@pytest.mark.parametrize("level", ["capture", "always"])
def test_a_new_tensor_object_over_the_captured_memory_is_accepted(level):
    base = torch.ones(16)
    wrapped = wrapper(level=level)
    call(wrapped, base[:4])
    for value in range(3):
        base.fill_(value)
        assert torch.equal(call(wrapped, base[:4]), base[:4] + 1)


@pytest.mark.parametrize("level", ["capture", "always"])
def test_a_moved_argument_that_the_graph_does_not_read_is_also_refused(level):
    wrapped, x, y = wrapper(level=level), torch.ones(4), torch.ones(3)
    call(wrapped, x, y)
    with pytest.raises(StaleInputError, match=r"argument \[0\]\[1\]"):
        call(wrapped, x, torch.ones(5))
    call(wrapped, x, y)


def test_the_error_of_a_moved_argument_names_the_class_of_a_module():
    layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(50)])
    wrapped = wrapper(layers.requires_grad_(False))
    call(wrapped, torch.ones(4))
    with pytest.raises(StaleInputError, match="of Sequential is not where") as caught:
        call(wrapped, torch.ones(4))
    assert len(str(caught.value)) < 1000


def test_the_error_of_a_moved_nested_argument_gives_its_path():
    wrapped = wrapper(lambda x, nested: x + nested["b"][1])
    x, a, b = torch.ones(4), torch.ones(4), torch.ones(4)
    call(wrapped, x, {"a": a, "b": [a, b]})
    with pytest.raises(StaleInputError, match=r"\['b'\]\[1\] of .* is not where"):
        call(wrapped, x, {"a": a, "b": [a, torch.ones(4)]})


@pytest.mark.parametrize(
    ("then", "now"),
    [(2, 3), (2.0, 3.0), ("sum", "max"), (None, 1), (True, False), (1, 1.5), (None, torch.ones(4))],
)
def test_a_changed_plain_argument_value_is_refused(then, now):
    wrapped, x = wrapper(), torch.ones(4)
    call(wrapped, x, then)
    call(wrapped, x, then)
    wrapped, x = wrapper(), torch.ones(4)
    call(wrapped, x, then)
    with pytest.raises(StaleInputError):
        call(wrapped, x, now)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {"scale": 2}), ((2,), {}), ((), {}), ((), {"scale": 2, "more": 1})],
)
def test_missing_extra_or_positional_arguments_unlike_the_capture_are_refused(args, kwargs):
    wrapped, x = wrapper(), torch.ones(4)
    call(wrapped, x, scale=2)
    if kwargs == {"scale": 2}:
        call(wrapped, x, *args, **kwargs)
        return
    with pytest.raises(StaleInputError):
        call(wrapped, x, *args, **kwargs)


def test_arguments_that_are_arbitrary_objects_are_not_compared():
    wrapped, x = wrapper(level="always"), torch.ones(4)
    call(wrapped, x, object(), of=D4)
    x.fill_(3)
    assert torch.equal(call(wrapped, x, object(), of=D4), torch.full((4,), 4.0))


def test_a_moved_argument_read_in_an_eager_part_is_refused():
    @eager_break
    def part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    options = GraphOptions(lazy=True)
    wrapped = CPUGraphWrapper(
        lambda x, y: part(x + 1, y) + 1,
        GraphMode.PIECEWISE,
        pool=GraphPool("cpu"),
        options=options,
        breakable=True,
    )
    x, y = torch.ones(4), torch.ones(4)
    with forward_context("PIECEWISE", D4):
        wrapped(x, y)
    with forward_context("PIECEWISE", D4), pytest.raises(StaleInputError, match=r"\[0\]\[1\]"):
        wrapped(x, torch.ones(4))


@pytest.mark.trust
def test_the_wrapper_of_a_runner_compares_no_arguments():
    runner = GraphRunner(
        lambda x: x + 1,
        sizes=[4],
        mode="FULL",
        platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens",))},
        outputs=("tokens",),
        options=GraphOptions(check="always"),
    )
    runner.capture()
    [wrapped] = runner.graphs.owners()
    assert not any(entry.compares_next for entry in wrapped.entries.values())
    for _ in range(3):
        runner(Batch(4, 4, 1), x=torch.ones(4))
    assert not any(entry.compares_next for entry in wrapped.entries.values())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_argument_other_than_the_captured_tensor_is_refused(
    level: str, layout: Any
) -> None:
    matrix = torch.eye(4).to_sparse(layout=layout)
    x = torch.ones(4, 2)
    wrapper = CPUGraphWrapper(
        lambda matrix, x: torch.mm(matrix, x) + 1,
        GraphMode.FULL,
        pool=GraphPool("cpu"),
        options=GraphOptions(lazy=True, check=level),
    )
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        with forward_context(GraphMode.FULL, D4):
            assert torch.equal(wrapper(matrix, x), torch.full((4, 2), value + 1))
    if level in ("off", "capture"):
        return
    other = CPUGraphWrapper(
        torch.mm, GraphMode.FULL, pool=GraphPool("cpu"), options=wrapper.options
    )
    with forward_context(GraphMode.FULL, D4):
        other(matrix, x)
    with forward_context(GraphMode.FULL, D4), pytest.raises(StaleInputError):
        other(matrix.clone(), x)


def test_unchanged_at_the_first_replay_repeats_the_capturing_steps_host_arguments():
    task = UpdatableTask(
        "scale", lambda x, out, factor: torch.mul(x, factor, out=out), {"factor": HostArg(None)}
    )

    def scaled(x):
        out = torch.empty_like(x)
        task(x, out)
        return out

    wrapped, x = wrapper(scaled), torch.ones(4)
    for updates, factor in (
        ({"scale": {"factor": 3}}, 3.0),
        (UNCHANGED, 3.0),
        ({"scale": {"factor": 5}}, 5.0),
        (UNCHANGED, 5.0),
    ):
        with forward_context("FULL", D4, updates=updates):
            assert torch.equal(wrapped(x), x * factor)
    assert list(wrapped.entries) == [D4]


def test_an_argument_list_that_the_runnable_clears_is_compared_as_given():
    def run(arguments):
        (x,) = arguments
        arguments.clear()
        return x + 1

    made, x = wrapper(run), torch.zeros(4)
    for _ in range(2):
        with forward_context(GraphMode.FULL, D4):
            assert torch.equal(made([x]), x + 1)
        x.add_(1)
    other = wrapper(run)
    with forward_context(GraphMode.FULL, D4):
        other([x])
    with forward_context(GraphMode.FULL, D4), pytest.raises(StaleInputError):
        other([x.clone()])
