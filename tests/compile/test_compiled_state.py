"""What compiled code writes is known to who watches it, so that warm-ups and trials are undone."""

from __future__ import annotations

import copy
import itertools
import shutil

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt import GraphPool, GraphRunner, InputSpec
from graphrt.compile import CompileOptions, compile_module, opaque
from graphrt.compile.backend.as_operator import AsOperator, TellingUses
from tests.draws import rest_long

SLOTS, WIDTH = 32, 8

pytestmark = pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor on the CPU needs g++"
)


@opaque("graphrt_tests::kept_in_cache", mutates=["cache"])
def kept_in_cache(x: torch.Tensor, slot: torch.Tensor, cache: torch.Tensor) -> None:
    cache.index_copy_(0, slot, x)


class Model(nn.Module):
    """State that compiled code writes: a counter, a cache, and a second one by an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(SLOTS, WIDTH))
        self.register_buffer("other", torch.zeros(SLOTS, WIDTH))

    def forward(self, x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        hidden = x * self.weight + self.steps
        kept_in_cache(hidden, slot, self.other)
        self.cache.index_copy_(0, slot, hidden + self.other[slot])
        return self.cache[slot] * 2 - self.other[slot]


OPTIONS = {
    "pieces": {},
    "whole": {"splitting_ops": []},
    "partitions": {"use_inductor_graph_partition": True},
}


def check_state(device: str, mode: str, options: dict, cache_dir: str) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    twin = copy.deepcopy(model)
    pool = GraphPool(device)
    how = CompileOptions(backend="inductor", cache_dir=cache_dir, **options)
    compile_module(model, ["x", "slot"], pool=pool, options=how)
    inputs = {
        "x": InputSpec(torch.float32, ("tokens", WIDTH)),
        "slot": InputSpec(torch.int64, ("tokens",), pad=SLOTS - 1, index=True),
    }
    with GraphRunner(
        model, mode=mode, sizes=[2, 4], inputs=inputs, outputs=("tokens", WIDTH), pool=pool
    ) as runner:
        runner.capture()
        for own, its in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(own[: SLOTS - 1], its[: SLOTS - 1]), "a capture leaves no effects"
        for step, rows in enumerate((4, 2, 3, 4, 1, 2)):
            x = torch.randn(rows, WIDTH, device=device)
            slot = torch.arange(step, step + rows, device=device)
            expected = twin(x, slot)
            torch.testing.assert_close(runner(x=x, slot=slot), expected)
            twin.other[-1], twin.cache[-1] = model.other[-1], model.cache[-1]
            torch.testing.assert_close(model.cache, twin.cache)
            assert torch.equal(model.steps, twin.steps)


@needs_compiler
@pytest.mark.parametrize(
    ("how", "mode"),
    rest_long(
        itertools.product(["pieces", "whole"], ["FULL", "PIECEWISE"]),
        ("pieces", "PIECEWISE"),
        ("whole", "FULL"),
    ),
)
def test_state_written_by_compiled_code_during_capture_is_restored(how, mode, tmp_path):
    check_state("cpu", mode, OPTIONS[how], str(tmp_path))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("how", OPTIONS)
def test_state_written_by_compiled_code_during_capture_is_restored_on_a_gpu(how, mode, tmp_path):
    check_state("cuda", mode, OPTIONS[how], str(tmp_path))


class Told(TorchDispatchMode):
    """The tensors that operators say they write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[torch.Tensor] = []
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.name())
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written += value if isinstance(value, list) else [value]
        return func(*args, **(kwargs or {}))


def unseen_add(target: torch.Tensor, amount: torch.Tensor) -> None:
    """As a kernel does that no operator launches."""
    target.numpy()[:] += amount.numpy()


@pytest.mark.parametrize("always", [False, True])
def test_a_compiled_piece_reports_its_writes_to_the_watching_mode(always):
    piece = AsOperator(unseen_add, None, [0], always=always)
    target, amount = torch.zeros(3), torch.ones(3)
    with Told() as told:
        piece(target, amount)
    assert [each is target for each in told.written] == [True]
    assert torch.equal(target, torch.ones(3))


def test_compiled_code_with_operators_inside_reports_its_other_writes():
    def run(target, amount):
        unseen_add(target, amount)
        return amount.mul(2)

    target, amount = torch.zeros(3), torch.ones(3)
    call = TellingUses(run, [0])
    with Told() as told:
        call(target, amount)
    assert [each is target for each in told.written] == [True]
    assert (told.calls[0], told.calls[-1]) == ("graphrt::compiled_uses", "aten::mul.Tensor")


def test_a_compiled_piece_skips_the_dispatcher_where_no_mode_watches(monkeypatch):
    def never(*_):
        raise AssertionError("a call through the dispatcher costs microseconds")

    monkeypatch.setattr("graphrt.compile.backend.as_operator._compiled_piece", never)
    piece = AsOperator(torch.add, 1, (), always=False)
    assert torch.equal(piece(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
