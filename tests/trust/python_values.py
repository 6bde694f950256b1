"""Python values that a host changes between steps: closures, attributes, globals, defaults.

A capture bakes them in, and at capture nobody can know that they will change: these are what the
higher levels are for.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
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


@defect("closure", "silent")
def nonlocal_number(device):
    scale = 1.0

    def between(step):
        nonlocal scale
        scale = 3.0 if step >= CHANGE else 1.0

    return Scenario(lambda x: x * scale, between=between)


@defect("closure", "silent")
def number_that_changes_at_every_step(device):
    scale = 1.0

    def between(step):
        nonlocal scale
        scale = 1.0 + step

    return Scenario(lambda x: x * scale, between=between)


@defect("closure", "silent")
def list_cell(device):
    scale = [1.0]
    return Scenario(
        lambda x: x * scale[0], between=at_change(lambda: scale.append(scale.pop() * 3))
    )


@defect("closure", "silent")
def tensor_of_a_closure_rebound(device):
    weight = torch.ones(8)

    def between(step):
        nonlocal weight
        if step == CHANGE:
            weight = torch.full((8,), 3.0)

    return Scenario(lambda x: x * weight, between=between)


@defect("closure", "silent")
def function_of_a_closure_rebound(device):
    activation = torch.relu

    def between(step):
        nonlocal activation
        if step == CHANGE:
            activation = torch.tanh

    return Scenario(lambda x: activation(x), between=between)


@defect("closure", "silent")
def set_of_skipped_layers(device):
    weights, skipped = [torch.randn(8, 8) for _ in range(3)], set()

    def forward(x):
        for layer, weight in enumerate(weights):
            if layer not in skipped:
                x = torch.tanh(x @ weight)
        return x

    return Scenario(forward, between=at_change(lambda: skipped.add(1)))


@defect("closure", "silent")
def partial_with_a_list_that_changes(device):
    scales = [1.0]
    forward = functools.partial(lambda scales, x: x * scales[-1], scales)
    return Scenario(forward, between=at_change(lambda: scales.append(3.0)))


@defect("closure", "silent")
def lora_chosen_by_a_python_index(device):
    adapters, active = [torch.randn(8, 8) for _ in range(3)], [0]

    def between(step):
        active[0] = step % 3

    return Scenario(lambda x: x + x @ adapters[active[0]], between=between)


@defect("attribute", "silent")
def float_attribute(device):
    model = simple_model()
    return Scenario(model, between=at_change(lambda: setattr(model, "scale", 3.0)))


@defect("attribute", "silent")
def int_attribute_in_a_slice(device):
    model = SimpleNamespace(weight=torch.randn(8, 8), window=8)

    def forward(x):
        return x[:, : model.window] @ model.weight[: model.window]

    return Scenario(forward, between=at_change(lambda: setattr(model, "window", 4)))


@defect("attribute", "silent")
def bool_attribute(device):
    model = SimpleNamespace(gated=False)

    def forward(x):
        return x * torch.sigmoid(x) if model.gated else x * 1

    return Scenario(forward, between=at_change(lambda: setattr(model, "gated", True)))


@defect("attribute", "silent")
def string_attribute(device):
    model = SimpleNamespace(activation="relu")

    def forward(x):
        return getattr(torch, model.activation)(x)

    return Scenario(forward, between=at_change(lambda: setattr(model, "activation", "tanh")))


@defect("attribute", "silent")
def attribute_that_was_none(device):
    model = SimpleNamespace(bias=None)

    def forward(x):
        return x * 1 if model.bias is None else x + model.bias

    return Scenario(forward, between=at_change(lambda: setattr(model, "bias", torch.ones(8))))


@defect("attribute", "silent")
def dtype_attribute(device):
    model = SimpleNamespace(dtype=torch.float32, weight=torch.randn(8, 8))

    def forward(x):
        return (x.to(model.dtype) @ model.weight.to(model.dtype)).float() + x

    # bfloat16 is off by more than the tolerance.
    change = at_change(lambda: setattr(model, "dtype", torch.bfloat16))
    return Scenario(forward, between=change, tolerance=1e-4)


@defect("attribute", "silent")
def attribute_of_a_slots_object(device):
    class Settings:
        __slots__ = ("scale",)

    settings = Settings()
    settings.scale = 1.0
    return Scenario(
        lambda x: x * settings.scale, between=at_change(lambda: setattr(settings, "scale", 3.0))
    )


@defect("attribute", "silent")
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


@defect("attribute", "silent")
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


@defect("global", "silent")
def global_number(device):
    module = {"SCALE": 1.0}
    exec("def forward(x):\n    return x * SCALE", module)
    return Scenario(module["forward"], between=at_change(lambda: module.update(SCALE=3.0)))


@defect("global", "silent")
def global_tensor_rebound(device):
    module = {"weight": torch.ones(8)}
    exec("def forward(x):\n    return x * weight", module)
    change = at_change(lambda: module.update(weight=torch.full((8,), 3.0)))
    return Scenario(module["forward"], between=change)


@defect("global", "silent")
def global_dict_of_settings(device):
    module: dict[str, Any] = {"SETTINGS": {"scale": 1.0}}
    exec("def forward(x):\n    return x * SETTINGS['scale']", module)
    return Scenario(
        module["forward"], between=at_change(lambda: module["SETTINGS"].update(scale=3.0))
    )


@defect("global", "silent")
def function_of_a_module_patched(device):
    library = SimpleNamespace(activation=torch.relu)
    return Scenario(
        lambda x: library.activation(x),
        between=at_change(lambda: setattr(library, "activation", torch.tanh)),
    )


@defect("class attribute", "silent")
def class_attribute(device):
    class Model:
        scale: ClassVar[float] = 1.0

        def step(self, x):
            return x * self.scale

    return Scenario(Model().step, between=at_change(lambda: setattr(Model, "scale", 3.0)))


@defect("class attribute", "silent")
def class_attribute_shadowed_by_an_instance(device):
    model = type("Model", (), {"scale": 1.0})()
    return Scenario(
        lambda x: x * model.scale, between=at_change(lambda: setattr(model, "scale", 3.0))
    )


@defect("class attribute", "silent")
def method_of_a_class_patched(device):
    class Model(nn.Module):
        def gate(self, x):
            return torch.relu(x)

        def forward(self, x):
            return self.gate(x)

    change = at_change(lambda: setattr(Model, "gate", lambda self, x: torch.tanh(x)))
    return Scenario(Model(), between=change)


@defect("default argument", "silent")
def mutable_default(device):
    default = {"scale": 1.0}

    def forward(x, settings=default):
        return x * settings["scale"]

    return Scenario(forward, between=at_change(lambda: default.update(scale=3.0)))


@defect("default argument", "silent")
def defaults_replaced(device):
    def forward(x, scale=1.0):
        return x * scale

    return Scenario(forward, between=at_change(lambda: setattr(forward, "__defaults__", (3.0,))))


@defect("environment", "silent")
def environment_variable(device):
    os.environ["GRAPHRT_TESTS_SCALE"] = "1"

    def forward(x):
        return x * float(os.environ["GRAPHRT_TESTS_SCALE"])

    return Scenario(forward, between=at_change(lambda: os.environ.update(GRAPHRT_TESTS_SCALE="3")))


@defect("environment", "silent")
def number_that_another_thread_changes(device):
    settings = SimpleNamespace(scale=1.0)

    def change():
        thread = threading.Thread(target=setattr, args=(settings, "scale", 3.0))
        thread.start()
        thread.join()

    return Scenario(lambda x: x * settings.scale, between=at_change(change))


@defect("environment", "silent")
def number_of_a_thread(device):
    local = threading.local()

    def forward(x):
        return x * getattr(local, "scale", 1.0)

    return Scenario(forward, between=at_change(lambda: setattr(local, "scale", 3.0)))


@defect("replaced method", "silent")
def forward_of_a_module_replaced(device):
    model = simple_model()

    def doubled(self, x):
        return self.linear(x) * 2

    change = at_change(lambda: setattr(model, "forward", MethodType(doubled, model)))
    return Scenario(model, between=change)


@defect("replaced method", "silent")
def method_of_an_instance_replaced(device):
    model = simple_model()
    inner = model.linear
    change = at_change(lambda: setattr(inner, "forward", lambda x: x @ inner.weight))
    return Scenario(model, between=change)
