"""Wrappers of an engine's own loop: what its host changes in Python is found as a runner finds it,
and arguments that lie elsewhere are refused."""

from __future__ import annotations

import functools
import gc
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphrt import (
    UNCHANGED,
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    HostArg,
    InputSpec,
    KeyedGraphs,
    Reason,
    UpdatableTask,
    WrapperTrials,
    forward_context,
    wrapper_class,
)
from graphrt.core.base._native_door import NativeWatch
from graphrt.errors import (
    GraphMemoryWarning,
    GraphQuarantinedWarning,
    MissingUpdateError,
    StaleInputError,
    VerificationError,
)
from graphrt.trust.checks import Checks
from graphrt.trust.reads import ReadSet
from tests.draws import rest_long
from tests.trust.host_programs import WIDTH, Net

IS_TOLD = NativeWatch is not None
TOLD_AFTER = 0 if IS_TOLD else 600
"""Calls after which a change is found where nobody tells of it: a wrapper has no report."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Loop:
    """An engine's own loop, of `step`s that `model` has to have the outputs of."""

    model: Callable[..., Any]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def wrong(self, count: int = 4, rows: int | None = None) -> list[int]:
        """The numbers of the steps that are not what the model says."""
        wrong = []
        for number in range(count):
            x = torch.randn(rows or (4, 2)[number % 2], WIDTH)
            if not torch.allclose(self.step(x).clone(), self.model(x), atol=1e-5):
                wrong.append(number)
        return wrong


class Engine(Loop):
    """A loop of its own: it writes a static input, and calls a wrapper in a context."""

    def __init__(self, model: Callable[..., Any], mode: str = "FULL", **options: Any) -> None:
        self.pool = GraphPool("cpu")
        self.trials = WrapperTrials()
        self.model, self.mode = model, mode
        self.wrapper: GraphWrapper = wrapper_class("cpu")(
            model,
            mode,
            pool=self.pool,
            trials=self.trials,
            options=GraphOptions(lazy=True, **options),
        )
        self.static = {rows: torch.zeros(rows, WIDTH) for rows in (2, 4)}
        self.contexts = {
            rows: ForwardContext(GraphMode[mode], BatchDescriptor(rows)) for rows in (2, 4)
        }
        for rows in (4, 2):
            self.step(torch.randn(rows, WIDTH))

    def step(self, x: torch.Tensor) -> torch.Tensor:
        static = self.static[len(x)]
        static.copy_(x)
        context = self.contexts[len(x)]
        context.begin_step()
        with context:
            outputs: torch.Tensor = self.wrapper(static)
        return outputs

    @property
    def eager(self) -> int:
        return self.wrapper.eager_calls[Reason.MISSING_GRAPH]

    @property
    def trial_count(self) -> int:
        return sum(record.steps for record in self.trials.records)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_unchanged_calls_are_replayed_after_a_single_trial(mode: str) -> None:
    engine = Engine(Net(), mode)
    assert engine.wrong(20) == []
    assert (engine.eager, engine.trial_count) == (0, 1)


CHANGES: dict[str, Callable[[Net], object]] = {
    "number": lambda net: setattr(net, "scale", 3.0),
    "adapter": lambda net: setattr(net.lora, "active", "b"),
    "hook": lambda net: net.norm.register_forward_hook(lambda module, args, out: out * 2),
    "weight": lambda net: setattr(net, "shift", net.shift * 2),
    "all weights": lambda net: net.load_state_dict(
        {name: each * 2 for name, each in net.state_dict().items()}, assign=True
    ),
    "method": lambda net: setattr(net, "helper", lambda x: x * 4),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    rest_long(
        itertools.product(CHANGES, ("FULL", "PIECEWISE")),
        *((name, "FULL") for name in CHANGES),
        ("weight", "PIECEWISE"),
    ),
)
def test_a_change_is_found_at_the_next_call_and_another_capture_ends_the_quarantine(
    name: str, mode: str
) -> None:
    net = Net()
    engine = Engine(net, mode)
    assert engine.wrong() == []
    CHANGES[name](net)
    with pytest.warns(GraphQuarantinedWarning):
        wrong = engine.wrong(TOLD_AFTER + 8)
    assert all(number <= TOLD_AFTER for number in wrong), wrong
    assert engine.eager
    engine.wrapper.clear_graphs()
    engine.wrong(2)
    before = engine.eager
    assert engine.wrong(8) == []
    assert engine.eager == before


def test_with_strict_a_call_after_a_change_raises_naming_the_attribute() -> None:
    net = Net()
    engine = Engine(net, strict=True)
    engine.wrong()
    net.config.deep.beta = 3.0
    with pytest.raises(VerificationError, match=r"model\.config\.deep\.beta = 1\.0, then 3\.0"):
        engine.wrong(TOLD_AFTER + 1)
    assert engine.pool.owner is None


def test_a_changing_unused_attribute_costs_a_wrapper_three_trials_a_graph() -> None:
    net = Net()
    engine = Engine(net)
    engine.wrong()
    for number in range(30):
        net.unused = number
        assert engine.wrong(2) == []
    assert engine.eager == 0
    assert engine.trial_count <= 1 + 2 * 3


class Bounded(torch.nn.Module):
    """Its bound cuts nothing off as long as inputs are small."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=self.bound) + 1


def test_another_number_of_an_operator_is_found_where_a_call_gives_equal_results() -> None:
    model = Bounded()
    engine = Engine(model)
    assert engine.wrong(2) == []
    model.bound = 2.0
    small = torch.rand(4, WIDTH)
    with pytest.warns(GraphQuarantinedWarning, match="2.0 where the graph has 10.0"):
        results = [engine.step(small) for _ in range(TOLD_AFTER + 2)]
    assert all(torch.equal(each, model(small)) for each in results)
    large = torch.full((4, WIDTH), 5.0)
    assert torch.equal(engine.step(large), model(large))


def test_a_call_that_is_tried_writes_its_state_only_once() -> None:
    class Adds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4, WIDTH))
            self.scale = 2.0
            self.unused = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total[: len(x)].add_(x)
            x.mul_(self.scale)
            return self.total[: len(x)] + x

    model = Adds()
    engine = Engine(model)
    model.total.zero_()
    x = torch.ones(4, WIDTH)
    for number in range(1, 9):
        model.unused = number
        outputs = engine.step(x)
        assert torch.equal(outputs, torch.full((4, WIDTH), number + 2.0))
    assert engine.trial_count > 1
    assert torch.equal(model.total, torch.full((4, WIDTH), 8.0))


def test_a_change_between_two_captures_quarantines_the_first_graph() -> None:
    net = Net()
    engine = Engine(net)
    engine.wrong()
    net.scale = 2.0
    x = torch.randn(6, WIDTH)
    engine.static[6] = torch.zeros(6, WIDTH)
    engine.contexts[6] = ForwardContext(GraphMode.FULL, BatchDescriptor(6))
    engine.step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphQuarantinedWarning)
        wrong = engine.wrong(TOLD_AFTER + 8)
    assert all(number <= TOLD_AFTER for number in wrong), wrong
    assert engine.eager


@pytest.mark.parametrize("where", [(WrapperTrials, "captured"), (ReadSet, "settle")])
@pytest.mark.parametrize("then", [(), (6,)], ids=["alone", "and another captured"])
def test_a_graph_whose_capture_was_interrupted_before_its_record_is_not_replayed(
    where: tuple[type, str], then: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has noted it, so no change of the host's would be found."""
    net = Net()
    engine = Engine(net)
    for rows in (5, *then):
        engine.static[rows] = torch.zeros(rows, WIDTH)
        engine.contexts[rows] = ForwardContext(GraphMode.FULL, BatchDescriptor(rows))

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step(torch.randn(5, WIDTH))
    for rows in then:
        engine.step(torch.randn(rows, WIDTH))
    net.scale = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphQuarantinedWarning)
        assert not engine.wrong(20, rows=5)
    assert engine.eager == 20


def test_without_trials_a_changed_attribute_is_replayed_stale_without_warning() -> None:
    net = Net()
    wrapper = wrapper_class("cpu")(net, "FULL", options=GraphOptions(lazy=True))
    static, size = torch.randn(4, WIDTH), BatchDescriptor(4)
    for _ in range(2):
        with forward_context("FULL", size):
            before = wrapper(static).clone()
    net.scale = 5.0
    with forward_context("FULL", size):
        assert torch.equal(wrapper(static), before)


@pytest.mark.parametrize(
    ("level", "calls"), [("capture", [1]), ("first", [1]), ("sample", [1, 2]), ("always", [1, 2])]
)
def test_an_argument_tensor_other_than_at_capture_is_refused(level: Any, calls: list[int]) -> None:
    net = Net()
    for call in (1, 2):
        wrapper = wrapper_class("cpu")(net, "FULL", options=GraphOptions(lazy=True, check=level))
        static, size = torch.randn(4, WIDTH), BatchDescriptor(4)
        for _ in range(call):
            with forward_context("FULL", size):
                wrapper(static)
        with forward_context("FULL", size):
            if call in calls:
                with pytest.raises(StaleInputError, match="argument"):
                    wrapper(static.clone())
            else:
                wrapper(static.clone())


def test_with_trials_an_argument_tensor_other_than_at_capture_is_refused_at_every_call() -> None:
    engine = Engine(Net())
    engine.wrong(10)
    engine.static[4] = torch.zeros(4, WIDTH)
    with pytest.raises(StaleInputError, match="argument"):
        engine.step(torch.randn(4, WIDTH))
    assert engine.pool.owner is None


# Graphs by key -----------------------------------------------------------------------------------


class Keyed(Loop):
    """A loop over graphs of its own keys, which are numbers of rows."""

    def __init__(self, model: Callable[..., Any], **options: Any) -> None:
        self.model = model
        self.graphs = KeyedGraphs(
            GraphPool("cpu"), options=GraphOptions(**options), trials=WrapperTrials
        )
        self.static = {rows: torch.zeros(rows, WIDTH) for rows in (2, 4)}
        for rows in (4, 2):
            self.capture(rows)

    def capture(self, rows: int) -> None:
        self.graphs.drop(rows)
        self.graphs.capture(rows, functools.partial(self.model, self.static[rows]))

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.static[len(x)].copy_(x)
        outputs: torch.Tensor = self.graphs.replay(len(x))
        assert torch.equal(outputs, self.graphs[len(x)].outputs)
        return outputs

    def statuses(self) -> list[str]:
        graphs = [self.graphs[rows] for rows in (4, 2)]
        return [each.status for graph in graphs for each in graph.trials.records]

    @property
    def trial_count(self) -> int:
        graphs = [self.graphs[rows] for rows in (4, 2)]
        return sum(each.steps for graph in graphs for each in graph.trials.records)


@pytest.mark.parametrize("name", rest_long(CHANGES, "number", "hook", "weight"))
def test_a_change_is_found_at_the_next_replay_of_a_keyed_graph(name: str) -> None:
    net = Net()
    engine = Keyed(net)
    assert engine.wrong(20) == [] and engine.trial_count == 2
    CHANGES[name](net)
    with pytest.warns(GraphQuarantinedWarning):
        wrong = engine.wrong(2 * TOLD_AFTER + 8)
    assert all(number <= 2 * TOLD_AFTER for number in wrong), wrong
    assert engine.statuses() == ["quarantined", "quarantined"]
    for rows in (4, 2):
        engine.capture(rows)
    assert engine.wrong(8) == []
    assert engine.statuses() == ["tried", "tried"]


def test_a_changing_unused_attribute_costs_a_keyed_graph_three_trials() -> None:
    net = Net()
    engine = Keyed(net)
    engine.wrong()
    for number in range(30):
        net.unused = number
        assert engine.wrong(2) == []
    assert engine.statuses() == ["tried", "tried"]
    assert engine.trial_count <= 2 + 2 * 3


def test_with_strict_a_keyed_replay_after_a_change_raises_and_frees_the_pool() -> None:
    net = Net()
    engine = Keyed(net, strict=True)
    engine.wrong()
    net.scale = 3.0
    with pytest.raises(VerificationError, match=r"scale = 1\.0, then 3\.0"):
        engine.wrong(2 * TOLD_AFTER + 2)
    assert engine.graphs.pool.owner is None


def test_a_quarantined_keyed_graph_reuses_the_host_arguments_of_the_last_step() -> None:
    out, held = torch.zeros(2), types.SimpleNamespace(scale=1.0)
    issue = lambda out, *, n: out.fill_(n)  # noqa: E731
    task = UpdatableTask(
        "fill", issue, {"n": HostArg(axis=None)}, at_capture=lambda descriptor: {"n": 7}
    )

    def forward() -> torch.Tensor:
        task(out)
        return out * held.scale

    graphs = KeyedGraphs(GraphPool("cpu"), trials=WrapperTrials)
    graph = graphs.capture("key", forward)
    for updates in (None, UNCHANGED):
        with pytest.raises(MissingUpdateError):
            graph.replay(updates)
    assert graph.replay({"fill": {"n": 3}}).tolist() == [3.0, 3.0]
    held.scale = 2.0
    with pytest.warns(GraphQuarantinedWarning, match="scale"):
        found = [graph.replay(UNCHANGED).tolist() for _ in range(TOLD_AFTER + 1)]
    assert found[-1] == [6.0, 6.0]
    assert graph.replay().tolist() == graph.outputs.tolist() == [6.0, 6.0]
    assert graph.replay({"fill": {"n": 1}}).tolist() == [2.0, 2.0]


def test_keyed_graphs_without_trials_hold_no_reference_to_the_forward() -> None:
    net = Net()
    kept, dropped = weakref.ref(net), KeyedGraphs(GraphPool("cpu"))
    x = torch.zeros(2, WIDTH)
    graph = dropped.capture("key", functools.partial(net, x))
    assert graph.trials is None
    net.scale = 5.0
    del net
    gc.collect()
    assert kept() is None


def test_dropping_a_graph_removes_its_trial_record() -> None:
    engine = Engine(Net())
    for _ in range(5):
        assert engine.wrong(4) == []
        engine.wrapper.drop(BatchDescriptor(4))
    assert [record.descriptor.num_tokens for record in engine.trials.records] == [2]
    assert engine.wrong(4) == []
    engine.model.scale = 3.0  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphQuarantinedWarning)
        assert all(number < 2 * TOLD_AFTER for number in engine.wrong(2 * TOLD_AFTER + 4))


def test_a_value_harmless_to_earlier_graphs_is_tried_for_a_later_graph() -> None:
    held = types.SimpleNamespace(scale=1.0)
    pool, trials = GraphPool("cpu"), WrapperTrials()
    wrapper: GraphWrapper = wrapper_class("cpu")(
        lambda x: x * held.scale if x.shape[0] > 2 else x * 1.0,
        "FULL",
        pool=pool,
        trials=trials,
        options=GraphOptions(lazy=True, check="first"),
    )
    x = {rows: torch.ones(rows, WIDTH) for rows in (2, 4)}

    def step(rows: int) -> float:
        with forward_context("FULL", BatchDescriptor(rows)):
            return float(wrapper(x[rows])[0, 0])

    for scale in range(TOLD_AFTER + 8):
        held.scale = float(scale)
        assert step(2) == 1.0
    scale = held.scale
    assert [step(4) for _ in range(4)] == [scale] * 4
    held.scale = -1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphQuarantinedWarning)
        assert step(4) == -1.0


def test_a_call_makes_no_full_check_of_the_host_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(Net())
    assert engine.wrong(8) == []
    looks: list[None] = []
    monkeypatch.setattr(Checks, "look_at_host", lambda checks: looks.append(None))
    # Of a model with 16 layers a look takes a millisecond.
    assert engine.wrong(8) == [] and not looks


def test_with_graphs_off_a_keyed_replay_calls_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    net = Net()
    engine = Keyed(net)
    net.scale = 3.0
    assert engine.wrong(4) == [] and engine.statuses() == []


def test_numbers_in_updates_of_a_task_are_no_host_change() -> None:
    held = types.SimpleNamespace(scale=1.0, unused=0)
    task = UpdatableTask(
        "fill",
        lambda out, *, n: out.fill_(n[0]),
        {"n": HostArg("tokens")},
        at_capture=lambda descriptor: {"n": [7] * descriptor.num_tokens},
    )

    def forward() -> torch.Tensor:
        out = torch.zeros(2)
        task(out)
        assert held.unused < 2
        return out * held.scale

    graph = KeyedGraphs(GraphPool("cpu"), trials=WrapperTrials).capture("key", forward)
    numbers = [3]
    for step in range(TOLD_AFTER + 20):
        numbers[0] = step
        held.unused = int(step > 8)
        assert graph.replay({"fill": {"n": numbers}}).tolist() == [step, step]
    assert [record.status for record in graph.trials.records] == ["tried"]
    # The numbers of the last step, though the host has written others since.
    numbers[0], held.scale = 99, 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphQuarantinedWarning)
        last = [graph.replay(UNCHANGED).tolist() for _ in range(TOLD_AFTER + 2)][-1]
    assert last == [2.0 * step, 2.0 * step]


def expanded() -> torch.Tensor:
    return torch.randn(4, 1).expand(4, WIDTH)


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(4, WIDTH)


def result_with_gradient() -> torch.Tensor:
    with torch.enable_grad():
        return torch.randn(4, WIDTH, requires_grad=True) * 1


ARGUMENTS: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": expanded,
    "parameter": lambda: torch.nn.Parameter(torch.randn(4, WIDTH)),
    "inference": made_in_inference_mode,
    "gradient": result_with_gradient,
    "conjugated": lambda: torch.randn(4, WIDTH, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("writes", [False, True], ids=["read", "written beside it"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_trial_puts_back_expanded_views_parameters_and_any_argument(
    name: str, writes: bool
) -> None:
    """Torch lets nobody write an expanded tensor, nor, with gradients on, a parameter."""
    given, state = ARGUMENTS[name](), torch.zeros(4, WIDTH)

    def forward(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        if writes:
            state.add_(1)
        return x * 2 + state

    trials = WrapperTrials()
    options = GraphOptions(lazy=True, check="always")
    wrapper = GraphWrapper(forward, "FULL", pool=GraphPool("cpu"), trials=trials, options=options)
    before, history = given.detach().clone(), given.grad_fn
    with torch.enable_grad():
        for step in range(3):
            with forward_context("FULL", BatchDescriptor(4)):
                out = wrapper(given, state)
            assert torch.equal(out, before * 2 + (step + 1) * writes)
    assert [(each.status, each.steps) for each in trials.records] == [("tried", 2)]
    assert torch.equal(given, before) and given.grad_fn is history


def test_eager_steps_of_a_runner_in_quarantine_replay_no_wrapper_in_its_forward():
    """The wrapper has no trials: its graph goes on with the number of its capture."""
    held = types.SimpleNamespace(scale=1.0)
    fixed = torch.zeros(4, 4)
    pool = GraphPool("cpu")
    inner = wrapper_class("cpu")(
        lambda x: x * held.scale, "FULL", pool=pool, options=GraphOptions(lazy=True)
    )

    def forward(x: torch.Tensor) -> torch.Tensor:
        fixed.copy_(x)
        with forward_context("FULL", BatchDescriptor(num_tokens=4, num_reqs=4)):
            return inner(fixed) + 0

    forward(torch.ones(4, 4))
    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    runner = GraphRunner(forward, mode="FULL", sizes=[4], inputs=inputs, platform="cpu")
    runner.capture()
    runner(x=torch.ones(4, 4))
    held.scale = 3.0
    with pytest.warns(GraphQuarantinedWarning):
        steps = [runner(x=torch.ones(4, 4)).clone() for _ in range(70)]
    assert runner.last_dispatch.reason is Reason.QUARANTINED
    assert torch.equal(steps[-1], torch.full((4, 4), 3.0))


def test_a_wrapper_without_memory_for_a_trial_replays_with_one_warning(tmp_path):
    full = tmp_path / "full"  # A file: no watch sees it change.
    state = torch.zeros(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        if full.exists():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * 2

    options = GraphOptions(lazy=True)
    wrapper = GraphWrapper(
        forward, "FULL", pool=GraphPool("cpu"), options=options, trials=WrapperTrials()
    )
    x, descriptor = torch.ones(2, 2), BatchDescriptor(2)
    with forward_context("FULL", descriptor):
        wrapper(x)
    full.touch()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for value in range(1, 5):
            x.fill_(value)
            with forward_context("FULL", descriptor):
                assert wrapper(x).tolist() == [[2.0 * value] * 2] * 2
    assert [each.category for each in warned] == [GraphMemoryWarning]
    assert state.item() == 5
