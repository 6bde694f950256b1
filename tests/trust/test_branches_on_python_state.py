"""Forwards that branch on Python values other than numbers, which their own calls change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphrt import Reason, eager_break
from tests.trust.test_python_state import WIDTH, served

Forward = Callable[[torch.Tensor], torch.Tensor]
STEPS = (4, 3, 2, 8, 5, 4, 1, *(4, 8, 3, 2) * 3)


def every_third_call_empties_a_list() -> Forward:
    queue: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        queue.append(1)
        if len(queue) == 3:
            queue.clear()
            return x * 2
        return x * 3

    return forward


def every_third_call_has_no_object() -> Forward:
    model = SimpleNamespace(first=None, second=None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if model.second is not None:
            model.first = model.second = None
            return x * 2
        model.second = model.first
        model.first = object()
        return x * 3

    return forward


def every_third_call_has_a_key() -> Forward:
    seen: dict[str, int] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if "b" in seen:
            seen.clear()
            return x * 2
        seen["b" if "a" in seen else "a"] = 1
        return x * 3

    return forward


def phases_in_turn() -> Forward:
    phases = [SimpleNamespace() for _ in range(3)]
    model = SimpleNamespace(now=phases[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        at = next(i for i, phase in enumerate(phases) if phase is model.now)
        model.now = phases[(at + 1) % 3]
        return x * (3 if at else 2)

    return forward


def layers_in_turn() -> Forward:
    model = SimpleNamespace(order=["a", "b", "c"])

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.order = [*model.order[1:], model.order[0]]
        return torch.relu(x) if model.order[0] == "a" else torch.tanh(x)

    return forward


def text_that_gets_long() -> Forward:
    model = SimpleNamespace(text="")

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.text += "."
        return x * 2 if len(model.text) < 60 else x * 3

    return forward


def tuple_that_gets_long() -> Forward:
    model = SimpleNamespace(seen=())

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.seen += (1,)
        return x * 2 if len(model.seen) < 60 else x * 3

    return forward


def position_in_a_tuple() -> Forward:
    model = SimpleNamespace(state=("cache", 0))

    def forward(x: torch.Tensor) -> torch.Tensor:
        name, position = model.state
        model.state = name, position + 1
        return x * 2 if position < 60 else x * 3

    return forward


SHORT = [
    every_third_call_empties_a_list,
    every_third_call_has_no_object,
    every_third_call_has_a_key,
    layers_in_turn,
]
LONG = [text_that_gets_long, tuple_that_gets_long, position_in_a_tuple]


@pytest.mark.parametrize("make", SHORT + LONG)
def test_a_forward_that_branches_on_a_changing_python_value_is_named_at_first_trial(make):
    right, ran, said, _ = served(make, STEPS * 5)
    assert right and set(ran) == {Reason.QUARANTINED}
    assert len(said) == 1 and "changes a Python value and computes something else" in said[0]


def test_a_counting_eager_break_inside_a_full_graph_is_quarantined():
    """A FULL graph has captured what would be an eager part of a PIECEWISE one."""

    def make() -> Forward:
        calls = [0]

        @eager_break
        def part(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return x * (2.0 if calls[0] > 500 else 1.0)

        return lambda x: part(x + 1) * 2

    right, ran, _, _ = served(make, STEPS)
    assert right and set(ran) == {Reason.QUARANTINED}


def list_that_gets_long() -> Forward:
    seen: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x * 2 if len(seen) < 60 else x * 3

    return forward


def queue_that_fills() -> Forward:
    seen: deque[int] = deque(maxlen=60)

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x * 2 if len(seen) < 60 else x * 3

    return forward


def list_that_is_used_up() -> Forward:
    left = [1] * 60

    def forward(x: torch.Tensor) -> torch.Tensor:
        if left:
            left.pop()
            return x * 2
        return x * 3

    return forward


LEFT = [list_that_gets_long, queue_that_fills, list_that_is_used_up, phases_in_turn]


@pytest.mark.parametrize("make", LEFT)
def test_a_forward_that_branches_on_values_left_by_warm_ups_is_named(make):
    # They put back no list of a captured forward and no object: eager steps are some calls ahead.
    _, ran, said, _ = served(make, STEPS)
    assert set(ran) == {Reason.QUARANTINED}
    assert len(said) == 1 and "changes a Python value and computes something else" in said[0]


# Right -------------------------------------------------------------------------------------------


def lazy_table_by_none() -> Forward:
    model = SimpleNamespace(table=None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if model.table is None:
            model.table = torch.arange(float(WIDTH)).cos()
        return x * model.table

    return forward


def lazy_tables_by_shape() -> Forward:
    tables: dict[int, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in tables:
            tables[len(x)] = torch.arange(float(len(x))).unsqueeze(1)
        return x + tables[len(x)]

    return forward


def mask_of_the_last_shape() -> Forward:
    model = SimpleNamespace(shape=(), mask=torch.zeros(0), cache=torch.zeros(8, WIDTH))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if model.shape != tuple(x.shape):
            model.shape, model.mask = tuple(x.shape), torch.ones(x.shape).tril()
        model.cache.index_copy_(0, torch.zeros(1, dtype=torch.int64), x[:1])
        return x * model.mask + model.cache[0]

    return forward


def notes() -> Forward:
    model = SimpleNamespace(log=[], last="", recent=deque(maxlen=3), kinds=set())

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.log.append(("call", x.dtype))
        model.last = f"{len(model.log)} calls"
        model.recent.append(model.last)
        model.kinds.add(x.dtype)
        return x * 2

    return forward


def notes_that_are_flushed() -> Forward:
    log: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        log.append(len(x))
        if len(log) >= 4:
            log.clear()
        return x * 2

    return forward


def figures_in_a_new_object() -> Forward:
    @dataclass(frozen=True)
    class Figures:
        calls: int = 0

    model = SimpleNamespace(figures=Figures())

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.figures = replace(model.figures, calls=model.figures.calls + 1)
        return x * 2

    return forward


def notes_beside_memory_of_a_kernel() -> Forward:
    log: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        log.append(len(x))
        # As compiled code allocates: past all operators, and somewhere else in each run.
        with _disable_current_modes():
            memory = [torch.empty_like(x), torch.empty_like(x)]
        return torch.mul(x, 2, out=memory[len(log) % 2]) + 0

    return forward


def test_a_buffer_returned_by_only_every_second_call_is_named_by_the_warning():
    # Its results are right; whoever reads the buffer would find an old one.
    def make() -> Forward:
        state, buffer = SimpleNamespace(calls=0), torch.zeros(8, WIDTH)

        def forward(x: torch.Tensor) -> torch.Tensor:
            state.calls += 1
            if state.calls % 2:
                return torch.mul(x, 2)
            return torch.mul(x, 2, out=buffer[: len(x)])

        return forward

    right, _, said, _ = served(make, STEPS)
    assert right and any("writes other memory" in str(each) for each in said)


RIGHT = [
    lazy_table_by_none,
    notes_beside_memory_of_a_kernel,
    lazy_tables_by_shape,
    notes,
    notes_that_are_flushed,
    figures_in_a_new_object,
]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("make", RIGHT)
def test_python_values_that_no_result_depends_on_change_and_every_step_replays(make, mode):
    right, ran, said, _ = served(make, STEPS, mode=mode)
    assert right and set(ran) == {Reason.HIT} and not said


@pytest.mark.parametrize("level", ["capture", "always"])
def test_a_mask_kept_for_the_last_shape_keeps_graphs_with_a_cache_replaying(level):
    # The first run of a trial may make the mask anew and the next ones not, and rows of an index
    # are saved in each of them.
    right, ran, said, _ = served(mask_of_the_last_shape, STEPS, level)
    assert right and set(ran) == {Reason.HIT} and not said
