"""A paged decode engine on graphrt: continuous batching, speculative decode, graphs.

    python3 -m examples.engine                             # a small random model
    python3 -m examples.engine --model DIR "A prompt"      # Llama or Qwen3 of Hugging Face

    config.py    limits and sampling
    model.py     the decoder: one flat row of tokens, a paged cache
    requests.py  requests, pages, the scheduler
    paged.py     the decoder behind a GraphRunner: here is graphrt
    engine.py    the loop: schedule, propose, run, sample, accept
    streams.py   the engine on an event loop: async for token in engine.stream(prompt)

It runs all prompts with graphs and without, and compares the tokens. It imports nothing of
`graphrt.demo`: that is a command to try a device with, this is a file to start an engine from.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from examples.engine.config import EngineConfig, Sampling
from examples.engine.engine import Engine
from examples.engine.model import Decoder, DecoderConfig, load, seeded
from graphrt import GraphMode, current_platform

PROMPTS = ["Hello", "A captured graph is", "Decode comes first, and prompts fill what is left"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", type=Path, help="a directory of Hugging Face (default: random)")
    parser.add_argument("--draft", type=Path, help="default: the first layers of the model")
    parser.add_argument("--draft-tokens", type=int, default=3, help="0: no speculative decode")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--report", action="store_true", help="print the runners' reports")
    options = parser.parse_args(arguments)

    device = current_platform().device_type
    decode: Callable[[list[int]], str]
    if options.model is None:
        # Operators this small only lose time to a second thread.
        torch.set_num_threads(1)
        model = seeded(DecoderConfig())
        prompts = [list(text.encode()) for text in options.prompts]
        decode = latin
    else:
        from tokenizers import Tokenizer

        model = load(options.model, torch.float32 if device == "cpu" else torch.bfloat16)
        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        prompts = [tokenizer.encode(text).ids for text in options.prompts]
        decode = tokenizer.decode
    model = model.to(device)
    draft = draft_of(model, options.draft) if options.draft_tokens else None
    sampling = Sampling(options.max_tokens, options.temperature)
    config = EngineConfig(max_len=1024, num_pages=1025, draft_tokens=options.draft_tokens)

    outputs = []
    for mode in (config.mode, GraphMode.NONE):
        with Engine(model, replace(config, mode=mode), draft) as engine:
            engine.generate(prompts, sampling)  # the first steps are slower
            start = time.perf_counter()
            outputs.append(engine.generate(prompts, sampling))
            seconds = time.perf_counter() - start
            tokens = sum(map(len, outputs[-1]))
            rate = f"{tokens} tokens, {tokens / seconds:.0f} tokens/s"
            proposals = f"{engine.accepted} of {engine.proposed} proposals accepted"
            print(f"{engine.model.runner.mode.name}: {rate}, {proposals}")
            if options.report:
                for each in (engine.model, engine.draft):
                    if each is not None:
                        print(each.runner.report())
    for text, ids in zip(options.prompts, outputs[0], strict=True):
        print(f"{text!r} -> {decode(ids)!r}")
    same = sum(map(operator.eq, itertools.chain(*outputs[0]), itertools.chain(*outputs[1])))
    print(f"{same} of {tokens} tokens are those without graphs")
    # Without graphs nothing is padded. On a GPU other sizes take other kernels, which may round in
    # another way, and then a token may differ. Replays are compared with eager *padded* steps.
    return int(device == "cpu" and outputs[0] != outputs[1])


def draft_of(model: Decoder, directory: Path | None) -> Decoder:
    if directory is None:
        return model.first_layers(max(1, model.config.num_hidden_layers // 3))
    weight = model.lm_head.weight
    return load(directory, weight.dtype).to(weight.device)


def latin(ids: list[int]) -> str:
    """Text of the random model, whose tokens are bytes."""
    return bytes(ids).decode("latin-1")


if __name__ == "__main__":
    raise SystemExit(main())
