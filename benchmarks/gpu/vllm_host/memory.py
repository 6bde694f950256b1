"""`memory`: the first captures of engines that have a process each, in a table."""

import argparse
import json
import subprocess
import time
from typing import Any

from benchmarks.gpu.vllm_host.processes import prepared, started


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
