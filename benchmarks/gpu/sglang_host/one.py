"""One engine: it starts, and generates greedily for batches of several sizes."""

import faulthandler
import json
import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.sglang_host.configurations import BATCHES, NEW_TOKENS, engine_arguments
from benchmarks.gpu.sglang_host.model import long_prompts, prompts
from benchmarks.gpu.sglang_host.turns import VARIABLE, in_turn

TURNS = 5
"""Timed for each batch, with `--in-turns`."""


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
    steps = work / f"{name}.bench"
    turns: tuple[str, ...] = ("recorded", "timed", "again")
    if VARIABLE in os.environ:
        turns = (*turns, *(f"turn {number}" for number in range(TURNS)))
    if name.startswith(("free", "cached")):
        _turn(engine, steps, result, "64 long, queued", long_prompts(64), hold=True)
        for turn in ("first", "second"):
            _turn(engine, steps, result, f"64 long, {turn}", long_prompts(64), abort=True)
    else:
        is_short = name.startswith(("checked", "defect"))
        for batch in (8, 64) if is_short else BATCHES:
            for turn in turns:
                record = turn == "recorded"
                label = f"{batch} {turn}"
                with in_turn():
                    _turn(engine, steps, result, label, prompts(batch), hold=True, record=record)
                _save(work, name, result)
    recorded = _beside(steps, "steps")
    if recorded.exists():
        result["steps"] = [json.loads(each) for each in recorded.read_text().splitlines()]
    told = _beside(steps, "told")
    _beside(steps, "tell").touch()
    for _ in range(100):
        time.sleep(0.1)
        if not _beside(steps, "tell").exists():
            result["told"] = json.loads(told.read_text())
            print(f"{name}: " + result["told"].get("report", "no graphrt"), flush=True)
            print(f"{name}: {result['told']['captures']}", flush=True)
            break
    _save(work, name, result)
    engine.shutdown()


def _beside(path: Path, kind: str) -> Path:
    return Path(f"{path}.{kind}")


def _turn(
    engine: Any,
    steps: Path,
    result: dict[str, Any],
    label: str,
    inputs: list[list[int]],
    *,
    hold: bool = False,
    record: bool = False,
    abort: bool = False,
) -> None:
    """Generate for these prompts; with `hold` all wait before the first step, with `abort` every
    eighth is aborted on its way."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    if hold:
        # At once: the scheduler reads it whenever it is there.
        written = _beside(steps, "hold.new")
        written.write_text(str(len(inputs)))
        written.replace(_beside(steps, "hold"))
    if record:
        _beside(steps, "record").touch()
    names = [f"{label} {index}".replace(" ", "-") for index in range(len(inputs))]
    timer = None
    if abort:

        def stop() -> None:
            for name in names[::8]:
                engine.tokenizer_manager.abort_request(name)

        # In the engine's own loop, which has the sockets.
        timer = threading.Timer(0.12, engine.loop.call_soon_threadsafe, (stop,))
        timer.start()
    began = time.perf_counter()
    try:
        outputs = engine.generate(
            input_ids=inputs,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=-1,
            rid=names,
        )
    except Exception as error:
        traceback.print_exc()
        result["batches"][label] = {"error": repr(error)}
        return
    finally:
        if timer is not None:
            timer.join()
        _beside(steps, "record").unlink(missing_ok=True)
    seconds = time.perf_counter() - began
    result["batches"][label] = {
        "seconds": round(seconds, 4),
        "tokens": [each["output_ids"] for each in outputs],
        "ends": [(each["meta_info"].get("finish_reason") or {}).get("type") for each in outputs],
        "logprobs": [
            [token[0] for token in each["meta_info"]["output_token_logprobs"]] for each in outputs
        ],
    }
    print(f"{result['name']}: batch {label}: {seconds:.3f} s", flush=True)


def _save(work: Path, name: str, result: dict[str, Any]) -> None:
    (work / f"{name}.json").write_text(json.dumps(result))
