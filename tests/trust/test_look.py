"""`runner.look()` names what has changed in Python since the capture."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from graphrt import GraphOptions, GraphRunner, InputSpec
from graphrt.errors import VerificationError
from graphrt.trust.reads import ReadSet

WIDTH = 4
TABLE = {"bias": torch.zeros(WIDTH)}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.scales = Inner(), 1.0, [1.0, 2.0]
        self.config = SimpleNamespace(factor=2.0)
        # Small, above 4 KiB, and above 64 KiB.
        self.table, self.rows, self.large = numpy.ones(2), numpy.ones(1000), numpy.ones(10000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale * self.scales[1] * self.config.factor + TABLE["bias"]


def runner_of(model: nn.Module, check: Any = "capture") -> GraphRunner[Any]:
    inputs = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}
    options = GraphOptions(check=check)
    return GraphRunner(
        model, inputs=inputs, sizes=[4], mode="FULL", platform="cpu", options=options
    )


def add_hook(model: Any) -> None:
    model.inner.register_forward_hook(lambda *args: None)


def move(model: Any) -> None:
    model.inner.linear.weight.data = torch.ones(WIDTH, WIDTH)


CHANGES: dict[str, Callable[[Any], object]] = {
    "model.scale": lambda model: setattr(model, "scale", 3.0),
    "model.scales[1]": lambda model: model.scales.__setitem__(1, 3.0),
    "model.config.factor": lambda model: setattr(model.config, "factor", 3.0),
    "model.inner": lambda model: setattr(model, "inner", Inner()),
    "model.inner._forward_hooks (keys)": add_hook,
    "model.inner.linear.weight": move,
    "model.added": lambda model: setattr(model, "added", 1),
    "model.table": lambda model: setattr(model, "table", numpy.zeros(2)),
    "model.large": lambda model: setattr(model, "large", numpy.zeros(10000)),
    "model.rows": lambda model: model.rows.fill(2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_look_names_a_change_and_nothing_else(name: str) -> None:
    model = Model()
    runner = runner_of(model)
    runner.capture()
    assert runner.look() == () and str(runner.look()) == "nothing has changed"
    CHANGES[name](model)
    assert runner.look().names == (name,)
    assert str(runner.look()).startswith(f"{name} = ")


def test_a_look_names_a_replaced_forward_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(Model())
    runner.capture()
    monkeypatch.setattr(Inner, "forward", lambda self, x: x)
    assert runner.look().names == ("Inner.forward",)


def test_a_look_names_a_tensor_that_no_module_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(Model())
    runner.capture()
    monkeypatch.setitem(TABLE, "bias", torch.ones(WIDTH))
    assert runner.look().names == ("global TABLE['bias']",)


EQUALS = {
    "list": ([1, 2], [1, 2], "list of 2, then another list of 2"),
    "dict": ({"a": 1}, {"a": 1}, "dict of 1, then another dict of 1"),
    "tensor": (
        torch.ones(2),
        torch.ones(2),
        "Tensor torch.float32 (2,), then another Tensor torch.float32 (2,)",
    ),
    "object": (SimpleNamespace(), SimpleNamespace(), "then another SimpleNamespace"),
    "function": (len, max, "builtin_function_or_method len, then builtin_function_or_method max"),
    "class": (int, float, "class int, then class float"),
}


@pytest.mark.parametrize("kind", EQUALS)
def test_a_look_tells_objects_by_their_kind_and_size_and_no_address(kind: str) -> None:
    was, now, text = EQUALS[kind]
    held = SimpleNamespace(value=was)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x if held.value is None else x * 2

    inputs = {"x": InputSpec(torch.float32, ("tokens", 2))}
    runner = GraphRunner(
        forward, mode="FULL", sizes=[4], inputs=inputs, outputs=("tokens", 2), platform="cpu"
    )
    with runner:
        runner.capture()
        held.value = now
        assert text in str(runner.look()) and "0x" not in str(runner.look())


def test_a_look_tells_a_global_that_was_not_there_at_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * LATER[0] if len(x) > 100 else x  # type: ignore[name-defined]  # noqa: F821

    inputs = {"x": InputSpec(torch.float32, ("tokens", 2))}
    runner = GraphRunner(
        forward, mode="FULL", sizes=[4], inputs=inputs, outputs=("tokens", 2), platform="cpu"
    )
    with runner:
        runner.capture()
        monkeypatch.setitem(globals(), "LATER", [3])
        assert str(runner.look()) == "global LATER = nothing, then list of 1"


def test_a_change_that_was_undone_is_none() -> None:
    model = Model()
    runner = runner_of(model)
    runner.capture()
    model.scale, model.added = 3.0, 1
    del model.added
    model.scale = float("1.0")
    assert runner.look() == ()


def test_a_look_compares_with_the_last_capture() -> None:
    model = Model()
    runner = runner_of(model)
    runner.capture()
    model.scale = 3.0
    runner.recapture()
    assert runner.look() == ()


def test_a_look_without_checks_or_a_capture_is_refused() -> None:
    runner = runner_of(Model())
    with pytest.raises(VerificationError, match=r"capture\(\) first"):
        runner.look()
    runner = runner_of(Model(), "off")
    runner.capture()
    with pytest.raises(VerificationError, match='got: check="off"'):
        runner.look()


def calls_of_a_look(modules: int) -> int:
    """How many functions of Python a look calls that finds nothing."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inners = nn.ModuleList(Inner() for _ in range(modules))
            self.scales = [[1.0] for _ in range(modules)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for inner, scales in zip(self.inners, self.scales, strict=True):
                x = inner(x) * scales[0]
            return x

    runner = runner_of(Many())
    runner.capture()
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    try:
        found = runner.look()
    finally:
        sys.setprofile(None)
    assert found == ()
    return len(calls)


def test_a_look_compares_modules_and_containers_in_c() -> None:
    assert calls_of_a_look(4) == calls_of_a_look(16)


@pytest.mark.parametrize("name", CHANGES)
def test_a_trial_walks_again_only_after_a_change(name: str) -> None:
    model = Model()
    reads = ReadSet(model)
    settled = reads.settle()
    assert reads.places() is settled
    CHANGES[name](model)
    now = reads.places()
    assert now is not settled
    assert reads.settle(now) is reads.places() is now


def test_a_trial_in_another_thread_walks_again_as_a_thread_has_values_of_its_own() -> None:
    reads = ReadSet(Model())
    settled, found = reads.settle(), []
    thread = threading.Thread(target=lambda: found.append(reads.places()))
    thread.start()
    thread.join()
    assert found != [settled]
    assert reads.places() is settled
