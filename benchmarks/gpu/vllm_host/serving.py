"""`serving`: captures beside steps, under requests that arrive, end and are aborted.

One process an engine, all on the same arrivals (Poisson, counted in steps of the model, so that
engines meet the same batches), a Llama of 1B with vLLM's own 51 sizes and async scheduling:

vllm      vLLM's own graphs
upfront   graphrt's, captured before vLLM is ready
while     graphrt's, most of them captured while it serves
checked   as `while`; each page of the KV cache is compared around each capture, each FULL graph is
          tried against eager runs of a step
eager     no graphs, whose tokens are the measure

From the first capture on a process has its GPU to itself; before that they load all at once.
"""

import argparse
import fcntl
import itertools
import json
import os
import random
import statistics
import subprocess
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.vllm_host.configurations import configurations
from benchmarks.gpu.vllm_host.engines import Engines
from benchmarks.gpu.vllm_host.model import VOCABULARY
from benchmarks.gpu.vllm_host.processes import prepared, started, wait_for

MIB = 2**20


class Alone:
    """The lock of the GPU, from the first capture of this process on, and what it found then."""

    def __init__(self, work: Path) -> None:
        # Held until this process ends.
        name = f"gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '')}.lock"
        self.file = os.open(work / name, os.O_WRONLY | os.O_CREAT)
        self.began_s = 0.0
        self.free = 0

    def take(self) -> None:
        """Wait for it; again it does nothing."""
        import torch

        if not self.began_s:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            torch.cuda.synchronize()
            self.free = torch.cuda.mem_get_info()[0]
            self.began_s = time.perf_counter()

    def take_at_captures(self) -> None:
        from vllm.v1.worker import gpu_model_runner as v1
        from vllm.v1.worker.gpu import model_runner as v2

        for runner in (v1.GPUModelRunner, v2.GPUModelRunner):
            original = runner.capture_model

            def capture_model(host: Any, *args: Any, _original: Any = original, **kw: Any) -> Any:
                self.take()
                return _original(host, *args, **kw)

            runner.capture_model = capture_model


class Arrivals:
    """Requests by the step at which they arrive, and those that are aborted."""

    def __init__(self, steps: int, seed: int) -> None:
        draw = random.Random(seed)
        self.prompts: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.at: dict[int, list[str]] = {}
        self.aborted_at: dict[int, list[str]] = {}
        now, step = 0.0, 0
        while step < steps:
            # Few requests and many, in turns.
            rate = 0.06 if (step // 150) % 3 == 0 else 0.55
            now += draw.expovariate(rate)
            step = int(now)
            name = f"r{len(self.prompts)}"
            size = draw.randrange(5, 60)
            self.prompts[name] = [draw.randrange(3, VOCABULARY) for _ in range(size)]
            self.lengths[name] = draw.randrange(32, 400)
            self.at.setdefault(step, []).append(name)
            if draw.random() < 0.1:
                self.aborted_at.setdefault(step + draw.randrange(1, 150), []).append(name)


class Pages:
    """Compares all blocks of the KV cache but the null block around each capture."""

    def __init__(self) -> None:
        self.captures = 0
        self.changed = 0

    def watch(self) -> None:
        import torch

        from graphrt.hosts.vllm import _state

        later = _state.state.later
        capture = later._capture_next

        def compared(runner: Any) -> None:
            with torch.inference_mode():
                before = [each.clone() for each in self._blocks(runner)]
                capture(runner)
                after = self._blocks(runner)
                pairs = zip(before, after, strict=True)
                # Bit by bit: pages that nothing was written to may hold NaN.
                same = all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
            self.captures += 1
            self.changed += not same

        vars(later)["_capture_next"] = compared

    @staticmethod
    def _blocks(runner: Any) -> list[Any]:
        count = runner.kv_cache_config.num_blocks
        found = []
        for cache in runner.kv_caches:
            # A block of the scheduler may be several of a kernel.
            dim = next(at for at, size in enumerate(cache.shape) if size and size % count == 0)
            first = cache.shape[dim] // count
            found.append(cache.narrow(dim, first, cache.shape[dim] - first))
        return found


class Steps:
    """When steps of the model began, by `execute_model`, and when nothing was missing any more."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.all_captured: tuple[int, float] | None = None

    def watch(self, runner: Any) -> None:
        from graphrt.hosts.vllm import _state

        original, later = runner.execute_model, _state.state.later

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens:
                self.begins.append(time.perf_counter())
                if self.all_captured is None and not later.missing:
                    self.all_captured = len(self.begins), self.begins[-1]
            return original(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def figures(self) -> dict[str, float]:
        ms = sorted((b - a) * 1e3 for a, b in itertools.pairwise(self.begins[20:]))
        return {
            "steps": len(ms),
            "median_ms": round(statistics.median(ms), 3),
            "p99_ms": round(ms[int(len(ms) * 0.99)], 3),
            "max_ms": round(ms[-1], 3),
            "mean_ms": round(statistics.fmean(ms), 3),
        }


def serve(engine: Any, sampling: Any, arrivals: Arrivals, steps: Steps, count: int) -> Any:
    """Run `count` steps of the model; returns the tokens of each request, the number of aborts and
    when the first token came."""
    from vllm.sampling_params import RequestOutputKind

    tokens: dict[str, list[int]] = {}
    done = 0
    aborts = 0
    first_token_s: float | None = None
    while len(steps.begins) < count:
        now = len(steps.begins)
        if not engine.has_unfinished_requests():
            # Nothing runs: the next request comes now.
            now = min((at for at in arrivals.at if at >= done), default=count)
        for step in range(done, now + 1):
            for name in arrivals.at.get(step, []):
                given = sampling(
                    temperature=0.0,
                    max_tokens=arrivals.lengths[name],
                    ignore_eos=True,
                    detokenize=False,
                    # What is new alone: a copy of all tokens so far takes longer than a step.
                    output_kind=RequestOutputKind.DELTA,
                )
                prompt = {"type": "token", "prompt_token_ids": arrivals.prompts[name]}
                engine.add_request(name, prompt, given)
            leaving = arrivals.aborted_at.get(step, [])
            if leaving:
                aborts += len(leaving)
                engine.abort_request(leaving)
        done = max(done, now + 1)
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
            first_token_s = first_token_s or time.perf_counter()
    engine.abort_request([*arrivals.prompts])
    while engine.has_unfinished_requests():
        engine.step()
    return tokens, aborts, first_token_s


def run_serving(name: str, work: Path, count: int) -> dict[str, Any]:
    """One engine under load, for so many steps."""
    options = configurations()[name]
    kind = options["serving"]
    result: dict[str, Any] = {"name": name, "stage": "began"}
    began_s = time.perf_counter()

    def reached(stage: str) -> None:
        result["stage"] = stage
        print(f"[{time.perf_counter() - began_s:6.1f} s] {name}: {stage}", flush=True)

    try:
        import torch
        import vllm

        from graphrt.hosts.vllm import _state, report

        result["versions"] = [vllm.__version__, torch.__version__, torch.cuda.get_device_name()]
        reached("imported")
        engines = Engines(options, work)
        engines.arguments |= {"max_num_seqs": 256, "kv_cache_memory_bytes": 3 << 30}
        engines.arguments["compilation_config"].pop("cudagraph_capture_sizes")
        engines.arguments["enforce_eager"] = kind == "eager"
        alone, steps, pages = Alone(work), Steps(), Pages()
        alone.take_at_captures()
        llm = engines.made(**engines.arguments)
        ready_s = time.perf_counter()
        alone.take()
        began = engines.capture.take()
        result["at_start"] = {"captures_s": began["seconds"], "graphs": began["graphs"]}
        result["ready_s"] = round(ready_s - alone.began_s, 3) if kind != "eager" else None
        engines.refill(llm)
        reached("ready")
        runner = engines.worker(llm).model_runner
        if kind == "checked":
            pages.watch()
        steps.watch(runner)
        later = _state.state.later
        serve_s = time.perf_counter()
        tokens, aborts, first_s = serve(
            llm.llm_engine,
            engines.sampling,
            Arrivals(count, 7),
            steps,
            count,
        )
        torch.cuda.synchronize()
        reached("served")
        result["first_token_s"] = first_s and round(first_s - serve_s, 3)
        result["served_s"] = round(time.perf_counter() - serve_s, 2)
        result["step"] = steps.figures()
        result["requests"] = {"served": len(tokens), "aborted": aborts}
        result["device_mib"] = round((alone.free - torch.cuda.mem_get_info()[0]) / MIB, 1)
        result["reserved_mib"] = round(torch.cuda.memory_reserved() / MIB, 1)
        result["async"] = bool(runner.vllm_config.scheduler_config.async_scheduling)
        if kind in ("while", "checked"):
            at = steps.all_captured
            result["captures"] = {
                "longest_ms": round(later._longest_s * 1e3, 1),
                "missing": len(later.missing),
                "dropped": [str(each) for each in later.dropped],
                "over_at_step": at and at[0],
                "over_at_s": at and round(at[1] - serve_s, 2),
            }
        if kind != "vllm":
            made = report()
            print(made, flush=True)
            result["graphs"] = len(made.graphs)
            result["eager_steps"] = dict(_state.state.eager.counts)
        if kind == "checked":
            result["pages"] = {"captures": pages.captures, "changed": pages.changed}
            statuses = [each.status for each in report().trust.trials]
            result["trials"] = {each: statuses.count(each) for each in sorted({*statuses})}
        (work / f"{name}.tokens").write_text(json.dumps(tokens))
        reached("done")
    except BaseException:
        result["error"] = traceback.format_exc()
        print(result["error"], flush=True)
    return result


def compared(work: Path, results: dict[str, dict[str, Any]]) -> None:
    """Add to each result the share of its tokens that are those of the same engine eager."""
    for name, result in results.items():
        theirs = work / f"{name.rpartition('-')[0]}-eager.tokens"
        mine = work / f"{name}.tokens"
        if not mine.exists() or not theirs.exists():
            continue
        a, b = json.loads(mine.read_text()), json.loads(theirs.read_text())
        pairs = [
            (x, y) for each in a.keys() & b.keys() for x, y in zip(a[each], b[each], strict=False)
        ]
        whole = [all(x == y for x, y in zip(a[n], b[n], strict=False)) for n in a.keys() & b.keys()]
        if pairs:
            result["equal_tokens"] = round(sum(x == y for x, y in pairs) / len(pairs), 4)
            result["equal_requests"] = round(sum(whole) / len(whole), 4)


def verdicts(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the runs must show, by configuration."""
    found: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        base, _, kind = name.rpartition("-")
        if kind not in ("while", "checked") or result.get("stage") != "done":
            continue
        checks = found.setdefault(base, {})
        step, captures = result["step"], result["captures"]
        if kind == "while":
            bound = step["median_ms"] + captures["longest_ms"]
            checks["p99 at most median and longest capture"] = step["p99_ms"] <= bound
            upfront = results.get(f"{base}-upfront", {}).get("at_start", {}).get("captures_s")
            if upfront:
                part = result["at_start"]["captures_s"] / upfront
                checks["captures at start, of all upfront"] = round(part, 3)
        else:
            checks["pages unchanged"] = (
                not result["pages"]["changed"] and result["pages"]["captures"] > 0
            )
            checks["trials"] = result["trials"]
        checks[f"captured all ({kind})"] = not captures["missing"] and not captures["dropped"]
    return found


def table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    heads = ["engine", "captures s", "graphs", "ready s", "first token s"]
    heads += ["step ms: median, p99, max", "longest capture ms", "all at step", "device MiB"]
    heads += ["tokens as eager", "pages changed"]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for name, got in results.items():
        step, captures = got.get("step", {}), got.get("captures", {})
        start, pages = got.get("at_start", {}), got.get("pages")
        cells = [
            name,
            start.get("captures_s"),
            start.get("graphs"),
            got.get("ready_s"),
            got.get("first_token_s"),
            ", ".join(str(step.get(each)) for each in ("median_ms", "p99_ms", "max_ms")),
            captures.get("longest_ms"),
            captures.get("over_at_step"),
            got.get("device_mib"),
            got.get("equal_tokens"),
            pages and f"{pages['changed']} of {pages['captures']} captures",
        ]
        yield "| " + " | ".join("-" if each is None else str(each) for each in cells) + " |"


def run_all_serving(args: argparse.Namespace) -> int:
    """All engines: they load at once, and serve one after the other on each GPU."""
    work, names, path = prepared(args)
    for old in work.glob("*.tokens"):
        old.unlink()
    began = time.time()
    running: dict[str, subprocess.Popen[bytes]] = {}
    for index, name in enumerate(names):
        more = "--steps", str(args.steps)
        log = work / f"{name}.log"
        running[name] = started(name, work, path, index % args.gpus, log, *more)
    wait_for(running, began, args.seconds)
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        file = work / f"{name}.result.json"
        results[name] = json.loads(file.read_text()) if file.exists() else {"stage": "no result"}
    compared(work, results)
    print(*table(results), sep="\n")
    found = verdicts(results)
    print(json.dumps(found, indent=1))
    for name, got in results.items():
        said = (work / f"{name}.log").read_text(errors="replace")
        lines = [line for line in said.splitlines() if "graphrt" in line]
        if got.get("stage") == "done":
            told = [each for each in lines if "ready with" in each or "beside steps" in each]
            print(f"\n== {name}", *[each[:200] for each in told[:3] + told[-3:]], sep="\n   | ")
        else:
            print(f"\n== {name}: {got.get('stage')}\n{said[-3000:]}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"engines": results, "shown": found}, indent=1))
    is_right = all(value is not False for checks in found.values() for value in checks.values())
    return 0 if is_right and all(got.get("stage") == "done" for got in results.values()) else 1
