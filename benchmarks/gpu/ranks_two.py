"""What a vote costs beside a step of two GPUs, whose graphs hold all-reduces of NCCL.

    python3 -m benchmarks.gpu.ranks_two [--layers 16] [--steps 300] [--json FILE]

Each rank has a GPU, and layers that sum over ranks; the votes are on gloo. In microseconds, the
median over steps, each waited for on the device:

- `step`: equal batches, no vote;
- `vote and step`: `Host(ranks=)`, each vote waited for before the step;
- `vote begun before`: the vote on the next step is begun once this one is launched;
- `eager`: the same layers without graphs.

With `--device cpu` it runs over gloo alone, to see that it runs.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import arguments, environment, finish, show, synchronizer
from graphrt import Batch, GraphRunner, Host, InputSpec, eager_break
from graphrt.ranks import Agreement

RANKS, SIZES = 2, [8, 16, 32]


def model_of(device: str, layers: int, hidden: int) -> Callable[..., torch.Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(hidden, hidden, device=device) / hidden for _ in range(layers)]

    def summed(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    # Graphs of the CPU hold no collectives.
    sum_over_ranks = summed if device == "cuda" else eager_break(summed)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x + torch.tanh(sum_over_ranks(x @ weight))
        return x

    return forward


def measure(rank: int, store: str, options: Any, results: Any) -> None:
    """One rank, in its process."""
    device, hidden = options.device, options.hidden
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS)
    synchronize = synchronizer(device)
    forward = model_of(device, options.layers, hidden)
    x, batch = torch.randn(12, hidden, device=device), Batch(12, 12)

    def median_us(step: Callable[[], object]) -> float:
        times = []
        for at in range(options.steps + 20):
            began = time.perf_counter()
            step()
            synchronize()
            if at >= 20:
                times.append(time.perf_counter() - began)
        return 1e6 * statistics.median(times)

    def runner_of(host: Host | None = None) -> GraphRunner[torch.Tensor]:
        return GraphRunner(
            forward,
            mode="FULL" if device == "cuda" else "PIECEWISE",
            sizes=SIZES,
            inputs={"x": InputSpec(torch.float32, ("tokens", hidden))},
            outputs=("tokens", hidden),
            host=host,
            platform=device,
        )

    figures = {}
    with torch.no_grad():
        figures["eager"] = median_us(lambda: forward(x))
        with runner_of() as alone:
            alone.capture()
            figures["step"] = median_us(lambda: alone(batch, x=x))
        with Agreement(timeout_s=60) as agreement, runner_of(Host(ranks=agreement)) as runner:
            runner.capture()
            figures["vote and step"] = median_us(lambda: runner(batch, x=x))

            def begun_before() -> None:
                runner(batch, x=x)
                agreement.begin(runner, batch)

            agreement.begin(runner, batch)
            figures["vote begun before"] = median_us(begun_before)
            runner(batch, x=x)
    if rank == 0:
        results.put(figures)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < RANKS:
        raise SystemExit(f"needs {RANKS} GPUs, found {torch.cuda.device_count()}")
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=measure, args=(rank, f"{folder}/store", options, results))
            for rank in range(RANKS)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
    if any(process.exitcode for process in started):
        raise SystemExit("a rank has failed")
    figures = results.get()
    rows = [(name, f"{us:.0f}", f"{us / figures['step']:.3f}") for name, us in figures.items()]
    show("A vote beside a step of two ranks", ["", "us", "of a step"], rows)
    finish("ranks_two", options, environment(options.device), figures)


if __name__ == "__main__":
    main()
