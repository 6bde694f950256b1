"""Compiled modules that a forward calls: named to the runner, or refused at the capture."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphMode, GraphPool, GraphRunner, InputSpec, PieceProvider, Plan
from graphrt.compile import CompileOptions, RetraceError, compile_module, opaque
from graphrt.core.base.errors import (
    CaptureError,
    InvalidModeError,
    InvalidOptionError,
    StaleInputError,
)
from graphrt.core.capture.options import GraphOptions

X = {"x": InputSpec(torch.float32, ("tokens", 4))}
DECODE, MIXED = Batch(4, 4, 1), Batch(4, 4)


@opaque("graphrt_tests::parted", mutates=[], fake=torch.empty_like)
def parted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Parted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(parted(self.first(x)))


def runner(forward: Any, pool: GraphPool | None = None, **more: Any) -> GraphRunner:
    keywords = {"mode": "FULL_AND_PIECEWISE", "sizes": [4], **more}
    where = {"platform": "cpu"} if pool is None else {"pool": pool}
    return GraphRunner(forward, inputs=X, outputs=("tokens", 4), **where, **keywords)


@pytest.fixture
def module() -> Parted:
    torch.manual_seed(0)
    return Parted()


class Larger(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Worker:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model


class Engine:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.worker = Worker(model)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.worker.model(x)


def with_helper(model: nn.Module) -> Callable[..., Any]:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return lambda x: helper(x)


def decorated(model: nn.Module) -> Callable[..., Any]:
    @torch.no_grad()
    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return forward


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "bound method": lambda model: model.__call__,
    "closure": lambda model: lambda x: model(x),
    "partial": lambda model: functools.partial(lambda net, x: net(x), model),
    "decorated": decorated,
    "helper": with_helper,
    "list": lambda model: (lambda nets: lambda x: nets[0](x))([model]),
    "dict": lambda model: (lambda nets: lambda x: nets["main"](x))({"main": model}),
    "engine": Engine,
    "engine's method": lambda model: Engine(model).step,
    "default argument": lambda model: lambda x, model=model: model(x),
    "large dict": lambda model: (lambda nets: lambda x: nets[0](x))(
        dict.fromkeys(range(300), model)
    ),
    "larger module": Larger,
}
MODULES = ("module", "larger module")
# How a part is reached and how it is captured have nothing to do with each other.
WAYS_AND_MODES = list(zip(WAYS, cycle(["FULL", "PIECEWISE"])))


@pytest.mark.parametrize(
    ("way", "mode"), [each for each in WAYS_AND_MODES if each[0] not in MODULES]
)
def test_capture_refuses_a_compiled_module_not_named_to_the_runner(module, way, mode):
    compiled = compile_module(module, ["x"])
    with runner(WAYS[way](module), mode=mode) as run:
        with pytest.raises(CaptureError, match=r"compiled=\["):
            run.capture()
        assert run.dispatcher.published == ()
        x = torch.randn(4, 4)
        assert torch.equal(run(DECODE, x=x), copy.deepcopy(module)(x))
    with runner(WAYS[way](module), mode=mode, compiled=[compiled]) as run:
        run.capture()
        run.verify(DECODE, x=torch.randn(4, 4))


@pytest.mark.parametrize("way", MODULES)
def test_a_module_announces_the_compiled_modules_inside(module, way):
    compiled = compile_module(module, ["x"])
    with runner(WAYS[way](module)) as run:
        assert list(run.plan.compiled) == [compiled]
        run.capture()


def test_a_compiled_module_is_announced_directly_or_by_its_parent_module(module):
    compiled = compile_module(module, ["x"])
    for announced in (compiled, module, Larger(module)):
        planned = Plan(sizes=[4], compiled=[announced, compiled], platform="cpu")
        assert list(planned.compiled) == [compiled]


def test_a_loaded_plan_must_be_given_its_compiled_modules(module, tmp_path):
    pool = GraphPool("cpu")
    compiled = compile_module(module, ["x"], pool=pool)
    planned = Plan("PIECEWISE", sizes=[4], compiled=[compiled], platform="cpu")
    planned.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", platform="cpu")
    run = GraphRunner(lambda x: module(x), loaded, inputs=X, outputs=("tokens", 4))
    with run, pytest.raises(CaptureError):
        run.capture()
    loaded = Plan.load(tmp_path / "plan.json", platform="cpu", compiled=[compiled])
    assert loaded.pieces is planned.pieces is PieceProvider.FX
    with GraphRunner(lambda x: module(x), loaded, inputs=X, outputs=("tokens", 4)) as run:
        run.capture()
        run.verify(DECODE, x=torch.randn(4, 4))


@pytest.mark.parametrize(("way", "mode"), WAYS_AND_MODES)
def test_recapture_uses_replaced_weights_of_compiled_modules(module, way, mode):
    compiled = compile_module(module, ["x"])
    with runner(WAYS[way](module), mode=mode, compiled=[compiled]) as run:
        run.capture()
        run.weights_changed()
        torch.manual_seed(1)
        other = Parted()
        module.load_state_dict(other.state_dict(), assign=True)
        with pytest.raises(StaleInputError, match="tensors were replaced after"):
            run.weights_changed()
        run.recapture()
        run.weights_changed()
        x = torch.randn(4, 4)
        assert torch.equal(run(DECODE, x=x), other(x))
        run.release()
        module.load_state_dict(Parted().state_dict(), assign=True)
        run.release()
        assert torch.equal(run(DECODE, x=x), copy.deepcopy(module)(x))


def test_an_object_that_is_no_compiled_module_is_refused():
    class Answering:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("asked for an attribute")

    with pytest.raises(InvalidOptionError, match="no compiled module"):
        runner(lambda x: x, compiled=[Answering()])


def test_a_moved_argument_of_a_compiled_module_raises_instead_of_replaying_stale(module):
    pool = GraphPool("cpu")
    compile_module(module, ["x"], pool=pool)
    with runner(lambda x: module(torch.relu(x)), pool, compiled=[module]) as run:
        run.capture()
        with pytest.raises(StaleInputError, match="without pool="):
            steps_until_it_moves(run, module)


def steps_until_it_moves(run: GraphRunner, module: nn.Module) -> None:
    kept = []
    for _ in range(8):
        kept.append(torch.empty(4, 4))
        x = torch.randn(4, 4)
        output = run(MIXED, x=x)
        with torch.no_grad():
            torch.testing.assert_close(output, copy.deepcopy(module)(torch.relu(x)))


def test_a_compiled_module_without_a_pool_is_captured_as_part_of_the_forward(module):
    compile_module(module, ["x"])
    with runner(lambda x: module(torch.relu(x)), compiled=[module]) as run:
        run.capture()
        for batch in (DECODE, MIXED, Batch(3, 3)):
            run.verify(batch, x=torch.randn(batch.num_tokens, 4))


def test_two_compiled_modules_in_sequence_are_captured(module):
    pool = GraphPool("cpu")
    parts = [module, copy.deepcopy(module)]
    for part in parts:
        compile_module(part, ["x"], pool=pool)
    with runner(lambda x: parts[1](parts[0](x)), pool, compiled=parts) as run:
        run.capture()
        for batch in (DECODE, MIXED):
            run.verify(batch, x=torch.randn(4, 4))


def test_a_runner_uses_the_pool_of_its_compiled_modules(module):
    pool = GraphPool("cpu")
    compile_module(module, ["x"], pool=pool)
    with runner(module) as run:
        assert run.pool is pool
    with pytest.raises(InvalidOptionError, match="another pool"):
        runner(module, GraphPool("cpu"))


def test_outputs_of_compiled_pieces_are_cloned_if_the_runner_clones(module):
    pool = GraphPool("cpu")
    compile_module(module, ["x"], pool=pool)
    with runner(module, pool, mode="PIECEWISE", options=GraphOptions(outputs="clone")) as run:
        run.capture()
        first = run(MIXED, x=torch.ones(4, 4))
        kept = first.clone()
        run(MIXED, x=-torch.ones(4, 4))
        assert torch.equal(first, kept)


def test_compiled_pieces_are_captured_with_the_options_of_the_runner(module):
    pool = GraphPool("cpu")
    compiled = compile_module(module, ["x"], pool=pool)
    graph_options = GraphOptions(check="always", strict=True)
    with runner(module, pool, options=graph_options) as run:
        run.capture()
        assert all(each.options.check == "always" for each in compiled.wrappers)
        assert all(each.options.strict for each in compiled.wrappers)


def test_a_compiled_module_with_graphs_off_gives_a_runner_without_graphs(module):
    compile_module(module, ["x"], graphs=False)
    with runner(module) as run:
        assert run.mode is GraphMode.NONE
        assert run.plan.resolution.steps[-1].rule == "graphs-off"
        run.capture()
        run(DECODE, x=torch.randn(4, 4))
    with pytest.raises(InvalidModeError, match="graphs=False"):
        runner(module, options=GraphOptions(strict=True))


def test_compile_sizes_are_compiled_in_a_runner_without_graphs(module):
    compiled = compile_module(module, ["x"], options=CompileOptions(compile_sizes=(3,)))
    with runner(module, mode="NONE") as run:
        run.capture()
        assert compiled.figures.static_compilations == 1
        run(Batch(3, 3), x=torch.randn(3, 4))


class Ragged(Parted):
    def forward(self, starts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + starts.sum()


def test_compile_sizes_count_tokens_though_requests_are_the_first_argument():
    compiled = compile_module(
        Ragged(),
        {"starts": {0: "reqs+1"}, "x": 0},
        options=CompileOptions(compile_sizes=(3,)),
    )
    compiled.ensure_compiled(torch.zeros(3), torch.zeros(5, 4))
    assert compiled.figures.static_compilations


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: setattr(m, "first", nn.Sequential(m.first)), "first.weight"),
        (lambda m: setattr(m.first, "weight", nn.Parameter(torch.randn(4, 4).t())), "first.weight"),
    ],
    ids=["gone", "strides"],
)
def test_replaced_weights_that_cannot_be_rebound_raise(module, change, text):
    compiled = compile_module(module, ["x"])
    compiled.ensure_compiled(torch.zeros(4, 4))
    change(module)
    with pytest.raises(RetraceError, match=text):
        compiled.rebind_weights()


def test_tied_weights_that_are_untied_raise_at_rebind(module):
    module.second.weight = module.first.weight
    compiled = compile_module(module, ["x"])
    compiled.ensure_compiled(torch.zeros(4, 4))
    module.second.weight = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(RetraceError, match=r"second\.weight"):
        compiled.rebind_weights()


def test_a_compiled_function_uses_replaced_weights_of_its_modules(module):
    def forward(x: torch.Tensor) -> torch.Tensor:
        return module(x)

    compiled = compile_module(forward, ["x"])
    compiled.ensure_compiled(torch.zeros(4, 4))
    module.first.weight = nn.Parameter(torch.zeros(4, 4))
    x = torch.randn(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))


def test_a_copy_of_a_compiled_module_is_compiled_again(module):
    compiled = compile_module(module, ["x"], in_place=False)
    compiled.ensure_compiled(torch.zeros(4, 4))
    other = copy.deepcopy(compiled)
    assert not other.compiled and other.module is not module
    x = torch.randn(4, 4)
    assert torch.equal(other(x), compiled(x))


def test_a_runner_closes_although_a_weight_cannot_be_rebound(module):
    compile_module(module, ["x"])
    run = runner(module)
    run.capture()
    wrappers = run.graphs.owners()
    module.first.weight = nn.Parameter(torch.randn(4, 4).t())
    run.release()
    assert not any(wrapper.entries for wrapper in wrappers)
    with pytest.raises(RetraceError, match=r"first\.weight"):
        run(DECODE, x=torch.randn(4, 4))
    run.close()


@pytest.mark.parametrize("replaced", ["weight", "module", "attribute"])
def test_a_call_without_a_runner_uses_replaced_weights(replaced):
    class Scaled(Parted):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [torch.ones(4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scales[0]

    module = Scaled()
    compiled = compile_module(module, ["x"])
    x = torch.randn(4, 4)
    compiled(x)
    if replaced == "weight":
        module.first.weight = nn.Parameter(torch.randn(4, 4))
    elif replaced == "module":
        module.first = nn.Linear(4, 4)
    else:
        module.scales = [torch.full((4,), 3.0)]
    assert torch.equal(compiled(x), copy.deepcopy(module)(x))


@pytest.mark.parametrize(("way", "mode"), WAYS_AND_MODES)
def test_after_a_direct_call_with_new_weights_weights_changed_still_raises(module, way, mode):
    compiled = compile_module(module, ["x"])
    with runner(WAYS[way](module), mode=mode, compiled=[compiled]) as run:
        run.capture()
        module.first.weight = nn.Parameter(torch.randn(4, 4))
        x = torch.randn(4, 4)
        assert torch.equal(compiled(x), copy.deepcopy(module)(x))
        with pytest.raises(StaleInputError, match=r"first\.weight"):
            run.weights_changed()
        run.recapture()
        run.weights_changed()
        run.verify(DECODE, x=x)


def test_constants_of_compiled_code_are_not_treated_as_weights(module):
    def forward(x: torch.Tensor) -> torch.Tensor:
        return module(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])

    compiled = compile_module(forward, ["x"])
    for called in (compiled, lambda x: compiled(x)):
        with runner(called, compiled=[compiled]) as run:
            run.capture()
            run.weights_changed()
