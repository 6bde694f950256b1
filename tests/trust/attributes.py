"""Attributes of instances and classes, and methods, that a host changes between steps."""

from __future__ import annotations

import dataclasses
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from tests.trust.scenario import CHANGE, Scenario, at_change, defect


def simple_model() -> nn.Module:
    """A module with one weight and a Python number that scales its output."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scale: Any = 1.0

        def forward(self, x):
            return self.linear(x) * self.scale

    return Scaled()


@defect("attribute", "late")
def float_attribute(device):
    model = simple_model()
    return Scenario(model, between=at_change(lambda: setattr(model, "scale", 3.0)))


@defect("attribute", "late", long=True)
def int_attribute_in_a_slice(device):
    model = SimpleNamespace(weight=torch.randn(8, 8), window=8)

    def forward(x):
        return x[:, : model.window] @ model.weight[: model.window]

    return Scenario(forward, between=at_change(lambda: setattr(model, "window", 4)))


@defect("attribute", "late")
def bool_attribute(device):
    model = SimpleNamespace(gated=False)

    def forward(x):
        return x * torch.sigmoid(x) if model.gated else x * 1

    return Scenario(forward, between=at_change(lambda: setattr(model, "gated", True)))


@defect("attribute", "late")
def string_attribute(device):
    model = SimpleNamespace(activation="relu")

    def forward(x):
        return getattr(torch, model.activation)(x)

    return Scenario(forward, between=at_change(lambda: setattr(model, "activation", "tanh")))


@defect("attribute", "late")
def attribute_that_was_none(device):
    model = SimpleNamespace(bias=None)

    def forward(x):
        return x * 1 if model.bias is None else x + model.bias

    return Scenario(forward, between=at_change(lambda: setattr(model, "bias", torch.ones(8))))


@defect("attribute", "late", long=True)
def dtype_attribute(device):
    model = SimpleNamespace(dtype=torch.float32, weight=torch.randn(8, 8))

    def forward(x):
        return (x.to(model.dtype) @ model.weight.to(model.dtype)).float() + x

    # bfloat16 is off by more than the tolerance.
    change = at_change(lambda: setattr(model, "dtype", torch.bfloat16))
    return Scenario(forward, between=change, tolerance=1e-4)


@defect("attribute", "late")
def attribute_of_a_slots_object(device):
    class Settings:
        __slots__ = ("scale",)

    settings = Settings()
    settings.scale = 1.0
    return Scenario(
        lambda x: x * settings.scale, between=at_change(lambda: setattr(settings, "scale", 3.0))
    )


@defect("attribute", "late", long=True)
def field_of_a_frozen_config_that_is_replaced(device):
    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float = 1.0

    model = simple_model()
    model.config = Config()
    forward = model.forward

    def scaled(x):
        return forward(x) * model.config.scale

    model.forward = scaled
    return Scenario(
        model,
        between=at_change(
            lambda: setattr(model, "config", dataclasses.replace(model.config, scale=3.0))
        ),
    )


@defect("attribute", "late")
def property_over_a_dict(device):
    class Model:
        def __init__(self) -> None:
            self.settings = {"scale": 1.0}

        @property
        def scale(self):
            return self.settings["scale"]

        def step(self, x):
            return x * self.scale

    model = Model()
    return Scenario(model.step, between=at_change(lambda: model.settings.update(scale=3.0)))


@defect("attribute", "late")
def scalar_argument_of_an_operator(device):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x):
            return torch.lerp(x, x * 2, self.scale)

    model = Scaled()
    return Scenario(model, between=at_change(lambda: setattr(model, "scale", 0.25)))


@defect("attribute", "named", drifts=True)
def hidden_state_rebound_in_the_forward(device):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8)
            self.h = torch.zeros(8, device=device)

        def forward(self, x):
            self.h = torch.tanh(self.w(x[:1]).sum(0) + self.h)
            return x + self.h

    return Scenario(Recurrent())


@defect("attribute", "named", drifts=True)
def previous_output_rebound_and_read(device):
    model = SimpleNamespace(last=torch.zeros(1, 8))

    def forward(x):
        out = x + model.last
        model.last = out[:1]
        return out

    return Scenario(forward)


@defect("class attribute", "late")
def class_attribute(device):
    class Model:
        scale: ClassVar[float] = 1.0

        def step(self, x):
            return x * self.scale

    return Scenario(Model().step, between=at_change(lambda: setattr(Model, "scale", 3.0)))


@defect("class attribute", "late")
def class_attribute_shadowed_by_an_instance(device):
    model = type("Model", (), {"scale": 1.0})()
    return Scenario(
        lambda x: x * model.scale, between=at_change(lambda: setattr(model, "scale", 3.0))
    )


@defect("class attribute", "late")
def method_of_a_class_patched(device):
    class Model(nn.Module):
        def gate(self, x):
            return torch.relu(x)

        def forward(self, x):
            return self.gate(x)

    change = at_change(lambda: setattr(Model, "gate", lambda self, x: torch.tanh(x)))
    return Scenario(Model(), between=change)


@defect("replaced method", "late", long=True)
def forward_of_a_module_replaced(device):
    model = simple_model()

    def doubled(self, x):
        return self.linear(x) * 2

    change = at_change(lambda: setattr(model, "forward", MethodType(doubled, model)))
    return Scenario(model, between=change)


@defect("replaced method", "late", long=True)
def method_of_an_instance_replaced(device):
    model = simple_model()
    inner = model.linear
    change = at_change(lambda: setattr(inner, "forward", lambda x: x @ inner.weight))
    return Scenario(model, between=change)


@defect("attribute", "named")
def flag_of_the_host_that_is_on_at_capture_alone(device):
    model = SimpleNamespace(warming_up=True)

    def forward(x):
        return x * 1 if model.warming_up else x * 3

    def between(step):
        model.warming_up = False

    return Scenario(forward, between=between)


@defect("attribute", "late")
def number_changed_for_one_step_alone(device):
    model = SimpleNamespace(scale=1.0)

    def between(step):
        model.scale = 3.0 if step == CHANGE else 1.0

    return Scenario(lambda x: x * model.scale, between=between)
