"""`generate` of transformers through graphs (`graphrt.hosts.transformers`), without and with
compiled pieces, beside `generate` as it is and with its compiled static cache.

    python3 -m benchmarks.gpu.transformers_host [--batches 1 16] [--prompts 16 128] [--json FILE]

Random weights, greedy. Medians over rounds in which all take turns, in milliseconds: "first" is a
call for one token, "step" the time of a long call less that of a short one, by the steps between
them. "replay" is a step called back to back on its graph alone, inputs copied: the rest of "step"
is the host's, between steps, because `generate` waits for each token. "seconds" is what each
prepares: captures, or compiles in its first two calls of each shape. "agree" is the share of tokens
that are those of `generate` as it is: from the first other token on, which other kernels' rounding
makes, sequences differ for good.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import arguments, environment, finish, show, synchronizer
from benchmarks.gpu.generate import SHAPES
from graphrt.hosts.transformers import graphs_of, with_graphs

PLAIN, COMPILED, GRAPHS = "generate", "generate, compiled", "with_graphs"
PIECES = "with_graphs, compiled"
SHORT = 8

Call = Callable[[Tensor, int], Tensor]


def calls(plain: Any, served: dict[str, Any], length: int) -> dict[str, Call]:
    """Each contestant: prompts and a number of tokens to all tokens."""

    def generate(model: Any, prompts: Tensor, tokens: int, **more: Any) -> Tensor:
        found: Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            **more,
        )
        return found

    # One length for all shapes: else each prompt compiles again.
    static = {"cache_implementation": "static", "max_cache_len": length}
    return {
        PLAIN: lambda prompts, tokens: generate(plain, prompts, tokens),
        COMPILED: lambda prompts, tokens: generate(plain, prompts, tokens, **static),
        **{name: functools.partial(generate, model) for name, model in served.items()},
    }


@torch.no_grad()
def replayed(model: Any, rows: int, length: int, options: argparse.Namespace) -> float:
    """Milliseconds of a step on its graph alone, behind a prompt of some length."""
    steps, synchronize = graphs_of(model).steps, synchronizer(options.device)
    tokens = torch.zeros((rows, 1), dtype=torch.int64, device=options.device)
    values = steps._values(tokens, tokens, length)
    times = []
    for _ in range(options.rounds):
        synchronize()
        began = time.perf_counter()
        for _ in range(options.tokens):
            steps.runner(steps._batches[rows], **values)
        synchronize()
        times.append((time.perf_counter() - began) / options.tokens * 1e3)
    return statistics.median(times)


def measured(
    contestants: dict[str, Call],
    served: dict[str, Any],
    prompts: Tensor,
    options: argparse.Namespace,
) -> dict[str, Any]:
    synchronize = synchronizer(options.device)

    def seconds(name: str, tokens: int) -> float:
        synchronize()
        began = time.perf_counter()
        contestants[name](prompts, tokens)
        synchronize()
        return time.perf_counter() - began

    results: dict[str, Any] = {}
    tokens = {}
    for name, call in contestants.items():
        began = time.perf_counter()
        for _ in range(2):
            tokens[name] = call(prompts, options.tokens)
        results[name] = {"seconds": time.perf_counter() - began, "first": [], "step": []}
    for turn in range(options.rounds):
        for name in list(contestants)[:: -1 if turn % 2 else 1]:
            results[name]["first"].append(seconds(name, 1) * 1e3)
            short, long = seconds(name, SHORT), seconds(name, options.tokens)
            results[name]["step"].append((long - short) / (options.tokens - SHORT) * 1e3)
    for name, model in served.items():
        results[name]["replay"] = replayed(model, *prompts.shape, options)
    for name, each in results.items():
        each["spread"] = {kind: (min(each[kind]), max(each[kind])) for kind in ("first", "step")}
        each |= {kind: statistics.median(each[kind]) for kind in ("first", "step")}
        each["agree"] = (tokens[name] == tokens[PLAIN]).float().mean().item()
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="1b", choices=SHAPES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 128, 512])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    import transformers

    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = transformers.LlamaConfig(**SHAPES[options.model], **ends)
    with torch.device(options.device):
        plain = transformers.LlamaForCausalLM(config).to(dtype).eval()
    length = max(options.prompts) + options.tokens
    most = {"max_batch": max(options.batches), "max_len": length}
    served, results = {}, {}
    for name, compiled in ((GRAPHS, False), (PIECES, True)):
        served[name] = copy.deepcopy(plain)
        began = time.perf_counter()
        with_graphs(served[name], **most, strict=True, compile=compiled)
        results[f"{name}, s"] = time.perf_counter() - began
        print(f"{name}: captured in {results[f'{name}, s']:.2f} s")
    for rows in options.batches:
        for prompt in options.prompts:
            prompts = torch.randint(config.vocab_size, (rows, prompt), device=options.device)
            each = measured(calls(plain, served, length), served, prompts, options)
            results[f"{rows} rows, {prompt} tokens"] = each
            columns = ("first", "step", "replay", "agree", "seconds")
            table = [[name, *(each[name].get(column, "") for column in columns)] for name in each]
            show(f"batch {rows}, prompt {prompt}, ms", ["", *columns], table)
    for name, model in served.items():
        report = graphs_of(model).report()
        results[f"{name}, steps"] = {"served": report.served, "eager": report.eager}
    told = {**environment(options.device), "transformers": transformers.__version__}
    finish("gpu_transformers_host", options, told, results)


if __name__ == "__main__":
    main()
