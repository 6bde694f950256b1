"""One engine, in its process: does what lines on its input ask, and replies on a pipe.

python -m benchmarks.gpu.vllm_host.ranks.engine OPTIONS.json FILE_DESCRIPTOR
"""

import itertools
import json
import os
import random
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.vllm_host.watching import steps_stamped


class Engine:
    """An `LLM` of vLLM's, and what is asked of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.vocabulary = options["vocabulary"]
        self.sampling = SamplingParams
        began = time.perf_counter()
        self.llm = LLM(**options["arguments"])
        self.start_s = time.perf_counter() - began

    def begin(self) -> dict[str, Any]:
        """Random weights; how long the start took."""
        refilled = self.llm.collective_rpc("bench_randomise")
        config = self.llm.llm_engine.vllm_config
        return {
            "start_s": round(self.start_s, 1),
            "refilled": refilled,
            "resolved": str(config.compilation_config.cudagraph_mode).rpartition(".")[2],
            "counts": self.llm.collective_rpc("bench_counts"),
        }

    def rpc(self, method: str, args: list[Any]) -> Any:
        """The result of a method of all workers."""
        return self.llm.collective_rpc(method, args=tuple(args))

    def generate(self, batch: int, seed: int, tokens: int, mixed: bool = False) -> dict[str, Any]:
        """Tokens of a batch of random prompts, and the median step in us. `mixed` requests end at
        different times, so that others begin between decode steps."""
        draw = random.Random(seed)
        prompts, sampling = [], []
        for _ in range(batch):
            ids = [draw.randrange(3, self.vocabulary) for _ in range(draw.randrange(5, 60))]
            prompts.append({"prompt_token_ids": ids})
            most = draw.randrange(1, tokens) if mixed else tokens
            sampling.append(
                self.sampling(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
            )
        with steps_stamped() as ends:
            outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        steps = [(b - a) / 1e3 for a, b in itertools.pairwise(ends)][6:-4]
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "step_us": round(statistics.median(steps), 1) if steps else None,
            "mean_us": round(statistics.fmean(steps), 1) if steps else None,
        }


def main() -> int:
    options = json.loads(Path(sys.argv[1]).read_text())
    descriptor = int(sys.argv[2])
    # Workers must not keep the pipe open after this process.
    os.set_inheritable(descriptor, False)
    replies = os.fdopen(descriptor, "w")

    def reply(found: Any) -> None:
        replies.write(json.dumps(found) + "\n")
        replies.flush()

    try:
        engine = Engine(options)
        reply({"reply": engine.begin()})
        for line in sys.stdin:
            request = json.loads(line)
            reply({"reply": getattr(engine, request.pop("do"))(**request)})
    except Exception:
        told = traceback.format_exc()
        print(told, flush=True)
        reply({"error": told[-3000:]})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
