"""What the parent asks of workers: vLLM mixes `Extension` into the class of its workers."""

import gc
import os
import signal
import threading
import time
import zlib
from pathlib import Path
from typing import Any

SCALE = 0.02


class Extension:
    """Methods of each worker, called by name on all ranks."""

    rank: int
    model_runner: Any

    def bench_randomise(self) -> int:
        """Refill weights in place: what is sharded differs by rank, what is replicated does not."""
        import torch
        from vllm.distributed import get_tensor_model_parallel_rank
        from vllm.distributed.parallel_state import get_dp_group

        shard = get_tensor_model_parallel_rank()
        expert_shard = shard + 100 * get_dp_group().rank_in_group
        model = self.model_runner.model
        count = 0
        with torch.inference_mode():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.fill_(1.0)
                    continue
                seed = zlib.crc32(name.rpartition("runnable.")[2].encode())
                if "experts" in name:
                    seed += expert_shard
                elif not name.endswith(".gate.weight"):
                    seed += shard
                generator = torch.Generator(device=weight.device).manual_seed(seed)
                weight.normal_(0.0, SCALE, generator=generator)
                count += 1
        torch.cuda.synchronize()
        return count

    def bench_recapture(self) -> dict[str, Any]:
        """Destroy all graphs and capture them again; seconds, graphs and bytes."""
        import torch
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
        from vllm.compilation.counter import compilation_counter
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        manager = getattr(self.model_runner, "cudagraph_manager", None)
        if manager is not None:
            manager.graphs.clear()
        for wrapper in (
            *CUDAGraphWrapper._all_instances,
            *BreakableCUDAGraphWrapper._all_instances,
        ):
            wrapper.clear_graphs()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        captured, began = compilation_counter.num_cudagraph_captured, time.perf_counter()
        self.model_runner.capture_model()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        torch.cuda.empty_cache()
        return {
            "seconds": round(seconds, 3),
            "graphs": compilation_counter.num_cudagraph_captured - captured,
            "reserved_mib": round((torch.cuda.memory_reserved() - reserved) / 2**20, 1),
        }

    def bench_counts(self) -> dict[str, Any]:
        """What graphrt has captured and replayed in this worker; all 0 without graphrt."""
        found: dict[str, Any] = {"rank": self.rank, "captures": 0, "steps": 0, "eager": {}}
        if os.environ.get("GRAPHRT_VLLM") == "1":
            from graphrt.hosts.vllm import _state

            state = _state.state
            found |= {
                "captures": state.pools.captures,
                "steps": state.pools.steps,
                "eager": dict(state.eager.counts),
            }
        return found

    def bench_die(self, rank: int, point: str, stamp: str, seconds: float = 1.0) -> bool:
        """Have the worker of one rank killed, at once where the others wait for it:

        - `replay`: before a replay that the other rank makes, whose collective then waits;
        - `exchange`: where ranks tell each other the addresses of what they captured;
        - `capture`: at its third capture;
        - `between`: after `seconds`, with no step under way.
        """
        if self.rank != rank:
            return False

        def die(*args: Any, **kwargs: Any) -> None:
            Path(stamp).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        if point == "between":
            threading.Timer(seconds, die).start()
        elif point == "exchange":
            import torch.distributed

            torch.distributed.broadcast_object_list = die
        else:
            import torch

            method = {"replay": "replay", "capture": "capture_begin"}[point]
            die_at(torch.cuda.CUDAGraph, method, 6 if point == "replay" else 3, die)
        return True


def die_at(owner: Any, method: str, count: int, die: Any) -> None:
    """Call `die` in place of the call number `count` of a method."""
    original, calls = getattr(owner, method), iter(range(1, count))

    def dying(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            die()
        return original(*args, **kwargs)

    setattr(owner, method, dying)
