"""What a runner reports of what its graphs read and of whether they were tried."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt import Example, GraphOptions, GraphRunner, Host, InputSpec
from graphrt.core.base.errors import GraphQuarantinedWarning, StateTooLargeError
from graphrt.core.runner.report import TrustReport
from graphrt.trust.reads import ReadSet, TensorUse
from graphrt.trust.watching.watch import Watch

WIDTH = 4
X = InputSpec(torch.float32, ("tokens", WIDTH))


def captured(forward: Callable[..., Any], level: str = "capture", **more: Any) -> GraphRunner:
    options = {"check": level, **more.pop("options", {})}
    runner = GraphRunner(
        forward,
        inputs=more.pop("inputs", {"x": X}),
        sizes=[2, 4],
        mode="FULL",
        outputs=more.pop("outputs", ("tokens", WIDTH)),
        platform="cpu",
        options=GraphOptions(**options),
        **more,
    )
    runner.capture()
    return runner


def reads(runner: GraphRunner) -> dict[str, TensorUse]:
    table = runner.report().trust.reads
    named = {use.name: use for use in table}
    assert len(named) == len(table)
    return named


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("state", torch.zeros(WIDTH, dtype=torch.float64))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.table = torch.ones(100, WIDTH)[10:12]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.add_(1)
        return self.linear(x) + self.table[0]


# What is read ------------------------------------------------------------------------------------


def test_each_tensor_read_or_written_has_a_report_line_with_name_and_bytes():
    found = reads(captured(Model()))
    assert found.keys() == {"model.linear.weight", "model.state", "model.table"}
    weight, state, table = (found[f"model.{n}"] for n in ("linear.weight", "state", "table"))
    assert (weight.dtype, weight.shape, weight.bytes) == (torch.float32, (4, 4), 64)
    assert (state.dtype, state.bytes) == (torch.float64, 32)
    # The whole storage: what a view keeps alive.
    assert table.bytes == 100 * WIDTH * 4
    assert (weight.written, state.written, table.written) == (False, True, False)
    assert "test_report.py" in weight.source and "self.linear(x)" in weight.source
    assert not any(use.moved for use in found.values())


def test_a_weight_read_by_graphs_of_all_sizes_has_only_a_single_line():
    model = SimpleNamespace(weight=torch.ones(WIDTH))
    runner = captured(lambda x: x * model.weight + model.weight)
    assert len(runner.report().trust.reads) == 1


@pytest.mark.parametrize("level", ["off", "capture", "always"])
def test_with_checks_off_the_report_has_no_reads_and_no_trials(level):
    trust = captured(Model(), level).report().trust
    assert bool(trust.reads) is (level != "off")
    assert bool(trust.trials) is (level != "off")
    assert trust.only_graphs_bytes == 0


def test_the_report_of_a_forward_without_weights_has_no_reads():
    assert captured(lambda x: x * 2).report().trust.reads == ()


def test_a_tensor_with_several_names_is_reported_by_the_shortest():
    model = SimpleNamespace(weight=torch.ones(WIDTH))
    model.a_longer_name = model.weight
    runner = captured(lambda x: x * model.weight * model.a_longer_name)
    [use] = runner.report().trust.reads
    assert use.name.endswith("model.weight")


def test_a_tensor_unreachable_from_the_forward_is_reported_without_a_name():
    def forever(weight: torch.Tensor) -> Iterator[torch.Tensor]:
        while True:
            yield weight

    made = forever(torch.ones(WIDTH))
    next(made)
    runner = captured(lambda x: x * next(made))
    [use] = runner.report().trust.reads
    assert use.name == "" and use.bytes == 16 and "next(made)" in use.source


def noted(forward: Callable[..., Any], *runs: Callable[[], Any]) -> tuple[TensorUse, ...]:
    """What `ReadSet` says after these watched runs, each of one kind of graph."""
    found = ReadSet(forward)
    for run in runs:
        watch = Watch()
        watch.around(run)
        found.note(watch)
    found.settle()
    return found.table()


def test_a_tensor_that_a_run_drops_is_not_kept_alive():
    held = [torch.ones(WIDTH), torch.ones(WIDTH)]

    def forward() -> torch.Tensor:
        return held[0] * held.pop().sum()

    [use] = noted(forward, forward)
    assert use.name == "closure held[0]"


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_state_written_by_any_graph_is_reported_as_written(writes):
    model = SimpleNamespace(state=torch.zeros(WIDTH))
    read, write = (lambda: model.state * 1), (lambda: model.state.add_(1))
    runs = [write if place == writes else read for place in range(2)]
    [use] = noted(lambda: model.state, *runs)
    assert use.written is (writes < 2)


# What moved --------------------------------------------------------------------------------------


def replace(model: Model) -> None:
    model.linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def other_data(model: Model) -> None:
    model.linear.weight.data = torch.ones(WIDTH, WIDTH)


def load_assigned(model: Model) -> None:
    state = {name: value.detach().clone() for name, value in model.linear.state_dict().items()}
    model.linear.load_state_dict(state, assign=True)


def whole_layer(model: Model) -> None:
    model.linear = nn.Linear(WIDTH, WIDTH, bias=False)


def delete(model: Model) -> None:
    del model.linear.weight


@pytest.mark.parametrize("change", [replace, other_data, load_assigned, whole_layer, delete])
def test_a_replaced_weight_is_reported_as_moved_and_held_by_graphs_only(change):
    model = Model()
    runner = captured(model)
    change(model)
    found = reads(runner)
    assert found["model.linear.weight"].moved
    assert not found["model.state"].moved and not found["model.table"].moved
    assert found["model.linear.weight"].bytes == 64
    assert runner.report().trust.only_graphs_bytes == 64


def test_a_weight_written_in_place_is_not_reported_as_moved():
    model = Model()
    runner = captured(model)
    with torch.no_grad():
        model.linear.weight.copy_(torch.ones(WIDTH, WIDTH))
    model.linear.weight = model.linear.weight
    assert runner.report().trust.only_graphs_bytes == 0


def test_a_tied_weight_has_moved_only_once_both_names_are_replaced():
    model = SimpleNamespace(a=torch.ones(WIDTH))
    model.tied = model.a
    runner = captured(lambda x: x * model.a * model.tied)
    model.a = torch.ones(WIDTH)
    assert [use.moved for use in runner.report().trust.reads] == [False]
    model.tied = torch.ones(WIDTH)
    assert [use.moved for use in runner.report().trust.reads] == [True]


def test_a_replaced_weight_that_is_set_back_is_not_reported_as_moved():
    model = SimpleNamespace(weight=torch.ones(WIDTH))
    runner = captured(lambda x: x * model.weight)
    held, model.weight = model.weight, torch.ones(WIDTH)
    assert runner.report().trust.only_graphs_bytes == 16
    model.weight = held
    assert runner.report().trust.only_graphs_bytes == 0


def test_a_tensor_that_graphs_read_stays_alive_until_release():
    model = SimpleNamespace(weight=torch.ones(WIDTH))
    runner = captured(lambda x: x * model.weight)
    storage = StorageWeakRef(model.weight.untyped_storage())
    model.weight = torch.zeros(WIDTH)
    gc.collect()
    assert not storage.expired()
    assert runner.report().trust.only_graphs_bytes == 16
    runner.release()
    gc.collect()
    assert storage.expired()
    assert runner.report().trust == TrustReport()


def test_after_a_recapture_the_report_names_the_new_weight():
    model = SimpleNamespace(weight=torch.ones(WIDTH))
    runner = captured(lambda x: x * model.weight)
    model.weight = torch.zeros(2 * WIDTH)[:WIDTH]
    runner.recapture()
    [use] = runner.report().trust.reads
    assert use.bytes == 32 and not use.moved


# What was tried ----------------------------------------------------------------------------------


def statuses(runner: GraphRunner) -> dict[int, tuple[str, int]]:
    trials = runner.report().trust.trials
    return {each.descriptor.num_tokens: (each.status, each.steps) for each in trials}


def test_a_graph_is_reported_untried_then_tried_then_quarantined():
    model = SimpleNamespace(factor=2.0)
    runner = captured(lambda x: x * model.factor, "always")
    assert statuses(runner) == {2: ("untried", 0), 4: ("untried", 0)}
    runner(x=torch.ones(4, WIDTH))
    assert statuses(runner) == {2: ("untried", 0), 4: ("tried", 1)}
    assert all(each.failure is None for each in runner.report().trust.trials)
    model.factor = 3.0
    with pytest.warns(GraphQuarantinedWarning):
        runner(x=torch.ones(4, WIDTH))
    assert statuses(runner) == {2: ("quarantined", 0), 4: ("quarantined", 2)}
    failures = {each.failure for each in runner.report().trust.trials}
    assert len(failures) == 1 and "differs from eager" in failures.pop()


def test_with_an_example_graphs_are_reported_tried_before_the_first_step():
    host = Host(example=lambda batch, _: Example({"x": torch.ones(batch.num_tokens, WIDTH)}))
    runner = captured(lambda x: x * 2, host=host)
    assert statuses(runner) == {2: ("tried", 1), 4: ("tried", 1)}


def test_a_nondeterministic_forward_is_noted_without_repeated_notes():
    noise = itertools.cycle([0.0, 5e-7, 1e-6])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + next(noise)

    runner = captured(forward, "always")
    for _ in range(12):
        runner(x=torch.ones(4, WIDTH))
    [record] = [each for each in runner.report().trust.trials if each.steps]
    assert record.steps == 12 and record.status == "tried" and not record.deterministic
    assert 1 <= len(record.notes) <= 8 and len(set(record.notes)) == len(record.notes)


def test_an_earlier_report_keeps_its_reads_after_a_step():
    runner = captured(lambda x: x * 2, "always")
    before = runner.report().trust
    assert before.unknown is None  # nobody has asked a graph of the CPU for pointers
    runner(x=torch.ones(4, WIDTH))
    assert runner.report().trust.trials[0].steps == 1
    assert before.reads == ()


def test_an_earlier_report_keeps_its_trial_statuses_after_a_step():
    runner = captured(lambda x: x * 2, "always")
    before = runner.report().trust.trials
    runner(x=torch.ones(4, WIDTH))
    assert {each.status for each in before} == {"untried"}


# What only padding protects, and what padding may change -----------------------------------------

SLOTS = InputSpec(torch.int64, ("tokens",), pad=3, index=True)


def putting(cache: torch.Tensor) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache.put_(slots, x[:, 0])
        return x * 2

    return forward


def test_state_too_large_to_save_is_reported_with_the_rows_that_padding_wrote():
    options = {"state_limit_bytes": 32}
    inputs = {"x": X, "slots": SLOTS}
    cache = torch.full((16,), 7.0)
    runner = captured(putting(cache), options=options, inputs=inputs)
    [line] = runner.report().trust.protected
    assert line.startswith("torch.float32 (16,), used at ") and "test_report.py" in line
    assert line.endswith(": rows 3 written by padding")
    assert cache.tolist() == [7.0] * 3 + [0.0] + [7.0] * 12
    runner.release()
    assert runner.report().trust.protected == ()


def test_state_small_enough_to_save_is_not_reported_as_protected_by_padding():
    cache = torch.full((16,), 7.0)
    runner = captured(putting(cache), inputs={"x": X, "slots": SLOTS})
    assert runner.report().trust.protected == ()
    assert cache.tolist() == [7.0] * 16


def test_a_write_to_cache_rows_outside_the_padding_is_refused():
    forward = putting(torch.full((16,), 7.0))
    options, inputs = {"state_limit_bytes": 32}, {"x": X, "slots": SLOTS}
    with pytest.raises(StateTooLargeError, match=r"rows 4\n.*padding of index inputs \(\[3\]\)"):
        captured(lambda x, slots: forward(x, slots + 1), options=options, inputs=inputs)


@pytest.mark.parametrize("level", ["off", "capture"])
@pytest.mark.parametrize("mixes", [False, True])
def test_a_report_says_whether_rows_mix_by_design(mixes, level):
    host = Host(mixes_rows=mixes)
    assert captured(lambda x: x - x.mean(), level, host=host).report().trust.mixes_rows is mixes
