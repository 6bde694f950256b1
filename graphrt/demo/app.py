"""`run_demo`: the demo on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from graphrt import BatchDescriptor, GraphMode, GraphOptions, get_platform
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.base.texts import printable
from graphrt.core.plan.plan import PlanArguments
from graphrt.demo.checkpoint import load_checkpoint, seeded_checkpoint
from graphrt.demo.engine import EngineLimits, StepRecord
from graphrt.demo.model import Decoder
from graphrt.demo.npu import FusedDecodeAttention
from graphrt.demo.report import Comparison, Run, Setup, compare, group_steps, run_prompts
from graphrt.demo.settings import runner_settings
from graphrt.demo.tokenizer import Tokenizer

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_NO_TIMES = "{} is a simulation: times and tokens/s below mean nothing, equality does."
_PROMPTS = [
    "Hello",
    "A captured graph is",
    "Decode comes first, and prompts fill what is left of the token budget, chunk by chunk, so",
    "Padding rows write to a page that nobody reads.",
    "Static addresses! " * 9,
    "Why?",
]


def run_demo(
    model: Path | None = None, platform: str | None = None, mode: str | None = None,
    sizes: list[int] | None = None, settings: Sequence[str] = (), prompts: Path | None = None,
    eager: bool = False, max_new_tokens: int = 32, console: Console | None = None,
) -> int:  # fmt: skip
    """Run the prompts with graphs and without; 0 if every token and logit row is equal, else 1.

    `model` is a local Hugging Face directory (None: a small seeded model), `settings` are
    key=value, `prompts` a file with one prompt per line; with `eager` nothing is captured and the
    result is 0. Raises a `GraphRTError` for what cannot be read or run.
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
    with _threads(1 if model is None else torch.get_num_threads()):
        runs = {} if eager else _both_launches(setup, options, console)
        runs["eager, not padded"] = run_prompts(unpadded, options)
    first, *others = runs.values()
    for text, generated in zip(texts, first.generated, strict=True):
        answer = printable(tokenizer.decode(generated))
        console.print(Text.assemble((printable(text), "dim"), " → ", (answer, "green")))
    console.print(_step_table(first), _speed_table(runs))
    return 0 if not others or _print_verdict(compare(first, others[0]), console) else 1


def _load(
    model: Path | None, platform: str | None, texts: Sequence[str], max_new_tokens: int,
    console: Console,
) -> tuple[Setup, Tokenizer]:  # fmt: skip
    device, limits = get_platform(platform), EngineLimits()
    dtype = torch.float32 if device.device_type == "cpu" else torch.bfloat16
    checkpoint = seeded_checkpoint() if model is None else load_checkpoint(model, dtype)
    tokenizer = Tokenizer(model, checkpoint.config.vocab_size)
    name = "a small seeded model (its text is noise)" if model is None else str(model)
    console.print(Text(f"{name} on {device.name}", style="bold"))
    if device.simulated:
        console.print(Text(_NO_TIMES.format(device.name), style="yellow"))
    if tokenizer.notice is not None:
        console.print(Text(tokenizer.notice, style="yellow"))
    weights = {key: weight.to(device.device_type) for key, weight in checkpoint.weights.items()}
    context = limits.pages(limits.context) * limits.page_size
    fused = None
    if device.device_type == "npu":
        fused = FusedDecodeAttention(checkpoint.config, context)
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


def _both_launches(setup: Setup, options: GraphOptions, console: Console) -> dict[str, Run]:
    with Progress(console=console) as progress:
        task = progress.add_task("no graphs")

        def show(done: int, total: int, descriptor: BatchDescriptor) -> None:
            text = f"capturing {descriptor}" if done < total else f"captured {total} graphs"
            progress.update(task, completed=done, total=total, description=text)

        graphs = run_prompts(setup, options, keep_logits=True, progress=show)
    eager = run_prompts(setup, options, keep_logits=True, eager=True)
    return {"graphs": graphs, "eager, padded the same": eager}


def _step_table(run: Run) -> Table:
    columns = "mode", "size", "reason", "steps", "with prompts", "live tokens", "padding"
    table = Table(*columns, "median ms", title="Steps")
    for group in group_steps(run.steps):
        mode, descriptor, reason = group[0].dispatch[:3]
        live = sum(step.num_tokens for step in group)
        mixed = sum(step.num_tokens > step.num_reqs for step in group)
        padding = 1 - live / (descriptor.num_tokens * len(group))
        figures = f"{len(group)}", f"{mixed}", f"{live}", f"{padding:.0%}", _median_ms(group)
        table.add_row(mode.name, f"{descriptor.num_tokens}", reason.name, *figures)
    return table


def _speed_table(runs: dict[str, Run]) -> Table:
    table = Table("run", "steps", "generated", "tokens/s", "decode step, median ms", title="Speed")
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
