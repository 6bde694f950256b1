"""One rank of two of tensor parallelism, with the stand-in for vLLM: tells of its trials.

python -m tests.hosts.vllm_ranks RANK STORE V1|V2
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import standin_vllm
import test_vllm_trials as loops
import vllm_on_cpu as host

from graphrt.hosts.vllm import install, report


def main(rank: int, store: str, kind: str) -> dict[str, Any]:
    """The statuses of its graphs, and how often its model ran after captures."""
    os.environ |= {"GRAPHRT_VLLM": "1", "GRAPHRT_PLATFORM": "cpu", "GRAPHRT_CHECK": "first"}
    sys.modules.update(standin_vllm.modules("0.24.0"))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    vllm = host.load()
    vllm.mode, vllm.Key = vllm.config.CUDAGraphMode, vllm.contexts.BatchDescriptor
    parallel = sys.modules["vllm.distributed.parallel_state"]
    parallel.get_tp_group = lambda: SimpleNamespace(cpu_group=dist.group.WORLD)
    install()
    config = host.config(loops.SIZES, "FULL_DECODE_ONLY")
    config.parallel_config.tensor_parallel_size = 2
    model = loops.Model(vllm)
    # The second rank alone has a defect, in steps of the larger graph.
    metadata = loops.Metadata(scale=1.0 + 2.0 * rank, above=2)
    steps = {"V1": loops.V1, "V2": loops.V2}[kind](vllm, config, model, metadata)
    captured, runs = model.calls, []
    for at, ids in enumerate(loops.BATCHES):
        if rank == 0 and at == 5:
            model.embed = model.embed.clone()  # seen by one rank alone: no trial
        assert steps.step(ids).isfinite().all()
        runs.append(model.calls - captured)
    torch.distributed.barrier()
    statuses = {each.descriptor.num_tokens: each.status for each in report().trust.trials}
    return {"statuses": statuses, "runs": runs}


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
