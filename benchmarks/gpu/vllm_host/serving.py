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

With `--logprobs` nothing is timed, and all serve at once. Each request may get one token alone, so
that all engines run each step on the same tokens: the log-probabilities of its best tokens, before
that choice, are compared with those of the eager engine, token by token. vLLM's own graphs say how
far apart padded and unpadded batches are anyway.
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
from typing import Any, NamedTuple

from benchmarks.gpu.vllm_host.configurations import configurations
from benchmarks.gpu.vllm_host.engines import Engines
from benchmarks.gpu.vllm_host.logprobs import difference, same_share
from benchmarks.gpu.vllm_host.model import VOCABULARY
from benchmarks.gpu.vllm_host.processes import prepared, started, wait_for

MIB = 2**20


class Load(NamedTuple):
    """How many steps of the model, and how many log-probabilities of each token."""

    steps: int
    logprobs: int


class Alone:
    """The lock of the GPU, from the first capture of this process on, and what it found then."""

    def __init__(self, work: Path, *, waits: bool) -> None:
        """Without `waits` others use the GPU meanwhile."""
        self.waits = waits
        # Held until this process ends.
        name = f"gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '')}.lock"
        self.file = os.open(work / name, os.O_WRONLY | os.O_CREAT)
        self.began_s = 0.0
        self.free = 0

    def take(self) -> None:
        """Wait for it; again it does nothing."""
        import torch

        if not self.began_s:
            if self.waits:
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
        self.forced: dict[str, int] = {}
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
            self.forced[name] = self.prompts[name][0]
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
    """When steps of the model began, by `execute_model`, the requests and tokens of each, and when
    nothing was missing any more."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.batches: list[tuple[int, int]] = []
        self.all_captured: tuple[int, float] | None = None

    def watch(self, runner: Any) -> None:
        from graphrt.hosts.vllm import _state

        original, later = runner.execute_model, _state.state.later

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens:
                self.begins.append(time.perf_counter())
                requests = len(scheduler_output.num_scheduled_tokens)
                self.batches.append((requests, scheduler_output.total_num_scheduled_tokens))
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


class Said:
    """What an engine returned of each request: tokens, and of each token its best candidates, each
    with its log-probability."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[list[tuple[int, float]]]] = {}
        self.aborts = 0
        self.first_token_s: float | None = None

    def add(self, output: Any) -> None:
        new = output.outputs[0]
        self.tokens.setdefault(output.request_id, []).extend(new.token_ids)
        self.first_token_s = self.first_token_s or time.perf_counter()
        if new.logprobs:
            self.logprobs.setdefault(output.request_id, []).extend(
                [(token, round(found.logprob, 4)) for token, found in each.items()]
                for each in new.logprobs
            )


def serve(engines: Engines, engine: Any, arrivals: Arrivals, steps: Steps, args: Load) -> Said:
    """Run so many steps of the model under load."""
    from vllm.sampling_params import RequestOutputKind

    said, done = Said(), 0
    while len(steps.begins) < args.steps:
        now = len(steps.begins)
        if not engine.has_unfinished_requests():
            # Nothing runs: the next request comes now.
            now = min((at for at in arrivals.at if at >= done), default=args.steps)
        for step in range(done, now + 1):
            for name in arrivals.at.get(step, []):
                more: dict[str, Any] = {}
                if args.logprobs:
                    more = {"logprobs": args.logprobs, "allowed_token_ids": [arrivals.forced[name]]}
                given = engines.sampling(
                    temperature=0.0,
                    max_tokens=arrivals.lengths[name],
                    ignore_eos=True,
                    detokenize=False,
                    # What is new alone: a copy of all tokens so far takes longer than a step.
                    output_kind=RequestOutputKind.DELTA,
                    **more,
                )
                prompt = {"type": "token", "prompt_token_ids": arrivals.prompts[name]}
                lora = engines.adapter_of(int(name[1:]))
                engine.add_request(name, prompt, given, lora_request=lora)
            leaving = arrivals.aborted_at.get(step, [])
            if leaving:
                said.aborts += len(leaving)
                engine.abort_request(leaving)
        done = max(done, now + 1)
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            said.add(output)
    engine.abort_request([*arrivals.prompts])
    while engine.has_unfinished_requests():
        engine.step()
    return said


def run_serving(name: str, work: Path, load: Load) -> dict[str, Any]:
    """One engine under load."""
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
        alone, steps, pages = Alone(work, waits=not load.logprobs), Steps(), Pages()
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
        said = serve(engines, llm.llm_engine, Arrivals(load.steps, 7), steps, load)
        torch.cuda.synchronize()
        reached("served")
        first_s = said.first_token_s
        result["first_token_s"] = first_s and round(first_s - serve_s, 3)
        result["served_s"] = round(time.perf_counter() - serve_s, 2)
        result["step"] = steps.figures()
        result["requests"] = {"served": len(said.tokens), "aborted": said.aborts}
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
        for kind_of in ("tokens", "logprobs"):
            (work / f"{name}.{kind_of}").write_text(json.dumps(getattr(said, kind_of)))
        (work / f"{name}.batches").write_text(json.dumps(steps.batches))
        reached("done")
    except BaseException:
        result["error"] = traceback.format_exc()
        print(result["error"], flush=True)
    return result


def compared(work: Path, results: dict[str, dict[str, Any]]) -> None:
    """Add to each result the share of its tokens that are those of the same engine eager, and how
    far apart their log-probabilities are."""
    for name, result in results.items():
        eager = f"{name.rpartition('-')[0]}-eager"
        kinds = ("tokens", "logprobs", "batches")
        files = {kind: [work / f"{each}.{kind}" for each in (name, eager)] for kind in kinds}
        if not all(file.exists() for pair in files.values() for file in pair):
            continue
        read = {kind: [json.loads(file.read_text()) for file in files[kind]] for kind in kinds}
        result["batches_as_eager"] = same_share(*read["batches"])
        if any(read["logprobs"]):
            result["logprobs"] = difference(*read["logprobs"])
        a, b = read["tokens"]
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
        if "logprobs" in result:
            vllms = results.get(f"{base}-vllm", {}).get("logprobs", {})
            checks[f"logprobs ({kind})"] = result["logprobs"]
            checks["logprobs of vLLM's own graphs"] = vllms
            if vllms:
                # Padded batches are other matrix products than those of eager: vLLM's own graphs
                # are as far from eager.
                bounds = [result["logprobs"][at] <= 1.5 * vllms[at] for at in ("p99", "max")]
                checks[f"as near to eager as vLLM's own ({kind})"] = all(bounds)
        elif kind == "while":
            bound = step["median_ms"] + captures["longest_ms"]
            checks["p99 at most median and longest capture"] = step["p99_ms"] <= bound
            upfront = results.get(f"{base}-upfront", {}).get("at_start", {}).get("captures_s")
            if upfront:
                part = result["at_start"]["captures_s"] / upfront
                checks["captures at start, of all upfront"] = round(part, 3)
        if kind == "checked":
            checks["pages unchanged"] = (
                not result["pages"]["changed"] and result["pages"]["captures"] > 0
            )
            checks["trials"] = result["trials"]
        checks[f"captured all ({kind})"] = not captures["missing"] and not captures["dropped"]
    return found


def table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    heads = ["engine", "captures s", "graphs", "ready s", "first token s"]
    heads += ["step ms: median, p99, max", "longest capture ms", "all at step", "device MiB"]
    heads += ["tokens as eager", "batches as eager", "logprobs apart: p99, max", "pages changed"]
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
            got.get("batches_as_eager"),
            ", ".join(str(got.get("logprobs", {}).get(each)) for each in ("p99", "max")),
            pages and f"{pages['changed']} of {pages['captures']} captures",
        ]
        yield "| " + " | ".join("-" if each is None else str(each) for each in cells) + " |"


def run_all_serving(args: argparse.Namespace) -> int:
    """All engines: they load at once, and serve one after the other on each GPU."""
    work, names, path = prepared(args)
    for old in itertools.chain(*(work.glob(f"*.{each}") for each in ("tokens", "logprobs"))):
        old.unlink()
    began = time.time()
    running: dict[str, subprocess.Popen[bytes]] = {}
    for index, name in enumerate(names):
        more = "--steps", str(args.steps), "--logprobs", str(args.logprobs)
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
