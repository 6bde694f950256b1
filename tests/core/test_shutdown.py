"""A step in `__del__` during interpreter shutdown is served or refused, and never aborts Python."""

from __future__ import annotations

import pytest

from tests import starts

PROGRAM = """
import sys
import torch
from graphrt import GraphOptions, GraphRunner, InputSpec

model = torch.nn.Linear(4, 4).eval()
runner = GraphRunner(
    lambda x: model(x),
    mode="FULL",
    sizes=[1, 2, 4],
    inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
    outputs=("tokens", 4),
    options=GraphOptions(check=sys.argv[1]),
)
if sys.argv[2] == "captured":
    runner.capture()


class Last:
    def __init__(self, runner):
        self.runner = runner

    def __del__(self):
        try:
            self.runner(x=torch.ones(3, 4))
            print(self.runner.last_dispatch.reason.name, flush=True)
        except BaseException as error:
            print(type(error).__name__, flush=True)


last = Last(runner)
if sys.argv[3] == "cycle":
    last.itself = last
"""


@pytest.mark.trust
@pytest.mark.parametrize(
    ("check", "captured", "told"),
    [
        ("capture", "captured", "PoolClosedError"),  # its first step is a trial
        ("always", "captured", "PoolClosedError"),
        ("off", "captured", "HIT"),
        ("capture", "not captured", "PoolClosedError"),  # an eager step
    ],
)
@pytest.mark.parametrize("shape", [pytest.param("plain", marks=pytest.mark.long), "cycle"])
def test_a_step_in_a_finalizer_at_interpreter_shutdown_does_not_abort(check, captured, told, shape):
    done = starts.run("-c", PROGRAM, check, captured, shape, finalized=True)
    assert done.stdout.split() == [told] and done.returncode == 0, done.stderr[-2000:]
