"""`run`: all configurations at once, and what they found."""

import argparse
import json
import subprocess
import time

from benchmarks.gpu.vllm_host.processes import prepared, started, wait_for
from benchmarks.gpu.vllm_host.report import passed, table, tell


def run_all(args: argparse.Namespace) -> int:
    work, names, path = prepared(args)
    began = time.time()
    (work / "plan.json").write_text(json.dumps({"names": names, "began": began}))
    running: dict[str, subprocess.Popen[bytes]] = {}
    for index, name in enumerate(names):
        barrier = "--barrier", str(args.barrier)
        log = work / f"{name}.log"
        running[name] = started(name, work, path, index % args.gpus, log, *barrier)
    wait_for(running, began, args.seconds)
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
