"""Which steps are tried at which level, what quarantine is, and what ends it."""

from __future__ import annotations

import itertools
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import (
    Batch,
    Example,
    GraphOptions,
    GraphRunner,
    Host,
    InputSpec,
    Reason,
    current_context,
)
from graphrt.core.base.errors import (
    GraphMemoryWarning,
    GraphQuarantinedWarning,
    InvalidInputError,
    InvalidOptionError,
    PythonStateError,
    StaleInputError,
    VerificationError,
)
from graphrt.core.runner.engine import StepEngine
from graphrt.observe import findings
from graphrt.trust.runner_checks import RunnerChecks
from tests.draws import rest_long
from tests.trust.twins import ambient_state_put_back

LEVELS = ("off", "capture", "first", "sample", "always")
WIDTH, SIZES = 4, (1, 2, 4, 8)
X = InputSpec(torch.float32, ("tokens", WIDTH))
CAPTURING = Path(tempfile.mkdtemp(), "capturing")
"""A file: no walk sees that a host makes or removes it."""


class Model(SimpleNamespace):
    """`wrong` are the variants of which graphs are captured that repeat something else."""

    def __init__(self, **more: Any) -> None:
        super().__init__(weight=torch.eye(WIDTH), wrong=(), calls=0, **more)
        self.capturing = False

    @property
    def capturing(self) -> bool:
        """Kept where nobody sees that a host changes it."""
        return CAPTURING.exists()

    @capturing.setter
    def capturing(self, value: bool) -> None:
        if value:
            CAPTURING.touch()
        else:
            CAPTURING.unlink(missing_ok=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        context = current_context()
        variant = None if context is None else context.descriptor.variant
        factor = 3.0 if self.capturing and variant in self.wrong else 2.0
        return (x * factor) @ self.weight


@pytest.fixture(autouse=True)
def _settings_put_back(monkeypatch):
    monkeypatch.delenv("GRAPHRT_CHECK", raising=False)
    CAPTURING.unlink(missing_ok=True)
    with ambient_state_put_back():
        yield


def runner_of(
    forward: Callable[..., Any],
    level: str = "capture",
    *,
    sizes: tuple[int, ...] = SIZES,
    inputs: dict[str, InputSpec] | None = None,
    host: Host | None = None,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> GraphRunner:
    return GraphRunner(
        forward,
        inputs=inputs or {"x": X},
        sizes=list(sizes),
        outputs=more.pop("outputs", ("tokens", WIDTH)),
        platform="cpu",
        host=host,
        options=GraphOptions(check=level, **(options or {})),
        **{"mode": "FULL", **more},
    )


def captured(forward: Any, level: str = "capture", **more: Any) -> GraphRunner:
    """A runner with graphs, of which those that are `wrong` repeat something else."""
    runner = runner_of(forward, level, **more)
    if isinstance(forward, Model):
        forward.capturing = True
    runner.capture()
    if isinstance(forward, Model):
        forward.capturing = False
    return runner


def rows(count: int) -> torch.Tensor:
    return torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH) + 1


def step(runner: GraphRunner, count: int, variant: str | None = None) -> torch.Tensor:
    """A step of decode; what it gives must be right whatever it ran by."""
    batch = Batch(count, count, 1, variant=variant)
    out = runner(batch, x=rows(count)).clone()
    assert torch.equal(out, rows(count) * 2)
    return out


def go_on(runner: GraphRunner) -> None:
    """Steps enough for the glance at one tensor a step to get round."""
    for _ in range(64):
        step(runner, 4)


def trials(runner: GraphRunner) -> dict[int, int]:
    return {each.descriptor.num_tokens: each.steps for each in runner.report().trust.trials}


def counts(runner: GraphRunner) -> dict[Reason, int]:
    return {reason: n for reason, n in runner.report().reasons.items() if n}


SERVED = (4, 3, 8, 1, 2, 4, 7, 5, 8, 1)
TRIED = {
    "off": {},
    "capture": {1: 1, 2: 0, 4: 2, 8: 1},
    "first": {1: 1, 2: 1, 4: 2, 8: 1},
    "sample": {1: 1, 2: 1, 4: 2, 8: 1},
    "always": {1: 2, 2: 1, 4: 3, 8: 4},
}


# Which steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_tries_its_own_number_of_steps_of_each_graph(level):
    runner = captured(Model(), level)
    for count in SERVED:
        step(runner, count)
    assert trials(runner) == TRIED[level]
    assert counts(runner) == {Reason.HIT: len(SERVED)}


SPELLED = [
    *((own, level, "{}") for own, level in zip(LEVELS, [*LEVELS[1:], LEVELS[0]], strict=True)),
    (LEVELS[0], LEVELS[-1], " {} "),
    (LEVELS[-1], LEVELS[0], "upper"),
]


@pytest.mark.parametrize(
    ("own", "level", "spelled"),
    rest_long(itertools.product(LEVELS, LEVELS, ["{}", " {} ", "upper"]), *SPELLED),
)
def test_the_environment_variable_overrides_the_level_of_the_options(
    own, level, spelled, monkeypatch
):
    value = level.upper() if spelled == "upper" else spelled.format(level)
    monkeypatch.setenv("GRAPHRT_CHECK", value)
    runner = captured(Model(), own)
    for count in SERVED:
        step(runner, count)
    assert trials(runner) == TRIED[level]


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_environment_variable_leaves_the_level_of_the_options(empty, monkeypatch):
    monkeypatch.setenv("GRAPHRT_CHECK", empty)
    runner = captured(Model(), "always")
    assert trials(runner) == dict.fromkeys(SIZES, 0)
    step(runner, 2)
    step(runner, 2)
    assert trials(runner)[2] == 2


@pytest.mark.parametrize("value", ["alway", "1", "true", "capture,first"])
def test_an_unknown_level_in_the_environment_is_refused_with_the_known_levels(value, monkeypatch):
    monkeypatch.setenv("GRAPHRT_CHECK", value)
    with pytest.raises(InvalidOptionError, match="GRAPHRT_CHECK") as raised:
        runner_of(Model())
    assert repr(value) in str(raised.value) and "off, capture, first" in str(raised.value)


def test_an_unknown_level_in_the_options_is_refused_by_name():
    with pytest.raises(InvalidOptionError, match="sometimes"):
        GraphOptions(check="sometimes")


def test_level_sample_tries_one_step_in_64():
    runner = captured(Model(), "sample", sizes=(2,))
    step(runner, 2)
    step(runner, 1)
    assert trials(runner) == {2: 2}
    for n in range(1, 64 * 3 + 1):
        step(runner, 2)
        assert trials(runner) == {2: 2 + n // 64}, n


def test_the_first_padded_step_is_tried_though_full_steps_were_tried_before():
    runner = captured(Model())
    for count in (1, 2, 4, 8):
        step(runner, count)
    assert trials(runner) == {1: 1, 2: 0, 4: 0, 8: 1}
    step(runner, 3)
    assert trials(runner) == {1: 1, 2: 0, 4: 1, 8: 1}
    step(runner, 7)
    assert trials(runner) == {1: 1, 2: 0, 4: 1, 8: 1}


def test_each_variant_has_trials_of_its_own():
    runner = captured(Model(), variants=("a", "b"), sizes=(2, 4, 8))
    for variant in ("a", "b", "a", "b"):
        step(runner, 4, variant)
        step(runner, 3, variant)
    found = {
        (each.descriptor.variant, each.descriptor.num_tokens): each.steps
        for each in runner.report().trust.trials
    }
    assert found == {(v, n): 2 * (n == 4) for v in "ab" for n in (2, 4, 8)}


def test_full_and_piecewise_graphs_have_trials_of_their_own():
    runner = captured(Model(), mode="FULL_AND_PIECEWISE", sizes=(4,))
    step(runner, 4)
    runner(Batch(4, 2, 2), x=rows(4))
    found = {each.mode.name: each.steps for each in runner.report().trust.trials}
    assert found == {"FULL": 1, "PIECEWISE": 1}


@pytest.mark.parametrize("level", ["off", "capture", "first"])
def test_after_all_trials_steps_are_replayed_without_any_check(level, monkeypatch):
    model = Model()
    called = SimpleNamespace(count=0)
    run = StepEngine._checked

    def counting(*args: Any) -> Any:
        called.count += 1
        return run(*args)

    monkeypatch.setattr(StepEngine, "_checked", counting)
    runner = captured(model, level)
    for count in range(1, 9):
        step(runner, count)
    model.calls = called.count = 0
    for count in range(1, 9):
        for _ in range(3):
            step(runner, count)
    assert called.count == 0


@pytest.mark.parametrize("level", ["sample", "always"])
def test_at_levels_sample_and_always_no_step_skips_the_checks(level):
    runner = captured(Model(), level)
    assert not runner._engine.is_clear(0, Batch(8))
    for count in range(1, 9):
        step(runner, count)
    slots = range(len(SIZES))
    pairs = [(slot, Batch(runner.graphs.steps[slot].descriptor.num_tokens)) for slot in slots]
    assert not any(runner._engine.is_clear(*pair) for pair in pairs)


def test_a_lazily_captured_graph_is_tried_by_the_step_that_captured_the_graph():
    runner = runner_of(Model(), options={"lazy": True})
    for count in SERVED:
        step(runner, count)
    found = trials(runner)
    # Each was the largest or the smallest of its kind when it came.
    assert found.keys() == {1, 2, 4, 8}
    assert found[4] == 2 and found[8] == found[1] == 1


# Quarantine --------------------------------------------------------------------------------------


def quarantined(level: str = "capture", **more: Any) -> tuple[Model, GraphRunner]:
    model = Model()
    model.wrong = (None,)
    runner = captured(model, level, **more)
    with pytest.warns(GraphQuarantinedWarning, match="differs from eager"):
        step(runner, 4)
    return model, runner


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_failing_graph_quarantines_its_variant_whose_batches_then_run_eagerly(level):
    _, runner = quarantined(level)
    served = runner.report().reasons[Reason.HIT]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in SERVED:
            step(runner, count)
            found = runner.last_dispatch
            assert (found.reason, found.slot, found.mode.name) == (Reason.QUARANTINED, -1, "NONE")
            assert found.descriptor.num_tokens == count
    report = runner.report()
    assert {each.status for each in report.trust.trials} == {"quarantined"}
    assert all("differs from eager" in each.failure for each in report.trust.trials)
    # The step whose trial failed is one of them.
    assert report.reasons[Reason.QUARANTINED] == len(SERVED) + 1
    assert report.reasons[Reason.HIT] == served
    assert sum(trials(runner).values()) == 1


def test_a_quarantined_step_does_not_count_as_a_graph_hit():
    _, runner = quarantined()
    before = sum(runner.report().steps.values())
    tokens = runner.report().live_tokens
    step(runner, 4)
    assert sum(runner.report().steps.values()) == before
    assert runner.report().live_tokens == tokens


def test_quarantine_of_a_variant_leaves_the_other_variant_replaying():
    model = Model()
    model.wrong = ("a",)
    runner = captured(model, variants=("a", "b"))
    with pytest.warns(GraphQuarantinedWarning, match="variant='a'"):
        step(runner, 4, "a")
    for count in SERVED:
        step(runner, count, "b")
        assert runner.last_dispatch.reason is Reason.HIT
        step(runner, count, "a")
        assert runner.last_dispatch.reason is Reason.QUARANTINED
    by_variant = {each.descriptor.variant: set() for each in runner.report().trust.trials}
    for each in runner.report().trust.trials:
        by_variant[each.descriptor.variant].add(each.status)
    assert by_variant == {"a": {"quarantined"}, "b": {"tried", "untried"}}


def test_quarantine_of_piecewise_graphs_leaves_full_graphs_replaying():
    model = Model()
    model.wrong = (None,)
    runner = runner_of(model, mode="FULL_AND_PIECEWISE", sizes=(4,))
    # PIECEWISE graphs are captured first; those of FULL are right.
    model.capturing = True
    runner.capture(lambda done, total, _: setattr(model, "capturing", done < 1))
    with pytest.warns(GraphQuarantinedWarning, match="PIECEWISE"):
        runner(Batch(4, 2, 2), x=rows(4))
    step(runner, 4)
    assert runner.last_dispatch.reason is Reason.HIT
    assert {each.mode.name: each.status for each in runner.report().trust.trials} == {
        "FULL": "tried",
        "PIECEWISE": "quarantined",
    }


def test_each_failing_variant_is_warned_of_only_once():
    model = Model()
    model.wrong = ("a", "b")
    runner = captured(model, variants=("a", "b"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for variant in ("a", "b", "a", "b"):
            step(runner, 4, variant)
    assert len(caught) == 2


def test_the_quarantine_warning_points_to_the_line_that_called_the_runner():
    model = Model()
    model.wrong = (None,)
    runner = captured(model)
    with pytest.warns(GraphQuarantinedWarning) as caught:
        step(runner, 4)
    assert caught[0].filename == __file__


def test_the_warning_of_a_changed_setting_points_to_the_line_that_called_the_runner():
    runner = captured(Model())
    torch.set_default_dtype(torch.float64)
    with pytest.warns(GraphQuarantinedWarning) as caught:
        runner(x=rows(4))
    assert caught[0].filename == __file__


def counting_state(model: SimpleNamespace) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        model.state.add_(1)
        model.calls += 1
        noise = torch.rand(1) + random.random() + float(np.random.rand())
        return x + (noise - noise) * 0 + (5.0 if model.capturing else 0.0)

    return forward


def stateful(level: str = "capture", **more: Any) -> tuple[Any, GraphRunner]:
    model = SimpleNamespace(state=torch.zeros(2), calls=0, capturing=True)
    runner = runner_of(counting_state(model), level, **more)
    return model, runner


def drawn() -> list[object]:
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), (kind, keys.tolist(), *rest)]


@pytest.mark.parametrize("level", LEVELS[1:])
def test_with_strict_a_failed_trial_raises_and_the_step_runs_at_most_once(level):
    model, runner = stateful(level, options={"strict": True})
    runner.capture()
    model.capturing = False
    with pytest.raises(VerificationError, match="differs from eager"):
        runner(x=rows(4))
    assert model.state.tolist() in ([0.0, 0.0], [1.0, 1.0])
    with pytest.raises(VerificationError, match=r"in quarantine\n.*differs from eager"):
        runner(x=rows(4))
    with pytest.raises(VerificationError, match="in quarantine"):
        runner(x=rows(1))


def test_with_strict_a_step_that_raises_leaves_state_unchanged():
    model, runner = stateful(options={"strict": True})
    runner.capture()
    model.capturing = False
    before = [*drawn(), model.calls, model.state.tolist()]
    with pytest.raises(VerificationError):
        runner(x=rows(4))
    assert [*drawn(), model.calls, model.state.tolist()] == before


def test_an_error_of_the_forward_in_a_trial_is_raised_and_state_restored():
    model, runner = stateful()
    model.capturing = False
    runner.capture()
    calls = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        raise KeyError("the replay's")

    before = [*drawn(), model.calls, model.state.tolist()]
    padded = runner.graphs.steps[1]
    call, padded.call = padded.call, failing
    with pytest.raises(KeyError, match="the replay's"):
        runner(x=rows(4))
    assert calls == [1]
    assert [*drawn(), model.calls, model.state.tolist()] == before
    padded.call = call
    runner(x=rows(4))
    assert model.state.tolist() == [1.0, 1.0]


class FillsTheDevice(torch.nn.Module):
    """A forward for whose eager runs there is no memory while a file says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2))
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.add_(1)
        if CAPTURING.exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x * self.scale


def without_memory(**options: Any) -> tuple[FillsTheDevice, GraphRunner]:
    model = FillsTheDevice()
    runner = runner_of(model, mode=options.pop("mode", "FULL"), **options)
    runner.capture()
    CAPTURING.touch()
    return model, runner


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("level", ["capture", "always"])
def test_a_first_step_without_memory_for_a_trial_is_replayed_with_one_warning(level, mode):
    model, runner = without_memory(level=level, mode=mode)
    with pytest.warns(GraphMemoryWarning, match="no memory was left for a trial") as warned:
        step(runner, 3)
    assert len(warned) == 1 and "2.00 GiB" in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for served in range(2, 30):
            step(runner, served % 8 + 1)
            assert runner.last_dispatch.reason is Reason.HIT
            assert model.state.tolist() == [served] * 2
        assert set(trials(runner).values()) == {0}
        of_four = next(
            each for each in runner.report().trust.trials if each.descriptor.num_tokens == 4
        )
        assert (of_four.status, of_four.notes) == ("untried", ("no memory was left for a trial",))
        assert any("never checked" in str(each) for each in findings(runner.report()))
        CAPTURING.unlink()  # Memory came back: a later step is tried.
        for _ in range(200):
            step(runner, 3)
    tried = {each.descriptor.num_tokens: each.status for each in runner.report().trust.trials}
    assert tried[4] == "tried"
    assert not any("never checked" in str(each) for each in findings(runner.report()))


@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphMemoryWarning")
def test_trials_become_rarer_while_there_is_no_memory(monkeypatch):
    _, runner = without_memory()
    attempts, real = [], RunnerChecks._try

    def counted(*args: Any, **more: Any) -> Any:
        attempts.append(number)
        return real(*args, **more)

    monkeypatch.setattr(RunnerChecks, "_try", counted)
    for number in range(400):  # noqa: B007 - `counted` reads it
        step(runner, 4)
    assert attempts == [0, 65, 194]


def test_among_ranks_a_trial_without_memory_raises(monkeypatch):
    """The collectives of a replay would meet those of the other ranks' trials."""
    model, runner = without_memory()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(torch.OutOfMemoryError):
        step(runner, 4)
    assert model.state.tolist() == [0, 0]


def test_a_change_by_the_host_without_memory_for_a_trial_quarantines_the_graph():
    model, runner = without_memory()
    with pytest.warns(GraphMemoryWarning):
        step(runner, 4)
    CAPTURING.unlink()
    for _ in range(80):
        step(runner, 4)
    CAPTURING.touch()
    model.scale = 3.0
    # No memory for the eager step either.
    with (
        pytest.warns(GraphQuarantinedWarning, match="it cannot be tried: CUDA out of memory"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        go_on(runner)
    CAPTURING.unlink()
    assert torch.equal(runner(x=rows(4)), rows(4) * 3)
    assert runner.last_dispatch.reason is Reason.QUARANTINED


@pytest.mark.parametrize("ends", ["recapture", "release"])
def test_recapture_and_release_end_a_quarantine(ends):
    model, runner = quarantined()
    if ends == "recapture":
        runner.recapture()
        assert {each.status for each in runner.report().trust.trials} == {"untried"}
    else:
        runner.release()
        assert runner.report().trust.trials == ()
        step(runner, 4)
        assert runner.last_dispatch.reason is Reason.NOT_CAPTURED
        runner.capture()
    assert not model.capturing
    for count in SERVED:
        step(runner, count)
        assert runner.last_dispatch.reason is Reason.HIT
    assert trials(runner) == TRIED["capture"]


def test_a_second_capture_call_does_not_end_a_quarantine():
    _, runner = quarantined()
    runner.capture()
    step(runner, 4)
    assert runner.last_dispatch.reason is Reason.QUARANTINED


def test_release_empties_the_report_of_tensors_that_graphs_read():
    runner = captured(Model())
    assert runner.report().trust.reads
    runner.release()
    assert runner.report().trust.reads == ()


# Settings and moved weights ----------------------------------------------------------------------


def test_steps_run_eagerly_while_a_setting_differs_and_replay_once_the_setting_is_back():
    runner = captured(Model())
    step(runner, 4)
    torch.set_default_dtype(torch.float64)
    with pytest.warns(GraphQuarantinedWarning, match="default dtype: torch.float64"):
        step(runner, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(runner, 3)
        assert runner.last_dispatch.reason is Reason.SETTINGS_CHANGED
        torch.set_default_dtype(torch.float32)
        step(runner, 4)
        assert runner.last_dispatch.reason is Reason.HIT
        torch.set_default_dtype(torch.float64)
        step(runner, 4)
    assert counts(runner) == {Reason.HIT: 2, Reason.SETTINGS_CHANGED: 3}
    assert {each.status for each in runner.report().trust.trials} <= {"tried", "untried"}


def test_with_strict_a_step_under_other_settings_raises():
    runner = captured(Model(), options={"strict": True})
    torch.set_default_dtype(torch.float64)
    for _ in range(2):
        with pytest.raises(VerificationError, match="default dtype"):
            step(runner, 4)
    torch.set_default_dtype(torch.float32)
    step(runner, 4)


def test_recapture_compares_later_steps_with_the_current_settings():
    runner = captured(Model())
    torch.set_default_dtype(torch.float64)
    runner.recapture()
    step(runner, 4)
    assert runner.last_dispatch.reason is Reason.HIT


def test_without_checks_settings_are_not_compared():
    runner = captured(Model(), "off")
    torch.set_default_dtype(torch.float64)
    step(runner, 4)
    assert runner.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("strict", [False, True])
def test_a_weight_that_moved_quarantines_all_graphs(strict):
    model = Model()
    runner = captured(model, options={"strict": strict})
    for count in SERVED:
        step(runner, count)
    model.weight = torch.eye(WIDTH)
    if strict:
        with pytest.raises(StaleInputError, match="weight"):
            go_on(runner)
        return
    with pytest.warns(GraphQuarantinedWarning, match=r"self\.weight"):
        go_on(runner)
    assert runner.last_dispatch.reason is Reason.QUARANTINED
    assert {each.status for each in runner.report().trust.trials} == {"quarantined"}
    runner.recapture()
    step(runner, 4)
    assert runner.last_dispatch.reason is Reason.HIT


def test_a_tensor_that_graphs_do_not_read_may_be_replaced():
    model = Model(unread=torch.ones(2))
    runner = captured(model)
    for count in SERVED:
        step(runner, count)
    model.unread = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_on(runner)
        runner.weights_changed()
    assert runner.last_dispatch.reason is Reason.HIT


def test_a_replaced_object_that_holds_the_same_tensors_keeps_graphs_replaying():
    holder = SimpleNamespace(inner=SimpleNamespace(weight=torch.ones(WIDTH)))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 * holder.inner.weight

    runner = captured(forward)
    for count in SERVED:
        step(runner, count)
    holder.inner = SimpleNamespace(weight=holder.inner.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(32):
            step(runner, 4)
            assert runner.last_dispatch.reason is Reason.HIT
        # The first of them has noted where everything is now: the others are simply replayed.
        assert all(runner._engine.is_clear(runner.last_dispatch.slot, Batch(4)) for _ in range(8))
    holder.inner.weight = torch.ones(WIDTH)
    with pytest.warns(GraphQuarantinedWarning, match="weight"):
        go_on(runner)


def test_a_changed_number_of_threads_is_checked_at_only_the_next_step():
    runner, threads = captured(lambda x: x * 2), torch.get_num_threads()
    for count in SERVED:
        step(runner, count)
    try:
        torch.set_num_threads(threads + 1)
        slot = runner.last_dispatch.slot
        assert not runner._engine.is_clear(slot, Batch(4))
        step(runner, 4)
        assert runner.last_dispatch.reason is Reason.HIT
        assert all(runner._engine.is_clear(slot, Batch(4)) for _ in range(8))
    finally:
        torch.set_num_threads(threads)


# Examples ----------------------------------------------------------------------------------------


def example_of(batch: Batch, generator: torch.Generator) -> Example:
    return Example({"x": torch.randn(batch.num_tokens, WIDTH, generator=generator)})


class Examples:
    """Makes steps, and keeps a list of their batches."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, batch: Batch, generator: torch.Generator) -> Example:
        self.batches.append(batch)
        made = example_of(batch, generator)
        self.values.append(made.values["x"])
        return made

    @property
    def tokens(self) -> list[int]:
        return [batch.num_tokens for batch in self.batches]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("off", []),
        ("capture", [7, 1]),
        ("first", [7, 3, 1, 1]),
        ("sample", [7, 3, 1, 1]),
        ("always", [7, 3, 1, 1]),
    ],
)
def test_examples_are_tried_in_capture_the_largest_first_with_padding(level, expected):
    made = Examples()
    runner = captured(Model(), level, host=Host(example=made))
    assert made.tokens == expected
    assert {n: s for n, s in trials(runner).items() if s} == dict.fromkeys(
        [8, 4, 2, 1][:: 1 if len(expected) == 4 else 3][: len(expected)], 1
    )
    assert counts(runner) == {}


def test_two_runners_try_equal_example_batches_whatever_the_random_seed():
    first, second = Examples(), Examples()
    captured(Model(), host=Host(example=first))
    torch.manual_seed(99)
    captured(Model(), host=Host(example=second))
    assert all(map(torch.equal, first.values, second.values))


def test_examples_of_each_variant_and_mode_are_tried_in_capture():
    made = Examples()
    captured(Model(), host=Host(example=made), variants=("a", "b"), sizes=(2, 8))
    assert sorted((b.variant, b.num_tokens) for b in made.batches) == [
        *(("a", 1), ("a", 7), ("b", 1), ("b", 7))
    ]
    made = Examples()
    captured(Model(), host=Host(example=made), mode="FULL_AND_PIECEWISE", sizes=(2, 8))
    assert sorted((b.query_len or 0, b.num_tokens) for b in made.batches) == [
        *((0, 1), (0, 7), (1, 1), (1, 7))
    ]


def test_example_batches_of_two_token_queries_have_only_whole_requests():
    made = Examples()
    captured(Model(), host=Host(example=made), query_lens=(2,), sizes=(2, 4, 8))
    assert [(b.num_tokens, b.num_reqs, b.query_len) for b in made.batches] in (
        [(6, 3, 2), (2, 1, 2)],
        [(7, 7, None), (1, 1, None)],
    )
    made = Examples()
    more = {"mode": "FULL_AND_PIECEWISE", "sizes": (2, 4, 8), "query_lens": (2,)}
    captured(Model(), host=Host(example=made), **more)
    decode = [(b.num_tokens, b.num_reqs) for b in made.batches if b.query_len == 2]
    assert decode == [(6, 3), (2, 1)]


def test_steps_are_not_tried_where_examples_were_tried_in_capture():
    runner = captured(Model(), host=Host(example=example_of))
    before = trials(runner)
    for count in SERVED:
        step(runner, count)
    assert trials(runner) == before


def test_examples_leave_state_generators_and_numbers_as_they_were():
    model, runner = stateful(host=Host(example=example_of))
    model.capturing = False
    before = [*drawn(), model.calls, model.state.tolist()]
    runner.capture()
    assert sum(trials(runner).values()) == 2
    assert [*drawn(), model.calls, model.state.tolist()] == before


def position(model: SimpleNamespace) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        model.calls += 1
        model.state.add_(torch.rand(2))
        return x + model.calls

    return forward


@pytest.mark.parametrize("strict", [False, True])
def test_a_failing_example_raises_at_capture_and_leaves_no_graphs(strict):
    model = SimpleNamespace(state=torch.zeros(2), calls=0)
    options = {"strict": strict}
    runner = runner_of(position(model), host=Host(example=example_of), options=options)
    before = [*drawn(), model.calls, model.state.tolist()]
    with pytest.raises(PythonStateError, match="calls = 0, then 1"):
        runner.capture()
    assert [*drawn(), model.calls, model.state.tolist()] == before
    report = runner.report()
    assert report.graphs == () and report.trust.trials == () and report.trust.reads == ()
    runner(x=rows(4)) if not strict else None
    if not strict:
        assert runner.last_dispatch.reason is Reason.NOT_CAPTURED


@pytest.mark.parametrize(
    ("made", "error", "text"),
    [
        ({"x": rows(7)}, InvalidOptionError, "dict"),
        (None, InvalidOptionError, "NoneType"),
        (Example({}), InvalidInputError, "x"),
        (Example({"y": rows(7)}), InvalidInputError, "y"),
        (Example({"x": rows(7).double()}), InvalidInputError, "float64"),
        (Example({"x": rows(3)}), InvalidInputError, "3"),
        (Example({"x": rows(7), "y": rows(7)}), InvalidInputError, "y"),
    ],
)
def test_an_example_with_wrong_inputs_is_named_and_leaves_no_graphs(made, error, text):
    runner = runner_of(Model(), host=Host(example=lambda batch, generator: made))
    with pytest.raises(error, match=text):
        runner.capture()
    assert runner.report().graphs == ()
    step(runner, 4)
    assert runner.last_dispatch.reason is Reason.NOT_CAPTURED


def test_an_example_function_that_raises_leaves_no_graphs():
    def make(batch: Batch, generator: torch.Generator) -> Example:
        raise ZeroDivisionError("the host's")

    runner = runner_of(Model(), host=Host(example=make))
    with pytest.raises(ZeroDivisionError, match="the host's"):
        runner.capture()
    assert runner.report().graphs == ()


@pytest.mark.parametrize("made", [3, "step", example_of(Batch(1), torch.Generator())])
def test_an_example_that_is_not_callable_is_refused_at_construction(made):
    with pytest.raises(InvalidOptionError, match="the argument 'example'"):
        Host(example=made)


# Live indices and rows ---------------------------------------------------------------------------

CACHED = {
    "x": X,
    "slots": InputSpec(torch.int64, ("tokens",), pad=0, index=True),
}


def caching(cache: torch.Tensor) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, slots, x)
        return cache[slots] * 2

    return forward


@pytest.mark.parametrize("level", ["always"])
def test_a_live_token_with_the_cache_row_of_padding_is_found(level):
    runner = captured(caching(torch.zeros(16, WIDTH)), level, inputs=CACHED)
    for count in (4, 2, 8, 1):
        runner(x=rows(count), slots=torch.arange(count) + 1)
    with pytest.warns(GraphQuarantinedWarning, match="padding"):
        runner(x=rows(3), slots=torch.tensor([4, 3, 0]))


@pytest.mark.parametrize("pad", [-1, 15])
def test_a_live_index_unlike_that_of_padding_passes_level_always(pad):
    spec = InputSpec(torch.int64, ("tokens",), pad=pad, index=True)
    cache = torch.zeros(16, WIDTH)

    def forward(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, slots % 16, x)
        return cache[slots] * 2

    runner = captured(forward, "always", inputs={"x": X, "slots": spec})
    out = runner(x=rows(3), slots=torch.tensor([0, 1, 2]))
    assert torch.equal(out, rows(3) * 2)


def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    return x + x.sum(0)


@pytest.mark.parametrize(("pad", "fails"), [(0.0, False), (1.0, True)])
def test_padding_rows_hold_the_declared_pad_value_in_a_trial(pad, fails):
    x = InputSpec(torch.float32, ("tokens", WIDTH), pad=pad)
    runner = captured(sum_of_rows, inputs={"x": x})
    expected = sum_of_rows(rows(3))
    if not fails:
        torch.testing.assert_close(runner(x=rows(3)), expected)
        assert runner.last_dispatch.reason is Reason.HIT
        return
    with pytest.warns(GraphQuarantinedWarning, match="without padding"):
        out = runner(x=rows(3))
    assert torch.equal(out, expected)


def test_state_within_the_limit_of_a_capture_is_within_that_of_a_trial():
    cache = torch.zeros(64, WIDTH)
    limit = 3 * 8 * WIDTH * 4  # of the rows of the largest graph, three times
    runner = captured(caching(cache), inputs=CACHED, options={"state_limit_bytes": limit})
    runner(x=rows(7), slots=torch.arange(7) + 1)
    assert runner.last_dispatch.reason is Reason.HIT


def test_a_lazily_captured_graph_joins_the_quarantine_of_its_variant():
    scale = [1.0]
    runner = GraphRunner(
        lambda x: x * scale[0],
        inputs={"x": X},
        outputs=("tokens", WIDTH),
        mode="FULL",
        sizes=[2, 4, 8],
        platform="cpu",
        options=GraphOptions(lazy=True, check="always"),
    )
    for count in (8, 7, 2, 1):
        runner(x=rows(count))
    scale[0] = 2.0
    with pytest.warns(GraphQuarantinedWarning):
        runner(x=rows(8))
    checks = runner.graphs.checks
    checks._levels -= {"sample", "always"}
    checks._note_pending()
    runner(x=rows(4))
    assert len(runner.report().graphs) == 3
    scale[0] = 3.0
    assert torch.equal(runner(x=rows(4)), rows(4) * 3)


def test_a_step_in_quarantine_does_not_search_the_forward_for_tensors(monkeypatch):
    weights = {"w": torch.ones(WIDTH)}
    runner = captured(lambda x: x * weights["w"])
    for count in (8, 7, 1, 4):
        runner(x=rows(count))
    weights["w"] = torch.full((WIDTH,), 2.0)

    def until_it_is_seen() -> None:
        for _ in range(20):
            runner(x=rows(4))

    with pytest.warns(GraphQuarantinedWarning, match="the graphs still read the old ones"):
        until_it_is_seen()
    monkeypatch.setattr(runner.graphs.checks.reads, "moved", lambda: pytest.fail("walked"))
    assert torch.equal(runner(x=rows(4)), rows(4) * 2)
