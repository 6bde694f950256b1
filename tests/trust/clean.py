"""Forwards that a graph stands for, though a careless check may say otherwise: no false alarms."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import parametrizations

from graphrt import InputSpec
from tests.trust.scenario import WIDTH, Net, Scenario, at_change, defect

log = logging.getLogger(__name__)


@defect("clean", "right")
def plain_call_counter(device):
    model = SimpleNamespace(weight=torch.randn(8, 8), calls=0)

    def forward(x):
        model.calls += 1
        return x @ model.weight

    return Scenario(forward)


@defect("clean", "right")
def counter_that_logs_every_third_call(device):
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls % 3 == 0:
                log.debug("call %d with %d rows", self.calls, len(x))
            return self.linear(x)

    return Scenario(Logging())


@defect("clean", "right")
def tokens_seen_in_a_dict(device):
    weight, stats = torch.randn(8, 8), {"tokens": 0, "largest": 0}

    def forward(x):
        stats["tokens"] += len(x)
        stats["largest"] = max(stats["largest"], len(x))
        return x @ weight

    return Scenario(forward)


@defect("clean", "right")
def shapes_kept_in_a_list(device):
    shapes: list[tuple[int, ...]] = []

    def forward(x):
        shapes.append(tuple(x.shape))
        return torch.tanh(x)

    return Scenario(forward)


@defect("clean", "right")
def table_built_at_the_first_call(device):
    model = SimpleNamespace(table=None, weight=torch.randn(8, 8))

    def forward(x):
        if model.table is None:
            model.table = torch.arange(WIDTH, device=x.device) * 0.5
        return x @ model.weight + model.table

    return Scenario(forward)


@defect("clean", "right")
def tables_built_by_shape(device):
    tables: dict[int, torch.Tensor] = {}

    def forward(x):
        if len(x) not in tables:
            tables[len(x)] = torch.arange(len(x), device=x.device).unsqueeze(1) * 0.5
        return x + tables[len(x)]

    return Scenario(forward)


@defect("clean", "right", watched=True)
def positions_cached_at_the_largest_size(device):
    model = SimpleNamespace(positions=torch.arange(2))

    def forward(x):
        if len(model.positions) < len(x):
            model.positions = torch.arange(len(x), device=x.device)
        return x + model.positions[: len(x)].unsqueeze(1)

    # Nine rows are more than any graph has: the table is made anew beside the graphs.
    return Scenario(forward, rows=(4, 3, 8, 1, 2, 9, 4, 7, 5, 9, 1, 3))


@defect("clean", "right")
def weight_converted_at_the_first_call(device):
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
            self.converted = False

        def forward(self, x):
            if not self.converted:
                self.weight.data = self.weight.data.to(x.dtype)
                self.converted = True
            return x @ self.weight

    return Scenario(Lazy())


@defect("clean", "right")
def lazy_linear(device):
    model = nn.LazyLinear(4, bias=False)
    torch.manual_seed(3)
    model(torch.zeros(1, WIDTH, device=device))
    return Scenario(Net(model))


@defect("clean", "right")
def tied_weights(device):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    def values(step, rows, generator):
        return {"ids": torch.randint(0, 16, (rows,), generator=generator)}

    return Scenario(Tied(), {"ids": InputSpec(torch.int64, ("tokens",))}, values)


@defect("clean", "right")
def weight_norm_computed_at_each_call(device):
    model = parametrizations.weight_norm(nn.Linear(8, 8))
    change = at_change(lambda: model.parametrizations.weight.original0.mul_(3))
    return Scenario(Net(model), between=change)


@defect("clean", "right")
def weights_loaded_in_place(device):
    model = nn.Linear(8, 8)
    other = nn.Linear(8, 8)
    return Scenario(
        Net(model), between=at_change(lambda: model.load_state_dict(other.state_dict()))
    )


@defect("clean", "right")
def weights_loaded_in_place_by_another_thread(device):
    weight = torch.randn(8, 8)

    def change():
        thread = threading.Thread(target=lambda: weight.mul_(3))
        thread.start()
        thread.join()

    return Scenario(lambda x: x @ weight, between=at_change(change))


@defect("clean", "right")
def steps_in_new_threads(device):
    return Scenario(Net(nn.Linear(8, 8)), in_new_threads=True)


@defect("clean", "right")
def time_taken_by_a_call(device):
    model = SimpleNamespace(weight=torch.randn(8, 8), seconds=0.0)

    def forward(x):
        began = time.perf_counter()
        y = x @ model.weight
        model.seconds += time.perf_counter() - began
        return y

    return Scenario(forward)


@defect("clean", "right")
def hook_that_keeps_figures(device):
    model, norms = nn.Linear(8, 8), []

    def note(module, arguments, output):
        norms.append((len(output), output.dtype))

    model.register_forward_hook(note)
    return Scenario(Net(model))
