"""One engine: it starts, and generates greedily for batches of several sizes."""

import faulthandler
import json
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.sglang_host.configurations import BATCHES, NEW_TOKENS, engine_arguments
from benchmarks.gpu.sglang_host.model import prompts


def run_one(name: str, work: Path) -> int:
    """Start the engine `name`; what it generates is in `work/NAME.json`, also if it fails."""
    faulthandler.enable()
    result: dict[str, Any] = {"name": name, "batches": {}}
    try:
        _generate(name, work, result)
    except BaseException as error:
        result["error"] = repr(error)
        traceback.print_exc()
    finally:
        _save(work, name, result)
    return 1 if "error" in result else 0


def _generate(name: str, work: Path, result: dict[str, Any]) -> None:
    began = time.perf_counter()
    import sglang

    result["import_s"] = round(time.perf_counter() - began, 1)
    began = time.perf_counter()
    engine = sglang.Engine(**engine_arguments(name, str(work / "llama")))
    result["start_s"] = round(time.perf_counter() - began, 1)
    print(f"{name}: imported {result['import_s']} s, started {result['start_s']} s", flush=True)
    _save(work, name, result)
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    for batch in BATCHES:
        for turn in ("first", "second"):
            began = time.perf_counter()
            try:
                outputs = engine.generate(
                    input_ids=prompts(batch),
                    sampling_params=sampling,
                    return_logprob=True,
                    logprob_start_len=-1,
                )
            except Exception as error:
                traceback.print_exc()
                result["batches"][f"{batch} {turn}"] = {"error": repr(error)}
                continue
            seconds = time.perf_counter() - began
            result["batches"][f"{batch} {turn}"] = {
                "seconds": round(seconds, 4),
                "tokens": [each["output_ids"] for each in outputs],
                "logprobs": [
                    [token[0] for token in each["meta_info"]["output_token_logprobs"]]
                    for each in outputs
                ],
            }
            print(f"{name}: batch {batch}, {turn}: {seconds:.3f} s", flush=True)
            _save(work, name, result)
    info = engine.get_server_info()
    result["info"] = repr(info.get("internal_states", info))[:4000]
    engine.shutdown()


def _save(work: Path, name: str, result: dict[str, Any]) -> None:
    (work / f"{name}.json").write_text(json.dumps(result))
