"""Run random programs: `python -m tests.fuzz --count 5000 --seed 0`, on the CPU or on the platform
that `--platform` or GRAPHRT_PLATFORM names."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from graphrt import get_platform
from graphrt.errors import PlatformError
from tests.fuzz.counting import Counts, counted, counted_apart, judged_on, work
from tests.fuzz.minimising import minimised
from tests.fuzz.printing import printed
from tests.fuzz.running import judge, program_of

_SHOWN = 10
"""Defects that are made smaller and printed; of the others only the number is."""


def main() -> int:
    """Run what the command line says; 1 if a program was wrong, raw or crashed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    named = os.environ.get("GRAPHRT_PLATFORM") or "cpu"
    parser.add_argument("--platform", default=named, help=f"its name (default: {named})")
    parser.add_argument("--mode", choices=("FULL", "PIECEWISE", "FULL_AND_PIECEWISE"))
    parser.add_argument("--one-process", action="store_true", help="all programs in this one")
    parser.add_argument("--show", action="store_true", help="print the program of --seed, run it")
    parser.add_argument("--save", type=Path, help="a folder for programs that fail")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        device = get_platform(arguments.platform).device_type
    except PlatformError as error:
        parser.error(str(error))
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    numbers = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.work:
        work(numbers, arguments.platform, arguments.mode)
        return 0
    if arguments.show:
        program = program_of(arguments.seed, arguments.mode)
        verdict = judge(program, arguments.platform)
        print(printed(program, f"{verdict.outcome} {verdict.reason}", arguments.platform))
        print(verdict.outcome, verdict.reason, verdict.detail)
        return int(verdict.is_defect)
    console = Console()
    began = time.perf_counter()
    run = counted if arguments.one_process else counted_apart
    console.print(f"platform {arguments.platform}, on {device}")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("programs", total=arguments.count)

        def progress(number: int, counts: Counts) -> None:
            bar.update(task, completed=counts.total, description=_said(counts))

        counts = run(numbers, arguments.platform, arguments.mode, progress)
    _print_table(console, counts, time.perf_counter() - began)
    for number in list(counts.defects)[:_SHOWN]:
        _print_defect(console, number, counts, arguments)
    return int(bool(counts.defects))


def _said(counts: Counts) -> str:
    return ", ".join(f"{name} {many}" for name, many in counts.outcomes.most_common())


def _print_table(console: Console, counts: Counts, seconds: float) -> None:
    table = Table(title=f"{counts.total} programs, {counts.hits} replays, {seconds:.0f} s")
    table.add_column("outcome")
    table.add_column("reason")
    table.add_column("programs", justify="right")
    for outcome, many in counts.outcomes.most_common():
        table.add_row(outcome, "", str(many))
        for (of, reason), how_many in counts.reasons.most_common():
            if of == outcome:
                table.add_row("", reason, str(how_many))
    console.print(table)
    console.print(f"refused or named: {counts.refused_share:.1%}")


def _print_defect(
    console: Console, number: int, counts: Counts, arguments: argparse.Namespace
) -> None:
    verdict = counts.defects[number]
    console.rule(f"program {number}: {verdict.outcome} {verdict.reason}")
    console.print(verdict.detail, markup=False, highlight=False)
    program = program_of(number, arguments.mode)
    if verdict.outcome != "crash":
        program = minimised(program, judged_on(arguments.platform))
    text = printed(program, f"{verdict.outcome}: {verdict.detail}", arguments.platform)
    console.print(text, markup=False, highlight=False)
    if arguments.save is not None:
        arguments.save.mkdir(parents=True, exist_ok=True)
        (arguments.save / f"program_{number}.py").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
