"""`run_demo`: the demo on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from graphrt import BatchDescriptor, GraphMode, GraphRunner, get_platform
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.base.texts import printable, seconds_text
from graphrt.core.plan.plan import PlanArguments
from graphrt.demo.checkpoint import load_checkpoint, seeded_checkpoint
from graphrt.demo.engine import EngineLimits, StepRecord
from graphrt.demo.measured import ON_A_GPU
from graphrt.demo.model import Decoder
from graphrt.demo.npu import FusedDecodeAttention
from graphrt.demo.report import (
    Comparison,
    Run,
    Setup,
    compare,
    group_steps,
    make_runner,
    serve_prompts,
)
from graphrt.demo.settings import runner_settings
from graphrt.demo.steady import SteadySize, cause_of, measure_steady
from graphrt.demo.tokenizer import Tokenizer
from graphrt.observe.pages.whole import write_page

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_NO_TIMES = "{} is a simulation: times and tokens/s below mean nothing, equality does."
_FOR_TESTS = "The CPU platform is for tests and development without a GPU."
_ROUNDS = 5
"""Turns in which every way to run serves all prompts."""
_ENOUGH_S = 6.0
"""No further turn after this time."""
_PROMPTS = [
    "Hello",
    "A captured graph is",
    "Decode comes first, and prompts fill what is left of the token budget, chunk by chunk, so",
    "Padding rows write to a page that nobody reads.",
    "Static addresses! " * 9,
    "Why?",
]


class _Way(NamedTuple):
    """A way to run the prompts: by this runner, with `padded_eager` on the inputs of its graphs."""

    name: str
    runner: GraphRunner
    padded_eager: bool = False


def run_demo(
    model: Path | None = None, platform: str | None = None, mode: str | None = None,
    sizes: list[int] | None = None, settings: Sequence[str] = (), prompts: Path | None = None,
    eager: bool = False, max_new_tokens: int = 32, console: Console | None = None,
    html: Path | None = None,
) -> int:  # fmt: skip
    """Run the prompts with graphs and without; 0 if every token and logit row is equal, else 1.

    `model` is a local Hugging Face directory (None: a small seeded model), `settings` are
    key=value, `prompts` a file with one prompt per line; with `eager` nothing is captured and the
    result is 0. `html` gets the page of the run with graphs. Raises a `GraphRTError` for anything
    that cannot be read, run or written.
    """
    console = console or Console()
    texts = _PROMPTS if prompts is None else _read_prompts(prompts)
    graphs, options = runner_settings(settings)
    graph_arguments: PlanArguments = {"sizes": _SIZES, **graphs}
    if mode is not None:
        graph_arguments["mode"] = GraphMode.parse(mode)
    if sizes is not None:
        graph_arguments["sizes"] = sizes
    setup, tokenizer = _load(model, platform, texts, max_new_tokens, console)
    setup = replace(setup, graphs=graph_arguments)
    unpadded = replace(setup, graphs={**graph_arguments, "mode": GraphMode.NONE})
    threads = 1 if model is None else torch.get_num_threads()
    result = None
    with ExitStack() as open_runners, _threads(threads):
        plain = open_runners.enter_context(make_runner(unpadded, options))
        ways = [_Way("eager, not padded", plain)]
        if not eager:
            runner = open_runners.enter_context(make_runner(setup, options))
            _capture(runner, console)
            proof = serve_prompts(setup, runner, keep_logits=True)
            # The page is of this run, and has the times of the steady steps.
            report = runner.report()
            padded = serve_prompts(setup, runner, eager=True, keep_logits=True)
            result = compare(proof, padded)
            steady = measure_steady(setup, runner, plain)
            if html is not None:
                report = replace(report, graphs=tuple(runner.graphs.records))
                write_page(html, report, title="graphrt demo")
            _print_steady(steady, console)
            ways = [_Way("graphs", runner), _Way("eager, padded alike", runner, True), *ways]
        serve_prompts(setup, plain)
        runs = _in_turns(setup, ways)
    if setup.platform.name == "cpu":
        console.print(Text(f"{_FOR_TESTS} {ON_A_GPU}", style="cyan"))
    first = runs[ways[0].name]
    console.print(_speed_table(runs), _step_table(first))
    for text, generated in zip(texts, first.generated, strict=True):
        answer = printable(tokenizer.decode(generated))
        console.print(Text.assemble((printable(text), "dim"), " → ", (answer, "green")))
    if html is not None and not eager:
        console.print(Text(f"The page of this run: {printable(str(html.resolve()))}", style="bold"))
    return 0 if result is None or _print_verdict(result, console) else 1


def _capture(runner: GraphRunner, console: Console) -> None:
    began = perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("no graphs")

        def show(done: int, total: int, descriptor: BatchDescriptor) -> None:
            progress.update(
                task, completed=done, total=total, description=f"capturing {descriptor}"
            )

        runner.capture(progress=show)
    whole_s, report = perf_counter() - began, runner.report()
    tried = sum(bool(trial.steps) for trial in report.trust.trials)
    checks = f"checks of {tried} of them {seconds_text(whole_s - report.capture_s)}"
    console.print(
        f"{len(report.graphs)} graphs: captures took {seconds_text(report.capture_s)}, {checks}"
    )
    if report.dropped:
        dropped = ", ".join(f"{each.mode.name} [{each.descriptor}]" for each in report.dropped)
        console.print(Text(f"Not captured for lack of memory: {dropped}", style="yellow"))


def _in_turns(setup: Setup, ways: Sequence[_Way]) -> dict[str, Run]:
    """Serve the prompts in every way, again and again; of each the fastest run. All ways have
    run before."""
    runs: dict[str, list[Run]] = {way.name: [] for way in ways}
    began = perf_counter()
    for turn in range(_ROUNDS):
        if turn and perf_counter() - began > _ENOUGH_S:
            break
        for way in ways:
            runs[way.name].append(serve_prompts(setup, way.runner, eager=way.padded_eager))
    return {name: max(each, key=attrgetter("tokens_per_s")) for name, each in runs.items()}


def _load(
    model: Path | None, platform: str | None, texts: Sequence[str], max_new_tokens: int,
    console: Console,
) -> tuple[Setup, Tokenizer]:  # fmt: skip
    device, limits = get_platform(platform), EngineLimits()
    on_npu = device.device_type == "npu"
    dtype = torch.float32 if device.device_type == "cpu" else torch.bfloat16
    checkpoint = seeded_checkpoint() if model is None else load_checkpoint(model, dtype)
    if on_npu:
        # The operator takes no float32; pages and head size are those of most engines there.
        limits = EngineLimits(page_size=128, num_pages=17)
        checkpoint = seeded_checkpoint(head_dim=128) if model is None else checkpoint
    tokenizer = Tokenizer(model, checkpoint.config.vocab_size)
    name = "a small seeded model (its text is noise)" if model is None else str(model)
    console.print(Text(f"{name} on {device.name}", style="bold"))
    if device.simulated:
        console.print(Text(_NO_TIMES.format(device.name), style="yellow"))
    if tokenizer.notice is not None:
        console.print(Text(tokenizer.notice, style="yellow"))
    weights = {
        key: weight.to(device.device_type, dtype if on_npu else None)
        for key, weight in checkpoint.weights.items()
    }
    context = limits.pages(limits.context) * limits.page_size
    fused = FusedDecodeAttention(checkpoint.config, context) if on_npu else None
    decoder = Decoder(checkpoint.config, weights, context, fused)
    ids = [tokenizer.encode(text) for text in texts]
    return Setup(decoder, device, limits, ids, max_new_tokens, checkpoint.eos_ids), tokenizer


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Operators as small as the seeded model's only lose time to a second CPU thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"the prompts file {path} cannot be read",
            got=error,
            advice="the path of a text file in UTF-8",
        ) from error
    if not (texts := [line for line in lines if line.strip()]):
        raise InvalidInputError(
            f"the prompts file {path} is empty",
            expected="a prompt per line",
            advice="write a prompt into it",
        )
    return texts


def _print_steady(sizes: list[SteadySize], console: Console) -> None:
    if not sizes:
        return
    table = Table(title="Steady steps of full batches, in ms: the fastest of many turns")
    table.add_column("graph", no_wrap=True)
    for column in ("by graph", "eager", "gain"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("if not faster, why", no_wrap=True)
    for each in sizes:
        times = f"{1e3 * each.graph_s:.2f}", f"{1e3 * each.eager_s:.2f}"
        gain = Text(f"{each.gain:.2f} x", style="green" if each.gain > 1 else "yellow")
        table.add_row(f"{each.mode.name} {each.tokens}", *times, gain, cause_of(each, sizes))
    console.print(table)


def _step_table(run: Run) -> Table:
    table = Table(title="Steps of the first run above: prompts are steps with parts of prompts")
    columns = "mode", "size", "reason", "steps", "prompts", "live", "padding", "ms"
    for column in columns:
        table.add_column(column, no_wrap=True)
    for group in group_steps(run.steps):
        mode, descriptor, reason = group[0].dispatch[:3]
        live = sum(step.num_tokens for step in group)
        mixed = sum(step.num_tokens > step.num_reqs for step in group)
        padding = 1 - live / (descriptor.num_tokens * len(group))
        figures = f"{len(group)}", f"{mixed}", f"{live}", f"{padding:.0%}", _median_ms(group)
        why = f"{reason.name}, trial" if group[0].tried else reason.name
        table.add_row(mode.name, f"{descriptor.num_tokens}", why, *figures)
    return table


def _speed_table(runs: dict[str, Run]) -> Table:
    table = Table(
        "run",
        "steps",
        "generated",
        "tokens/s",
        "decode step, ms",
        title="Serving: the fastest of some turns",
    )
    for name, run in runs.items():
        figures = f"{len(run.steps)}", f"{sum(map(len, run.generated))}", f"{run.tokens_per_s:.0f}"
        decode = [step for step in run.steps if step.num_tokens == step.num_reqs]
        table.add_row(name, *figures, _median_ms(decode))
    return table


def _median_ms(steps: Sequence[StepRecord]) -> str:
    """Not the mean: on a busy machine one slow step would decide it."""
    return f"{1e3 * median(step.seconds for step in steps):.2f}" if steps else ""


def _print_verdict(result: Comparison, console: Console) -> bool:
    console.print(
        f"{result.tokens} tokens, {result.wrong_tokens} differ; "
        f"{result.rows} rows of logits, {result.wrong_rows} differ (torch.equal); "
        f"{result.replayed} steps replayed a graph; "
        f"the steps were {'the same' if result.same_steps else 'not the same'}"
    )
    verdict = ("equal", "bold green") if result.equal else ("NOT EQUAL", "bold red")
    if result.equal and not result.replayed:
        verdict = ("equal, but no graph was replayed", "bold yellow")
    console.print(Text.assemble("Graphs and eager, padded the same: ", verdict))
    return result.equal
