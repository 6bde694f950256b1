"""The `graphrt` command: attention, cache, demo, doctor, explain, plan and report.

Help, and what is wrong with an option's form, come without torch: commands import what they need.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from graphrt._version import __version__

if TYPE_CHECKING:
    from graphrt.core.capture.options import GraphOptions
    from graphrt.core.plan.plan import PlanArguments

try:
    import typer
except ImportError:  # pragma: no cover - an installation without the extra
    sys.exit('The graphrt command needs the extra "cli": pip install "graphrt[cli]"')

from graphrt.cli.cache import cache_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(cache_app, name="cache")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"graphrt {__version__}")
        raise typer.Exit()


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Capture a PyTorch forward as static device graphs and replay the right one per batch."""


Platform = Annotated[str | None, typer.Option(help="Platform by name; else the current one.")]
_MODES = "NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE."
Mode = Annotated[str | None, typer.Option(help=_MODES)]
Sizes = Annotated[str | None, typer.Option(help="Capture sizes, such as 1,2,4,8.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "-c", "--config", help="A setting of the plan or the graphs, such as -c outputs=clone."
    ),
]


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Local Hugging Face Llama or Qwen3; else a seeded one.")
    ] = None,
    platform: Platform = None,
    mode: Mode = None,
    sizes: Sizes = None,
    config: Settings = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Capture nothing.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 32,
    html: Annotated[Path, typer.Option(help="Where the page of the run goes.")] = Path("demo.html"),
) -> None:
    """Serve prompts with graphs and without: what graphs bring, and that replay equals eager."""
    from graphrt.demo import run_demo

    try:
        code = run_demo(
            model=model,
            platform=platform,
            mode=mode,
            sizes=_sizes(sizes),
            settings=config or [],
            prompts=prompts,
            eager=eager,
            max_new_tokens=max_new_tokens,
            html=html,
        )
    except ModuleNotFoundError as error:
        if error.name not in ("safetensors", "tokenizers"):
            raise
        advice = f'graphrt demo --model needs {error.name}: pip install "graphrt[demo]"'
        typer.secho(advice, fg="red", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    tries: Annotated[
        bool, typer.Option("--try/--no-try", help="Capture and replay a graph on each platform.")
    ] = True,
) -> None:
    """Show platforms, devices, versions and variables, and whether graphs work."""
    from graphrt.cli.doctor import print_doctor

    raise typer.Exit(print_doctor(as_json=json, tries=tries))


@app.command()
def attention(
    backend: Annotated[
        str | None, typer.Argument(help="One backend, such as flashinfer:trtllm_kernels=true.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show what known attention backends can capture, and when."""
    from graphrt.cli.attention import print_attention

    print_attention(backend, as_json=json)


@app.command()
def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of report().save() or graphrt.observe.trace()."),
    ],
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
) -> None:
    """Show saved reports, or make a page of them; two of them are compared."""
    from graphrt.core.base.texts import printable
    from graphrt.observe.files import runs_of
    from graphrt.observe.memory import taken_and_predicted
    from graphrt.observe.pages.whole import write_page
    from graphrt.observe.report import report_text

    if html is not None:
        write_page(html, *files)
        print(f"Wrote {printable(str(html))}")
        return
    texts = []
    for run in (run for file in files for run in runs_of(file)):
        memory = taken_and_predicted(run.figures)
        text = f"{run.label}: {report_text(run.figures)}"
        if memory is not None:
            text += f"\nMemory: {memory[0]}, {memory[1]} predicted after two graphs"
        texts.append(text)
    print("\n\n".join(texts))


@app.command("explain")
def explain_forward(
    target: Annotated[str, typer.Argument(help="The forward, as module:name.")],
    inputs: Annotated[
        list[str],
        typer.Option("--input", help="An input, such as x=float32[tokens,16]; may be repeated."),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the graph.")] = 8,
    platform: Platform = None,
    made: Annotated[bool, typer.Option("--made", help="Call the target for the forward.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Say what stands in the way of graphs for a forward, and what they would bring."""
    from graphrt.cli.explain import print_explanation

    code = print_explanation(
        target, inputs, tokens=tokens, platform=platform, made=made, as_json=json
    )
    raise typer.Exit(code)


# Of `graphrt plan`.
MaxNumReqs = Annotated[
    int | None,
    typer.Option(min=1, help="Most requests of a batch: 256, or as many as --sizes says."),
]
MaxNumTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of a batch: 2048, or as many as --sizes says."),
]
QueryLens = Annotated[
    list[int] | None, typer.Option(min=1, help="A decode query length; may be repeated.")
]
Attention = Annotated[
    list[str] | None,
    typer.Option(
        help="A level, backend=level, or a known backend (see attention); may be repeated."
    ),
]
Pieces = Annotated[str, typer.Option(help="breakable, fx, inductor or none.")]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Layers of the model; a piecewise size has one more.")
]
Npu = Annotated[
    list[str] | None,
    typer.Option(
        help="How the streams of an NPU are counted: device=A2 (A3, A5, 310P), "
        "profile=structural (0.9.1, 0.11, ... last), domains=tp,ep, aiv, moe, multi_stream=1, "
        "draft_layers=1; may be repeated."
    ),
]
Limits = Annotated[
    list[str] | None,
    typer.Option(help="A limit, such as streams=1000, bytes=2GiB, seconds=60, graphs=500."),
]
DeviceBytes = Annotated[
    str | None,
    typer.Option(help="All graphs together, such as 2GiB: the same as --budget bytes=2GiB."),
]
ReportOfCosts = Annotated[
    Path | None, typer.Option("--report", help="A saved report: what graphs take.")
]
Costs = Annotated[
    list[str] | None,
    typer.Option(help="What one size takes, such as bytes=20MiB or seconds=0.5."),
]
Traffic = Annotated[
    list[str] | None,
    typer.Option(help="The share of steps of a batch size, such as 64=0.5; may be repeated."),
]
MinPiecewise = Annotated[
    int, typer.Option(min=0, help="With fewer piecewise sizes, only decode is captured.")
]


@app.command()
def plan(
    mode: Mode = None,
    sizes: Sizes = None,
    max_num_reqs: MaxNumReqs = None,
    max_num_tokens: MaxNumTokens = None,
    query_len: QueryLens = None,
    attention: Attention = None,
    pieces: Pieces = "breakable",
    platform: Platform = None,
    config: Settings = None,
    layers: Layers = None,
    npu: Npu = None,
    budget: Limits = None,
    cost: Costs = None,
    device_bytes: DeviceBytes = None,
    report: ReportOfCosts = None,
    traffic: Traffic = None,
    min_piecewise: MinPiecewise = 2,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show the mode, sizes and graphs that a configuration gives."""
    from graphrt import GraphMode
    from graphrt.cli.budget import BudgetRequest
    from graphrt.cli.plan import PlanRequest, print_plan

    arguments, options = _settings(config)
    arguments = {
        "query_lens": tuple(query_len or [1]),
        "pieces": None if pieces.lower() == "none" else pieces.lower(),
        **arguments,
    }
    if mode is not None:
        arguments["mode"] = GraphMode.parse(mode)
    if sizes is not None:
        arguments["sizes"] = _sizes(sizes)
    if max_num_reqs is not None:
        arguments["max_num_reqs"] = max_num_reqs
    if max_num_tokens is not None:
        arguments["max_num_tokens"] = max_num_tokens
    if arguments.get("sizes") is None:
        # The largest given size is the largest batch: the default would add a graph of 256.
        # A schedule of query lengths says the requests itself.
        if not isinstance(arguments["query_lens"], dict):
            arguments = {"max_num_reqs": 256, **arguments}
        arguments = {"max_num_tokens": 2048, **arguments}
    request = PlanRequest(
        arguments,
        attention=tuple(attention or ["ALWAYS"]),
        platform=platform,
        strict=options.strict,
        save=save,
        budget=BudgetRequest(
            layers=layers,
            npu=tuple(npu or ()),
            limits=(*(budget or ()), *([f"bytes={device_bytes}"] if device_bytes else ())),
            report=report,
            costs=tuple(cost or ()),
            traffic=tuple(traffic or ()),
            min_piecewise=min_piecewise,
        ),
    )
    print_plan(request, as_json=json)


def _settings(config: list[str] | None) -> tuple[PlanArguments, GraphOptions]:
    """Arguments of a plan, and options, that -c says; errors name the flag."""
    from graphrt.core.base.errors import InvalidOptionError
    from graphrt.demo.settings import runner_settings

    try:
        return runner_settings(config or [])
    except InvalidOptionError as error:
        raise InvalidOptionError(
            f"-c, --config: {error.what}",
            got=error.got,
            expected=error.expected,
            advice=f"-c {error.advice}" if str(error.advice).isidentifier() else error.advice,
        ) from error


def _sizes(text: str | None) -> list[int] | None:
    """`1,2,4`, with or without brackets; errors are those of the plan's `sizes`."""
    if text is None:
        return None
    from graphrt.core.plan.sizes import check_sizes
    from graphrt.demo.settings import read_settings

    bare = text.strip().removeprefix("[").removesuffix("]")
    sizes: Any = read_settings([f"sizes=[{bare}]"])["sizes"]
    return list(check_sizes(sizes))


_FLAGS = {
    "attention": "--attention", "budget": "--budget", "config": "-c",
    "max_num_reqs": "--max-num-reqs", "max_num_tokens": "--max-num-tokens", "mode": "--mode",
    "pieces": "--pieces", "platform": "--platform", "query_lens": "--query-len",
    "sizes": "--sizes", "traffic": "--traffic",
}  # fmt: skip
_WRITTEN = re.compile(rf"\b({'|'.join(_FLAGS)})=(\[[^\]]*\]|'[^']*'|[\w.]+)")


def _with_flags(message: str) -> str:
    """An error's text with flags in place of Python's arguments: `--mode FULL` for `mode='FULL'`.
    Settings of -c are written as they are."""

    def flag(match: re.Match[str]) -> str:
        return f"{_FLAGS[match[1]]} {match[2].strip('[]').replace(chr(39), '').replace(', ', ',')}"

    return _WRITTEN.sub(flag, message)


def main() -> None:
    """Entry point: a named error is printed without a traceback, exit code 2."""
    try:
        app(prog_name="graphrt")
    except Exception as error:
        from graphrt.core.base.errors import GraphRTError

        if not isinstance(error, GraphRTError):
            raise
        text = _with_flags(f"{type(error).__name__}: {error}")
        typer.secho(text, fg="red", err=True)
        sys.exit(2)
