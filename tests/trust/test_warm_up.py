"""Warm-ups are watched where they have to be, undone, and leave no state of padding behind."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import graphrt
from graphrt import (
    Batch,
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphRunner,
    InputSpec,
    Reason,
    current_context,
    eager_break,
)
from graphrt.core.base.errors import PythonStateError, StateTooLargeError
from graphrt.trust.reads import ReadSet
from graphrt.trust.snapshot import StateSnapshot
from graphrt.trust.warm_up import MovedSlots, WarmedUp, WatchedState
from graphrt.trust.watching.padding import PaddingRows

WIDTH = 4
PADDED = InputSpec(torch.float32, ("tokens", WIDTH), pad=1.0)


def watched(
    forward: Any, warmed_up: dict[Any, WarmedUp] | None = None, *, watch: bool = True, **more: Any
) -> WatchedState:
    declared, limit = more.pop("declared", ()), more.pop("limit_bytes", 1 << 20)
    return WatchedState(
        StateSnapshot("cpu", limit, declared=declared),
        ReadSet(forward, watched=watch),
        {} if warmed_up is None else warmed_up,
        MovedSlots(),
        is_in_graphs=lambda _: False,
        has_parts=True,
        **{"pad_rows": (), "padding": PaddingRows(), **more},
    )


def run(state: WatchedState, function: Callable[[], Any], kind: Any = "a", tokens: int = 4) -> Any:
    return state.run(kind, tokens, {}, lambda: function)


class Model(SimpleNamespace):
    def __init__(self, **more: Any) -> None:
        super().__init__(state=torch.zeros(2), calls=0, table=None, **more)

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(4)
        self.state.add_(torch.rand(1) + random.random() + float(np.random.rand()))
        return self.state * 1


# Undone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 3])
def test_writes_and_draws_of_warm_ups_are_put_back_and_built_objects_stay(times):
    model = Model()
    # Before: NumPy loads what it draws from when it is first asked.
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    state = watched(model)
    for _ in range(times):
        run(state, model)
        assert model.state.sum() != 0
        state.restore()
        assert model.state.tolist() == [0.0, 0.0]
    table = model.table
    state.settle(lambda: None)
    state.state.generators.restore()  # as a session does at its end
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert model.table is table is not None
    # A warm-up that writes is two runs, of which both have moved it.
    assert model.calls == 0


def test_a_flag_set_by_only_the_first_run_stays_set():
    model = SimpleNamespace(built=False, calls=0)

    def forward() -> None:
        model.built = True
        model.calls += 1

    state = watched(forward)
    for _ in range(2):
        run(state, forward)
    state.settle(lambda: None)
    assert (model.built, model.calls) == (True, 0)


def test_containers_filled_only_by_host_and_platform_keep_their_items():
    model = SimpleNamespace(log=[], captured={}, bound=[])

    def forward() -> None:
        model.log.append(1)

    state = watched(lambda: (forward(), model.captured, model.bound))
    for size in (4, 2, 1):
        model.bound.append(size)  # As what a host does before a run,
        run(state, forward, tokens=size)
        model.bound.append(size)
        forward()
        # And a platform, or a hook around a graph, in a capture.
        add = partial(model.captured.update, {size: True})
        state.capture(GraphMode.FULL, BatchDescriptor(size), add, in_one=True)
    state.settle(lambda: None)
    assert model.log == []
    assert model.captured == {4: True, 2: True, 1: True}
    assert model.bound == [4, 4, 2, 2, 1, 1]


def test_a_tensor_replaced_by_every_run_is_put_back_and_a_first_table_stays():
    model = SimpleNamespace(last=torch.zeros(2), table=torch.zeros(2), calls=0)
    before = model.last

    def forward() -> None:
        model.last = model.last + 1
        if model.calls == 0:
            model.table = torch.ones(2)
        model.calls += 1

    state = watched(forward)
    for _ in range(3):
        run(state, forward)
    state.settle(lambda: None)
    assert model.last is before and model.table.tolist() == [1.0, 1.0]


def test_declared_state_is_put_back_together_with_found_state():
    declared, found = torch.zeros(2), torch.zeros(2)
    forward = lambda: found.add_(1)  # noqa: E731
    state = watched(forward, declared=(declared,))
    run(state, forward)
    declared.add_(5)
    state.restore()
    assert declared.tolist() == found.tolist() == [0.0, 0.0]


def test_a_warm_up_without_watching_restores_nothing():
    model = Model()
    state = watched(model, watch=False)
    assert run(state, model) is not None
    state.restore()
    assert model.state.sum() != 0 and model.calls == 1
    state.settle(lambda: None)
    assert model.calls == 1


def test_writes_of_a_warm_up_that_raises_are_put_back():
    model = Model()
    state = watched(model)

    def fails():
        model.state.add_(5)
        raise ValueError("of the forward")

    with pytest.raises(ValueError, match="of the forward"):
        run(state, fails)
    state.restore()
    assert model.state.sum() == 0


# Which are watched -------------------------------------------------------------------------------


def is_watched(state: WatchedState, model: Any, kind: Any, tokens: int) -> bool:
    def function() -> None:
        model.state.add_(1)

    run(state, function, kind, tokens)
    undone = model.state.clone()
    state.restore()
    return bool((model.state != undone).any())


def reads_only(model: Any) -> Callable[[], Any]:
    return lambda: model.state * 2


def traced(warmed_up: dict[Any, WarmedUp]) -> dict[Any, int]:
    return {kind: each.tokens for kind, each in warmed_up.items()}


class Elsewhere(torch.Tensor):
    def untyped_storage(self) -> Any:
        raise NotImplementedError("no storage")


def test_a_write_to_a_subclass_without_storage_is_allowed():
    held = torch.zeros(2).as_subclass(Elsewhere)
    state = watched(lambda: held)
    for tokens in (4, 2):
        run(state, lambda: held.add_(1), tokens=tokens)
    assert held.tolist() == [2.0, 2.0]


def test_the_largest_run_of_each_kind_of_batch_is_kept():
    model, known = Model(), {}
    state = watched(model, known)
    function = reads_only(model)
    for kind, tokens in (("a", 4), ("a", 2), ("b", 2), ("a", 8), ("b", 1), (None, 16)):
        run(state, function, kind, tokens)
    assert traced(known) == {"a": 8, "b": 2}
    assert [str(op) for op in known["a"].trace] == ["aten.mul.Tensor"]
    assert not known["a"].writes


def test_a_kind_of_batch_that_writes_is_watched_in_every_session():
    model, known = Model(), {}
    assert is_watched(watched(model, known), model, "a", 4)
    assert known["a"].writes
    # A smaller one, in another session: what it writes is not saved yet.
    other = Model()
    assert is_watched(watched(other, known), other, "a", 2)


def test_a_kind_of_batch_that_writes_nothing_is_watched_once():
    model, known = Model(), {}
    run(watched(model, known), reads_only(model), "a", 4)
    again = watched(model, known)
    run(again, reads_only(model), "a", 4)
    assert again._kinds == set()
    run(again, reads_only(model), "a", 8)
    assert again._kinds == {"a"}


def test_state_beyond_the_limit_raises_before_any_write():
    model = SimpleNamespace(rows=torch.zeros(4, 4))
    state = watched(model, limit_bytes=15)
    with pytest.raises(StateTooLargeError):
        run(state, lambda: model.rows.index_fill_(0, torch.tensor([1]), 5.0))
    assert model.rows.sum() == 0


@pytest.mark.parametrize(("pads", "ok"), [((2,), True), ((1,), False)])
def test_state_too_large_to_save_is_checked_after_the_last_warm_up(pads, ok):
    model = SimpleNamespace(rows=torch.zeros(4, 4))
    state = watched(model, limit_bytes=15, pad_rows=pads)
    run(state, lambda: model.rows.put_(torch.tensor([2 * 4]), torch.ones(1)))
    if ok:
        state.settle(lambda: None)
        assert "rows 2 written by padding" in state.reads.protected[0]
        return
    with pytest.raises(StateTooLargeError, match="rows 2"):
        state.settle(lambda: None)


# State that a warm-up makes ----------------------------------------------------------------------


def captured(forward: Callable[..., Any]) -> GraphRunner:
    runner = GraphRunner(
        forward,
        inputs={"x": PADDED},
        sizes=[2, 4],
        mode="FULL",
        platform="cpu",
        outputs=("tokens", WIDTH),
        options=GraphOptions(),
    )
    runner.capture()
    return runner


def state_made_by(
    make: Callable[[torch.Tensor], torch.Tensor],
    use: Callable[[torch.Tensor, torch.Tensor], Any],
) -> Callable[..., torch.Tensor]:
    """A forward that makes its state when it runs first."""
    model = SimpleNamespace(state=None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if model.state is None:
            model.state = make(x)
        used = use(model.state, x)
        return x + (0 if used is None else used)

    return forward


def zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(WIDTH)


def first_row(x: torch.Tensor) -> torch.Tensor:
    return x[0] * 1


def add_out(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.add(state, x[0], out=state)


def half_by_half(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    state[:2] = state[2:] + x[0, :2]
    return state


def other_half(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    state[:2].copy_(x[0, :2])
    old = state[2:] * 1
    state[2:].add_(x[0, 2:])
    return old.sum()


REFUSED = {
    "sums": (zeros, lambda state, x: state.add_(x[0])),
    "the first row that ever was": (first_row, lambda state, x: state * 1),
    "a mean that moves": (first_row, lambda state, x: state.mul_(0.5).add_(x[0])),
    "half by half": (zeros, half_by_half),
    "a count of calls": (zeros, lambda state, x: state.add_(1)),
    "rows that are put": (
        zeros,
        lambda state, x: state.index_add_(0, torch.tensor([1]), x[0, :1]) * 1,
    ),
}
FINE = {
    "a table": (lambda x: torch.arange(float(WIDTH)), lambda state, x: state * 2),
    "a table by the shape": (lambda x: torch.ones(x.shape[1]), lambda state, x: state * 2),
    "scratch memory": (zeros, lambda state, x: state.copy_(x[0]) * 2),
    "scratch memory as out=": (zeros, lambda state, x: torch.mul(x[0], 2, out=state) + 1),
    "scratch memory of the inputs": (first_row, lambda state, x: state.copy_(x[0]) * 2),
    "a first output that nobody reads": (first_row, lambda state, x: None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_made_by_a_warm_up_and_continued_by_later_runs_is_refused(name):
    with pytest.raises(
        PythonStateError, match="first call of the forward made or filled"
    ) as raised:
        captured(state_made_by(*REFUSED[name]))
    assert "model.state" in str(raised.value)


@pytest.mark.parametrize("name", FINE)
def test_a_table_made_by_a_warm_up_that_fits_every_run_is_accepted(name):
    runner = captured(state_made_by(*FINE[name]))
    for count in (4, 3, 1):
        x = torch.rand(count, WIDTH)
        expected = state_made_by(*FINE[name])(x)
        assert torch.equal(runner(x=x), expected)


@pytest.mark.parametrize(
    "use",
    [add_out, other_half],
)
def test_state_made_by_a_warm_up_and_partly_overwritten_is_refused(use):
    with pytest.raises(PythonStateError, match="first call of the forward made or filled"):
        captured(state_made_by(zeros, use))


def test_a_kept_first_output_is_refused_only_if_computed_from_inputs():
    made = {"inputs": (first_row, True), "no inputs": (zeros, False)}
    for make, refused in made.values():
        forward = state_made_by(make, lambda state, x: state * 1)
        if not refused:
            captured(forward)
            continue
        with pytest.raises(PythonStateError):
            captured(forward)


def test_after_a_refused_capture_the_forward_is_as_before():
    model = SimpleNamespace(state=None, calls=0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.calls += 1
        if model.state is None:
            model.state = torch.zeros(WIDTH)
        return x + model.state.add_(x[0])

    with pytest.raises(PythonStateError):
        captured(forward)
    assert (model.state, model.calls) == (None, 0)


def test_a_table_replaced_by_a_larger_step_stays_alive_for_the_graphs():
    tables: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not tables or len(tables[-1]) < len(x):
            tables[:] = [torch.arange(float(len(x)))]
        return x + tables[-1][: len(x), None]

    runner = captured(forward)
    for count in itertools.chain(range(1, 7), (2, 4, 6, 3)):
        x = torch.rand(count, WIDTH)
        assert torch.equal(runner(x=x), x + torch.arange(float(count))[:, None]), count


def test_runs_that_infer_output_axes_leave_no_changed_python_number():
    """They have sizes, 3 rows here, that no step of the runner may ever have."""
    state = [1.0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            state[0] = 7.0
        return x * state[0]

    with GraphRunner(
        forward,
        mode="FULL_DECODE_ONLY",
        sizes=[1, 2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        platform="cpu",
    ) as runner:
        runner.capture()
        assert state == [1.0]
        assert runner(Batch(2, 2, 1), x=torch.ones(2, 4)).unique().tolist() == [1.0]
        assert runner.last_dispatch.reason is Reason.HIT


def test_a_table_for_each_kind_of_batch_is_made_in_its_own_warm_up():
    tables = {}

    @eager_break
    def part(y):
        return y + 1

    def forward(x):
        context = current_context()
        key = bool(context and context.descriptor and context.descriptor.uniform), len(x)
        if key not in tables:
            tables[key] = torch.arange(len(x), dtype=torch.float32)[:, None] * 2
        return part(x + tables[key])

    runner = GraphRunner(
        forward,
        mode="FULL_AND_PIECEWISE",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        platform="cpu",
    )
    runner.capture()
    for batch in (Batch(4, 4, 1), Batch(4, 1, 4), Batch(2, 2, 1), Batch(2, 1, 2)) * 3:
        x = torch.rand(batch.num_tokens, 4)
        rows = torch.arange(batch.num_tokens, dtype=torch.float32)[:, None]
        assert torch.equal(runner(batch, x=x), x + rows * 2 + 1)
        assert runner.last_dispatch.reason.name == "HIT"


def test_a_capture_compiles_nothing_that_its_warm_up_can_compile():
    """Dynamo guards on dispatch keys. On a GPU, code that is compiled in a capture fails there."""
    seen: list[tuple[int, str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        capture = current_context().capture
        seen.append((len(inputs[0]), "warm-up" if capture is None else "capture"))
        return graph.forward

    compiled = eager_break(torch.compile(torch.sin, backend=backend, dynamic=False))
    runner = GraphRunner(
        lambda x: compiled(x + 1) + 1,
        mode="PIECEWISE",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 3))},
        outputs=("tokens", 3),
    )
    with runner:
        runner.capture()
        assert {size for size, _ in seen} == {4, 2}
        assert {phase for _, phase in seen} == {"warm-up"}, seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", ["capture", "always"])
def test_a_hosts_dynamo_compiles_no_function_of_graphrt(check):
    """Where Dynamo gives up on a frame it goes on with those that this one calls: the handlers of
    graphrt, in which it failed (torch 2.11), and whose frames counted as the host's."""
    torch._dynamo.reset()
    memory = torch.zeros(4, 3)

    def part(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # a graph break in a loop: Dynamo leaves the function alone
            torch._dynamo.graph_break()
            memory.add_(1).index_add_(0, torch.zeros(1, dtype=torch.int64), x[:1])
        return helper(x)

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.sum().item() > -1e9 else x

    compiled = eager_break(torch.compile(part, backend="eager", dynamic=False))
    with GraphRunner(
        lambda x: compiled(x + 1) + 1,
        mode="PIECEWISE",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 3))},
        outputs=("tokens", 3),
        options=GraphOptions(check=check),
    ) as runner:
        runner.capture()
        for count in (4, 2, 4, 1):
            x = torch.rand(count, 3)
            assert torch.equal(runner(Batch(count), x=x), (x + 1).sin() + 1)
    met = {code().co_filename for code in torch._dynamo.convert_frame.input_codes.seen}
    torch._dynamo.reset()
    assert __file__ in met
    package = os.path.dirname(graphrt.__file__)
    assert not [name for name in met if name.startswith(package)]


class Halved(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@eager_break
def halved_in_a_part(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


@pytest.mark.filterwarnings("ignore")
def test_functions_that_dynamo_keeps_among_a_modules_globals_stay_after_warm_ups():
    """Without, a block of this module that `block.compile()` has compiled in a warm-up was a
    NameError at the next call: its code looks up `__compiled_fn_...`."""
    torch._dynamo.reset()
    block = Halved()
    block.compile(backend="eager")
    before = {name for name in globals() if name.startswith("__compiled_fn")}
    runner = GraphRunner(
        lambda x: halved_in_a_part(block, x + 1) * 3,
        mode="PIECEWISE",
        sizes=[1, 2, 8],
        inputs={"x": PADDED},
        platform="cpu",
    )
    runner.capture()
    code = torch._dynamo.eval_frame._debug_get_cache_entry_list(Halved.forward)
    looked_up = {
        name for each in code for name in each.code.co_names if name.startswith("__compiled_fn")
    }
    assert looked_up - before
    assert looked_up <= globals().keys()
    for count in (1, 2, 5):
        x = torch.rand(count, WIDTH)
        torch.testing.assert_close(runner(x=x), (x + 1) / 2 * 3)
    torch._dynamo.reset()
