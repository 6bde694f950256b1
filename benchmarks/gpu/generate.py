"""Decode steps of transformers' own Llama: `generate` with its compiled static cache, and the same
model served by graphrt, as it is and compiled.

    python3 -m benchmarks.gpu.generate [--batches 1 16] [--tokens 128] [--json FILE]

Random weights, greedy. `generate` compiles its decode steps itself (CUDA graphs included), as
`cache_implementation="static"` asks. Milliseconds a step, medians over rounds in which all take
turns: the time of a long call less that of a short one, by the steps between them. "agree" is the
share of tokens that are the eager twin's, each of which is fed to all, "equal" that of steps whose
logits are, bit for bit. (Of equal logits, argmax may take another of two that are the greatest.)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import arguments, environment, finish, show, synchronizer
from graphrt import GraphPool, GraphRunner, InputSpec
from graphrt.compile import CompileOptions, compile_module

SHAPES = {
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
GENERATE, EAGER, FULL, COMPILED = "generate, compiled", "eager", "FULL", "graphrt.compile, FULL"
PROMPT, SHORT = 16, 8


class Step(nn.Module):
    """Logits `(rows, vocabulary)` after one token `(rows,)` of each row; it has its own cache."""

    def __init__(self, model: Any, rows: int, length: int, device: str) -> None:
        super().__init__()
        import transformers

        config = model.config
        width = config.head_dim or config.hidden_size // config.num_attention_heads
        heads = config.num_key_value_heads
        self.model = model
        self.cache = transformers.StaticCache(config=config, max_cache_len=length)
        self.cache.early_initialization(rows, heads, width, model.dtype, device)

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.unsqueeze(1)
        return self.model(tokens, past_key_values=self.cache, use_cache=True).logits[:, -1]

    def prefill(self, prompts: Tensor) -> Tensor:
        self.cache.reset()
        with torch.no_grad():
            logits = self.model(prompts, past_key_values=self.cache, use_cache=True).logits
        return logits[:, -1].argmax(-1)


def decoded(step: Step, call: Callable[[Tensor], Tensor], prompts: Tensor, tokens: int) -> Tensor:
    """`(rows, tokens)` greedy tokens."""
    found = [step.prefill(prompts)]
    for _ in range(tokens - 1):
        found.append(call(found[-1]).argmax(-1))
    return torch.stack(found, 1)


class Contestants:
    def __init__(self, model: Any, rows: int, tokens: int, device: str) -> None:
        vocabulary = model.config.vocab_size
        self.prompts = torch.randint(vocabulary, (rows, PROMPT), device=device)
        self.prepared: dict[str, Any] = {}
        self._model, self._rows, self._device = model, rows, device
        self._length = PROMPT + tokens
        self._stack = ExitStack()
        self._steps: dict[str, tuple[Step, Callable[[Tensor], Tensor]]] = {}
        eager = self._step()
        self._steps[EAGER] = eager, torch.no_grad()(eager)
        for name, compiled in ((FULL, False), (COMPILED, True)):
            started = time.perf_counter()
            self._steps[name] = self._served(name, compiled)
            seconds = time.perf_counter() - started
            self.prepared.setdefault(name, {})["seconds"] = seconds

    def _step(self) -> Step:
        return Step(self._model, self._rows, self._length, self._device)

    def _served(self, name: str, compiled: bool) -> tuple[Step, Callable[[Tensor], Tensor]]:
        step, pool = self._step(), GraphPool(self._device)
        if compiled:
            options = CompileOptions(backend="inductor", splitting_ops=[])
            # A static cache has one batch size: no dimension is dynamic.
            module = compile_module(step, {}, pool=pool, options=options, in_place=False)
        runner = GraphRunner(
            module if compiled else step,
            mode="FULL",
            sizes=[self._rows],
            inputs={"input_ids": InputSpec(torch.int64, ("tokens",))},
            outputs=("tokens", self._model.config.vocab_size),
            pool=pool,
        )
        self._stack.enter_context(runner).capture()
        if compiled:
            self.prepared[name] = {"figures": asdict(module.figures)}
        return step, lambda tokens: runner(input_ids=tokens)

    def run(self, name: str, tokens: int) -> Tensor:
        """`(rows, tokens)`"""
        if name != GENERATE:
            return decoded(*self._steps[name], self.prompts, tokens)
        found = self._model.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
        )
        return found[:, PROMPT:]

    def agreement(self, name: str, tokens: int) -> tuple[float, float]:
        """Share of tokens that are the eager ones, after which both go on, and of steps whose
        logits are the eager ones bit for bit."""
        (eager, eagerly), (step, call) = self._steps[EAGER], self._steps[name]
        token, _ = eager.prefill(self.prompts), step.prefill(self.prompts)
        same, equal = 0.0, 0
        for _ in range(tokens - 1):
            logits, ours = eagerly(token), call(token)
            expected = logits.argmax(-1)
            same += (ours.argmax(-1) == expected).float().mean().item()
            equal += torch.equal(ours, logits)
            token = expected
        return same / (tokens - 1), equal / (tokens - 1)

    def close(self) -> None:
        self._stack.close()


def measured(model: Any, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    synchronize = synchronizer(options.device)
    contestants = Contestants(model, rows, options.tokens, options.device)
    names = (EAGER, FULL, COMPILED, GENERATE)
    started = time.perf_counter()
    for _ in range(2):
        contestants.run(GENERATE, SHORT)
        contestants.run(GENERATE, options.tokens)
    contestants.prepared[GENERATE] = {"seconds": time.perf_counter() - started}
    for name in (EAGER, FULL, COMPILED):  # their first steps are tried
        contestants.run(name, SHORT)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names[:: -1 if turn % 2 else 1]:
            taken = []
            for tokens in (SHORT, options.tokens):
                synchronize()
                began = time.perf_counter()
                contestants.run(name, tokens)
                synchronize()
                taken.append(time.perf_counter() - began)
            times[name].append((taken[1] - taken[0]) / (options.tokens - SHORT) * 1e3)
    agree = {name: contestants.agreement(name, options.tokens) for name in (FULL, COMPILED)}
    contestants.close()
    return {
        "step_ms": {name: statistics.median(each) for name, each in times.items()},
        "spread_ms": {name: (min(each), max(each)) for name, each in times.items()},
        "agree": agree,
        "prepared": contestants.prepared,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="1b", choices=SHAPES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    import transformers

    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = transformers.LlamaConfig(**SHAPES[options.model], **ends)
    with torch.device(options.device):
        model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    found = {}
    for rows in options.batches:
        found[rows] = measured(model, rows, options)
        torch.compiler.reset()
        table = [
            [name, ms, *found[rows]["agree"].get(name, ("", ""))]
            for name, ms in found[rows]["step_ms"].items()
        ]
        show(f"batch {rows}, ms a step", ["", "step", "agree", "equal"], table)
    told = {**environment(options.device), "transformers": transformers.__version__}
    finish("gpu_generate", options, told, found)


if __name__ == "__main__":
    main()
