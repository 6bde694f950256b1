"""What comes out of a step, and what a host keeps of a step beside its inputs."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from graphrt import InputSpec, current_context
from tests.trust.scenario import ROWS, WIDTH, Scenario, X, at_change, defect


@defect("output", "right")
def output_that_is_the_state(device):
    state = torch.zeros(8, WIDTH)

    def forward(x):
        state[: len(x)].add_(1)
        return state[: len(x)]

    # Padding rows advance rows of the state that are live at other steps.
    return Scenario(forward, rows=(8, 8, 8, 8, 8, 8), sizes=(8,))


@defect("output", "late")
def output_of_another_structure_later(device):
    model = SimpleNamespace(details=False)

    def forward(x):
        return {"y": x * 2, "z": x} if model.details else {"y": x * 2}

    return Scenario(forward, between=at_change(lambda: setattr(model, "details", True)))


@defect("output", "named", drifts=True)
def python_number_in_the_output(device):
    model = SimpleNamespace(steps=0)

    def forward(x):
        model.steps += 1
        return {"y": x * 2, "steps": model.steps}

    return Scenario(forward)


@defect("output", "late")
def python_number_of_the_host_in_the_output(device):
    model = SimpleNamespace(request="a")

    def forward(x):
        return {"y": x * 2, "request": model.request}

    return Scenario(forward, between=at_change(lambda: setattr(model, "request", "b")))


@defect("metadata", "named")
def metadata_of_a_step_read_in_a_full_graph(device):
    now = SimpleNamespace(window=8)

    def forward(x):
        context = current_context()
        window = now.window if context is None else context.metadata
        return x[:, : window or 1].sum(1, keepdim=True) + x

    def between(step):
        now.window = 2 + step % 4

    return Scenario(forward, between=between, metadata=lambda step: 2 + step % 4)


@defect("metadata", "named")
def metadata_in_a_global_of_the_host(device):
    # As engines do that have a forward context of their own.
    context = SimpleNamespace(lengths=torch.ones(8), longest=8)

    def forward(x):
        return x[:, : context.longest].sum(1, keepdim=True) * context.lengths.sum()

    def between(step):
        context.lengths = torch.full((8,), 1.0 + step)
        context.longest = 1 + step % 8

    return Scenario(forward, between=between)


@defect("metadata", "named")
def tensor_of_the_host_that_is_new_at_every_step(device):
    model = SimpleNamespace(mask=torch.ones(WIDTH))

    def between(step):
        model.mask = (torch.arange(WIDTH) % (step + 2) == 0).float()

    return Scenario(lambda x: x * model.mask, between=between)


@defect("metadata", "named")
def longest_context_kept_as_a_number(device):
    model = SimpleNamespace(cache=torch.randn(32, WIDTH), longest=4)

    def forward(x, lengths):
        seen = torch.arange(model.longest, device=x.device) < lengths.unsqueeze(1)
        return x + seen.float() @ model.cache[: model.longest]

    def values(step, rows, generator):
        lengths = torch.full((rows,), min(4 + step, 32))
        return {"x": torch.randn(rows, WIDTH, generator=generator), "lengths": lengths}

    def between(step):
        model.longest = min(4 + step, 32)

    inputs = {"x": X, "lengths": InputSpec(torch.int64, ("tokens",), pad=1)}
    return Scenario(forward, inputs, values, between, rows=ROWS)
