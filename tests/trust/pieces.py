"""The same in pieces: what is captured between eager parts is baked in, what is eager is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from graphrt import Batch, current_context, eager_break
from graphrt.compile import compile_module
from tests.trust.scenario import CHANGE, LONG, WIDTH, Scenario, at_change, defect


def piecewise(forward: Any, **more: Any) -> Scenario:
    """The scenario in PIECEWISE mode, its pieces between functions marked `@eager_break`."""
    return Scenario(forward, mode="PIECEWISE", **more)


@eager_break
def attend(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An eager part that is a function of its arguments."""
    return torch.tanh(x @ weight)


@defect("pieces", "late")
def number_in_a_captured_piece(device):
    model = SimpleNamespace(weight=torch.randn(8, 8), scale=1.0)

    def forward(x):
        return attend(x * model.scale, model.weight) + 1

    return piecewise(forward, between=at_change(lambda: setattr(model, "scale", 3.0)))


@defect("pieces", "late")
def tensor_given_to_an_eager_part_rebound(device):
    model = SimpleNamespace(weight=torch.randn(8, 8))

    def change():
        model.weight = torch.randn(8, 8)

    forward = lambda x: attend(x + 1, model.weight) + 1  # noqa: E731
    return piecewise(forward, between=at_change(change), rows=LONG)


@defect("pieces", "named", drifts=True)
def counter_in_a_captured_piece(device):
    model = SimpleNamespace(weight=torch.randn(8, 8), calls=0)

    def forward(x):
        model.calls += 1
        return attend(x * model.calls, model.weight) + 1

    return piecewise(forward)


@defect("pieces", "late")
def eager_part_left_out_by_a_flag(device):
    model = SimpleNamespace(weight=torch.randn(8, 8), skip=False)

    def forward(x):
        y = x * 2
        if not model.skip:
            y = attend(y, model.weight)
        return y + 1

    return piecewise(forward, between=at_change(lambda: setattr(model, "skip", True)))


@defect("pieces", "named")
def eager_part_returns_another_number(device):
    settings = SimpleNamespace(scale=1.0)

    @eager_break
    def scale_of(x):
        return settings.scale

    return piecewise(
        lambda x: (x + 1) * scale_of(x), between=at_change(lambda: setattr(settings, "scale", 3.0))
    )


@defect("pieces", "named")
def eager_part_hands_a_tensor_over_by_an_attribute(device):
    layer = SimpleNamespace(kept=None)

    @eager_break
    def part(x):
        layer.kept = x * 2

    def forward(x):
        part(x + 1)
        return layer.kept + 1

    return piecewise(forward)


@defect("pieces", "named")
def rows_mixed_in_a_captured_piece(device):
    weight = torch.randn(8, 8)
    return piecewise(lambda x: attend(x - x.mean(0), weight) + 1)


@defect("pieces", "named")
def rows_mixed_in_an_eager_part(device):
    @eager_break
    def centred(x):
        return x - x.mean(0)

    return piecewise(lambda x: centred(x + 1) * 2)


@defect("pieces", "late")
def weight_of_a_captured_piece_moved(device):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(attend(self.first(x), self.second.weight))

    model = Model()

    def change():
        model.first.weight = nn.Parameter(torch.randn(8, 8))

    return piecewise(model, between=at_change(change), rows=LONG)


@defect("pieces", "right")
def state_advanced_in_a_captured_piece(device):
    total, weight = torch.zeros(WIDTH), torch.randn(8, 8)

    def forward(x):
        total.add_(1)
        return attend(x + total, weight) + 1

    return piecewise(forward, state=lambda: [total])


@defect("pieces", "right")
def state_advanced_in_an_eager_part(device):
    total = torch.zeros(WIDTH)

    @eager_break
    def part(x):
        total.add_(x[0] + 1)
        return x + total

    return piecewise(lambda x: part(x + 1) + 1, state=lambda: [total])


@defect("pieces", "named")
def metadata_read_in_a_captured_piece(device):
    weight = torch.randn(8, 8)
    now = SimpleNamespace(scale=1.0)

    def forward(x):
        context = current_context()
        scale = now.scale if context is None else context.metadata
        return attend(x * (1.0 if scale is None else scale), weight) + 1

    def between(step):
        now.scale = 1.0 + step

    return piecewise(forward, between=between, metadata=lambda step: 1.0 + step)


@defect("pieces", "named")
def autocast_turned_on_around_pieces(device):
    weight = torch.randn(8, 8)

    def change():
        torch.set_autocast_enabled(device, True)

    return piecewise(lambda x: attend(x @ weight, weight) @ weight, between=at_change(change))


def prompts_after_the_change(step: int, rows: int) -> Batch:
    """Decode steps, and from the change on prompts of one request, which are of another kind."""
    return Batch(rows, rows, 1) if step < CHANGE else Batch(rows, 1)


@defect("kinds", "named")
def number_changed_before_the_first_step_of_a_kind(device):
    model = SimpleNamespace(weight=torch.randn(8, 8), scale=1.0)

    def forward(x):
        return attend(x * model.scale, model.weight) + 1

    return Scenario(
        forward,
        between=at_change(lambda: setattr(model, "scale", 3.0)),
        mode="FULL_AND_PIECEWISE",
        batch=prompts_after_the_change,
    )


@defect("kinds", "named")
def rows_mixed_by_one_kind_alone(device):
    weight = torch.randn(8, 8)

    @eager_break
    def prompt_or_decode(x):
        # An eager part of PIECEWISE steps; in FULL ones it is captured.
        piecewise = current_context() is not None and current_context().mode.name == "PIECEWISE"
        return x - x.mean(0) if piecewise else x * 1

    def forward(x):
        return prompt_or_decode(attend(x + 1, weight)) + 1

    return Scenario(forward, mode="FULL_AND_PIECEWISE", batch=prompts_after_the_change)


@defect("kinds", "named")
def number_baked_into_each_lazy_capture(device):
    model = SimpleNamespace(scale=1.0)

    def between(step):
        model.scale = 1.0 + step

    return Scenario(lambda x: x * model.scale, between=between, options={"lazy": True})


@defect("kinds", "right")
def state_advanced_by_lazy_captures(device):
    total = torch.zeros(WIDTH)

    def forward(x):
        total.add_(1)
        return x + total

    return Scenario(forward, options={"lazy": True}, state=lambda: [total])


class Small(nn.Module):
    """A module to be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


def compiled(model: nn.Module, **more: Any) -> Scenario:
    """The scenario of a compiled module, in one FULL graph."""
    return Scenario(compile_module(model, dynamic_dims=["x"], in_place=False), plain=model, **more)


@defect("compiled", "late", drifts=True)
def weight_of_a_compiled_module_moved(device):
    model = Small()

    def change():
        model.linear.weight = nn.Parameter(torch.randn(8, 8))

    return compiled(model, between=at_change(change), rows=LONG)


@defect("compiled", "named")
def rows_mixed_in_a_compiled_module(device):
    class Mixing(Small):
        def forward(self, x):
            return self.linear(x - x.mean(0))

    return compiled(Mixing())
