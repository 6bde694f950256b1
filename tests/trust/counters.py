"""Numbers that the forward itself changes at every call, and what it remembers of earlier calls."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import torch
from torch import nn

from tests.trust.scenario import ROWS, Scenario, defect

WINDOW = 60
"""The call at which a cache of the tests is full: long after those of warm-ups and trials."""
MANY = ROWS * 7


class Position:
    """A cache's position without `__dict__`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


@defect("counter", "named", drifts=True)
def count_scales_the_output(device):
    model = SimpleNamespace(calls=0)

    def forward(x):
        model.calls += 1
        return x * model.calls

    return Scenario(forward)


@defect("counter", "named", drifts=True)
def count_of_a_closure_scales_the_output(device):
    calls = 0

    def forward(x):
        nonlocal calls
        calls += 1
        return x * calls

    return Scenario(forward)


@defect("counter", "named", drifts=True)
def itertools_count_scales_the_output(device):
    counter = itertools.count(1)
    return Scenario(lambda x: x * next(counter))


@defect("counter", "named", drifts=True)
def generator_object_scales_the_output(device):
    def decaying():
        scale = 1.0
        while True:
            yield scale
            scale *= 1.5

    scales = decaying()
    return Scenario(lambda x: x * next(scales))


@defect("counter", "named", drifts=True)
def length_of_a_list_scales_the_output(device):
    seen: list[int] = []

    def forward(x):
        seen.append(len(x))
        return x * len(seen)

    return Scenario(forward)


@defect("counter", "named", drifts=True)
def alternating_flag(device):
    model = SimpleNamespace(odd=False)

    def forward(x):
        model.odd = not model.odd
        return torch.relu(x) if model.odd else torch.tanh(x)

    return Scenario(forward)


@defect("counter", "named", drifts=True)
def alternating_ping_pong_buffers(device):
    model = SimpleNamespace(buffers=[torch.zeros(8), torch.zeros(8)])

    def forward(x):
        old, new = model.buffers
        new.copy_(old * 0.5 + x[0])
        model.buffers = [new, old]
        return x + new

    return Scenario(forward)


@defect("counter", "named", drifts=True)
def sliding_cache_with_an_int_position(device):
    class SlidingCache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(WINDOW, 8, device=device))
            self.register_buffer("position", torch.zeros(1, dtype=torch.int64, device=device))
            self.length = 0

        def forward(self, x):
            if self.length < WINDOW:
                self.keys.index_copy_(0, self.position, x[:1])
            else:
                self.keys.copy_(torch.cat((self.keys[1:], x[:1])))
            self.position.add_(1).clamp_(max=WINDOW - 1)
            self.length += 1
            return x + self.keys.sum(0)

    return Scenario(SlidingCache(), rows=MANY)


@defect("counter", "named", drifts=True)
def position_on_the_object_that_owns_the_cache(device):
    cache = SimpleNamespace(weight=torch.randn(8, 8), length=0)

    def forward(x):
        cache.length += 1
        return x @ cache.weight if cache.length < WINDOW else x - x @ cache.weight

    return Scenario(forward, rows=MANY)


@defect("counter", "named", drifts=True)
def schedule_by_an_int_of_the_module(device):
    class Warmed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.seen_tokens = 0

        def forward(self, x):
            self.seen_tokens += 1
            return self.linear(x) * (2.0 if self.seen_tokens > WINDOW else 1.0)

    return Scenario(Warmed(), rows=MANY)


@defect("counter", "named", drifts=True)
def position_in_a_dict(device):
    weight, state = torch.randn(8, 8), {"length": 0}

    def forward(x):
        state["length"] += 1
        return x @ weight if state["length"] < WINDOW else x * 1

    return Scenario(forward, rows=MANY)


@defect("counter", "named", drifts=True)
def position_in_a_list(device):
    weight, lengths = torch.randn(8, 8), [0, 0]

    def forward(x):
        lengths[1] += 1
        return x @ weight if lengths[1] < WINDOW else x * 1

    return Scenario(forward, rows=MANY)


@defect("counter", "named", drifts=True)
def position_in_an_object_without_dict(device):
    weight, position = torch.randn(8, 8), Position()

    def forward(x):
        position.value += 1
        return x @ weight if position.value < WINDOW else x * 1

    return Scenario(forward, rows=MANY)


@defect("counter", "silent", drifts=True)
def position_of_an_itertools_count(device):
    weight, counter = torch.randn(8, 8), itertools.count()

    def forward(x):
        return x @ weight if next(counter) < WINDOW else x * 1

    return Scenario(forward, rows=MANY)


@defect("counter", "silent", drifts=True)
def generator_object_that_changes_its_mind(device):
    weight = torch.randn(8, 8)
    phases = itertools.chain(itertools.repeat("early", WINDOW), itertools.repeat("late"))

    def forward(x):
        return x @ weight if next(phases) == "early" else x * 1

    return Scenario(forward, rows=MANY)


@defect("cache", "late")
def memo_by_a_setting(device):
    settings = SimpleNamespace(scale=1.0)
    tables: dict[float, torch.Tensor] = {}

    def forward(x):
        if settings.scale not in tables:
            tables[settings.scale] = torch.full((8,), settings.scale, device=x.device)
        return x * tables[settings.scale]

    def between(step):
        settings.scale = 1.0 + step // 5

    return Scenario(forward, between=between)


@defect("cache", "named", drifts=True)
def result_remembered_by_shape(device):
    results: dict[int, torch.Tensor] = {}

    def forward(x):
        # The first values of a size are kept for ever.
        return x + results.setdefault(len(x), x.sum(1, keepdim=True))

    return Scenario(forward)


@defect("cache", "named", drifts=True)
def first_input_remembered(device):
    model = SimpleNamespace(offset=None)

    def forward(x):
        if model.offset is None:
            model.offset = x[:1].clone()
        return x - model.offset

    return Scenario(forward)


@defect("cache", "named")
def lru_cache_of_a_table_that_is_cleared(device):
    settings = SimpleNamespace(scale=1.0)

    @functools.lru_cache
    def table():
        return torch.full((8,), settings.scale, device=device)

    def between(step):
        if step % 5 == 0:
            settings.scale += 1
            table.cache_clear()

    return Scenario(lambda x: x * table(), between=between)


@defect("cache", "late")
def rope_table_rebuilt_longer_with_another_base(device):
    class Rope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(16, 8, device=device))
            self.proj = nn.Linear(8, 8)

        def grow(self):
            self.table = torch.cat((self.table * 0.5, self.table))

        def forward(self, x):
            return self.proj(x) + self.table[: len(x)]

    model = Rope()

    def between(step):
        if step == 5:
            model.grow()

    return Scenario(model, between=between, rows=MANY)
