"""What inputs cost a step on the device, in microseconds, by their size: fetched or copied.

    python3 -m benchmarks.gpu.inputs [--json FILE]

The size from which the copy engine is faster than a graph's own loads is the measure of
`CudaPlatform.fetched_bytes` and `CudaPlatform.fetch_limit_s`; the limit on this machine is printed
too. benchmarks/gpu/overhead.py has the host's cost of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish, show
from graphrt import Batch, GraphOptions, GraphRunner, InputSpec, get_platform
from graphrt.core.inputs.transport import Slab


def by_size(device: str) -> list[dict[str, float]]:
    """Of steps of one input, by its bytes: the host's and the device's microseconds, fetched and
    staged."""
    platform = get_platform(device)
    rows = []
    for shift in range(12, 24, 2):
        found: dict[str, float] = {"bytes": 1 << shift}
        for name in ("fetched", "staged"):
            before, platform.fetched_bytes = platform.fetched_bytes, 1 << 26
            limit, platform.fetch_limit_s = platform.fetch_limit_s, None
            try:
                runner = GraphRunner(
                    lambda x: x[:, :1] + 1,
                    inputs={"x": InputSpec(torch.uint8, ("tokens", 1 << shift))},
                    outputs=("tokens", 1),
                    mode="FULL",
                    sizes=[1],
                    max_num_reqs=1,
                    platform=platform,
                    options=GraphOptions(inputs_in_graph=name == "fetched", check="off"),
                )
            finally:
                platform.fetched_bytes, platform.fetch_limit_s = before, limit
            runner.capture()
            x = torch.zeros(1, 1 << shift, dtype=torch.uint8)
            found[f"{name}, device us"] = device_us(partial(runner, Batch(1, 1, 1), x=x))
            runner.close()
        rows.append(found)
    return rows


def device_us(step: Callable[[], Any], steps: int = 20, rounds: int = 9) -> float:
    """Microseconds of the device for a step, where the host is far enough ahead."""
    if not torch.cuda.is_available():
        return 0.0
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / steps * 1e3)
    return sorted(times)[rounds // 2]


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = by_size(options.device)
    show("By size", list(sizes[0]), [list(each.values()) for each in sizes])
    limit = fetched_here(options.device)
    print(f"fetched on this machine: up to {limit} bytes")
    results = {"by_size": sizes, "fetched_bytes": limit}
    finish("inputs", options, environment(options.device), results)


def fetched_here(device: str) -> int:
    """The largest inputs, to a KiB, that a runner on this machine has its graphs fetch."""
    buffer = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    ring = get_platform(device).new_input_transport(Slab(buffer, 1 << 20, 5))
    if ring is None:
        return 0
    return next(n << 10 for n in range(1 << 10, -1, -1) if not n or ring.fetch_of(n << 10))


if __name__ == "__main__":
    main()
