"""Python values of closures, globals, defaults and the process that a host changes between steps.

A capture bakes them in, and at capture nobody can know that they will change: these are what the
higher levels are for.
"""

from __future__ import annotations

import functools
import os
import threading
from types import SimpleNamespace
from typing import Any

import torch

from tests.trust.scenario import CHANGE, Scenario, at_change, defect


@defect("closure", "late")
def nonlocal_number(device):
    scale = 1.0

    def between(step):
        nonlocal scale
        scale = 3.0 if step >= CHANGE else 1.0

    return Scenario(lambda x: x * scale, between=between)


@defect("closure", "named")
def number_that_changes_at_every_step(device):
    scale = 1.0

    def between(step):
        nonlocal scale
        scale = 1.0 + step

    return Scenario(lambda x: x * scale, between=between)


@defect("closure", "late")
def list_cell(device):
    scale = [1.0]
    return Scenario(
        lambda x: x * scale[0], between=at_change(lambda: scale.append(scale.pop() * 3))
    )


@defect("closure", "named")
def tensor_of_a_closure_rebound(device):
    weight = torch.ones(8)

    def between(step):
        nonlocal weight
        if step == CHANGE:
            weight = torch.full((8,), 3.0)

    return Scenario(lambda x: x * weight, between=between)


@defect("closure", "late")
def function_of_a_closure_rebound(device):
    activation = torch.relu

    def between(step):
        nonlocal activation
        if step == CHANGE:
            activation = torch.tanh

    return Scenario(lambda x: activation(x), between=between)


@defect("closure", "late")
def set_of_skipped_layers(device):
    weights, skipped = [torch.randn(8, 8) for _ in range(3)], set()

    def forward(x):
        for layer, weight in enumerate(weights):
            if layer not in skipped:
                x = torch.tanh(x @ weight)
        return x

    return Scenario(forward, between=at_change(lambda: skipped.add(1)))


@defect("closure", "late")
def partial_with_a_list_that_changes(device):
    scales = [1.0]
    forward = functools.partial(lambda scales, x: x * scales[-1], scales)
    return Scenario(forward, between=at_change(lambda: scales.append(3.0)))


@defect("closure", "named")
def lora_chosen_by_a_python_index(device):
    adapters, active = [torch.randn(8, 8) for _ in range(3)], [0]

    def between(step):
        active[0] = step % 3

    return Scenario(lambda x: x + x @ adapters[active[0]], between=between)


@defect("global", "late")
def global_number(device):
    module = {"SCALE": 1.0}
    exec("def forward(x):\n    return x * SCALE", module)
    return Scenario(module["forward"], between=at_change(lambda: module.update(SCALE=3.0)))


@defect("global", "named")
def global_tensor_rebound(device):
    module = {"weight": torch.ones(8)}
    exec("def forward(x):\n    return x * weight", module)
    change = at_change(lambda: module.update(weight=torch.full((8,), 3.0)))
    return Scenario(module["forward"], between=change)


@defect("global", "late")
def global_dict_of_settings(device):
    module: dict[str, Any] = {"SETTINGS": {"scale": 1.0}}
    exec("def forward(x):\n    return x * SETTINGS['scale']", module)
    return Scenario(
        module["forward"], between=at_change(lambda: module["SETTINGS"].update(scale=3.0))
    )


@defect("global", "late")
def function_of_a_module_patched(device):
    library = SimpleNamespace(activation=torch.relu)
    return Scenario(
        lambda x: library.activation(x),
        between=at_change(lambda: setattr(library, "activation", torch.tanh)),
    )


@defect("default argument", "late")
def mutable_default(device):
    default = {"scale": 1.0}

    def forward(x, settings=default):
        return x * settings["scale"]

    return Scenario(forward, between=at_change(lambda: default.update(scale=3.0)))


@defect("default argument", "late")
def defaults_replaced(device):
    def forward(x, scale=1.0):
        return x * scale

    return Scenario(forward, between=at_change(lambda: setattr(forward, "__defaults__", (3.0,))))


@defect("environment", "late", told="named")
def environment_variable(device):
    os.environ["GRAPHRT_TESTS_SCALE"] = "1"

    def forward(x):
        return x * float(os.environ["GRAPHRT_TESTS_SCALE"])

    return Scenario(forward, between=at_change(lambda: os.environ.update(GRAPHRT_TESTS_SCALE="3")))


@defect("environment", "late")
def number_that_another_thread_changes(device):
    settings = SimpleNamespace(scale=1.0)

    def change():
        thread = threading.Thread(target=setattr, args=(settings, "scale", 3.0))
        thread.start()
        thread.join()

    return Scenario(lambda x: x * settings.scale, between=at_change(change))


@defect("environment", "late", long=True)
def number_of_a_thread(device):
    local = threading.local()

    def forward(x):
        return x * getattr(local, "scale", 1.0)

    return Scenario(forward, between=at_change(lambda: setattr(local, "scale", 3.0)))
