"""What looking at a call of a compiled module costs, part by part, and what it costs to compile.

    python3 -m benchmarks.guards [--layers 16] [--json FILE]

Microseconds, medians of rounds in which all take turns; the model is the tests' Llama, small enough
for the host's part to be all there is. "rerun" is the proof that the general code serves a size
of 1, in milliseconds, once for each compiled module; "trace" what Dynamo took.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish, median_us, show
from graphrt.compile import CompiledModule, CompileOptions, compile_module
from graphrt.compile.trace.parameters import leaves
from tests.models.llama import Llama, step_inputs


def parts(compiled: CompiledModule, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The parts of a check, each as a call without arguments."""
    built = compiled._built
    assert built is not None
    parameters, outside = compiled._subject.parameters, built.outside
    bound = parameters.bind((), inputs)
    found = leaves(bound)
    return {
        "bind": lambda: leaves(parameters.bind((), inputs)),
        "arguments": lambda: built.checker.check(found),
        "settings": outside.check_settings,
        "state": lambda: outside.check_state(bound.arguments, (), inputs),
        "whole check": lambda: compiled.check(**inputs),
        "run": lambda: built.run(**inputs),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    given = parser.parse_args()
    model = Llama(layers=given.layers)
    inputs = step_inputs(4)
    compiled = compile_module(model, options=CompileOptions(backend="eager"), in_place=False)
    compiled.ensure_compiled(**inputs)
    built = compiled._built
    assert built is not None
    started = time.perf_counter()
    served = built.checker._does_the_same({"tokens": 1})
    rerun_ms = 1e3 * (time.perf_counter() - started)
    calls = parts(compiled, inputs)
    with torch.no_grad():
        medians = median_us(*calls.values(), rounds=15, calls=200, warm_ups=1)
        figures = dict(zip(calls, medians, strict=True))
        compiled.seal()
        (sealed,) = median_us(calls["whole check"], rounds=15, calls=200, warm_ups=1)
        figures["whole check, sealed"] = sealed
    show(
        f"{given.layers} layers, us a call",
        ["part", "us"],
        [[name, round(us, 2)] for name, us in figures.items()],
    )
    trace_ms = 1e3 * compiled.figures.trace_s
    print(f"rerun {rerun_ms:.0f} ms ({served=}), trace {trace_ms:.0f} ms")
    results = {"us": figures, "rerun_ms": rerun_ms, "trace_ms": trace_ms}
    finish("guards", given, environment("cpu"), results)


if __name__ == "__main__":
    main()
