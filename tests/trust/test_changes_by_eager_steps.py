"""Tensors of graphs that an eager step replaces: with values from before the step they are a
quarantine. Those that each step fills first are scratch memory, and graphs serve."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphOptions, GraphRunner, InputSpec, Reason, eager_break
from graphrt.errors import StaleInputError, StaleTensorWarning
from tests.draws import rest_long

WIDTH = 4
LONG = 12
"""Tokens of a step that no graph serves."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Place(NamedTuple):
    """Reads a tensor of the forward, and puts another one there."""

    get: Callable[[], torch.Tensor]
    put: Callable[[torch.Tensor], object]


@dataclass
class Fields:
    kept: torch.Tensor


class Slotted:
    __slots__ = ("kept",)


def attribute(first: torch.Tensor) -> Place:
    held = SimpleNamespace(kept=first)
    return Place(lambda: held.kept, lambda value: setattr(held, "kept", value))


def dataclass_field(first: torch.Tensor) -> Place:
    held = Fields(first)
    return Place(lambda: held.kept, lambda value: setattr(held, "kept", value))


def slot(first: torch.Tensor) -> Place:
    held = Slotted()
    held.kept = first
    return Place(lambda: held.kept, lambda value: setattr(held, "kept", value))


def class_attribute(first: torch.Tensor) -> Place:
    held = type("Held", (), {"kept": first})
    return Place(lambda: held.kept, lambda value: setattr(held, "kept", value))


def first_own_attribute(first: torch.Tensor) -> Place:
    held = type("Held", (), {"kept": first})()
    return Place(lambda: held.kept, lambda value: setattr(held, "kept", value))


def dict_entry(first: torch.Tensor) -> Place:
    held = {"kept": first}
    return Place(lambda: held["kept"], lambda value: held.update(kept=value))


def list_element(first: torch.Tensor) -> Place:
    held = [first]
    return Place(lambda: held[0], lambda value: held.__setitem__(0, value))


def nested(first: torch.Tensor) -> Place:
    held = SimpleNamespace(layers=[{"cache": SimpleNamespace(kept=first)}])
    inner = held.layers[0]["cache"]
    return Place(lambda: held.layers[0]["cache"].kept, lambda value: setattr(inner, "kept", value))


def replaced_holder(first: torch.Tensor) -> Place:
    held = SimpleNamespace(cache=SimpleNamespace(kept=first))
    return Place(
        lambda: held.cache.kept, lambda value: setattr(held, "cache", SimpleNamespace(kept=value))
    )


def closure(first: torch.Tensor) -> Place:
    kept = first

    def put(value: torch.Tensor) -> None:
        nonlocal kept
        kept = value

    return Place(lambda: kept, put)


def set_buffer(first: torch.Tensor) -> Place:
    module = nn.Module()
    module.register_buffer("kept", first)
    return Place(lambda: module.kept, lambda value: setattr(module, "kept", value))


def registered_buffer(first: torch.Tensor) -> Place:
    module = nn.Module()
    module.register_buffer("kept", first)
    return Place(lambda: module.kept, lambda value: module.register_buffer("kept", value))


def parameter(first: torch.Tensor) -> Place:
    module = nn.Module()
    module.kept = nn.Parameter(first)
    return Place(lambda: module.kept, lambda value: setattr(module, "kept", nn.Parameter(value)))


def data(first: torch.Tensor) -> Place:
    held = SimpleNamespace(kept=first)
    return Place(lambda: held.kept, lambda value: setattr(held.kept, "data", value))


def set_memory(first: torch.Tensor) -> Place:
    held = SimpleNamespace(kept=first)
    return Place(lambda: held.kept, lambda value: held.kept.set_(value))


PLACES = [
    attribute,
    dataclass_field,
    slot,
    class_attribute,
    first_own_attribute,
    dict_entry,
    list_element,
    nested,
    replaced_holder,
    closure,
    set_buffer,
    registered_buffer,
    parameter,
    data,
    set_memory,
]


def runner_of(
    forward: Callable[..., Any],
    sizes: tuple[int, ...] = (4, 8),
    *,
    padded: bool = True,
    **options: Any,
) -> Any:
    """A runner whose graphs were all captured and tried; `padded` steps too."""
    runner = GraphRunner(
        forward,
        mode=options.pop("mode", "FULL"),
        sizes=sizes,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        options=GraphOptions(**options),
        platform="cpu",
    )
    runner.capture()
    for rows in (*sizes, *[size - 1 for size in sizes if padded]) * 2:
        runner(x=torch.randn(rows, WIDTH))
    assert {each.status for each in runner.report().trust.trials} <= {"tried", "untried"}
    return runner


def words_of(steps: Callable[[], None]) -> list[str]:
    """The warnings of some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    return [str(each.message) for each in caught]


def compare(runner: Any, forward: Callable[..., Any], *rows: int) -> list[Reason]:
    """Run steps, each beside the forward itself; how they ran."""
    reasons = []
    for number, count in enumerate(rows):
        x = torch.randn(count, WIDTH)
        outputs = runner(x=x)
        reasons.append(runner.last_dispatch.reason)
        assert torch.allclose(outputs, forward(x), atol=1e-6), (number, reasons)
    return reasons


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("place", PLACES, ids=lambda each: each.__name__)
def test_a_cache_that_an_eager_step_replaced_is_a_quarantine_at_the_next_step(
    place: Callable[[torch.Tensor], Place], mode: str
) -> None:
    kept = place(torch.zeros(WIDTH))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 8:
            kept.put(x.mean(0))
        return x + kept.get()

    runner = runner_of(forward, mode=mode)
    said = words_of(lambda: runner(Batch(LONG), x=torch.ones(LONG, WIDTH)))
    reasons = []
    said += words_of(lambda: reasons.extend(compare(runner, forward, 4, 8, 3, 7, 4)))
    assert reasons == [Reason.QUARANTINED] * 5
    assert len(said) >= 1
    if place is not first_own_attribute:
        with pytest.raises(StaleInputError):
            runner.weights_changed()
    runner.recapture()
    assert compare(runner, forward, 4, 8) == [Reason.HIT] * 2


def test_a_number_that_only_eager_steps_move_is_tried_further_on() -> None:
    held = SimpleNamespace(count=0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        held.count += x.shape[0] > 8
        return x * (1.0 if held.count < 20 else 2.0)

    runner = runner_of(forward)
    runner(Batch(LONG), x=torch.ones(LONG, WIDTH))
    said = words_of(lambda: runner(x=torch.ones(4, WIDTH)))
    assert "held.count" in "".join(said) or "closure held.count" in "".join(said), said
    held.count = 30
    assert compare(runner, forward, 4) == [Reason.QUARANTINED]


def test_attributes_that_eager_steps_set_and_nobody_reads_cost_no_look_after_some_steps() -> None:
    held = SimpleNamespace(weight=torch.ones(WIDTH), last=None, calls=0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        held.calls += 1
        if x.shape[0] > 8:
            held.last = SimpleNamespace(of=x.mean(0), number=held.calls)
        return x * held.weight

    runner = runner_of(forward)
    for _ in range(8):
        runner(Batch(LONG), x=torch.ones(LONG, WIDTH))
        assert compare(runner, forward, 4, 8) == [Reason.HIT] * 2
    steps = sum(each.steps for each in runner.report().trust.trials)
    for _ in range(8):
        runner(Batch(LONG), x=torch.ones(LONG, WIDTH))
        compare(runner, forward, 4, 8)
    assert sum(each.steps for each in runner.report().trust.trials) == steps


# Scratch memory ----------------------------------------------------------------------------------

Fill = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def copied(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer[: len(x)].copy_(x * 3)
    return buffer[: len(x)] + 1


def by_out(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch.mul(x, 3, out=buffer[: len(x)])
    return buffer[: len(x)] + 1


def in_chunks(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    half = len(x) // 2
    buffer[:half].copy_(x[:half] * 3)
    buffer[half : len(x)].copy_(x[half:] * 3)
    return buffer[: len(x)] + 1


def added_to_zeros(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer.zero_()
    buffer[: len(x)].add_(x * 3)
    return buffer[: len(x)] + 1


def columns(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer[: len(x), :2].copy_(x[:, :2])
    return torch.cat([buffer[: len(x), :2] * 3, x[:, 2:]], 1)


def result_alone(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer[: len(x)].copy_(x * 3)
    return x * 2


FILLS = [copied, by_out, in_chunks, added_to_zeros, columns, result_alone]


def growing(place: Place, fill: Fill) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(place.get()) < len(x):
            place.put(torch.full((2 * len(x), WIDTH), 7.0))
        return fill(place.get(), x)

    return forward


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("place", PLACES, ids=lambda each: each.__name__)
def test_graphs_serve_after_an_eager_step_has_made_larger_scratch_memory(
    place: Callable[[torch.Tensor], Place], mode: str
) -> None:
    forward = growing(place(torch.full((8, WIDTH), 5.0)), copied)
    runner = runner_of(forward, mode=mode)
    said = words_of(lambda: compare(runner, forward, LONG, 4, 8, 3, LONG, 4, 8))
    assert compare(runner, forward, 4, 8, 3, 7, 2 * LONG) == [Reason.HIT] * 4 + [Reason.TOO_LARGE]
    assert [text for text in said if "was replaced after the capture" in text] == said
    assert len(said) == 1, said
    # Larger again, and then told.
    runner(Batch(5 * LONG), x=torch.ones(5 * LONG, WIDTH))
    assert compare(runner, forward, 4, 8, 3, 7) == [Reason.HIT] * 4
    runner.weights_changed()
    assert compare(runner, forward, 4, 8, 3, 7) == [Reason.HIT] * 4


@pytest.mark.parametrize("level", rest_long(["capture", "first", "sample", "always"], "capture"))
@pytest.mark.parametrize("fill", FILLS, ids=lambda each: each.__name__)
def test_each_way_to_fill_scratch_memory_is_known_at_each_level(fill: Fill, level: str) -> None:
    forward = growing(attribute(torch.full((8, WIDTH), 5.0)), fill)
    runner = runner_of(forward, check=level)
    with pytest.warns(StaleTensorWarning, match=r"kept was replaced after the capture"):
        compare(runner, forward, LONG, 4, 8)
    assert set(compare(runner, forward, *[4, 8, 3, 7] * 20)) == {Reason.HIT}


def test_a_capacity_that_grows_with_the_scratch_memory_is_no_quarantine() -> None:
    held = SimpleNamespace(rows=8, buffer=torch.full((8, WIDTH), 5.0))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if held.rows < len(x):
            held.rows = 2 * len(x)
            held.buffer = torch.full((held.rows, WIDTH), 7.0)
        return copied(held.buffer, x)

    runner = runner_of(forward)
    with pytest.warns(StaleTensorWarning, match=r"held\.buffer"):
        compare(runner, forward, LONG, 4, 8)
    assert compare(runner, forward, 4, 8, 3, 7, 3 * LONG, 4, 8)[-1] is Reason.HIT


def test_scratch_memory_that_the_host_replaces_is_named_once_and_graphs_serve() -> None:
    held = SimpleNamespace(buffer=torch.full((8, WIDTH), 5.0))
    runner = runner_of(lambda x: copied(held.buffer, x))
    held.buffer = torch.full((8, WIDTH), 6.0)
    runner.weights_changed()
    with pytest.warns(StaleTensorWarning, match=r"held\.buffer"):
        compare(runner, lambda x: copied(held.buffer, x), 4, 8)
    assert compare(runner, lambda x: copied(held.buffer, x), 4, 8, 3) == [Reason.HIT] * 3


@pytest.mark.parametrize("fill", [copied, None], ids=["scratch", "cache"])
def test_a_size_that_is_captured_later_may_replace_scratch_memory_and_no_cache(
    fill: Fill | None,
) -> None:
    held = SimpleNamespace(kept=torch.zeros(4, WIDTH))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(held.kept) < len(x):
            held.kept = torch.zeros(8, WIDTH)
        return x + held.kept[: len(x)] if fill is None else fill(held.kept, x)

    inputs = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}
    options = GraphOptions(lazy=True)
    runner = GraphRunner(
        forward, mode="FULL", sizes=(4, 8), inputs=inputs, options=options, platform="cpu"
    )
    compare(runner, forward, 4, 3, 4)
    said = words_of(lambda: compare(runner, forward, 8, 4, 8))
    held.kept.fill_(3.0)
    reasons = compare(runner, forward, 4, 8, 4)
    assert reasons == [Reason.HIT if fill else Reason.QUARANTINED] * 3
    assert len(said) == (0 if fill else 1)


def test_deleting_weights_that_no_graph_reads_is_no_stale_input() -> None:
    class Adapters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.active = "a"
            self.of = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.of[self.active](x)

    model = Adapters()
    runner = runner_of(model)
    for change in (
        lambda: model.of.pop("b"),
        lambda: model.of.update({"d": nn.Linear(WIDTH, WIDTH)}),
        lambda: setattr(model.of["c"], "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
    ):
        change()
        runner.weights_changed()
        assert set(compare(runner, model, 4, 8, 3, 7)) == {Reason.HIT}
    model.of["a"].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    with pytest.raises(StaleInputError, match=r"of\.a\.weight"):
        runner.weights_changed()
    assert set(compare(runner, model, 4, 8)) == {Reason.QUARANTINED}


@pytest.mark.parametrize("other", [False, True], ids=["longer", "with other values"])
def test_a_table_that_the_forward_makes_itself_is_replaced_by_one_with_equal_values_alone(
    other: bool,
) -> None:
    held = SimpleNamespace(table=None, base=1.0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if held.table is None or len(held.table) < len(x):
            held.base = 1.0 if held.table is None or not other else 2.0
            held.table = torch.arange(float(max(len(x), 8))) * held.base
        return x + held.table[: len(x), None]

    runner = runner_of(forward)
    reasons = compare(runner, forward, LONG, 4, 8, 3, 2 * LONG, 4, 8)
    assert reasons[-2:] == [Reason.QUARANTINED if other else Reason.HIT] * 2
    held.table = None
    runner.weights_changed()
    compare(runner, forward, 4, 8, 3, 7)


# What is no scratch memory ------------------------------------------------------------------------


def other_half(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer[: len(x)].copy_(x)
    return x + buffer[8:9]


def other_columns(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer[: len(x), :2].copy_(x[:, :2])
    return x + buffer[: len(x)]


def added(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + buffer[: len(x)].mul_(1.0)


def at_indices(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer.index_copy_(0, torch.arange(1, device=x.device), x[:1])
    return x + buffer[: len(x)]


def copied_onto_itself(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer[:8].copy_(buffer[:8])
    return x + buffer[:1]


def only_in_small_graphs(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if len(x) > 4:
        buffer[: len(x)].copy_(x)
    return x + buffer[: len(x)]


@torch.library.custom_op("graphrt_test::write_some_rows", mutates_args=["buffer"])
def write_some_rows(buffer: torch.Tensor, x: torch.Tensor) -> None:
    buffer[:1].copy_(x[:1])


def by_an_own_operator(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    write_some_rows(buffer, x)
    return x + buffer[1:2]


@pytest.mark.parametrize(
    "fill",
    [
        other_half,
        other_columns,
        added,
        at_indices,
        copied_onto_itself,
        only_in_small_graphs,
        by_an_own_operator,
    ],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("sizes", [(4, 8), (2, 3, 4, 6, 8)], ids=str)
def test_a_tensor_with_values_from_before_the_step_is_no_scratch_memory(
    fill: Fill, sizes: tuple[int, ...]
) -> None:
    held = SimpleNamespace(kept=torch.full((9, WIDTH), 5.0))
    grown = torch.full((LONG, WIDTH), 5.0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(held.kept) < len(x):
            held.kept = grown
        return fill(held.kept, x)

    # Padding's rows of such a buffer are read by later steps.
    runner = runner_of(forward, sizes=sizes, padded=fill is not other_columns)
    runner(Batch(LONG), x=torch.ones(LONG, WIDTH))
    # Nobody sees a difference yet: the values are equal, until the host writes others.
    for rows in sizes:
        runner(x=torch.ones(rows, WIDTH))
    for value in (6.0, 7.0, 8.0):
        grown.fill_(value)
        for rows in sizes:
            x = torch.randn(rows, WIDTH)
            before = grown.clone()
            outputs = runner(x=x)
            grown.copy_(before)
            assert torch.allclose(outputs, forward(x), atol=1e-6), (rows, value)
            grown.copy_(before)


def test_a_tensor_that_an_eager_part_reads_is_no_scratch_memory() -> None:
    held = SimpleNamespace(kept=torch.full((8, WIDTH), 5.0))

    @eager_break
    def read(x: torch.Tensor) -> torch.Tensor:
        return x + held.kept[: len(x)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(held.kept) < len(x):
            held.kept = torch.full((LONG, WIDTH), 7.0)
        held.kept[: len(x)].copy_(x * 3)
        return read(x) * 1.0

    runner = runner_of(forward, mode="PIECEWISE")
    runner(Batch(LONG), x=torch.ones(LONG, WIDTH))
    assert set(compare(runner, forward, 4, 8, 3, 7)) == {Reason.QUARANTINED}


def test_scratch_memory_that_resize_has_freed_is_no_longer_read() -> None:
    held = SimpleNamespace(kept=torch.full((8, WIDTH), 5.0))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(held.kept) < len(x):
            held.kept.resize_(1000 * len(x), WIDTH)
        return copied(held.kept, x)

    runner = runner_of(forward)
    runner(Batch(LONG), x=torch.ones(LONG, WIDTH))
    assert set(compare(runner, forward, 4, 8, 3, 7)) == {Reason.QUARANTINED}
