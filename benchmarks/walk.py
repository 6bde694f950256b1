"""How far a reader walks: the functions of graphrt that a step and a capture go through.

    python3 -m benchmarks.walk [--trace [full piecewise capture trial]] [--json FILE]
    PYTHONPATH=OTHER python3 benchmarks/walk.py      # of the graphrt in another tree

The program is three linear layers with two eager breaks between them, one float input ("tokens",
8), one size of 4 tokens, on the CPU platform. Four walks, each after the same was done before, so
that caches are warm:

- full: `runner(Batch(4, 4), x=...)`, a FULL hit;
- piecewise: the same call, a PIECEWISE step of three segments and two eager parts;
- capture: `runner.capture()` of a new runner with `sizes=[4], mode="PIECEWISE"`, which was made
  before and is the second one for this model;
- trial: the first PIECEWISE step of a runner that has just captured, which tries its graph.

Calls are the "call" events of `sys.setprofile` in this thread whose code lies in graphrt's own
files: functions and methods, and also lambdas, resumed generators and (up to Python 3.11)
comprehensions; nothing of C, torch or the model. Files are those that these calls are in, and a
change of file is a call in another file than the one before it. A trace lists the calls in order;
the same one several times in a row is one line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import graphrt
from graphrt import Batch, GraphRunner, InputSpec, eager_break

ROOT = Path(graphrt.__file__).parent
WARM_UPS = 3


class Call(NamedTuple):
    """A function by its file below graphrt/ and its qualified name."""

    file: str
    function: str


class Model(nn.Module):
    """Three layers; what stands between two of them runs eagerly under PIECEWISE."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        x = first(x)
        for layer in others:
            x = layer(between(x))
        return x


@eager_break
def between(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def new_runner(model: Model, mode: str) -> GraphRunner:
    return GraphRunner(
        model,
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        sizes=[4],
        mode=mode,
        platform="cpu",
    )


def walk(action: Callable[[], object]) -> list[Call]:
    """What `action` calls of graphrt, in order."""
    inside, found = str(ROOT) + "/", []

    def seen(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(inside):
            # Python 3.10 has no qualified names here.
            name = getattr(code, "co_qualname", code.co_name)
            found.append(Call(code.co_filename.removeprefix(inside), name))

    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def step_walk(model: Model, mode: str) -> list[Call]:
    batch, x = Batch(4, 4), torch.ones(4, 8)
    with new_runner(model, mode) as runner:
        runner.capture()
        for _ in range(WARM_UPS):
            runner(batch, x=x)
        found = walk(lambda: runner(batch, x=x))
        assert runner.last_dispatch is not None
        hit = runner.last_dispatch
        assert (hit.reason.name, hit.mode.name) == ("HIT", mode), hit
    return found


def capture_walk(model: Model) -> list[Call]:
    with new_runner(model, "PIECEWISE") as runner:
        runner.capture()
    with new_runner(model, "PIECEWISE") as runner:
        return walk(runner.capture)


def trial_walk(model: Model) -> list[Call]:
    batch, x = Batch(4, 4), torch.ones(4, 8)
    for _ in range(2):
        with new_runner(model, "PIECEWISE") as runner:
            runner.capture()
            found = walk(lambda runner=runner: runner(batch, x=x))  # type: ignore[misc]
            assert [record.status for record in runner.report().trust.trials] == ["tried"]
    return found


def figures(calls: list[Call]) -> dict[str, int]:
    return {
        "calls": len(calls),
        "files": len({call.file for call in calls}),
        "changes_of_file": sum(one.file != other.file for one, other in pairwise(calls)),
    }


def lines(calls: list[Call]) -> list[str]:
    """`file:function` in order, with the number of calls where there are several in a row."""
    counted = [(call, len(list(same))) for call, same in groupby(calls)]
    return [
        f"{file}:{function}" + (f" ({count} times)" if count > 1 else "")
        for (file, function), count in counted
    ]


WALKS: dict[str, tuple[str, Callable[[Model], list[Call]]]] = {
    "full": ("FULL hit", lambda model: step_walk(model, "FULL")),
    "piecewise": ("PIECEWISE step with two breaks", lambda model: step_walk(model, "PIECEWISE")),
    "capture": ("capture of one breakable size", capture_walk),
    "trial": ("first step, with its trial", trial_walk),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", nargs="*", choices=list(WALKS), help="list these walks, or all")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Model()
    found = {name: take(model) for name, (_, take) in WALKS.items()}
    print(f"{'':<32}{'calls':>8}{'files':>8}{'changes of file':>18}")
    for name, (title, _) in WALKS.items():
        calls, files, changes = figures(found[name]).values()
        print(f"{title:<32}{calls:>8}{files:>8}{changes:>18}")
    traced = [] if options.trace is None else options.trace or list(WALKS)
    for name in traced:
        print(f"\n{WALKS[name][0]}", *lines(found[name]), sep="\n  ")
    if options.json is not None:
        whole = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "walks": {name: {**figures(calls), "trace": calls} for name, calls in found.items()},
        }
        options.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
