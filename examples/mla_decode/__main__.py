"""An MLA decoder before and after its attention backend declares what its graphs can serve.

    python3 -m examples.mla_decode [--layers 61 --tokens 50 --batch 1] [--json FILE]

The same tokens are generated three ways:

- eagerly;
- with the declaration withheld: PIECEWISE, Python calls every layer's attention between two graphs;
- with the declaration: FULL_AND_PIECEWISE, a decode step is one graph.

All counts are measured at every step. The exit code is 1 if a replay differs from eager on the same
padded inputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.mla_decode.host import Workload
from examples.mla_decode.measure import Result, run
from examples.mla_decode.model import PRESETS, MlaConfig


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.device == "cpu":
        # Read when the kernels are defined: on a CPU they run in Triton's interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    config, work = config_of(options), workload_of(options)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, attention by {options.backend}")
    print(f"{config}\n{work}\n", flush=True)
    results = run(config, work, options.device, options.backend)
    for result in results:
        print(f"{result.way}: {result.mode}, {'; '.join(result.resolution) or 'as asked for'}")
    print()
    show(["", *(result.way for result in results)], rows(results))
    for result in results:
        if result.difference is not None:
            print(f"\n{result.way}: {result.difference}")
    if options.json is not None:
        write(options.json, where, config, work, options.backend, results)
    return int(any(result.difference is not None for result in results))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m examples.mla_decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--backend", choices=["triton", "sdpa"], help="triton on a GPU, else sdpa")
    parser.add_argument("--preset", choices=list(PRESETS), help="lite on a GPU, else tiny")
    for field in dataclasses.fields(MlaConfig):
        each = ", ".join(
            f"{name} {getattr(preset, field.name)}" for name, preset in PRESETS.items()
        )
        parser.add_argument(f"--{field.name}", type=positive, metavar="N", help=each)
    for name, default, meaning in (
        ("tokens", 50 if on_gpu else 8, "decode steps"),
        ("batch", 1, "requests"),
        (
            "context",
            1024 if on_gpu else 128,
            "random tokens in the cache of each request before its prompt",
        ),
        ("prompt", 8, "longest prompt"),
        ("query-len", 1, "tokens of a request in a decode step"),
        ("page-size", 64, "tokens of a page"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, metavar="N", default=default, help=f"{meaning} ({default})"
        )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if (options.rope or 0) % 2:
        parser.error("--rope must be even: its numbers are rotated in pairs")
    on_gpu = options.device == "cuda"
    options.backend = options.backend or ("triton" if on_gpu else "sdpa")
    options.preset = options.preset or ("lite" if on_gpu else "tiny")
    return options


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def config_of(options: argparse.Namespace) -> MlaConfig:
    names = [field.name for field in dataclasses.fields(MlaConfig)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return dataclasses.replace(PRESETS[options.preset], **given)


def workload_of(options: argparse.Namespace) -> Workload:
    return Workload(
        options.batch,
        options.tokens,
        options.context,
        options.prompt,
        options.query_len,
        options.page_size,
    )


def rows(results: list[Result]) -> list[list[str]]:
    """The printed table: a row for each figure, a column for each way."""
    eager = results[0].tokens

    def row(title: str, figure: Any) -> list[str]:
        return [title, *(str(figure(result)) for result in results)]

    def each(name: str, figure: Any) -> Any:
        return lambda result: figure([getattr(step, name) for step in result.steps])

    def total(values: list[int]) -> str:
        return f"{sum(values):,}"

    return [
        row("mode", lambda result: result.mode),
        row("a decode step runs as", each("mode", spread)),
        row("attention dispatched by Python, a step", each("attention_dispatches", spread)),
        row("... in all decode steps", each("attention_dispatches", total)),
        row("graphs launched, a step", each("graph_launches", spread)),
        row("... in all decode steps", each("graph_launches", total)),
        row("launches, copies and fills, a step", device_calls),
        row(
            "host time of a step, median us",
            each("host_us", lambda values: f"{statistics.median(values):,.0f}"),
        ),
        row(
            "whole step, median ms",
            each("step_ms", lambda values: f"{statistics.median(values):.3f}"),
        ),
        row("the prompts ran as", lambda result: result.prompts.mode),
        row("equal to eager, bit for bit", equality),
        row(
            "tokens as eager",
            lambda result: f"{(result.tokens == eager).sum():,} of {eager.numel():,}",
        ),
    ]


def device_calls(result: Result) -> str:
    return "-" if result.device_calls is None else f"{sum(result.device_calls.values()):,}"


def equality(result: Result) -> str:
    if result.mode == "NONE":
        return "-"
    return "yes" if result.difference is None else "NO"


def spread(values: list[Any]) -> str:
    """The value that all steps share, or the least and the largest."""
    least, largest = min(values), max(values)
    return str(least) if least == largest else f"{least} to {largest}"


def show(columns: list[str], lines: list[list[str]]) -> None:
    """A table, by rich where it is installed."""
    widths = [max(map(len, cells)) for cells in zip(columns, *lines, strict=True)]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for first, *others in (columns, *lines):
            padded = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
            print("  ".join((first.ljust(widths[0]), *padded)))
        return
    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for cells in lines:
        table.add_row(*cells)
    # A file or a pipe has no width, and rich would cut the table at 80.
    Console(width=sum(widths) + 3 * len(widths) + 1).print(table)


def write(
    path: Path, where: str, config: MlaConfig, work: Workload, backend: str, results: list[Result]
) -> None:
    """Everything that was measured, as JSON."""
    whole = {
        "device": where,
        "torch": torch.__version__,
        "backend": backend,
        "config": dataclasses.asdict(config),
        "workload": dataclasses.asdict(work),
        "results": [
            {**dataclasses.asdict(result), "tokens": result.tokens.tolist()} for result in results
        ],
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
