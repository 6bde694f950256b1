"""State in tensors that nobody declared."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from tests.trust.scenario import LONG, WIDTH, Scenario, at_change, defect


@defect("state", "right")
def total_advanced_in_place(device):
    total = torch.zeros(WIDTH)

    def forward(x):
        total.add_(1)
        return x + total

    return Scenario(forward, state=lambda: [total])


@defect("state", "right")
def total_of_the_first_row(device):
    total = torch.zeros(WIDTH)

    def forward(x):
        total.add_(x[0] + 1)
        return x + total

    return Scenario(forward, state=lambda: [total])


@defect("state", "right")
def exponential_moving_average(device):
    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH, device=device))

        def forward(self, x):
            self.average.mul_(0.9).add_(x[0] + 1, alpha=0.1)
            return x - self.average

    model = Smoothed()
    return Scenario(model, state=lambda: [model.average])


@defect("state", "right")
def ring_buffer_with_a_tensor_position(device):
    ring, at = torch.zeros(5, WIDTH), torch.zeros(1, dtype=torch.int64)

    def forward(x):
        ring.index_copy_(0, at, x[:1] + 1)
        at.add_(1).remainder_(5)
        return x + ring.mean(0)

    return Scenario(forward, state=lambda: [ring, at])


@defect("state", "right")
def cache_written_at_a_tensor_position(device):
    cache, length = torch.zeros(64, WIDTH), torch.zeros((), dtype=torch.int64)

    def forward(x):
        cache.index_put_((length.unsqueeze(0),), x[:1])
        length.add_(1)
        seen = torch.arange(64, device=x.device) < length
        return x + (cache * seen.unsqueeze(1)).sum(0)

    return Scenario(forward, state=lambda: [cache, length])


@defect("state", "right")
def state_written_through_a_view(device):
    state = torch.zeros(4, WIDTH)
    row = state[2]

    def forward(x):
        row.add_(x[0] + 1)
        return x + state.sum(0)

    return Scenario(forward, state=lambda: [state])


@defect("state", "right")
def state_written_by_an_out_argument(device):
    state = torch.ones(WIDTH)

    def forward(x):
        torch.add(state, x[0] + 1, out=state)
        return x + state

    return Scenario(forward, state=lambda: [state])


@defect("state", "right")
def state_written_by_a_foreach_operator(device):
    states = [torch.zeros(WIDTH), torch.ones(3)]

    def forward(x):
        torch._foreach_add_(states, 1.0)
        return x * states[1][0] + states[0]

    return Scenario(forward, state=lambda: states)


@defect("state", "right")
def counter_tensor_that_selects_by_where(device):
    calls, weight = torch.zeros((), dtype=torch.int64), torch.randn(WIDTH, WIDTH)

    def forward(x):
        calls.add_(1)
        return torch.where(calls < 6, x @ weight, x * 3)

    return Scenario(forward, state=lambda: [calls])


@defect("state", "right")
def weight_written_in_place_by_the_forward(device):
    model = nn.Linear(WIDTH, WIDTH)

    def forward(x):
        model.weight.mul_(0.9)
        return model(x)

    return Scenario(forward, state=lambda: [model.weight])


@defect("state", "named", drifts=True)
def cache_written_by_a_slice_at_an_int(device):
    cache = SimpleNamespace(keys=torch.zeros(256, WIDTH), length=0)

    def forward(x):
        cache.keys[cache.length : cache.length + 1] = x[:1] + 1
        cache.length += 1
        return x + cache.keys.sum(0)

    return Scenario(forward)


@defect("state", "named", drifts=True)
def state_replaced_by_its_next_value(device):
    model = SimpleNamespace(h=torch.zeros(WIDTH))

    def forward(x):
        model.h = model.h * 0.9 + x[0] + 1
        return x + model.h

    return Scenario(forward)


@defect("state", "named", drifts=True)
def cache_grown_by_cat(device):
    cache: list[torch.Tensor] = [torch.zeros(1, WIDTH)]

    def forward(x):
        cache[0] = torch.cat((cache[0], x[:1] + 1))
        return x + cache[0].sum(0)

    return Scenario(forward)


@defect("state", "named", drifts=True)
def memory_of_the_state_replaced_in_the_forward(device):
    state = torch.zeros(WIDTH)

    def forward(x):
        state.data = state * 0.5 + x[0] + 1
        return x + state

    return Scenario(forward)


@defect("state", "named")
def request_state_exchanged_by_the_host(device):
    caches = [torch.full((WIDTH,), float(n)) for n in range(3)]
    active = SimpleNamespace(cache=caches[0])

    def forward(x):
        active.cache.add_(1)
        return x + active.cache

    def between(step):
        active.cache = caches[step % 3]

    return Scenario(forward, between=between, state=lambda: caches)


@defect("state", "late", drifts=True)
def state_moved_by_a_reset_of_the_host(device):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.reset()

        def reset(self):
            self.register_buffer("count", torch.zeros(WIDTH, device=device))

        def forward(self, x):
            self.count.add_(1)
            return self.linear(x) + self.count

    model = Counting()
    return Scenario(model, between=at_change(model.reset), rows=LONG)


@defect("state", "named")
def state_larger_than_the_limit(device):
    cache = torch.zeros(64, WIDTH)

    def forward(x):
        cache.mul_(0.5).add_(1)
        return x + cache.sum(0)

    return Scenario(forward, options={"state_limit_bytes": 1024}, state=lambda: [cache])
