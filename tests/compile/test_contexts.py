"""What a forward enters around an opaque operator: the operator runs inside of it, at replays too,
and nothing of it is left when a call ends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import graphrt
from graphrt import Batch, CompileOptions, GraphMode, GraphPool, GraphRunner, InputSpec
from graphrt.compile import CompileError, compile_module
from graphrt.errors import GraphQuarantinedWarning

WIDTH = 8
BACKENDS = [
    "eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
    ),
]
enters: list[TorchDispatchMode] = []


@graphrt.opaque("tests_contexts::product", mutates=["out"])
def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x @ weight)
    for mode in enters:
        mode.__enter__()


def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    product(x, weight, out)
    return out


class Mixed(nn.Module):
    """Autocast that begins and ends in the middle of pieces, and one inside of it that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = multiplied(x + 1, self.layer.weight)
            twice = multiplied(multiplied(x, self.layer.weight), self.layer.weight)
            with torch.autocast("cpu", enabled=False):
                exact = multiplied(self.layer(twice), self.layer.weight)
            x = self.layer(exact).float()
        return multiplied(x, self.layer.weight)


class Inferring(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            x = multiplied(self.layer(x), self.layer.weight) + 1
        return self.layer(x)


def runner_of(model: Any, pool: GraphPool, mode: str = "PIECEWISE") -> GraphRunner:
    return GraphRunner(
        model,
        mode=mode,
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        pool=pool,
    )


def rows(seed: int, count: int = 4) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


class Between(Mixed):
    """Autocast that begins and ends in one piece."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = multiplied(x, self.layer.weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layer(x)
            with torch.autocast("cpu", enabled=False):
                x = self.layer(x.float())
            x = self.layer(x).float()
        return multiplied(x, self.layer.weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [Between, Inferring])
def test_a_piece_runs_in_the_autocast_or_inference_mode_that_it_enters(kind, backend, tmp_path):
    model, pool = kind().eval(), GraphPool("cpu")
    compile_options = CompileOptions(backend=backend, cache_dir=str(tmp_path))
    compiled = compile_module(model, ["x"], pool=pool, options=compile_options, in_place=False)
    near = {"rtol": 0, "atol": 0} if backend == "eager" else {"rtol": 1e-2, "atol": 1e-2}
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows(0, 3)), model(rows(0, 3)), **near)
        with runner_of(compiled, pool) as runner:
            runner.capture()
            for step in range(3):
                output = runner(Batch(4, 4, 1), x=rows(step)).clone()
                assert runner.last_dispatch.mode is GraphMode.PIECEWISE
                torch.testing.assert_close(output, model(rows(step)), **near)


def test_autocast_around_a_splitting_operator_is_refused():
    with pytest.raises(CompileError, match="setting of torch around a splitting operator") as told:
        compile_module(Mixed(), ["x"])(rows(0))
    assert "autocast" in str(told.value)


def test_an_eager_part_of_a_breakable_capture_runs_in_its_surrounding_autocast():
    model, pool = Mixed().eval(), GraphPool("cpu")
    with torch.no_grad(), runner_of(model, pool) as runner:
        runner.capture()
        for step in range(3):
            assert torch.equal(runner(Batch(4, 4, 1), x=rows(step)), model(rows(step)))
            assert runner.last_dispatch.mode is GraphMode.PIECEWISE


def test_an_eager_part_runs_in_the_autocast_of_the_caller():
    part = graphrt.eager_break(lambda x: x @ x.t())
    runner = runner_of(lambda x: part(x) + 1, GraphPool("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        runner.capture()
        output = runner(Batch(4, 4, 1), x=rows(0))
    assert output.dtype is torch.bfloat16


class Setting(Mixed):
    def __init__(self, around: Any, inside: bool) -> None:
        super().__init__()
        self.around = around
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.around():
            x = multiplied(self.layer(x), self.layer.weight) if self.inside else self.layer(x)
            with self.around():
                x = x + 1
        x = multiplied(x, self.layer.weight)
        with self.around():
            return self.layer(x)


def attention() -> Any:
    return sdpa_kernel([SDPBackend.MATH])


@contextmanager
def determinism() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class _Raising(TorchDispatchMode):
    """The first product fails, which is inside of the setting."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "addmm" in str(func):
            raise ZeroDivisionError
        return func(*args, **(kwargs or {}))


SETTINGS = pytest.mark.parametrize("around", [attention, determinism])


@SETTINGS
def test_a_setting_around_a_splitting_operator_is_refused(around):
    with pytest.raises(CompileError, match="setting of torch around a splitting operator"):
        compile_module(Setting(around, inside=True), ["x"])(rows(0))


@SETTINGS
def test_a_setting_between_splitting_operators_is_restored_after_a_call_that_fails(around):
    def found() -> list[Any]:
        return [_cur_sdpa_kernel_backends(), torch.are_deterministic_algorithms_enabled()]

    model = Setting(around, inside=False).eval()
    compiled = compile_module(model, ["x"], in_place=False)
    with torch.no_grad():
        assert torch.equal(compiled(rows(0)), model(rows(0)))
    before = found()
    enters.append(_Raising())
    try:
        with pytest.raises(ZeroDivisionError):
            compiled(rows(1))
    finally:
        enters.pop().__exit__(None, None, None)
    assert found() == before


def test_autocast_is_restored_after_a_call_that_fails():
    model = Between().eval()
    compiled = compile_module(model, ["x"], in_place=False)
    with torch.no_grad():
        compiled(rows(0))
        enters.append(_Raising())
        try:
            with pytest.raises(ZeroDivisionError):
                compiled(rows(1))
        finally:
            enters.pop().__exit__(None, None, None)
        assert not torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 1
        assert torch.autocast_decrement_nesting() == 0
        assert torch.equal(compiled(rows(2)), model(rows(2)))


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("around", [_Dispatched, _Called])
def test_a_sealed_runner_under_changed_settings_gives_the_results_of_the_module(around, mode):
    pool = GraphPool("cpu")
    model = Setting(nullcontext, inside=False).eval()
    compile_module(model, ["x"], pool=pool, options=CompileOptions(backend="eager"))
    run = runner_of(model, pool, mode)
    run.capture()
    x = rows(1)
    expected = run(Batch(4, 4, 1), x=x).clone()
    with around(), pytest.warns(GraphQuarantinedWarning, match="a setting of torch has changed"):
        assert torch.equal(run(Batch(4, 4, 1), x=x), expected)
    assert run.last_dispatch is not None
    assert run.last_dispatch.reason is graphrt.Reason.SETTINGS_CHANGED
    assert torch.equal(run(Batch(4, 4, 1), x=x), expected)
    assert run.last_dispatch.reason is graphrt.Reason.HIT


def test_a_piece_given_a_number_read_from_a_tensor_ignores_compile_sizes():
    def forward(x, scale):
        by = scale.item()
        return multiplied(x, torch.eye(WIDTH)) * by

    compiled = compile_module(forward, ["x"], options=CompileOptions(compile_sizes=(4,)))
    assert torch.equal(compiled(rows(0), torch.tensor(2.5)), rows(0) * 2.5)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: torch.vmap(lambda row: row * row.sum())(x),
        lambda x: torch.func.grad(lambda y: y.tanh().sum())(x),
    ],
    ids=["vmap", "grad"],
)
def test_a_forward_that_uses_vmap_or_grad_is_refused(forward):
    with pytest.raises(CompileError, match="transforms a function"):
        compile_module(forward, ["x"])(rows(0))
