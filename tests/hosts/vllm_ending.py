"""One rank of two, as a worker of vLLM's: the other rank stops inside of a collective.

python -m tests.hosts.vllm_ending RANK STORE
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import standin_vllm
import vllm_on_cpu as host

from graphrt.hosts.vllm import ending, install


def main(rank: int, store: str) -> None:
    os.environ |= {"GRAPHRT_VLLM": "1", "GRAPHRT_PLATFORM": "cpu"}
    sys.modules.update(standin_vllm.modules("0.24.0"))
    sys.modules["vllm.envs"].VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS = 1
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    vllm = host.load()
    install()
    ending.LATER_S = 1.0

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    config, mode = host.config([2], "FULL"), vllm.config.CUDAGraphMode.FULL
    key, buffer = vllm.contexts.BatchDescriptor(2), torch.ones(2, 4)
    wrapper = vllm.v1.CUDAGraphWrapper(forward, config, runtime_mode=mode)

    def step() -> torch.Tensor:
        context = {"cudagraph_runtime_mode": mode, "batch_descriptor": key}
        with vllm.contexts.set_forward_context(None, config, **context):
            return wrapper(buffer)

    with vllm.v1.graph_capture(device=torch.device("cpu")):
        step()
    dist.all_reduce(step())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    # The process of the engine ends, and nobody kills this one.
    reader, writer = multiprocessing.Pipe(duplex=False)
    worker = sys.modules["vllm.v1.executor.multiproc_executor"].WorkerProc(rank)
    worker.monitor_death_pipe(reader, threading.Event())
    threading.Timer(0.2, writer.close).start()
    dist.all_reduce(step())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
