"""A trial makes the same runs in the same order whatever they give, each from the same state."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.core.base.errors import PythonStateError, RowsMixedError, VerificationError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.cpu.platform import CpuPlatform
from graphrt.trust.reads import ReadSet
from graphrt.trust.trial import Rows, Trial, TriedStep
from graphrt.trust.verdict import TrialRecord, TriedGraph, Verdict
from graphrt.trust.warm_up import WarmedUp
from graphrt.trust.watching.watch import Watch

ROWS, LIVE = 4, 3
NAMES = {
    "padded": "eager",
    "padding": "of_padding",
    "disturbed": "disturbed",
    "alone": "unpadded",
}
ORDER = ["eager", "of_padding", "replay", "unpadded", "eager"]
"""What runs where no Python number moves."""
MOVED = [*ORDER[:4], "eager", "eager", "eager", "eager"]
"""What runs where some do and change nothing."""
DRAWN = [*MOVED[:4], "disturbed", *MOVED[4:]]
"""What runs where random numbers are drawn as well."""

Forward = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(SimpleNamespace):
    """What a forward holds: a tensor that it advances, and Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.full((2,), 1.5)
        self.state = torch.zeros(2)
        self.calls = 0
        self.scale = 1.0
        self.own = torch.Generator().manual_seed(5)
        self.forward: Forward = clean

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(self, x)


def clean(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.state.add_(1)
    return x * model.weight + model.state


def replayed(model: Model, x: torch.Tensor) -> torch.Tensor:
    """What a graph does of it: the operators, and no Python."""
    model.state.add_(1)
    return x * model.weight + model.state


class FakeStep(TriedStep):
    """A step of `model` that keeps a list of its runs; `runs` are stand-ins by name."""

    def __init__(self, model: Model, *, sizes: Any = ((ROWS, LIVE),), **runs: Any) -> None:
        self.model = self.forward = model
        self.sizes = sizes
        self.runs = {"replay": lambda: replayed(model, live()), **runs}
        self.buffer = torch.empty(ROWS, 2)
        self.inputs = frozenset([self.buffer.data_ptr()])
        self.done: list[str] = []
        self.starts: list[list[float]] = []
        self.fails_at: tuple[int, BaseException] | None = None

    def _run(self, name: str, x: torch.Tensor, watch: Watch | None) -> Any:
        self.done.append(name)
        self.starts.append(self.model.state.tolist())
        given = self.buffer[: len(x)].copy_(x)
        function = self.runs.get(name) or (lambda: self.model(given))

        def run() -> Any:
            found = function()
            if self.fails_at is not None and len(self.done) == self.fails_at[0]:
                raise self.fails_at[1]
            return found

        out = run() if watch is None else watch.around(run)
        return out if out is None else out[:LIVE]

    def eager(self, watch: Watch | None, rows: Rows = "padded") -> Any:
        name = NAMES[rows]
        inputs = {"padding": live() * 0, "alone": live()[:LIVE]}.get(rows, live())
        return self._run(name, inputs, watch)

    def with_gradients(self, watch: Watch, inference: bool) -> Any:
        return self._run("with_gradients", live(), watch)

    def replay(self) -> Any:
        return self._run("replay", live(), None)


def live() -> torch.Tensor:
    x = torch.arange(ROWS * 2.0).view(ROWS, 2) + 1
    x[LIVE:] = 0
    return x


def trial_of(step: FakeStep, *, mode: str = "FULL", warm: WarmedUp | None = None) -> Trial:
    return Trial(
        step,
        TriedGraph(TrialRecord(GraphMode[mode], BatchDescriptor(ROWS))),
        warm,
        CpuPlatform(),
        GraphOptions(state_limit_bytes=1 << 20),
        ReadSet(step.forward, watched=False),
    )


def tried(step: FakeStep, *, undone: bool = False, **more: Any) -> Verdict:
    return trial_of(step, **more).run(undone=undone)


# Forwards with something wrong -------------------------------------------------------------------


def mean_of_rows(model: Model, x: torch.Tensor) -> torch.Tensor:
    return clean(model, x) - x.mean(0)


def counted(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return clean(model, x)


def position(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return clean(model, x) + float(model.calls)


def rebinding(model: Model, x: torch.Tensor) -> torch.Tensor:
    out = clean(model, x)
    model.weight = model.weight + 0
    return out


def other_outputs() -> Any:
    return torch.zeros(LIVE, 2)


BAD: dict[str, tuple[Forward, dict[str, Any], type[Exception], str]] = {
    "replay": (clean, {"replay": other_outputs}, VerificationError, "differs from eager"),
    "padding": (mean_of_rows, {}, RowsMixedError, "without padding"),
    "position": (position, {}, PythonStateError, "calls = 0, then 1"),
    "rebound": (rebinding, {}, PythonStateError, "weight"),
    "not a function": (
        lambda model, x: clean(model, x) * random.SystemRandom().random(),
        {},
        PythonStateError,
        "two eager runs of one step",
    ),
}


def bad(name: str) -> tuple[FakeStep, type[Exception], str]:
    forward, runs, error, text = BAD[name]
    model = Model()
    model.forward = forward
    step = FakeStep(model, **runs)
    if name == "padding":
        step.runs["replay"] = lambda: mean_of_rows(model, live())[:LIVE]
    return step, error, text


@pytest.mark.parametrize("name", BAD)
def test_each_defect_fails_the_trial_with_its_error_and_text(name):
    step, error, text = bad(name)
    verdict = tried(step)
    assert type(verdict.failure) is error and text in str(verdict.failure), verdict.failure
    assert "FULL [4 tokens]" in str(verdict.failure)


@pytest.mark.parametrize("name", [each for each in BAD if each != "position"])
def test_correct_and_defective_steps_make_the_same_runs_in_the_same_order(name):
    step, _, _ = bad(name)
    tried(step)
    assert step.done == ORDER
    good = FakeStep(Model())
    verdict = tried(good)
    assert good.done == ORDER and verdict.failure is None and verdict.notes == []


@pytest.mark.xfail(
    strict=True,
    reason="runs with numbers moved on are made only where some move, and end at the first finding",
)
@pytest.mark.parametrize("name", ["counted", "position"])
def test_a_trial_makes_the_same_runs_whether_or_not_the_forward_counts_calls(name):
    """A rank that alone counts, or logs, makes collectives that the others do not make."""
    step = bad(name)[0] if name in BAD else FakeStep(Model())
    if name == "counted":
        step.model.forward = counted
    tried(step)
    good = FakeStep(Model())
    tried(good)
    assert step.done == good.done


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_ranks_that_try_together_make_the_same_runs_whatever_they_find(mode):
    """One that ended at its first finding would leave the others in a collective."""
    steps = []
    for forward in (counted, position):
        step = FakeStep(Model())
        step.model.forward = forward
        step.together = True
        verdict = tried(step, mode=mode)
        assert (verdict.failure is None) == (forward is counted)
        steps.append(step.done)
    assert steps[0] == steps[1] and len(steps[0]) > len(ORDER)


def test_a_call_counter_passed_to_an_operator_without_effect_is_no_failure():
    model = Model()

    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        model.calls += 1
        return clean(model, x) + 0 * torch.ones(2).mul_(model.calls)

    model.forward = forward
    verdict = tried(FakeStep(model))
    assert verdict.failure is None and verdict.notes == []


def test_a_forward_that_counts_calls_is_run_with_advanced_counts_and_passes():
    step = FakeStep(Model())
    step.model.forward = counted
    verdict = tried(step)
    assert verdict.failure is None and verdict.deterministic
    assert step.done == MOVED
    assert step.model.calls == 1


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("name", ["", "counted", *BAD])
def test_every_run_of_a_trial_starts_from_the_same_state(name, undone):
    step = bad(name)[0] if name in BAD else FakeStep(Model())
    if name == "counted":
        step.model.forward = counted
    tried(step, undone=undone)
    assert step.starts == [[0.0, 0.0]] * len(step.done)


def test_where_rows_mix_by_design_a_trial_makes_no_unpadded_run():
    step, _, _ = bad("padding")
    step.sizes = ()
    assert tried(step).failure is None
    assert step.done == [each for each in ORDER if each != "unpadded"]


def test_a_step_without_padding_rows_has_no_unpadded_run():
    step = FakeStep(Model(), sizes=())
    verdict = tried(step)
    assert verdict.failure is None
    assert step.done == [each for each in ORDER if each != "unpadded"]


@pytest.mark.parametrize("name", BAD)
def test_a_failed_trial_returns_outputs_and_state_of_the_unpadded_run(name):
    step, _, _ = bad(name)
    step.runs["unpadded"] = lambda: step.model.state.add_(10) + 100
    verdict = tried(step)
    assert verdict.failure is not None
    assert verdict.outputs.tolist() == [110.0, 110.0]
    assert step.model.state.tolist() == [10.0, 10.0]


@pytest.mark.parametrize("name", ["replay", "rebound"])
def test_a_failed_trial_of_a_full_batch_returns_the_last_eager_run(name):
    step, _, _ = bad(name)
    step.sizes = ()
    verdict = tried(step)
    assert verdict.failure is not None
    assert torch.equal(verdict.outputs, clean(Model(), live())[:LIVE])
    assert step.model.state.tolist() == [1.0, 1.0]


def test_a_passed_trial_returns_the_eager_outputs_including_padding_rows():
    step = FakeStep(Model(), unpadded=lambda: clean(step.model, live()[:LIVE]) + 1e-5)
    verdict = tried(step)
    assert verdict.failure is None
    assert torch.equal(verdict.outputs, clean(Model(), live())[:LIVE])
    assert step.model.state.tolist() == [1.0, 1.0]
    assert len(verdict.notes) == 1 and "by rounding" in verdict.notes[0]


@pytest.mark.parametrize("name", ["", *BAD])
def test_an_undone_trial_leaves_the_model_as_before(name):
    step = bad(name)[0] if name else FakeStep(Model())
    before = everything(step.model)
    verdict = tried(step, undone=True)
    assert (verdict.failure is not None) is bool(name)
    assert verdict.outputs is not None
    assert everything(step.model) == before


def drawing(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    model.state.add_(torch.rand(2) + torch.rand(2, generator=model.own))
    return x * model.weight + model.state + float(random.random() + np.random.rand())


def numbers() -> list[object]:
    """The state of all that random numbers come from."""
    kind, keys, *rest = np.random.get_state()
    of_numpy = (kind, keys.tolist(), *rest)
    return [torch.get_rng_state().tolist(), random.getstate(), of_numpy]


def everything(model: Model) -> list[object]:
    tensors = (model.weight, model.state)
    where = [each.data_ptr() for each in tensors]
    drawn = model.own.get_state().tolist()
    values = [each.tolist() for each in tensors]
    return [*numbers(), drawn, model.calls, model.scale, where, values]


@pytest.fixture
def drawing_step():
    model = Model()
    model.forward = drawing
    step = FakeStep(model)
    step.runs["replay"] = lambda: drawing(model, live())[:LIVE]
    return step


def test_every_run_draws_the_same_random_numbers_and_the_step_draws_them_once(drawing_step):
    step = drawing_step
    expected = Model()
    expected.forward = drawing
    before = numbers()
    out = drawing(expected, live())[:LIVE]
    after = everything(expected)
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
    random.setstate(before[1])
    np.random.set_state(before[2])
    verdict = tried(step)
    assert verdict.failure is None and verdict.deterministic
    assert torch.equal(verdict.outputs, out)
    assert everything(step.model)[:5] == after[:5]
    assert step.model.state.tolist() == expected.state.tolist()


def test_an_undone_trial_leaves_random_generators_as_before(drawing_step):
    before = everything(drawing_step.model)
    assert tried(drawing_step, undone=True).failure is None
    assert everything(drawing_step.model) == before


LOUD = [n for n, name in enumerate(DRAWN, 1) if n == len(DRAWN) or n < 4]
"""The runs of which an error is the caller's: not those that are made for the trial alone."""


@pytest.mark.parametrize("n", LOUD)
@pytest.mark.parametrize("error", [ValueError("of the forward"), KeyboardInterrupt()])
def test_an_error_in_any_run_is_raised_and_the_model_restored(drawing_step, n, error):
    step = drawing_step
    before = everything(step.model)
    step.fails_at = n, error
    with pytest.raises(type(error)):
        tried(step)
    assert len(step.done) == n
    assert everything(step.model) == before


@pytest.mark.parametrize("n", [n for n in range(1, len(DRAWN) + 1) if n not in LOUD])
def test_an_error_in_a_run_that_only_the_trial_makes_is_a_note(drawing_step, n):
    step = drawing_step
    step.fails_at = n, ValueError("of another size")
    verdict = tried(step)
    # Where it does not run without padding, nothing is compared with it.
    assert verdict.failure is None and step.done == (MOVED if n == 4 else DRAWN)
    assert any("of another size" in each for each in verdict.notes)
    assert step.model.calls == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("n", [n for n in range(1, len(DRAWN) + 1) if n not in LOUD])
def test_an_interrupt_or_memory_error_in_a_trial_is_raised_and_the_model_restored(
    drawing_step, n, error
):
    before = everything(drawing_step.model)
    drawing_step.fails_at = n, error()
    with pytest.raises(error):
        tried(drawing_step)
    assert everything(drawing_step.model) == before


def test_a_failed_trial_whose_unpadded_run_raised_returns_the_last_eager_run():
    step, _, _ = bad("replay")

    def raises():
        step.model.state.add_(50)
        raise ValueError("no such size")

    step.runs["unpadded"] = raises
    verdict = tried(step)
    assert verdict.failure is not None
    assert torch.equal(verdict.outputs, clean(Model(), live())[:LIVE])
    assert step.model.state.tolist() == [1.0, 1.0]


# What is compared --------------------------------------------------------------------------------


def test_eager_runs_that_differ_by_rounding_are_noted_as_not_deterministic():
    model, runs = Model(), iter(range(100))
    model.forward = lambda model, x: clean(model, x) + 1e-6 * next(runs)
    verdict = tried(FakeStep(model))
    assert verdict.failure is None
    assert not verdict.deterministic
    assert any("not deterministic" in note for note in verdict.notes)


@pytest.mark.parametrize(("times", "fails"), [(3, False), (6, True)])
def test_a_replay_may_differ_a_few_times_more_than_eager_runs_differ(times, fails):
    model, eager = Model(), iter([0.0, 1e-3])
    step = FakeStep(
        model,
        eager=lambda: clean(model, live())[:LIVE] + next(eager),
        replay=lambda: clean(model, live())[:LIVE] + 1e-3 + times * 1e-3,
        sizes=(),
    )
    model.weight = model.weight.to(torch.bfloat16)  # 0.1 is rounding then
    verdict = tried(step)
    assert not verdict.deterministic
    assert (verdict.failure is not None) is fails


@pytest.mark.parametrize(("times", "fails"), [(3, False), (6, True)])
def test_state_left_by_a_replay_may_differ_a_few_times_more_than_eager_state(times, fails):
    model, eager = Model(), iter([0.0, 1e-4])
    out = torch.ones(LIVE, 2)

    def leaves(value: float) -> torch.Tensor:
        model.state.add_(1 + value)
        return out.clone()

    step = FakeStep(
        model,
        eager=lambda: leaves(next(eager)),
        replay=lambda: leaves(1e-4 + times * 1e-4),
        sizes=(),
    )
    verdict = tried(step)
    assert (verdict.failure is not None) is fails


def test_state_left_by_a_replay_is_compared_with_eager_state():
    model = Model()
    step = FakeStep(model)
    step.runs["replay"] = lambda: replayed(model, live())[:LIVE].clone() + model.state.add_(1) * 0
    verdict = tried(step)
    assert "in the state that it writes" in str(verdict.failure)


def test_a_replay_that_does_not_write_the_state_fails_the_trial():
    model = Model()
    step = FakeStep(model, replay=lambda: live()[:LIVE] * model.weight + 1)
    assert "in the state that it writes" in str(tried(step).failure)


def test_the_first_operator_that_differs_from_the_capture_is_named():
    step = FakeStep(Model())
    warm = Watch(frozenset([step.buffer.data_ptr()]))
    warm.around(lambda: step.model(step.buffer))
    step.model.forward = lambda model, x: clean(model, x).exp()
    verdict = tried(step, warm=WarmedUp(2 * ROWS, warm.trace, True, {}))
    assert "the first operator that is another one now is aten.exp" in str(verdict.failure)
    assert "test_trial.py" in str(verdict.failure)


def test_the_first_operator_that_mixes_rows_is_named():
    step, _, _ = bad("padding")
    text = str(tried(step).failure)
    # The mean has no rows: what brings it into them is named.
    assert "the first operator that mixes rows is aten.sub.Tensor at" in text
    assert "test_trial.py" in text


def test_a_failure_names_every_python_number_that_changed():
    model = Model()

    def forward(model, x):
        model.calls += 1
        model.scale += 1.0
        return clean(model, x) * min(model.scale, 3.0)

    model.forward = forward
    step = FakeStep(model)
    step.runs["replay"] = lambda: replayed(model, live())[:LIVE] * 2
    text = str(tried(step).failure)
    assert "scale = 1.0, then 2.0" in text and "calls = 0, then 1" in text


def test_a_call_counter_used_only_in_an_assertion_is_no_failure():
    model = Model()

    def forward(model, x):
        model.calls += 1
        assert model.calls < 10, "used up"
        return clean(model, x)

    model.forward = forward
    verdict = tried(FakeStep(model))
    assert verdict.failure is None
    assert any("AssertionError: used up" in note for note in verdict.notes)


def test_a_counter_used_as_index_is_named_without_reading_out_of_bounds():
    model = Model()
    table = torch.ones(8, 2)

    def forward(model, x):
        out = clean(model, x) + table.index_select(0, torch.tensor([model.calls]))
        model.calls += 1
        return out

    model.forward = forward
    step = FakeStep(model)
    step.runs["replay"] = lambda: replayed(model, live())[:LIVE] + table[:1]
    failure = tried(step).failure
    assert isinstance(failure, PythonStateError)
    assert "calls = 0, then 1" in str(failure)


def ticking(read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[Model, FakeStep]:
    """State that every eager run writes with another number, and a replay with the first."""
    model, ticks = Model(), iter(range(1, 100))

    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        model.state.fill_(float(next(ticks)))
        return read(x, model.state)

    model.forward = forward
    step = FakeStep(model, sizes=())

    def replay() -> torch.Tensor:
        model.state.fill_(0.5)
        return read(live(), model.state)

    step.runs["replay"] = replay
    return model, step


def test_state_that_differs_between_eager_runs_and_is_read_fails_the_trial():
    _, step = ticking(lambda x, state: x + state)
    assert isinstance(tried(step).failure, PythonStateError)


def test_state_that_differs_between_eager_runs_fails_the_trial_without_reaching_an_output():
    _, step = ticking(lambda x, state: x * 2)
    assert isinstance(tried(step).failure, PythonStateError)


def test_state_that_differs_between_eager_runs_by_rounding_is_not_deterministic():
    model, eager = Model(), iter([0.0, 1e-6])
    step = FakeStep(model, sizes=())

    def leaves(value: float) -> torch.Tensor:
        model.state.add_(1 + value)
        return torch.ones(LIVE, 2)

    step.runs |= {"eager": lambda: leaves(next(eager)), "replay": lambda: leaves(0.0)}
    verdict = tried(step)
    assert verdict.failure is None and not verdict.deterministic
