"""The same for settings of torch, random numbers, rows, state and outputs: no false alarms."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import torch
from torch import nn

from graphrt import InputSpec, eager_break
from graphrt.compile import compile_module
from tests.trust.rows import CACHE_INPUTS, cache_forward, cache_values
from tests.trust.scenario import WIDTH, Net, Scenario, X, at_change, defect

log = logging.getLogger(__name__)


@defect("clean", "right")
def number_of_threads_changed(device):
    return Scenario(Net(nn.Linear(8, 8)), between=at_change(lambda: torch.set_num_threads(2)))


@defect("clean", "right")
def autocast_inside(device):
    model = nn.Linear(8, 8)

    def forward(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(x).float()

    return Scenario(forward, tolerance=2e-2)


@defect("clean", "right")
def noise_of_the_default_generator(device):
    return Scenario(lambda x: x + torch.rand(1, device=x.device))


@defect("clean", "right")
def default_generator_seeded_by_the_host(device):
    return Scenario(lambda x: x + torch.rand(1, device=x.device), between=torch.manual_seed)


@defect("clean", "right")
def dropout_left_on(device):
    masks: list[torch.Tensor] = []

    def judge(step, values, out):
        masks.append(out == 0)
        kept = torch.allclose(out, values["x"].cpu() * 2 * ~masks[-1])
        same = [m for m in masks[:-1] if m.shape == out.shape and torch.equal(m, masks[-1])]
        return kept and not (same and len(out) > 3)

    return Scenario(Net(nn.Dropout(0.5)).train(), judge=judge)


@defect("clean", "right")
def rows_mixed_and_declared(device):
    # The padding is always zeros, and one more row is not counted: what a step gives is right.
    def forward(x, count):
        return x - x.sum(0) / count.sum()

    def values(step, rows, generator):
        return {"x": torch.randn(rows, WIDTH, generator=generator), "count": torch.ones(rows)}

    inputs = {"x": X, "count": InputSpec(torch.float32, ("tokens",))}
    return Scenario(forward, inputs, values, host={"mixes_rows": True})


@defect("clean", "right")
def capacity_routing_declared(device):
    experts, expert_ids = torch.randn(2, WIDTH, WIDTH), torch.arange(2)

    def forward(x):
        # First come, first served, and padding rows come last.
        wanted = (x[:, 0] > 0).long()
        place = (wanted.unsqueeze(1) == expert_ids).cumsum(0).gather(1, wanted.unsqueeze(1))
        out = torch.einsum("te,teo->to", x, experts[wanted])
        return torch.where(place <= 2, out, x)

    return Scenario(forward, host={"mixes_rows": True})


@defect("clean", "right")
def rows_that_see_earlier_rows(device):
    return Scenario(lambda x: x.cumsum(0))


@defect("clean", "right")
def sum_over_rows_whose_padding_is_zero(device):
    # No step has other padding than zeros, so nothing is mixed in.
    return Scenario(lambda x: x + x.sum(0))


@defect("clean", "right")
def cache_with_a_page_for_padding(device):
    cache, forward = cache_forward()
    return Scenario(forward, CACHE_INPUTS, cache_values(1, late=100), state=lambda: [cache[1:]])


@defect("clean", "right")
def input_changed_in_place(device):
    return Scenario(lambda x: x.mul_(2).add_(1))


@defect("clean", "right")
def input_returned(device):
    return Scenario(lambda x: (x, x * 2))


@defect("clean", "right")
def weight_returned_beside_the_output(device):
    model = nn.Linear(8, 5, bias=False)
    return Scenario(
        lambda x: {"y": model(x), "w": model.weight}, outputs={"y": ("tokens", 5), "w": (5, 8)}
    )


@defect("clean", "right")
def number_in_an_eager_part(device):
    model = SimpleNamespace(scale=1.0)

    @eager_break
    def scaled(x):
        return x * model.scale

    change = at_change(lambda: setattr(model, "scale", 3.0))
    return Scenario(lambda x: scaled(x + 1) + 1, mode="PIECEWISE", between=change)


@defect("clean", "right")
def state_and_lazy_capture(device):
    total = torch.zeros(WIDTH)

    def forward(x):
        total.add_(1)
        return x + total

    return Scenario(forward, options={"lazy": True}, host={"state": [total]}, state=lambda: [total])


@defect("clean", "right")
def random_lengths_in_a_compiled_module(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    net = Net(model)
    compiled = compile_module(net, dynamic_dims=["x"], in_place=False)
    return Scenario(compiled, plain=net)


@defect("clean", "right")
def scratch_written_before_it_is_read(device):
    scratch = torch.zeros(16, WIDTH)

    def forward(x):
        part = scratch[: len(x)]
        part.copy_(x)
        return part * 2 + part.relu()

    return Scenario(forward)


@defect("clean", "right")
def cache_larger_than_the_limit_written_by_rows(device):
    cache, forward = cache_forward()
    return Scenario(
        forward,
        CACHE_INPUTS,
        cache_values(1, late=100),
        state=lambda: [cache[1:]],
        options={"state_limit_bytes": 1024},
    )


@defect("clean", "right")
def output_changed_in_place_by_the_host(device):
    model = nn.Linear(8, 8)
    return Scenario(Net(model), after=lambda step, out: out.fill_(float("nan")))


@defect("clean", "right", devices=("cpu",))
def constant_list_made_a_tensor(device):
    return Scenario(lambda x: x * torch.tensor([1.0, 2.0] * 4))


@defect("clean", "right")
def output_that_is_a_global_tensor(device):
    table = torch.randn(8, WIDTH)

    def forward(x):
        table[: len(x)].copy_(x * 2)
        return table[: len(x)]

    return Scenario(forward, outputs=("tokens", WIDTH))
