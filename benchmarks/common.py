"""Timing in turns, the record of the machine, tables and the JSON of the GPU benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform as host_platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], object]

WARM_UPS = 3


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser


def synchronizer(device: str) -> Callable[[], None]:
    """What waits for the device."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def release_cache(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def left_out(device: str, names: Sequence[str]) -> bool:
    """Whether contestants that need CUDA are left out, which is printed."""
    if device == "cuda":
        return False
    for name in names:
        print(f"left out: {name} (needs CUDA, the device is {device!r})")
    return True


def interleaved(
    contestants: Mapping[str, Step],
    *,
    rounds: int,
    steps: int,
    singles: int,
    synchronize: Callable[[], None],
) -> dict[str, dict[str, float]]:
    """Medians over rounds in which all take turns, in milliseconds for each contestant.

    "step" is a share of `steps` back to back and the wait for the last one, "enqueue" the host's
    part of that before the wait, and "latency" one step with a wait of its own.
    """
    found = {name: {"step": [], "enqueue": [], "latency": []} for name in contestants}
    for step in contestants.values():
        for _ in range(WARM_UPS):
            step()
    for turn in range(rounds):
        order = list(contestants)
        # Nobody runs always behind the same neighbour.
        order = order[turn % len(order) :] + order[: turn % len(order)]
        for name in order[::-1] if turn % 2 else order:
            step, times = contestants[name], found[name]
            synchronize()
            started = time.perf_counter()
            for _ in range(steps):
                step()
            enqueued = time.perf_counter()
            synchronize()
            times["step"].append((time.perf_counter() - started) / steps * 1e3)
            times["enqueue"].append((enqueued - started) / steps * 1e3)
            for _ in range(singles):
                started = time.perf_counter()
                step()
                synchronize()
                times["latency"].append((time.perf_counter() - started) * 1e3)
    return {
        name: {kind: statistics.median(values) for kind, values in times.items()}
        for name, times in found.items()
    }


def median_us(
    *functions: Step,
    rounds: int,
    calls: int,
    warm_ups: int = 0,
    synchronize: Callable[[], None] = lambda: None,
) -> list[float]:
    """Medians over rounds in which all functions take turns, in microseconds a call.

    A round is `calls` calls of each, of which the device is waited for before, not after.
    """
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(-warm_ups, rounds):
        for function, found in zip(functions, times, strict=True):
            synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                function()
            if turn >= 0:
                found.append((time.perf_counter() - started) / calls * 1e6)
    synchronize()
    return [statistics.median(found) for found in times]


def in_fork(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work` in a fork of this process, which must not have used CUDA; the error's
    text where that fails, so that other figures are not lost."""
    try:
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            return pool.submit(work, *arguments).result()
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def copy_bandwidth(device: str, rounds: int = 15) -> float:
    """Bytes a second that a copy inside the device reads and writes together."""
    size = 1 << (30 if device == "cuda" else 24)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    synchronize, times = synchronizer(device), []
    target.copy_(source)
    for _ in range(rounds):
        synchronize()
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronize()
        times.append((time.perf_counter() - started) / 4)
    return 2 * size / statistics.median(times)


def environment(device: str) -> dict[str, Any]:
    """The machine and its versions, as far as they can be told."""
    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "driver": _driver() if on_gpu else None,
        "host": f"{_processor()}, {os.cpu_count()} CPUs",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return host_platform.processor() or host_platform.machine()


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return found.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table, by rich where it is installed."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}")
        for line in (list(columns), *cells):
            first, *others = (
                (str.rjust if place else str.ljust)(text, width)
                for place, (text, width) in enumerate(zip(line, widths, strict=True))
            )
            print("  ".join((first, *others)))
        return
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    # A file or a pipe has no width: the table has the one it needs.
    Console(width=max(len(title), sum(widths) + 3 * len(widths) + 1)).print(table)


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 100 else f"{cell:.1f}"
    return str(cell)


def finish(
    benchmark: str, options: argparse.Namespace, machine: dict[str, Any], results: Any
) -> None:
    """Print the machine, and write everything to the file that `--json` names."""
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    whole = {
        "benchmark": benchmark,
        "environment": machine,
        "options": settings,
        "results": results,
    }
    text = json.dumps(whole, indent=2, default=str)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n")
