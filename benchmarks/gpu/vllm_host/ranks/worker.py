"""What the parent asks of workers: vLLM mixes `Extension` into the class of its workers."""

import gc
import os
import signal
import threading
import time
import zlib
from collections import Counter
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
        # torch lets nobody capture into a pool with blocks and without a graph. In vLLM's V2 runner
        # cuBLAS's workspace of the capture's stream is such a block; graphrt holds a share.
        is_own = os.environ.get("GRAPHRT_VLLM") != "1"
        if is_own:
            torch._C._cuda_clearCublasWorkspaces()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = _held_in(manager.pool) if is_own and manager is not None else 0
        if held:
            manager.pool = torch.cuda.graph_pool_handle()
            for wrapper in CUDAGraphWrapper._all_instances:
                wrapper.graph_pool = manager.pool
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
            "held_before_mib": round(held / 2**20, 2),
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

    def bench_watch(self) -> None:
        """Count from now on which graph each step takes, and keep the one replayed last."""
        import torch
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        _watch.dispatches_of(CudagraphDispatcher, lambda found: (found[0].name, found[1]))
        _watch.dispatches_of(CudaGraphManager, lambda found: (found.cg_mode.name, found))
        _watch.replays_of(torch.cuda.CUDAGraph)

    def bench_dispatched(self) -> dict[str, int]:
        """How often each graph was dispatched since the call before: `FULL 64` -> steps."""
        counts = dict(_watch.counts)
        _watch.counts.clear()
        return counts

    def bench_replay(self, times: int = 20) -> float:
        """The us of a replay alone, of the graph that was replayed last; on all ranks at once."""
        import torch

        assert _watch.last is not None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for at in range(times + 4):
            if at == 4:  # the ranks have met
                begin.record()
            _watch.replay(_watch.last)
        end.record()
        end.synchronize()
        return round(begin.elapsed_time(end) * 1e3 / times, 1)

    def bench_kernels(self, times: int = 5) -> list[tuple[str, float, float]]:
        """The kernels of that graph that take longest: name, count and us in a replay."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        assert _watch.last is not None
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(times):
                _watch.replay(_watch.last)
            torch.cuda.synchronize()
        rows = [
            (each.key[:90], each.count / times, round(each.device_time_total / times, 1))
            for each in found.key_averages()
        ]
        return sorted(rows, key=lambda row: -row[2])[:16]

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


class Watch:
    """What runs in this worker: dispatches, and the graph replayed last."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last: Any = None
        self.replay: Any = None
        """torch's own replay of a graph."""

    def dispatches_of(self, owner: Any, read: Any) -> None:
        """Count what `owner.dispatch` returns, of which `read` gives mode and descriptor."""
        dispatch, counts = owner.dispatch, self.counts

        def counted(*args: Any, **kwargs: Any) -> Any:
            found = dispatch(*args, **kwargs)
            mode, descriptor = read(found)
            counts[f"{mode} {descriptor.num_tokens}"] += 1
            return found

        owner.dispatch = counted

    def replays_of(self, owner: Any) -> None:
        """Keep the graph of each replay."""
        self.replay = replay = owner.replay

        def kept(graph: Any) -> None:
            self.last = graph
            replay(graph)

        owner.replay = kept


_watch = Watch()


def _held_in(pool: Any) -> int:
    """The bytes of a pool of torch's that are allocated."""
    import torch

    return sum(
        segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(pool)
    )


def die_at(owner: Any, method: str, count: int, die: Any) -> None:
    """Call `die` in place of the call number `count` of a method."""
    original, calls = getattr(owner, method), iter(range(1, count))

    def dying(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            die()
        return original(*args, **kwargs)

    setattr(owner, method, dying)
