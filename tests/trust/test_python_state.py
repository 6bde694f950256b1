"""Python values that padded, unpadded and eager steps leave: compared, put back, tried again."""

from __future__ import annotations

import array
import ctypes
import time
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphrt import (
    Batch,
    Example,
    GraphOptions,
    GraphRunner,
    Host,
    InputSpec,
    Reason,
    eager_break,
)
from graphrt.errors import GraphQuarantinedWarning, PythonStateError

WIDTH = 4
X = InputSpec(torch.float32, ("tokens", WIDTH))
LEVELS = ("capture", "first", "sample", "always")


def runner_of(forward: Callable[..., Any], level: str = "capture", **more: Any) -> GraphRunner:
    options = GraphOptions(check=level, **more.pop("options", {}))
    arguments = {"mode": "FULL", "inputs": {"x": X}, "sizes": [4, 8], "platform": "cpu", **more}
    runner = GraphRunner(forward, **arguments, options=options)
    runner.capture()
    return runner


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def served(
    make: Callable[[], Callable[..., Any]],
    counts: tuple[int, ...] = (4, 3, 2, 8, 5, 4, 1),
    level: str = "capture",
    **more: Any,
) -> tuple[bool, list[Reason], list[str], GraphRunner]:
    """Whether every step gave what the twin gave, how they ran, and what was said."""
    twin = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner = runner_of(make(), level, **more)
        right, ran = True, []
        for seed, count in enumerate(counts):
            x = rows(count, seed)
            right &= torch.allclose(runner(x=x.clone()), twin(x.clone()), rtol=1e-4, atol=1e-4)
            assert runner.last_dispatch is not None
            ran.append(runner.last_dispatch.reason)
    said = [f"{each.category.__name__}: {each.message}" for each in caught]
    return right, ran, said, runner


# State of eager parts ----------------------------------------------------------------------------


@dataclass
class Stats:
    """What a host keeps beside its model."""

    seen: int = 0


class Frozen(SimpleNamespace):
    """Holds a frozen record that each step replaces."""


def part_of(advance: Callable[[int], float]) -> Callable[..., Any]:
    """A forward whose eager part adds what `advance(rows)` says of all rows so far."""

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        return x + advance(x.shape[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return part(x * 2) + 1

    return forward


def attribute() -> Callable[[int], float]:
    held = SimpleNamespace(seen=0)

    def advance(count: int) -> float:
        held.seen += count
        return float(held.seen)

    return advance


def closure() -> Callable[[int], float]:
    seen = 0

    def advance(count: int) -> float:
        nonlocal seen
        seen += count
        return float(seen)

    return advance


def listed() -> Callable[[int], float]:
    log: list[int] = []

    def advance(count: int) -> float:
        log.append(count)
        return float(sum(log))

    return advance


def nested() -> Callable[[int], float]:
    log: list[list[int]] = [[], []]

    def advance(count: int) -> float:
        log[0].append(count)
        log.append([count, count])
        return float(sum(map(sum, log)))

    return advance


def keyed() -> Callable[[int], float]:
    log: dict[str, int] = {"seen": 0}

    def advance(count: int) -> float:
        log["seen"] += count
        return float(log["seen"])

    return advance


def counted() -> Callable[[int], float]:
    log: Counter[int] = Counter()

    def advance(count: int) -> float:
        log[count] += 1
        return float(sum(key * many for key, many in log.items()))

    return advance


def defaulted() -> Callable[[int], float]:
    log: defaultdict[int, int] = defaultdict(int)

    def advance(count: int) -> float:
        log[count] += 1
        return float(sum(key * many for key, many in log.items()))

    return advance


def ordered() -> Callable[[int], float]:
    log: OrderedDict[int, int] = OrderedDict()

    def advance(count: int) -> float:
        log[len(log)] = count
        return float(sum(log.values()))

    return advance


def queued() -> Callable[[int], float]:
    log: deque[int] = deque(maxlen=3)

    def advance(count: int) -> float:
        log.append(count)
        return float(sum(log))

    return advance


def in_a_set() -> Callable[[int], float]:
    log: set[int] = set()

    def advance(count: int) -> float:
        log.add(count)
        return float(sum(log))

    return advance


def dataclassed() -> Callable[[int], float]:
    stats = Stats()

    def advance(count: int) -> float:
        stats.seen += count
        return float(stats.seen)

    return advance


def replaced() -> Callable[[int], float]:
    held = SimpleNamespace(stats=Stats())

    def advance(count: int) -> float:
        held.stats = replace(held.stats, seen=held.stats.seen + count)
        return float(held.stats.seen)

    return advance


def list_replaced() -> Callable[[int], float]:
    held = SimpleNamespace(log=[])

    def advance(count: int) -> float:
        held.log = [*held.log, count]
        return float(sum(held.log))

    return advance


def tupled() -> Callable[[int], float]:
    held = SimpleNamespace(log=(0, 0))

    def advance(count: int) -> float:
        held.log = (held.log[0] + count, 1)
        return float(held.log[0])

    return advance


def in_numpy() -> Callable[[int], float]:
    log = np.zeros(2, dtype=np.int64)

    def advance(count: int) -> float:
        log[0] += count
        return float(log[0])

    return advance


def in_a_buffer(make: Callable[[], Any]) -> Callable[[int], float]:
    log = make()

    def advance(count: int) -> float:
        log[0] += count
        return float(log[0])

    return advance


def in_a_bytearray() -> Callable[[int], float]:
    return in_a_buffer(lambda: bytearray(2))


def in_an_array() -> Callable[[int], float]:
    return in_a_buffer(lambda: array.array("l", [0, 0]))


def in_ctypes() -> Callable[[int], float]:
    return in_a_buffer(ctypes.c_long * 2)


def by_a_second_number() -> Callable[[int], float]:
    held = SimpleNamespace(seen=0, before=0)

    def advance(count: int) -> float:
        held.before = held.seen
        held.seen += count
        return float(held.before)

    return advance


def at_a_threshold() -> Callable[[int], float]:
    held = SimpleNamespace(seen=0)

    def advance(count: int) -> float:
        held.seen += count
        return 1.0 if held.seen > 20 else 0.0

    return advance


SEEN = 0


def in_a_global() -> Callable[[int], float]:
    global SEEN
    SEEN = 0

    def advance(count: int) -> float:
        global SEEN
        SEEN += count
        return float(SEEN)

    return advance


HOLDERS = (
    attribute,
    closure,
    listed,
    nested,
    keyed,
    counted,
    defaulted,
    ordered,
    queued,
    in_a_set,
    dataclassed,
    replaced,
    list_replaced,
    tupled,
    in_numpy,
    in_a_bytearray,
    in_an_array,
    in_ctypes,
    by_a_second_number,
    at_a_threshold,
)


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda each: each.__name__)
def test_python_state_that_padding_advances_and_that_reaches_an_output_is_found(holder):
    right, ran, said, _ = served(lambda: part_of(holder()), mode="PIECEWISE")
    assert right
    assert ran[0] is Reason.HIT and set(ran[1:]) == {Reason.QUARANTINED}
    assert len(said) == 1 and "RowsMixedError" not in said[0] and "Python state" in said[0]


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_finds_python_state_that_padding_advances(level):
    right, ran, said, _ = served(lambda: part_of(attribute()), level=level, mode="PIECEWISE")
    assert right and ran[-1] is Reason.QUARANTINED and "held.seen" in said[0]


def in_a_method() -> Callable[..., Any]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        @eager_break
        def part(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.shape[0]
            return x * self.seen

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x + 1) - 1

    return Model()


def test_python_state_that_an_eager_method_advances_is_named():
    right, ran, said, _ = served(in_a_method, mode="PIECEWISE")
    assert right and ran[-1] is Reason.QUARANTINED and "model.seen" in said[0]


def test_python_state_in_a_global_that_an_eager_part_advances_is_named():
    # The twin and the graphs' forward share it: only what is said is looked at.
    _, ran, said, _ = served(lambda: part_of(in_a_global()), mode="PIECEWISE")
    assert ran[-1] is Reason.QUARANTINED and "global SEEN" in said[0]


def only_written(advance: Callable[[int], float]) -> Callable[..., Any]:
    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        advance(x.shape[0])
        return x + 1

    return lambda x: part(x * 2) + 1


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda each: each.__name__)
def test_python_state_that_reaches_no_output_is_noted_without_quarantine(holder):
    right, ran, said, runner = served(lambda: only_written(holder()), mode="PIECEWISE")
    assert right and set(ran) == {Reason.HIT}
    assert said == []
    assert any("Python state" in note for t in runner.report().trust.trials for note in t.notes)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_forward_that_only_counts_its_calls_is_replayed_without_warnings(mode, eager):
    def make() -> Callable[..., Any]:
        held = SimpleNamespace(calls=0, log=[], at=np.zeros(1))

        def note() -> None:
            held.calls += 1
            held.log.append(held.calls)
            held.at[0] += 1

        part = eager_break(lambda x: (note(), x * 2)[1])
        if eager:
            return lambda x: part(x + 1) + 1

        def forward(x: torch.Tensor) -> torch.Tensor:
            note()
            return part(x + 1) + 1

        return forward

    right, ran, said, _ = served(make, mode=mode)
    assert right and set(ran) == {Reason.HIT} and not said


def test_an_eager_part_that_keeps_tables_and_timings_is_replayed_without_warnings():
    def make() -> Callable[..., Any]:
        tables: dict[int, torch.Tensor] = {}
        held = SimpleNamespace(mean_s=0.0, starts=[], last=None)

        @eager_break
        def part(x: torch.Tensor) -> torch.Tensor:
            start = time.perf_counter()
            rows = x.shape[0]
            if rows not in tables:
                tables[rows] = torch.arange(float(rows))[:, None]
            held.starts.append(start)
            held.last = x.clone()
            held.mean_s = 0.9 * held.mean_s + 0.1 * (time.perf_counter() - start)
            return x + tables[rows]

        return lambda x: part(x * 2) + 1

    right, ran, said, _ = served(make, mode="PIECEWISE")
    assert right and set(ran) == {Reason.HIT} and not said


def test_a_row_count_kept_in_a_captured_piece_is_replayed_without_warnings():
    """Replays move nothing there, padded or not."""

    def make() -> Callable[..., Any]:
        held = SimpleNamespace(seen=0)
        part = eager_break(lambda x: x * 2)

        def forward(x: torch.Tensor) -> torch.Tensor:
            held.seen += x.shape[0]
            return part(x + 1) + 1

        return forward

    for mode in ("FULL", "PIECEWISE"):
        right, ran, said, _ = served(make, mode=mode)
        assert right and set(ran) == {Reason.HIT} and not said


def test_a_row_count_of_the_live_rows_from_the_context_is_right_and_replayed():
    from graphrt import current_context

    def make() -> Callable[..., Any]:
        held = SimpleNamespace(seen=0)

        @eager_break
        def part(x: torch.Tensor) -> torch.Tensor:
            context = current_context()
            live = None if context is None else context.live
            held.seen += x.shape[0] if live is None else live.num_tokens
            return x + held.seen

        return lambda x: part(x * 2) + 1

    right, ran, said, _ = served(make, mode="PIECEWISE")
    assert right and set(ran) == {Reason.HIT} and not said


# Values that eager steps move --------------------------------------------------------------------


def moved_by_large_steps(**kept: Any) -> Callable[..., Any]:
    held = SimpleNamespace(scale=1.0, text="", log=[], calls=0, **kept)

    def forward(x: torch.Tensor) -> torch.Tensor:
        held.calls += 1
        if x.shape[0] > 8:
            held.scale += 1.0
        return x * held.scale

    return forward


@pytest.mark.parametrize("level", LEVELS)
def test_a_number_changed_by_a_step_too_large_for_graphs_is_found(level):
    right, ran, said, _ = served(
        moved_by_large_steps, (4, 3, 8, 5, 4, 12, 4, 8, 3, 12, 5), level=level
    )
    assert right and ran[5] is Reason.TOO_LARGE
    assert ran[6:9] == [Reason.QUARANTINED] * 3
    assert len(said) == 1 and "held.scale" in said[0]


def test_a_number_changed_by_an_eager_step_that_raised_is_found():
    held = SimpleNamespace(scale=1.0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 8:
            held.scale = 2.0
            raise ValueError("no room")
        return x * held.scale

    runner = runner_of(forward)
    for count in (4, 3, 8, 5):
        runner(x=rows(count))
    with pytest.raises(ValueError, match="no room"):
        runner(x=rows(12))
    with pytest.warns(GraphQuarantinedWarning, match=r"held\.scale"):
        assert torch.equal(runner(x=rows(4)), rows(4) * 2)


@pytest.mark.parametrize("kind", ["text", "flag", "list", "dict", "item", "object", "array"])
def test_python_values_of_any_type_changed_by_an_eager_step_are_found(kind):
    def make() -> Callable[..., Any]:
        held = SimpleNamespace(
            text="a",
            flag=False,
            list=[],
            dict={},
            item={"a": [1]},
            object=Stats(1),
            array=np.ones(1),
        )

        moves: dict[str, Callable[[], object]] = {
            "text": lambda: setattr(held, "text", "b"),
            "flag": lambda: setattr(held, "flag", True),
            "list": lambda: held.list.append(1),
            "dict": lambda: held.dict.update(more=1),
            "item": lambda: held.item.update(a=[2]),
            "object": lambda: setattr(held, "object", Stats(2)),
            "array": lambda: held.array.fill(3),
        }

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 8:
                moves[kind]()
            factor = {
                "text": len(held.text) if held.text == "a" else 7,
                "flag": 2 if held.flag else 1,
                "list": len(held.list) + 1,
                "dict": len(held.dict) + 1,
                "item": held.item["a"][0],
                "array": float(held.array[0]),
                "object": held.object.seen,
            }
            return x * factor[kind]

        return forward

    right, ran, said, _ = served(make, (4, 3, 8, 5, 4, 12, 4, 8, 3))
    assert right and ran[6:] == [Reason.QUARANTINED] * 3 and len(said) == 1


def test_counts_advanced_by_eager_steps_cost_few_trials_and_no_quarantine():
    def make() -> Callable[..., Any]:
        held = SimpleNamespace(calls=0, seen=0, large=0, log=[], shape=(), last="")

        def forward(x: torch.Tensor) -> torch.Tensor:
            held.calls += 1
            held.seen += x.shape[0]
            held.log.append(x.shape[0])
            held.shape = tuple(x.shape)
            held.last = f"{held.calls} calls"
            if x.shape[0] > 8:
                held.large += 1
            return x * 2

        return forward

    counts = (4, 3, 8, 5, *(12, 4, 8, 3) * 12)
    right, ran, said, runner = served(make, counts)
    assert right and not said
    assert set(ran) == {Reason.HIT, Reason.TOO_LARGE}
    steps = {t.descriptor.num_tokens: t.steps for t in runner.report().trust.trials}
    # Not one for each of the twelve large steps.
    assert sum(steps.values()) <= 12, steps


def test_a_changed_number_read_only_by_an_eager_part_keeps_graphs_replaying():
    def make() -> Callable[..., Any]:
        held = SimpleNamespace(scale=1.0)
        part = eager_break(lambda x: x * held.scale)

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 8:
                held.scale += 1
            return part(x + 1) + 1

        return forward

    right, ran, said, _ = served(make, (4, 3, 8, 5, 12, 4, 8, 3, 12, 4), mode="PIECEWISE")
    assert right and not said and set(ran) == {Reason.HIT, Reason.TOO_LARGE}


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("make", [lambda: Counting(), lambda: CountingModule()])
def test_a_counter_with_a_class_level_default_is_put_back_after_capture(make, mode):
    held = make()

    def count(x: torch.Tensor) -> torch.Tensor:
        held.steps += 1
        return x + held.steps if mode == "PIECEWISE" else x

    part = eager_break(count) if mode == "PIECEWISE" else count
    runner = GraphRunner(lambda x: part(x * 1), mode=mode, sizes=[1, 2, 4], inputs={"x": X})
    runner.capture()
    assert held.steps == type(held).steps == 0 and "steps" not in vars(held)
    if mode == "PIECEWISE":
        found = [float(runner(x=torch.zeros(4, WIDTH))[0, 0]) for _ in range(4)]
        assert found == [1, 2, 3, 4]


class Counting:
    """Counts in an attribute of its own, whose default is its class'."""

    steps = 0


class CountingModule(torch.nn.Module):
    """The same as a module."""

    steps = 0


# Rows that equal the padding ---------------------------------------------------------------------

mixing = (
    lambda x: x - x.mean(0),
    lambda x: x.sort(0).values,
    lambda x: x - x[-1],
)


@pytest.mark.parametrize("level", ["capture", "first"])
@pytest.mark.parametrize("forward", mixing)
def test_a_step_of_zeros_does_not_count_as_a_trial_of_padding(level, forward):
    runner = runner_of(lambda x: forward(x) + 1, level)
    for count in (3, 8, 4, 5, 1):
        assert torch.allclose(
            runner(x=torch.zeros(count, WIDTH)), forward(torch.zeros(count, WIDTH)) + 1, atol=0.5
        )
    with pytest.warns(GraphQuarantinedWarning):
        out = runner(x=rows(3))
    assert torch.allclose(out, forward(rows(3)) + 1)


@pytest.mark.parametrize("forward", [lambda x: x.softmax(0), lambda x: x.logsumexp(0) + x])
def test_the_first_padded_step_is_tried_although_its_rows_are_zeros(forward):
    """What mixes rows of zeros too: how many rows there are shows."""
    runner = runner_of(forward)
    runner(x=torch.zeros(4, WIDTH))
    with pytest.warns(GraphQuarantinedWarning):
        out = runner(x=torch.zeros(3, WIDTH))
    assert torch.allclose(out, forward(torch.zeros(3, WIDTH)))


def embedded() -> tuple[Callable[..., Any], dict[str, InputSpec]]:
    table = torch.randn(32, WIDTH)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        found = table[ids]
        return found - found.mean(0) + positions[:, None]

    inputs = {
        "ids": InputSpec(torch.int64, ("tokens",)),
        "positions": InputSpec(torch.int64, ("tokens",)),
    }
    return forward, inputs


def test_a_trial_of_padding_needs_every_input_to_differ_from_its_padding():
    """Positions differ in a warm-up of zeros, and the tokens that mix do not."""
    forward, inputs = embedded()
    runner = runner_of(forward, inputs=inputs)
    for count in (4, 3, 8, 5):
        runner(ids=torch.zeros(count, dtype=torch.int64), positions=torch.arange(count))
    ids = torch.tensor([3, 4, 5])
    with pytest.warns(GraphQuarantinedWarning):
        out = runner(ids=ids, positions=torch.arange(3))
    assert torch.allclose(out, forward(ids, torch.arange(3)))


@pytest.mark.parametrize("pad", [1.0, "repeat"])
def test_rows_equal_to_a_nonzero_pad_value_are_no_trial_of_padding(pad):
    spec = InputSpec(torch.float32, ("tokens", WIDTH), pad=pad)
    runner = runner_of(lambda x: x - x.mean(0), inputs={"x": spec})
    for count in (4, 3, 8, 5):
        runner(x=torch.ones(count, WIDTH))
    with pytest.warns(GraphQuarantinedWarning):
        runner(x=rows(3))


def test_equal_rows_unlike_the_padding_count_as_a_trial_of_padding():
    runner = runner_of(lambda x: x - x.mean(0))
    runner(x=rows(4))
    with pytest.warns(GraphQuarantinedWarning):
        runner(x=torch.full((3, WIDTH), 2.0))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_step_with_full_tokens_and_few_requests_is_no_trial_of_token_padding(count):
    """As the chunks of a long prompt are: with them alone no token is padding."""
    runner = runner_of(lambda x: x - x.mean(0), sizes=[8], max_num_reqs=8)
    for seed in range(3):
        runner(Batch(8, count), x=rows(8, seed))
        assert runner.last_dispatch.reason is Reason.HIT
    x = rows(5)
    with pytest.warns(GraphQuarantinedWarning):
        out = runner(Batch(5, min(count, 5)), x=x)
    assert torch.allclose(out, x - x.mean(0))


def test_a_step_whose_only_padding_is_of_requests_is_tried():
    """A step of all tokens was no padded one, however few of its requests were live."""

    def forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + bias.mean(0)

    inputs = {"x": X, "bias": InputSpec(torch.float32, ("reqs", WIDTH))}
    runner = runner_of(forward, inputs=inputs, sizes=[8], max_num_reqs=8)
    x, bias = rows(8), torch.ones(8, WIDTH)
    for _ in range(3):
        runner(Batch(8, 8), x=x, bias=bias)
        assert runner.last_dispatch.reason is Reason.HIT
    with pytest.warns(GraphQuarantinedWarning):
        out = runner(Batch(8, 2), x=x, bias=bias[:2])
    assert torch.allclose(out, x + 1)


def test_padding_of_requests_is_tried_once_and_then_not_again():
    def forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + bias[:1]

    inputs = {"x": X, "bias": InputSpec(torch.float32, ("reqs", WIDTH))}
    runner = runner_of(forward, inputs=inputs, sizes=[8], max_num_reqs=8)
    pending = runner._engine._checks
    runner(Batch(8, 8), x=rows(8), bias=rows(8))
    assert list(pending.pending.values()) == [(8, 8)]
    runner(Batch(8, 2), x=rows(8), bias=rows(2))
    # Of the tokens none was padding.
    assert list(pending.pending.values()) == [8]
    runner(Batch(5, 2), x=rows(5), bias=rows(2))
    assert not pending.pending
    assert [t.steps for t in runner.report().trust.trials] == [3]


def test_trials_end_although_an_input_always_equals_its_padding():
    def forward(x: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        return x * 2 + types[:, None]

    inputs = {"x": X, "types": InputSpec(torch.int64, ("tokens",))}
    runner = runner_of(forward, inputs=inputs, sizes=[4])
    for seed in range(200):
        runner(x=rows(3, seed), types=torch.zeros(3, dtype=torch.int64))
    assert [t.steps for t in runner.report().trust.trials] == [1]
    assert not runner._engine._checks.pending  # no step is looked at any more


def test_an_example_of_zeros_does_not_count_as_a_trial_of_padding():
    from graphrt import Example

    runner = runner_of(
        lambda x: x - x.mean(0),
        host=Host(example=lambda batch, _: Example({"x": torch.zeros(batch.num_tokens, WIDTH)})),
    )
    with pytest.warns(GraphQuarantinedWarning):
        runner(x=rows(3))


@torch.library.custom_op("graphrt_test_python_state::negated", mutates_args=())
def negated(x: torch.Tensor) -> torch.Tensor:
    """No operator of torch's own: a run that leaves its way is ended before it."""
    return -x


def test_a_call_counter_is_found_though_its_run_stops_at_a_custom_operator():
    def make() -> Callable[..., Any]:
        held = SimpleNamespace(calls=0)
        part = eager_break(lambda x: negated(x))

        def forward(x: torch.Tensor) -> torch.Tensor:
            held.calls += 1
            return part(x * 2 if held.calls < 1000 else x * 3 + 1)

        return forward

    _, ran, said, _ = served(make, mode="PIECEWISE")
    assert set(ran) == {Reason.QUARANTINED}
    assert len(said) == 1 and "changes a Python number" in said[0]


# Optimizers in a forward -------------------------------------------------------------------------


class Trained:
    """A forward that steps an optimizer."""

    def __init__(self, kind: Any, in_part: bool, **arguments: Any) -> None:
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.weight.grad = torch.zeros(WIDTH)
        self.optimizer = kind([self.weight], **arguments)
        self.step = eager_break(self.optimizer.step) if in_part else self.optimizer.step

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.grad is not None
        self.weight.grad.copy_(x.sum(0))
        self.step()
        return x * self.weight


def momentum(in_part: bool = False) -> Trained:
    return Trained(torch.optim.SGD, in_part, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, tuple[Callable[[], Trained], str]] = {
    "momentum": (momentum, "FULL"),
    "momentum in a part": (lambda: momentum(in_part=True), "PIECEWISE"),
    "Adam in a part": (lambda: Trained(torch.optim.Adam, in_part=True, lr=0.1), "PIECEWISE"),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_an_optimizer_makes_in_a_warm_up_is_named_and_put_back(name, level):
    make, mode = OPTIMIZERS[name]
    forward = make()
    with pytest.raises(PythonStateError, match=r"optimizer\.state\[<Parameter>\]"):
        runner_of(forward, level, mode=mode)
    assert not forward.optimizer.state
    assert torch.equal(forward.weight, torch.ones(WIDTH))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_has_stepped_before_the_capture_is_replayed(name, level):
    make, mode = OPTIMIZERS[name]

    def stepped() -> Trained:
        forward = make()
        forward(rows(4))
        return forward

    right, ran, said, _ = served(stepped, level=level, mode=mode)
    assert right and said == []
    assert {*ran} == {Reason.HIT}


# Tensors that the forward puts in one another's place ---------------------------------------------


class Swapping(nn.Module):
    """Reads one buffer, writes the other, and swaps them: the next call reads what this one wrote.
    A graph reads the same one at each replay, and its first replay equals eager."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = torch.zeros(WIDTH), torch.full((WIDTH,), 5.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x + self.front
        self.back.copy_(self.front + 1)
        self.front, self.back = self.back, self.front
        return result


def example_of_rows(batch: Batch, generator: torch.Generator) -> Example:
    return Example({"x": torch.randn(batch.num_tokens, WIDTH, generator=generator)})


@pytest.mark.parametrize("warmups", [None, 1, 2])
def test_buffers_that_a_forward_swaps_are_named_by_the_trials_of_examples(warmups):
    """These trials put Python back, so that no look after them finds another tensor."""
    with pytest.raises(PythonStateError, match=r"puts another one in its place.*\n.*model\.front"):
        runner_of(Swapping(), host=Host(example=example_of_rows), options={"warmups": warmups})


def test_steps_are_right_where_a_forward_swaps_buffers():
    right, _, said, _ = served(Swapping)
    assert right and "model.front" in "".join(said)


# What grows with each call ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [list, tuple, str], ids=lambda kind: kind.__name__)
def test_a_value_that_grows_past_a_length_after_many_calls_is_named_by_the_first_trial(make):
    item = "a" if make is str else make([1])
    model = SimpleNamespace(seen=make())

    def forward(x):
        model.seen = model.seen + item
        return x * 2 if len(model.seen) > 60 else x * 1

    runner = runner_of(forward)
    with pytest.warns(GraphQuarantinedWarning, match="changes a Python value and computes"):
        runner(x=rows(4))
