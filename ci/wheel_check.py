"""Whether an installed graphrt runs: captures and replays a graph on the CPU, away from a checkout.

    python ci/wheel_check.py [--native | --pure]

`--native` asks for the C part too, `--pure` for a wheel without it. Exits with 1 and says what is
wrong. Wheels are tried with this before they are published.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

# This file lies in a checkout, whose package would be found first.
sys.path[:] = [each for each in sys.path if not (Path(each or ".") / "ci" / "setup.sh").exists()]

import torch  # noqa: E402

import graphrt  # noqa: E402
from graphrt import Batch, GraphRunner, InputSpec, Reason  # noqa: E402
from graphrt.core.base._native_door import native_state  # noqa: E402


def problems(arguments: list[str]) -> list[str]:
    found = []
    if graphrt.__version__ != metadata.version("graphrt"):
        found.append(f"it says {graphrt.__version__}, its metadata {metadata.version('graphrt')}")
    if "--native" in arguments and native_state != "in use":
        found.append(f"the C part is not in use: {native_state}")
    if "--pure" in arguments and not native_state.startswith("it was not built"):
        found.append(f"the pure wheel has a C part: {native_state}")
    model = torch.nn.Linear(8, 8).eval()
    runner = GraphRunner(
        model,
        inputs={"input": InputSpec(torch.float32, ("rows", 8))},
        outputs=("rows", 8),
        sizes=[1, 2, 4],
    )
    runner.capture()
    values = torch.randn(3, 8)
    with torch.no_grad():
        result = runner(Batch(3), input=values).clone()
        expected = model(values)
    if runner.last_dispatch is None or runner.last_dispatch.reason is not Reason.HIT:
        found.append(f"a step was not replayed: {runner.last_dispatch}")
    if not torch.allclose(result, expected):
        found.append("a replay differs from eager")
    runner.close()
    return found


def main() -> int:
    found = problems(sys.argv[1:])
    where = Path(graphrt.__file__).parent
    print(f"graphrt {graphrt.__version__} in {where}, C part: {native_state}")
    for each in found:
        print(f"wrong: {each}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
