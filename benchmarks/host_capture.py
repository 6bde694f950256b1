"""What capturing a model costs the host in Python, without a device.

    python3 -m benchmarks.host_capture [--sizes N] [--rounds N] [--json FILE]

A CPU platform whose graphs record nothing, and a model of 16 layers so small that its operators
take what it takes to issue them: what is left of `capture()` is the forward, and graphrt's own
part. By hand a loop runs the forward twice at each size (FULL_AND_PIECEWISE captures twice as many
graphs), and the same under a dispatch mode that does nothing: what watching costs at the least. All
take turns; seconds are medians. What drivers take for a graph, and first replays, are not in it:
see `benchmarks.gpu.capture`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import arguments, environment, finish, show
from benchmarks.llama import Llama, config
from graphrt import GraphOptions
from graphrt.cpu import CpuPlatform

MODEL = config(256, 32, 64, 16, 4, 2, 8, tied=True, dtype=torch.float32)
MODES = ("FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE")
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "check='off'": {"check": "off"},
}
BY_HAND = "by hand"


class NullGraph:
    """A graph that is captured, and replays nothing."""

    kernels = 1

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class NullPlatform(CpuPlatform):
    """The CPU, where what is captured runs, and is forgotten."""

    def new_graph(self) -> Any:
        return NullGraph()

    def begin_capture(self, graph: Any, memory: Any) -> None: ...

    def end_capture(self, graph: Any) -> bool:
        return True

    def abort_capture(self, graph: Any) -> None: ...

    def owns(self, memory: Any, tensor: torch.Tensor) -> bool:
        return False

    def weak_ref(self, memory: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()


class NullMode(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def by_hand(
    model: Llama, inputs: dict[int, dict[str, torch.Tensor]], *, watched: bool
) -> Callable[[], float]:
    """Two forwards a size; the first `watched` by a mode."""

    def seconds() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            for given in inputs.values():
                with NullMode() if watched else nullcontext():
                    model(**given)
                model(**given)
        return time.perf_counter() - began

    return seconds


def by_graphrt(
    model: Llama, mode: str, sizes: list[int], options: dict[str, Any]
) -> Callable[[], float]:
    def seconds() -> float:
        given = GraphOptions(**options)
        with model.runner(mode, sizes, platform=NullPlatform(), options=given) as runner:
            gc.collect()
            began = time.perf_counter()
            runner.capture()
            return time.perf_counter() - began

    return seconds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, default=51, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    options = parser.parse_args()
    options.device = "cpu"
    torch.set_num_threads(1)
    sizes = list(range(1, options.sizes + 1))
    model = Llama(MODEL, max_batch=max(sizes), context=16, device="cpu")
    inputs = {size: model.inputs(size) for size in sizes[::-1]}
    contestants = {
        BY_HAND: by_hand(model, inputs, watched=False),
        f"{BY_HAND}, one of two under a mode": by_hand(model, inputs, watched=True),
    }
    for mode in MODES:
        for name, settings in OPTIONS.items():
            contestants[f"{mode} {name}".strip()] = by_graphrt(model, mode, sizes, settings)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(options.rounds + 1):
        for name, seconds in contestants.items():
            taken = seconds()
            if round_:  # the first one warms up
                times[name].append(taken)
    medians = {name: statistics.median(each) for name, each in times.items()}
    rows = [[name, taken, taken / medians[BY_HAND]] for name, taken in medians.items()]
    show(f"Capturing {len(sizes)} sizes, 16 layers", ["", "seconds", "of by hand"], rows)
    finish("host_capture", options, environment("cpu"), medians)


if __name__ == "__main__":
    main()
