"""A sealed runner whose compiled module changes: its steps are those of the module as it is now."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import GraphPool, GraphRunner, InputSpec
from graphrt.compile import CompiledModule, CompileOptions, RetraceError, compile_module, opaque
from graphrt.core.dispatch.reasons import Reason
from tests.trust import host_programs
from tests.trust.host_programs import HANDLES, PROGRAMS, WIDTH, Program

NOT_TRACED = "context variable"
HIDDEN = "global that hides a builtin"  # docs/concepts/trust.md names it

ALWAYS_RUN = (
    "number", "flag", "hook", "buffer", "submodule", "dict value", "list element",
    "class attribute", "parameters replaced", "keyword of a partial", "global number",
    "closure number", "default of an argument", "code of a function", "hook that looks",
    "eval mode",
)  # fmt: skip

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor on the CPU needs g++"
)


@opaque("graphrt_tests::halved", mutates=[], fake=torch.empty_like)
def halved(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


@pytest.fixture(autouse=True)
def _without_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRAPHRT_DISABLE_COMPILE_CACHE", "1")
    names = vars(host_programs)
    before = dict(names)
    with torch.no_grad():
        yield
    while HANDLES:
        HANDLES.pop().remove()
    for name in names.keys() - before.keys():
        del names[name]
    names.update(before)
    host_programs.restored("TABLE")


class Sealed:
    """A sealed runner around a compiled forward, all of whose graphs were tried. `wrong` are the
    numbers of steps that differ from the forward as it is now, `said` the warnings."""

    def __init__(self, forward: Any, mode: str = "FULL", backend: str = "eager") -> None:
        pool = GraphPool("cpu")
        self.compiled: CompiledModule = compile_module(
            forward, ["x"], pool=pool, options=CompileOptions(backend=backend)
        )
        self.now = self.compiled._subject.call
        self.runner = GraphRunner(
            forward if isinstance(forward, nn.Module) else self.compiled,
            mode=mode,
            sizes=[2, 4],
            inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
            outputs=("tokens", WIDTH),
            pool=pool,
        )
        self.runner.capture()
        self.wrong: list[int] = []
        self.said: list[str] = []
        self.step = 0
        self.run(10)
        assert (self.wrong, self.said) == ([], [])
        self.step = 0

    def run(self, count: int, rows: int | None = None) -> None:
        for _ in range(count):
            x = torch.randn(rows or (4, 3, 2, 1, 6)[self.step % 5], WIDTH)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                outputs = self.runner(x=x)
            self.said += [str(each.message) for each in caught]
            if not torch.allclose(outputs, self.now(x), atol=1e-5):
                self.wrong.append(self.step)
            self.step += 1

    def run_past_glances(self) -> int:
        """Run until a change that no watcher reports was looked at; returns how many steps. One in
        five has no graph, and looks at nothing."""
        steps: int = self.runner.report().trust.glance_steps * 5 // 4 + 1
        self.run(steps + 10)
        return steps

    @property
    def reason(self) -> Reason:
        self.run(1, rows=2)
        assert self.runner.last_dispatch is not None
        return self.runner.last_dispatch.reason


def _programs() -> Iterator[Any]:
    for each in PROGRAMS:
        if each.name not in (NOT_TRACED, HIDDEN):
            marks = [] if each.name in ALWAYS_RUN else [pytest.mark.long]
            yield pytest.param(each, id=each.name, marks=marks)


@pytest.mark.parametrize("each", [*_programs()])
def test_after_a_change_a_compiled_forward_is_served_as_it_is_now(each: Program):
    torch.manual_seed(0)
    forward, change = each.build()
    steps = Sealed(forward)
    change()
    late = steps.run_past_glances()
    if each.seen == "none":
        assert (steps.wrong, steps.said, steps.reason) == ([], [], Reason.HIT)
    else:
        assert all(step < late for step in steps.wrong), steps.wrong
        assert len(steps.said) == 1 and steps.reason is Reason.QUARANTINED


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.is_loud, self.log = nn.Linear(WIDTH, WIDTH), 1.0, False, [1.0]
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = halved(self.linear(x)) * self.scale * self.table
        if self.is_loud:
            pass
        return y if self.log else -y


def _hook(net: Net) -> None:
    net.linear.register_forward_hook(lambda *_: None)


HARMLESS: dict[str, Callable[[Net], object]] = {
    "flag": lambda net: setattr(net, "is_loud", True),
    "longer list": lambda net: net.log.append(2.0),
    "hook": _hook,
}


def _harmless() -> Iterator[Any]:
    for name in HARMLESS:
        yield pytest.param("PIECEWISE", "eager", name, id=f"{name}-eager")
        for mode in ("FULL", "PIECEWISE"):
            is_quick = (mode, name) == ("FULL", "hook")
            marks = [needs_compiler] if is_quick else [needs_compiler, pytest.mark.long]
            yield pytest.param(mode, "inductor", name, id=f"{name}-{mode}-inductor", marks=marks)


@pytest.mark.parametrize(("mode", "backend", "change"), [*_harmless()])
def test_a_change_that_makes_no_difference_leaves_compiled_graphs_in_service(mode, backend, change):
    net = Net().eval()
    steps = Sealed(net, mode, backend)
    traces = steps.compiled.figures.traces
    HARMLESS[change](net)
    steps.run_past_glances()
    steps.runner.verify(x=torch.randn(3, WIDTH))
    assert (steps.wrong, steps.said, steps.reason) == ([], [], Reason.HIT)
    assert steps.compiled.figures.traces == traces


@needs_compiler
@pytest.mark.parametrize("mode", ["FULL", pytest.param("PIECEWISE", marks=pytest.mark.long)])
def test_a_change_of_inductors_code_is_served_uncompiled_until_it_is_undone(mode):
    net = Net().eval()
    steps = Sealed(net, mode, "inductor")
    net.scale = 3.0
    late = steps.run_past_glances()
    assert all(step < late for step in steps.wrong)
    assert len(steps.said) == 1 and steps.reason is Reason.QUARANTINED
    net.scale = 1.0
    steps.wrong.clear()
    steps.run(5)
    assert steps.wrong == []


def test_a_replaced_tensor_is_read_by_eager_steps_of_a_compiled_module():
    net = Net().eval()
    steps = Sealed(net)
    net.table = torch.full((WIDTH,), 3.0)
    late = steps.run_past_glances()
    assert all(step < late for step in steps.wrong)
    assert len(steps.said) == 1 and steps.reason is Reason.QUARANTINED


def test_an_announced_change_is_named_and_steps_run_the_module_as_it_is_now():
    net = Net().eval()
    steps = Sealed(net)
    net.scale = 3.0
    with pytest.raises(RetraceError, match=r"module\.scale"):
        steps.runner.weights_changed()
    steps.run(10)
    assert (steps.wrong, steps.reason) == ([], Reason.QUARANTINED)


def test_steps_of_another_thread_run_the_module_as_it_is_now():
    net = Net().eval()
    steps = Sealed(net)
    net.scale = 3.0
    with pytest.raises(RetraceError):
        steps.runner.weights_changed()
    thread = Thread(target=torch.no_grad()(partial(steps.run, 10)))
    thread.start()
    thread.join()
    assert (steps.step, steps.wrong) == (10, [])


def test_trials_trace_a_module_that_changes_often_a_few_times_only():
    net = Net().eval()
    steps = Sealed(net)
    for number in range(20):
        net.log.append(number)
        steps.runner.verify(x=torch.randn(2, WIDTH))
    assert len(steps.compiled._retraced_for) == 8


class Rope:
    """Called by modules, and none itself."""

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @classmethod
    def moved(cls, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0


REPLACED: dict[str, Any] = {
    "turned": lambda self, x: x * 3,
    "moved": classmethod(lambda cls, x: x + 3),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_method_that_is_replaced_in_a_class_of_no_module_is_named(name):
    kind = type("Rope", (Rope,), {n: vars(Rope)[n] for n in REPLACED})
    rope = kind()
    compiled = compile_module(lambda x: rope.moved(rope.turned(x)), ["x"])
    compiled(torch.randn(3, 4))
    setattr(kind, name, REPLACED[name])
    with pytest.raises(RetraceError, match=rf"Rope\.{name}"):
        compiled(torch.randn(3, 4))
