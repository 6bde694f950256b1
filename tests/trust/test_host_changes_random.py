"""Random changes of random small models between steps, beside an eager twin.

Each change sets a reachable attribute, dict entry, weight or hook, or undoes one. Where CPython
tells of changes no step may be wrong; else none later than the glances take. Whether a graph goes
into quarantine is up to chance; then the runner captures again.
"""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import GraphRunner, InputSpec, Reason
from graphrt.core.base._native_door import NativeWatch, native_state
from tests.trust.host_programs import all_ids_taken

WIDTH = 4
ROOT = Path(__file__).resolve().parents[2]


class Part(nn.Module):
    """One of several small forwards, each with Python state of its own."""

    def __init__(self, numbers: random.Random) -> None:
        super().__init__()
        self.kind = numbers.randrange(6)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.scale = 1.0
        self.flag = bool(numbers.randrange(2))
        self.name = "relu"
        self.unused = 0
        self.config = SimpleNamespace(alpha=1.0, notes={}, deep=SimpleNamespace(beta=1.0))
        self.table = {"a": 1.0, "b": 2.0}
        self.active = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == 0:
            return self.linear(x) * self.scale
        if self.kind == 1:
            return x + self.shift * 2 if self.flag else x - self.shift
        if self.kind == 2:
            return getattr(torch, self.name)(self.linear(x))
        if self.kind == 3:
            return self.linear(x) * self.config.alpha + self.config.deep.beta
        if self.kind == 4:
            return x * self.table[self.active]
        return self.helper(x)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def changes_of(part: Part, numbers: random.Random) -> list[Callable[[], object]]:
    """What a host may do to one part."""
    number = round(numbers.uniform(0.5, 4.0), 1)
    layer = part.linear
    return [
        lambda: setattr(part, "scale", number),
        lambda: setattr(part, "flag", not part.flag),
        lambda: setattr(part, "name", numbers.choice(["relu", "tanh", "sigmoid"])),
        lambda: setattr(part, "unused", number),
        lambda: setattr(part, f"extra{numbers.randrange(3)}", number),
        lambda: setattr(part.config, "alpha", number),
        lambda: setattr(part.config.deep, "beta", number),
        lambda: setattr(part.config, "deep", SimpleNamespace(beta=number)),
        lambda: part.config.notes.update({numbers.randrange(100): number}),
        lambda: part.table.update({numbers.choice("abc"): number}),
        lambda: setattr(part, "active", numbers.choice("ab")),
        lambda: setattr(part, "linear", nn.Linear(WIDTH, WIDTH)),
        lambda: setattr(layer, "weight", nn.Parameter(layer.weight * number)),
        lambda: layer.weight.mul_(number),
        lambda: setattr(part, "shift", part.shift * number),
        lambda: part.register_forward_hook(lambda module, args, out: out * number),
        lambda: part._forward_hooks.clear(),
        lambda: setattr(part, "helper", lambda x: x * number),
        lambda: part.__dict__.pop("helper", None),
        lambda: layer.load_state_dict(
            {name: each * number for name, each in layer.state_dict().items()}, assign=True
        ),
        lambda: part.train(not part.training),
        lambda: None,
    ]


USED = {
    0: ("scale", "linear", "_forward_hooks"),
    1: ("flag", "shift", "_forward_hooks"),
    2: ("name", "linear", "_forward_hooks"),
    3: ("linear", "config", "_forward_hooks"),
    4: ("table", "active", "_forward_hooks"),
    5: ("helper", "scale", "shift", "_forward_hooks"),
}
"""By the kind of a part, which of its attributes its forward uses."""


class Driver:
    """Steps of random models, one after the other, with changes between them."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(seed)
        torch.manual_seed(seed)
        self.changes = self.trials = self.quarantines = 0
        # Steps that were wrong later than they may be.
        self.wrong: list[str] = []

    def run(self, changes: int) -> None:
        self.model = nn.Sequential(*(Part(self.numbers) for _ in range(3)))
        model = self.model
        runner: GraphRunner[Any] = GraphRunner(
            Forward(model),
            mode=self.numbers.choice(["FULL", "PIECEWISE"]),
            sizes=[1, 2, 4],
            inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
            platform="cpu",
        )
        runner.capture()
        in_a_row = 0
        for _ in range(changes):
            said = []
            for _ in range(self.numbers.choice([0, 1, 1, 1, 2, 3])):
                part: Any = self.numbers.choice([*model])
                index = self.numbers.randrange(22)
                changes_of(part, self.numbers)[index]()
                said.append(f"change {index} of a part of kind {part.kind}")
                self.changes += 1
            for _ in range(self.numbers.choice([1, 1, 2, 4])):
                x = torch.randn(self.numbers.choice([1, 2, 3, 4, 4, 6]), WIDTH)
                outputs = runner(x=x)
                right = torch.allclose(outputs, model(x), rtol=1e-4, atol=1e-4)
                in_a_row = 0 if right else in_a_row + 1
                trust = runner.report().trust
                allowed = 0 if trust.watched else trust.glance_steps
                if in_a_row > allowed and not self.is_left_out(trust):
                    self.wrong.append(f"{said}: {runner.last_dispatch}, {trust.harmless}")
            if any(each.status == "quarantined" for each in runner.report().trust.trials):
                self.quarantines += 1
                in_a_row = 0
                runner.recapture()
        self.trials += sum(each.steps for each in runner.report().trust.trials)
        runner.close()

    def is_left_out(self, trust: Any) -> bool:
        """Whether something is looked at no more that may make a difference: three changes of an
        entry of a table, say, while another entry was in use."""
        used = [re.findall(r"\[(\d)\]\.(\w+)", path) for path in trust.harmless]
        return any(name in USED[self.model[int(at)].kind] for each in used for at, name in each[:1])


class Forward(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def drive(seed: int, programs: int, changes: int) -> Driver:
    driver = Driver(seed)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(programs):
            driver.run(changes)
    assert driver.wrong == [], (seed, driver.wrong[:3])
    assert driver.quarantines, "nothing made a difference"
    return driver


def test_after_random_changes_each_step_is_right_or_the_change_named_in_time() -> None:
    assert drive(1, programs=3, changes=40).changes > 100


@pytest.mark.skipif(NativeWatch is None, reason=f"no dict is watched: {native_state}")
def test_with_all_watchers_taken_random_changes_are_named_in_time() -> None:
    with all_ids_taken():
        drive(2, programs=2, changes=40)


ALONE = """
import os, sys
sys.path.insert(0, os.getcwd())
from tests.trust.test_host_changes_random import drive
seed, programs, changes = map(int, sys.argv[1:])
driver = drive(seed, programs, changes)
print(driver.changes, driver.quarantines, driver.trials)
"""


@pytest.mark.long
@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("seed", range(10, 16))
def test_after_thousands_of_random_changes_each_step_is_right_or_named_in_time(
    seed: int, native: str
) -> None:
    import os

    switch = {} if native == "1" else {"GRAPHRT_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(seed), "15", "60"],
        cwd=ROOT,
        env={**os.environ, **switch},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 800


@pytest.mark.long
@pytest.mark.parametrize("taken", [False, True])
def test_thousands_of_random_changes_in_the_same_process_are_right_or_named(taken: bool) -> None:
    if taken and sys.version_info < (3, 12):
        pytest.skip("CPython has no watchers of dicts before 3.12, which could be taken")
    with all_ids_taken() if taken else contextlib.nullcontext():
        driver = drive(99, programs=40, changes=60)
    assert driver.changes > 2000


def test_a_quarantined_graph_stays_quarantined_until_recapture() -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(Part(random.Random(0)))
        model[0].kind = 0
        runner: GraphRunner[Any] = GraphRunner(
            Forward(model),
            mode="FULL",
            sizes=[2],
            inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
            platform="cpu",
        )
        runner.capture()
        x = torch.randn(2, WIDTH)
        runner(x=x)
        model[0].scale = 3.0
        runner.weights_changed()
        runner(x=x)
        model[0].scale = 1.0
        assert torch.equal(runner(x=x), model(x))
        assert runner.last_dispatch is not None
        assert runner.last_dispatch.reason is Reason.QUARANTINED
