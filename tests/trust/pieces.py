"""The same in pieces: what is captured between eager parts is baked in, what is eager is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from graphrt import current_context, eager_break
from tests.trust.scenario import LONG, WIDTH, Scenario, at_change, defect


def piecewise(forward: Any, **more: Any) -> Scenario:
    """The scenario in PIECEWISE mode, its pieces between functions marked `@eager_break`."""
    return Scenario(forward, mode="PIECEWISE", **more)


@eager_break
def attend(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An eager part that is a function of its arguments."""
    return torch.tanh(x @ weight)


@defect("pieces", "silent")
def number_in_a_captured_piece(device):
    model = SimpleNamespace(weight=torch.randn(8, 8), scale=1.0)

    def forward(x):
        return attend(x * model.scale, model.weight) + 1

    return piecewise(forward, between=at_change(lambda: setattr(model, "scale", 3.0)))


@defect("pieces", "silent")
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


@defect("pieces", "silent")
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


@defect("pieces", "right")
def autocast_turned_on_around_pieces(device):
    weight = torch.randn(8, 8)

    def change():
        torch.set_autocast_enabled(device, True)

    return piecewise(lambda x: attend(x @ weight, weight) @ weight, between=at_change(change))
