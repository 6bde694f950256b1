"""The engines of one process, graphrt's and vLLM's own: started, captured again, asked."""

import copy
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.vllm_host.configurations import SIZES
from benchmarks.gpu.vllm_host.model import VOCABULARY, randomise
from benchmarks.gpu.vllm_host.watching import Capture


class Engines:
    """The two engines of a configuration, by name."""

    def __init__(self, options: dict[str, Any], work: Path) -> None:
        from vllm import LLM, SamplingParams

        self.options = options
        self.made = LLM
        self.llms: dict[str, Any] = {}
        self.capture = Capture()
        self.capture.watch()
        if options.get("lora"):
            order_sums()
        if options.get("profile"):
            self.capture.profile_too()
        self.adapter = work / "adapter"
        self.arguments: dict[str, Any] = {
            "model": str(work / "llama"),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "gpu_memory_utilization": 0.03,
            "kv_cache_memory_bytes": 256 << 20,
            "enable_prefix_caching": False,
            "seed": 0,
            "compilation_config": {
                **options["compilation"],
                "cudagraph_capture_sizes": SIZES,
            },
        }
        if "speculative" in options:
            given = dict(options["speculative"])
            if given["method"] == "draft_model":
                given["model"] = str(work / "llama")
            self.arguments["speculative_config"] = given
        if options.get("lora"):
            self.arguments |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        self.sampling = SamplingParams

    def start(self, name: str) -> dict[str, Any]:
        began = time.perf_counter()
        llm = self.llms[name] = self.made(**copy.deepcopy(self.arguments))
        seconds = time.perf_counter() - began
        refilled = self.refill(llm)
        config = llm.llm_engine.vllm_config.compilation_config
        return {
            "start_s": round(seconds, 1),
            "compile_s": round(getattr(config, "compilation_time", 0.0), 1),
            "resolved": str(config.cudagraph_mode),
            "refilled": refilled,
            **self.capture.take(),
        }

    def refill(self, llm: Any) -> list[int]:
        """Give the models of an engine weights that matter."""
        refilled: list[int] = llm.apply_model(randomise)
        if self.options.get("speculative", {}).get("method") == "draft_model":
            # The same weights: what it drafts is accepted.
            refilled.append(randomise(self.worker(llm).model_runner.drafter.model))
        return refilled

    def recapture(self, name: str) -> dict[str, Any]:
        """Destroy the graphs of one engine and capture them again, now that all kernels are
        loaded; graphrt has to be installed for its engine, and not for the other one."""
        import gc

        import torch
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        runner = self.worker(self.llms[name]).model_runner
        manager = getattr(runner, "cudagraph_manager", None)
        if manager is not None:
            manager.graphs.clear()
        for wrapper in (
            *CUDAGraphWrapper._all_instances,
            *BreakableCUDAGraphWrapper._all_instances,
        ):
            if type(wrapper).__module__.startswith("graphrt") == (name == "graphrt"):
                wrapper.clear_graphs()
        gc.collect()
        torch.cuda.empty_cache()
        runner.capture_model()
        return self.capture.take()

    @staticmethod
    def worker(llm: Any) -> Any:
        """The worker of an engine in this process."""
        driver = llm.llm_engine.model_executor.driver_worker
        return getattr(driver, "worker", None) or driver

    def adapter_of(self, index: int) -> Any:
        """The LoRA adapter of a request, of two in turns; every third request has none."""
        if not self.options.get("lora") or index % 3 == 0:
            return None
        from vllm.lora.request import LoRARequest

        number = index % 3
        folder = self.adapter if number == 1 else self.adapter.with_name("adapter2")
        return LoRARequest(f"random{number}", number, str(folder))

    def generate(self, name: str, batch: int, seed: int, tokens: int) -> list[list[int]]:
        draw = random.Random(seed)
        prompts = []
        for _ in range(batch):
            ids = [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(5, 60))]
            if self.options.get("repeating"):
                ids = (ids[:7] * 8)[:50]
            prompts.append({"prompt_token_ids": ids})
        more: dict[str, Any] = {}
        if self.options.get("lora"):
            from vllm.lora.request import LoRARequest

            given = LoRARequest("random", 1, str(self.adapter))
            more["lora_request"] = [given if i % 2 else None for i in range(batch)]
        sampling = self.sampling(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        outputs = self.llms[name].generate(prompts, sampling, use_tqdm=False, **more)
        return [list(output.outputs[0].token_ids) for output in outputs]


def order_sums() -> None:
    """Have vLLM's LoRA kernel sum in one order: split, it adds up atomically, in any order, and
    vLLM's own graphs do not give the same tokens twice."""
    from vllm.lora.ops.triton_ops import lora_shrink_op as module

    original = module.get_lora_op_configs

    def configs(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = dict(original(*args, **kwargs))
        return found | {"split_k": 1} if "split_k" in found else found

    module.get_lora_op_configs = configs
