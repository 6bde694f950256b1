"""`tried`: do trials of FULL graphs find a defect that is put into vLLM's Llama, and no other?

baked   the model multiplies by 2 if the longest request is long, as it is at the capture
stale   the model adds a buffer, in place of which there is another one after the capture
none    nothing is wrong
"""

import argparse
import json
import logging
import re
import statistics
import subprocess
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.vllm_host.configurations import BATCHES, configurations
from benchmarks.gpu.vllm_host.engines import Engines
from benchmarks.gpu.vllm_host.one import share, timed
from benchmarks.gpu.vllm_host.processes import prepared, started


class Lines(logging.Handler):
    """What vLLM's log says of trials."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def ms(self) -> list[float]:
        """How long each trial took."""
        found = (re.search(r"tried .* in ([\d.]+) ms", line) for line in self.lines)
        return [float(each[1]) for each in found if each]


def seed(defect: str) -> SimpleNamespace:
    """Put a defect into vLLM's Llama, for engines that start from now on."""
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.models.llama import LlamaForCausalLM

    held = SimpleNamespace(bias=torch.zeros(1024, dtype=torch.bfloat16, device="cuda"))
    forward = LlamaForCausalLM.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = forward(self, *args, **kwargs)
        if defect == "stale":
            return hidden + held.bias
        metadata = get_forward_context().attn_metadata
        # None in the run that measures memory.
        is_long = metadata and next(iter(metadata.values())).max_seq_len >= 512
        return hidden * (2.0 if is_long else 1.0) + (1.0 if is_long else 0.0)

    if defect != "none":
        LlamaForCausalLM.forward = wrong
    return held


def run_tried(name: str, work: Path) -> dict[str, Any]:
    """One engine with graphs that are tried, then one without graphs, both with the defect."""
    import torch
    import vllm  # noqa: F401  (as it is imported, its loggers lose their handlers)

    from graphrt.hosts.vllm import report, uninstall

    options = configurations()[name]
    result: dict[str, Any] = {"name": name, "stage": "began"}
    lines = Lines()
    logging.getLogger("vllm.graphrt").addHandler(lines)
    try:
        held = seed(options["defect"])
        engines = Engines(options, work)
        engines.start("graphrt")
        held.bias = torch.full_like(held.bias, 1.0)
        mine = [engines.generate("graphrt", batch, batch, 48) for batch in BATCHES]
        trials = report().trust.trials
        print(report(), flush=True)
        result["graphs"] = {str(each.descriptor.num_tokens): each.status for each in trials}
        result["failures"] = [each.failure for each in trials if each.failure][:2]
        result["trial_ms"] = lines.ms()
        print(*lines.lines, sep="\n", flush=True)
        uninstall()
        engines.arguments["enforce_eager"] = True
        engines.start("vllm")
        theirs = [engines.generate("vllm", batch, batch, 48) for batch in BATCHES]
        result["equal"] = {
            batch: share(one, other)
            for batch, one, other in zip(BATCHES, mine, theirs, strict=True)
        }
        result["eager_step_us"] = timed(engines, 8, rounds=2)
        result["stage"] = "done"
    except BaseException:
        result["error"] = traceback.format_exc()
        print(result["error"], flush=True)
    wanted = "tried" if options["defect"] == "none" else "quarantined"
    statuses = {*result.get("graphs", {}).values()}
    result["ok"] = result["stage"] == "done" and statuses == {wanted}
    return result


def run_all_tried(args: argparse.Namespace) -> int:
    """All configurations, one after the other on each GPU."""
    work, names, path = prepared(args)
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    results: dict[str, Any] = {}
    began = time.time()
    for index, name in enumerate(names):
        running.append((name, started(name, work, path, index % args.gpus, work / f"{name}.log")))
    for name, process in running:
        try:
            process.wait(max(1.0, args.seconds - (time.time() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        file = work / f"{name}.result.json"
        results[name] = json.loads(file.read_text()) if file.exists() else {"stage": "no result"}
        got = results[name]
        ms = got.get("trial_ms") or [0.0]
        print(f"{name}: {'ok' if got.get('ok') else 'FAILED'}, {got.get('graphs')}")
        print(f"   a trial takes {statistics.median(ms):.1f} ms (at most {max(ms):.1f})")
        print(f"   equal to eager: {got.get('equal')}, steps {got.get('eager_step_us')}")
        for text in got.get("failures", []):
            print(f"   {text[:600]}")
        if not got.get("ok"):
            print((work / f"{name}.log").read_text(errors="replace")[-4000:])
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))
    return 0 if all(got.get("ok") for got in results.values()) else 1
