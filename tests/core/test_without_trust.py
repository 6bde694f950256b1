"""With `check="off"` a runner needs nothing of `graphrt.trust`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests import starts

ROOT = Path(__file__).resolve().parents[2]

_SESSION = """
import sys
import torch
from graphrt import GraphOptions, GraphRunner, Host, InputSpec, State

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.linear(x)

model = Model().eval()
runner = GraphRunner(
    model, mode="{mode}", sizes=[2, 4], pieces="breakable",
    inputs={{"x": InputSpec(torch.float32, ("tokens", 4))}}, outputs=("tokens", 4),
    host=Host(state=[model.count]), options=GraphOptions(check="off"), platform="cpu",
)
runner.capture()
assert model.count == 0, model.count
x = torch.randn(3, 4)
assert torch.equal(runner(x=x), model.linear(torch.cat([x, torch.zeros(1, 4)]))[:3])
assert runner.last_dispatch.reason.name == "HIT", runner.last_dispatch
print(runner.report().trust.trials)
runner.weights_changed()
runner.recapture()
assert runner(x=x).shape == (3, 4)
runner.release()
while runner.capture_next().left:
    pass
runner.close()
print([name for name in sys.modules if name.startswith("graphrt.trust")])
"""


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_runner_without_checks_imports_no_trust(mode: str) -> None:
    done = starts.run("-c", _SESSION.format(mode=mode), check=False)
    assert done.stdout.splitlines() == ["()", "[]"], done.stderr


_DEFAULT = """
import sys
# An editable install finds modules of the checkout that the copy lacks.
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each)]
import torch
from graphrt import GraphRunner, InputSpec
from graphrt.errors import MissingCapabilityError

try:
    GraphRunner(
        lambda x: x, mode="FULL", sizes=[2], platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
    )
except MissingCapabilityError as error:
    print(error)
"""


def test_a_default_runner_raises_where_trust_is_left_out(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "trust")
    shutil.copytree(ROOT / "graphrt", tmp_path / "graphrt", ignore=left_out)
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "GRAPHRT_CHECK": ""}
    done = starts.run("-c", _DEFAULT, cwd=tmp_path, env=environ, check=True)
    assert done.stdout.startswith("graphrt.trust, which checks steps, is not installed")
    done = starts.run("-c", _SESSION.format(mode="FULL"), cwd=tmp_path, env=environ)
    assert done.stdout.splitlines() == ["()", "[]"], done.stderr
