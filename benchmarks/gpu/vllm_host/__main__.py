"""vLLM's own graphs against graphrt's, in one process each: the same tokens, and what a step costs.

    python -m benchmarks.gpu.vllm_host run --site SITE --work DIR [--only REGEX] [--out FILE]
    python -m benchmarks.gpu.vllm_host memory --site SITE --work DIR --only REGEX [--out FILE]

SITE is a folder with vLLM and what it imports (left out: where Python finds them). Every
configuration is a process of its own, all at once, on the GPUs in turn; in it one engine has
graphrt's graphs and another one vLLM's own. Both generate greedily for the same prompts, then are
timed in turns, one process a GPU at a time. Weights are random normals, so that tokens depend on
attention. `memory` compares the first capture of one engine that has its process, and its GPU, to
itself, as what one engine has made is there for the next one.
"""

import argparse
import copy
import fcntl
import itertools
import json
import logging
import os
import random
import re
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import tomllib

from benchmarks.gpu.vllm_host.configurations import BATCHES, SIZES, TIMED, configurations
from benchmarks.gpu.vllm_host.model import VOCABULARY, randomise, write_model

ROOT = Path(__file__).resolve().parents[3]


class Capture:
    """What `capture_model` of the engine that is made says."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.bytes = 0
        self.reserved = 0
        self.graphs = 0
        self.profiled_bytes: int | None = None
        self.profile_seconds: float | None = None

    def watch(self) -> None:
        import torch
        from vllm.compilation.counter import compilation_counter
        from vllm.v1.worker import gpu_model_runner as v1
        from vllm.v1.worker.gpu import model_runner as v2

        for runner in (v1.GPUModelRunner, v2.GPUModelRunner):
            original = runner.capture_model

            def capture_model(host: Any, *args: Any, _original: Any = original, **kw: Any) -> Any:
                torch.cuda.empty_cache()
                reserved = torch.cuda.memory_reserved()
                before, began = compilation_counter.num_cudagraph_captured, time.perf_counter()
                size = _original(host, *args, **kw)
                self.seconds = time.perf_counter() - began
                torch.cuda.empty_cache()
                # Of this process, unlike what vLLM measures.
                self.reserved = torch.cuda.memory_reserved() - reserved
                self.bytes = size
                self.graphs = compilation_counter.num_cudagraph_captured - before
                return size

            runner.capture_model = capture_model

    def profile_too(self) -> None:
        """Have vLLM profile the memory of graphs, though the size of its cache is given."""
        from vllm.v1.worker.gpu_worker import Worker

        original = Worker.determine_available_memory

        def determine(worker: Any) -> Any:
            found = original(worker)
            # Of the first engine alone: it destroys the graphs of all that there are.
            Worker.determine_available_memory = original
            began = time.perf_counter()
            self.profiled_bytes = worker.model_runner.profile_cudagraph_memory()
            self.profile_seconds = time.perf_counter() - began
            return found

        Worker.determine_available_memory = determine

    def take(self) -> dict[str, Any]:
        taken = {
            "seconds": round(self.seconds, 3),
            "mib": round(self.bytes / 2**20, 1),
            "reserved_mib": round(self.reserved / 2**20, 1),
            "graphs": self.graphs,
            "profiled_mib": None
            if self.profiled_bytes is None
            else round(self.profiled_bytes / 2**20, 1),
            "profile_s": self.profile_seconds and round(self.profile_seconds, 2),
        }
        self.seconds, self.bytes, self.graphs = 0.0, 0, 0
        self.profiled_bytes = self.profile_seconds = None
        return taken


class Replays:
    """Counts the replays of all graphs of CUDA."""

    def __init__(self) -> None:
        import torch

        self.count = 0
        original = torch.cuda.CUDAGraph.replay

        def replay(graph: Any) -> None:
            self.count += 1
            original(graph)

        torch.cuda.CUDAGraph.replay = replay
        self.restore = lambda: setattr(torch.cuda.CUDAGraph, "replay", original)


class Engines:
    """The two engines of a configuration, by name."""

    def __init__(self, options: dict[str, Any], work: Path) -> None:
        from vllm import LLM, SamplingParams

        self.options = options
        self.made = LLM
        self.llms: dict[str, Any] = {}
        self.capture = Capture()
        self.capture.watch()
        if options.get("lora"):
            order_sums()
        if options.get("profile"):
            self.capture.profile_too()
        self.adapter = work / "adapter"
        self.arguments: dict[str, Any] = {
            "model": str(work / "llama"),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "gpu_memory_utilization": 0.03,
            "kv_cache_memory_bytes": 256 << 20,
            "enable_prefix_caching": False,
            "seed": 0,
            "compilation_config": {
                **options["compilation"],
                "cudagraph_capture_sizes": SIZES,
            },
        }
        if "speculative" in options:
            given = dict(options["speculative"])
            if given["method"] == "draft_model":
                given["model"] = str(work / "llama")
            self.arguments["speculative_config"] = given
        if options.get("lora"):
            self.arguments |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        self.sampling = SamplingParams

    def start(self, name: str) -> dict[str, Any]:
        began = time.perf_counter()
        llm = self.llms[name] = self.made(**copy.deepcopy(self.arguments))
        seconds = time.perf_counter() - began
        refilled = llm.apply_model(randomise)
        if self.options.get("speculative", {}).get("method") == "draft_model":
            # The same weights: what it drafts is accepted.
            refilled.append(randomise(self.worker(llm).model_runner.drafter.model))
        config = llm.llm_engine.vllm_config.compilation_config
        return {
            "start_s": round(seconds, 1),
            "compile_s": round(getattr(config, "compilation_time", 0.0), 1),
            "resolved": str(config.cudagraph_mode),
            "refilled": refilled,
            **self.capture.take(),
        }

    def recapture(self, name: str) -> dict[str, Any]:
        """Destroy the graphs of one engine and capture them again, now that all kernels are
        loaded; graphrt has to be installed for its engine, and not for the other one."""
        import gc

        import torch
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        runner = self.worker(self.llms[name]).model_runner
        manager = getattr(runner, "cudagraph_manager", None)
        if manager is not None:
            manager.graphs.clear()
        for wrapper in (
            *CUDAGraphWrapper._all_instances,
            *BreakableCUDAGraphWrapper._all_instances,
        ):
            if type(wrapper).__module__.startswith("graphrt") == (name == "graphrt"):
                wrapper.clear_graphs()
        gc.collect()
        torch.cuda.empty_cache()
        runner.capture_model()
        return self.capture.take()

    @staticmethod
    def worker(llm: Any) -> Any:
        """The worker of an engine in this process."""
        driver = llm.llm_engine.model_executor.driver_worker
        return getattr(driver, "worker", None) or driver

    def generate(self, name: str, batch: int, seed: int, tokens: int) -> list[list[int]]:
        draw = random.Random(seed)
        prompts = []
        for _ in range(batch):
            ids = [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(5, 60))]
            if self.options.get("repeating"):
                ids = (ids[:7] * 8)[:50]
            prompts.append({"prompt_token_ids": ids})
        more: dict[str, Any] = {}
        if self.options.get("lora"):
            from vllm.lora.request import LoRARequest

            given = LoRARequest("random", 1, str(self.adapter))
            more["lora_request"] = [given if i % 2 else None for i in range(batch)]
        sampling = self.sampling(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        outputs = self.llms[name].generate(prompts, sampling, use_tqdm=False, **more)
        return [list(output.outputs[0].token_ids) for output in outputs]


def order_sums() -> None:
    """Have vLLM's LoRA kernel sum in one order: split, it adds up atomically, in any order, and
    vLLM's own graphs do not give the same tokens twice."""
    from vllm.lora.ops.triton_ops import lora_shrink_op as module

    original = module.get_lora_op_configs

    def configs(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = dict(original(*args, **kwargs))
        return found | {"split_k": 1} if "split_k" in found else found

    module.get_lora_op_configs = configs


def run_alone(name: str, work: Path, contestant: str) -> dict[str, Any]:
    """The first capture of an engine, and nothing else."""
    from graphrt.hosts.vllm import uninstall

    engines = Engines(configurations()[name], work)
    if contestant == "vllm":
        uninstall()
    return engines.start(contestant)


def run_one(name: str, work: Path, barrier: float) -> dict[str, Any]:
    options = configurations()[name]
    result: dict[str, Any] = {"name": name, "began": time.time(), "stage": "import"}

    def reached(stage: str) -> None:
        result["stage"] = stage
        print(f"[{time.time() - result['began']:6.1f} s] {name}: {stage}", flush=True)

    import torch
    import vllm

    from graphrt.hosts.vllm import _state, install, uninstall

    reached("imported")
    try:
        result["versions"] = [vllm.__version__, torch.__version__, torch.cuda.get_device_name()]
        engines = Engines(options, work)
        replays = Replays()
        result["graphrt"] = engines.start("graphrt")
        pools = _state.state.pools
        result["graphrt"]["own_captures"] = pools.captures
        reached("graphrt's engine is there")
        uninstall()
        result["vllm"] = engines.start("vllm")
        reached("vLLM's engine is there")
        assert pools.captures == result["graphrt"]["own_captures"], "uninstalled, yet it captures"

        result["batches"] = {}
        eager = _state.state.eager.counts
        result["eager"] = {}
        for batch in BATCHES:
            before, steps = replays.count, pools.steps
            eager.clear()
            mine = engines.generate("graphrt", batch, batch, 48)
            counted = {"replays": replays.count - before, "graphrt_steps": pools.steps - steps}
            for reason, count in eager.items():
                result["eager"][reason] = result["eager"].get(reason, 0) + count
            theirs = engines.generate("vllm", batch, batch, 48)
            again = engines.generate("graphrt", batch, batch, 48)
            result["batches"][batch] = {
                "equal": mine == theirs,
                "same_again": mine == again,
                "share_equal": share(mine, theirs),
                "distinct": len({token for request in mine for token in request}),
                **counted,
            }
        reached("compared")
        (work / f"{name}.compared").touch()
        wait_for_others(work, barrier)
        replays.restore()
        with open(work / f"gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '')}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            reached("timing")
            again: dict[str, list[Any]] = {"graphrt": [], "vllm": []}
            for _ in range(0 if options.get("off") else 3):
                again["vllm"].append(engines.recapture("vllm"))
                install()
                again["graphrt"].append(engines.recapture("graphrt"))
                uninstall()
            result["recaptured"] = again
            reached("captured again")
            tokens = [engines.generate(each, 8, 8, 48) for each in ("graphrt", "vllm")]
            result["equal_after"] = tokens[0] == tokens[1]
            result["timed"] = {batch: timed(engines, batch) for batch in TIMED}
        reached("done")
    except BaseException:
        result["error"] = traceback.format_exc()
        print(result["error"], flush=True)
    finally:
        (work / f"{name}.compared").touch()
    return result


def share(mine: list[list[int]], theirs: list[list[int]]) -> float:
    pairs = [
        pair
        for one, other in zip(mine, theirs, strict=True)
        for pair in zip(one, other, strict=True)
    ]
    return round(sum(a == b for a, b in pairs) / len(pairs), 4)


def wait_for_others(work: Path, seconds: float) -> None:
    """Until all have compared, so that no engine starts while another one is timed."""
    expected = json.loads((work / "plan.json").read_text())
    until = expected["began"] + seconds
    while time.time() < until:
        if all((work / f"{name}.compared").exists() for name in expected["names"]):
            return
        time.sleep(0.5)


def timed(engines: Engines, batch: int, rounds: int = 5, tokens: int = 64) -> dict[str, Any]:
    """Median time of a decode step, us: median over turns of one engine, then the other one."""
    from vllm.v1.engine.llm_engine import LLMEngine

    ends: list[int] = []
    step = LLMEngine.step

    def stamped(self: Any) -> Any:
        outputs = step(self)
        ends.append(time.perf_counter_ns())
        return outputs

    LLMEngine.step = stamped
    medians: dict[str, list[float]] = {"graphrt": [], "vllm": []}
    try:
        for turn in range(rounds):
            order = ("graphrt", "vllm") if turn % 2 else ("vllm", "graphrt")
            for name in order:
                ends.clear()
                engines.generate(name, batch, batch, tokens)
                steps = [(b - a) / 1e3 for a, b in itertools.pairwise(ends)][4:-2]
                medians[name].append(statistics.median(steps))
    finally:
        LLMEngine.step = step
    found = {name: round(statistics.median(values), 1) for name, values in medians.items()}
    ratios = [a / b for a, b in zip(medians["graphrt"], medians["vllm"], strict=True)]
    return {**found, "ratio": round(statistics.median(ratios), 3), "turns": medians}


def entry_points(folder: Path) -> None:
    """Stand in for an installed graphrt: its entry points, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "graphrt-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graphrt\nVersion: 0.1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


def prepared(args: argparse.Namespace) -> tuple[Path, list[str], str]:
    """The working directory with a model and adapters, the configurations, and PYTHONPATH."""
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for old in (*work.glob("*.compared"), *work.glob("*.json")):
        old.unlink()
    write_model(work / "llama")
    entry_points(work / "installed")
    names = [name for name in configurations() if re.search(args.only, name)]
    paths = [str(ROOT), str(work / "installed"), *([str(args.site)] if args.site else [])]
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if any(configurations()[name].get("lora") for name in names):
        # A process of its own: torch and safetensors may be in SITE alone.
        code = (
            "import sys, pathlib; from benchmarks.gpu.vllm_host.model import write_adapter; "
            "write_adapter(pathlib.Path(sys.argv[1]))"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(work / "adapter")],
            env=os.environ | {"PYTHONPATH": path},
            check=True,
        )
    return work, names, path


def started(
    name: str, work: Path, path: str, gpu: int, log: Path, *more: str
) -> subprocess.Popen[bytes]:
    """A process for one configuration on one GPU."""
    options = configurations()[name]
    environment = os.environ | {
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "OMP_NUM_THREADS": "1",
        "GRAPHRT_VLLM": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": {"v1": "0", "v2": "1"}[options["runner"]],
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DISABLE_COMPILE_CACHE": str(int("backend" in options["compilation"])),
        "VLLM_CACHE_ROOT": str(work / "cache" / name),
        **options.get("env", {}),
    }
    command = [sys.executable, "-m", "benchmarks.gpu.vllm_host", "one", name, "--work", str(work)]
    with open(log, "wb") as out:
        return subprocess.Popen(
            [*command, *more], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
        )


def run_memory(args: argparse.Namespace) -> int:
    """One process at a time on a GPU."""
    work, names, path = prepared(args)
    waiting = {
        gpu: [(name, each) for name in names[gpu :: args.gpus] for each in ("vllm", "graphrt")]
        for gpu in range(args.gpus)
    }
    running: dict[int, subprocess.Popen[bytes]] = {}
    while running or any(waiting.values()):
        for gpu, left in waiting.items():
            if gpu in running and running[gpu].poll() is None:
                continue
            running.pop(gpu, None)
            if left:
                name, each = left.pop(0)
                log = work / f"{name}.{each}.log"
                running[gpu] = started(name, work, path, gpu, log, "--alone", each)
        time.sleep(0.2)
    results: dict[str, dict[str, Any]] = {}
    rows = ["configuration", "first capture s g|v", "device MiB g|v", "reserved MiB g|v"]
    print("| " + " | ".join(rows) + " |\n|" + "---|" * len(rows))
    for name in names:
        found = results[name] = {}
        for each in ("graphrt", "vllm"):
            file = work / f"{name}.{each}.result.json"
            if file.exists():
                found[each] = json.loads(file.read_text())
            else:
                print((work / f"{name}.{each}.log").read_text(errors="replace")[-4000:])
        if len(found) == 2:
            cells = [
                "|".join(str(found[each][key]) for each in ("graphrt", "vllm"))
                for key in ("seconds", "mib", "reserved_mib")
            ]
            print(f"| {name} | {' | '.join(cells)} |")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    return 0 if all(len(found) == 2 for found in results.values()) else 1


def run_all(args: argparse.Namespace) -> int:
    work, names, path = prepared(args)
    began = time.time()
    (work / "plan.json").write_text(json.dumps({"names": names, "began": began}))
    running: dict[str, subprocess.Popen[bytes]] = {}
    for index, name in enumerate(names):
        barrier = "--barrier", str(args.barrier)
        log = work / f"{name}.log"
        running[name] = started(name, work, path, index % args.gpus, log, *barrier)
    while running and time.time() - began < args.seconds:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                print(f"{name}: exit {process.returncode}, {time.time() - began:.0f} s", flush=True)
        time.sleep(0.3)
    for name, process in running.items():
        process.kill()
        process.wait()
        print(f"{name}: stopped after {args.seconds} s", flush=True)
    results = {}
    for name in names:
        file = work / f"{name}.result.json"
        results[name] = json.loads(file.read_text()) if file.exists() else {"stage": "no result"}
    print(table(results))
    for name in names:
        tell(name, results[name], (work / f"{name}.log").read_text(errors="replace").splitlines())
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))
    return 0 if all(passed(result, name) for name, result in results.items()) else 1


def passed(result: dict[str, Any], name: str) -> bool:
    if "error" in result or result.get("stage") != "done":
        return False
    if not all(batch["equal"] for batch in result["batches"].values()):
        return False
    if not result["equal_after"]:
        return False
    captured = result["graphrt"]["own_captures"]
    replayed = all(batch["graphrt_steps"] for batch in result["batches"].values())
    return not captured if configurations()[name].get("off") else bool(captured and replayed)


def table(results: dict[str, Any]) -> str:
    head = [
        "configuration",
        "mode",
        "ok",
        "equal at",
        "captures g|v",
        "capture s g|v",
        "reserved MiB g|v",
    ]
    head += [f"step us B={batch} g|v (ratio)" for batch in TIMED] + ["replays|steps B=64", "eager"]
    rows = [head, ["---"] * len(head)]
    for name, result in results.items():
        mine, theirs = result.get("graphrt", {}), result.get("vllm", {})
        batches = result.get("batches", {})
        equal = ",".join(
            str(batch) if got["equal"] else f"{batch}:{got['share_equal']}"
            for batch, got in batches.items()
        )
        row = [name, mine.get("resolved", "-").split(".")[-1], str(passed(result, name)), equal]
        row.append(f"{mine.get('graphs')}|{theirs.get('graphs')} (own {mine.get('own_captures')})")
        again = result.get("recaptured", {})
        best = [min((c["seconds"] for c in again[each]), default=None) for each in again]
        row.append("|".join(map(str, best)) or "-")
        row.append(f"{mine.get('reserved_mib')}|{theirs.get('reserved_mib')}")
        for batch in TIMED:
            got = result.get("timed", {}).get(str(batch))
            row.append(f"{got['graphrt']}|{got['vllm']} ({got['ratio']})" if got else "-")
        last = batches.get("64", {})
        row.append(f"{last.get('replays')}|{last.get('graphrt_steps')}")
        row.append(str(sum(result.get("eager", {}).values())))
        rows.append(row)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def tell(name: str, result: dict[str, Any], log: list[str]) -> None:
    """What the log says of graphrt, and, of what failed, its end."""
    print(f"\n== {name}: {result.get('stage')}")
    for key in ("graphrt", "vllm", "eager", "equal_after"):
        print(f"   {key}: {result.get(key)}")
    for engine, captures in result.get("recaptured", {}).items():
        told = ", ".join(
            f"{c['graphs']} in {c['seconds']} s, {c['mib']} MiB, {c['reserved_mib']} reserved"
            for c in captures
        )
        print(f"   {engine} captured again: {told}")
    for line in [line for line in log if "graphrt" in line and "Traceback" not in line][:14]:
        print(f"   | {line[:260]}")
    if not passed(result, name):
        for line in (result.get("error", "").splitlines() or log)[-60:]:
            print(f"   ! {line[:400]}")
        for line in [line for line in log if "rror" in line][-12:]:
            print(f"   ? {line[:400]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.vllm_host", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("one")
    one.add_argument("name")
    one.add_argument("--alone", choices=["graphrt", "vllm"], help="start that engine alone")
    everything = commands.add_parser("run")
    memory = commands.add_parser("memory")
    for command in (everything, memory):
        command.add_argument("--site", type=Path, help="a folder with vLLM")
        command.add_argument("--out", type=Path, help="a JSON file for all results")
        command.add_argument("--only", default="", help="regular expression on names")
        command.add_argument("--gpus", type=int, default=2)
    everything.add_argument("--seconds", type=float, default=270, help="stop what runs then")
    for command in (one, everything, memory):
        command.add_argument("--work", type=Path, required=True)
    for command in (one, everything):
        command.add_argument(
            "--barrier", type=float, default=190, help="time from then at the latest"
        )
    args = parser.parse_args()
    if args.command == "run":
        return run_all(args)
    if args.command == "memory":
        return run_memory(args)
    logging.basicConfig(level=logging.WARNING)
    args.work = args.work.resolve()
    if args.alone:
        result = run_alone(args.name, args.work, args.alone)
        (args.work / f"{args.name}.{args.alone}.result.json").write_text(json.dumps(result))
        return 0
    result = run_one(args.name, args.work, args.barrier)
    (args.work / f"{args.name}.result.json").write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
