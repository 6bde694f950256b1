"""Starts of the programs of `edits.py`: a server that forks a process for each.

A fork has imported torch and nothing of the program. With `compiler="stand-in"` pieces are compiled
by AOTAutograd alone, whose graph is kept as text: what a compiler bakes in is baked in, within
milliseconds. Values are compared at the size that it was compiled for.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


class StandInPiece:
    """The text of a graph of ATen operators, with the tensors that it holds."""

    batch = 3

    def __init__(self, content: dict[str, Any]) -> None:
        import torch

        self.content = content
        self.space: dict[str, Any] = {
            "torch": torch,
            "device": torch.device,
            "inf": float("inf"),
            "nan": float("nan"),
        }
        exec(content["code"], self.space)
        StandInPiece.batch = content["batch"]

    def __call__(self, *args: Any) -> Any:
        from types import SimpleNamespace

        outputs = self.space["forward"](SimpleNamespace(**self.content["held"]), *args)
        returns = self.content["returns"]
        if returns is None:
            return None
        return outputs[0] if returns == 1 else tuple(outputs)

    def save(self, path: Path, save_format: str) -> None:
        import torch

        torch.save(self.content, path / "code")

    @classmethod
    def load(cls, path: Path, returns: int | None, place: str | None = None) -> StandInPiece:
        import torch

        return cls(torch.load(path / "code", weights_only=False))


class StandIn:
    """What `backend_for` gives in place of Inductor."""

    name = "stand-in"

    def compile(self, piece: Any, inputs: Any, *, static: bool) -> StandInPiece:
        import torch
        from torch._functorch.aot_autograd import aot_function
        from torch._inductor.decomposition import select_decomp_table

        from graphrt.compile.split.graph import returned_count

        def number(size: Any) -> int:
            # Without a hint, as of "unbacked" sizes, any will do.
            return size if isinstance(size, int) else int(size.node.hint or 3)

        request = [
            torch.ones([number(n) for n in each.shape], dtype=each.dtype)
            if isinstance(each, torch.Tensor)
            else number(each)
            for each in inputs
        ]
        batch = next((n for n in request if isinstance(n, int)), 0)
        batch = batch or next(each.shape[0] for each in request if each.dim())
        kept: dict[str, Any] = {}

        def keep(graph: Any, examples: Any) -> Any:
            kept.update(code=graph.code, held=dict(graph.named_buffers()))
            return graph.forward

        def several(*args: Any) -> Any:
            record = piece.forward(*args)
            return record if isinstance(record, tuple) else (record,)

        table = select_decomp_table()
        aot_function(several, fw_compiler=keep, decompositions=table)(*request)
        returns = returned_count(piece)
        return StandInPiece({**kept, "returns": returns, "batch": batch})


def stand_in() -> None:
    """Let `graphrt.compile` take the stand-in for any backend, in this process."""
    from graphrt.compile.pieces import assembly, cached, compiler

    backend: Any = lambda *args, **kwargs: (StandIn(), "")  # noqa: E731
    assembly.backend_for = compiler.backend_for = backend  # type: ignore[attr-defined]
    cached.CompiledPiece = StandInPiece  # type: ignore[misc,assignment]


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Import the program, compile it or load it, and hold what it returns against eager."""
    import torch

    from graphrt.compile import CompileOptions, compile_module
    from graphrt.core.base.errors import GraphRTError

    sys.dont_write_bytecode = True
    os.environ.update(request["environment"])
    sys.path.insert(0, request["directory"])
    torch.set_num_threads(1)
    if request["compiler"] == "stand-in":
        stand_in()
    torch.manual_seed(0)
    exec(request["setup"], {})
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        model = importlib.import_module("main").build()
        exec(request["setup_after"], {})
        if request["around"]:
            stack.enter_context(eval(request["around"], {"torch": torch}))
        options = CompileOptions(
            **{"backend": "inductor", "cache_dir": request["cache"], **request["options"]}
        )
        compiled = compile_module(model, ["x"], options=options, in_place=False)
        try:
            compiled.ensure_compiled(torch.ones(3, 4))
            x = torch.randn(StandInPiece.batch, 4)
            with torch.no_grad():
                expected, output = model(x), compiled(x)
        except GraphRTError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        figures = compiled.figures
        # Between products in bfloat16 Inductor rounds less often.
        halves = output.dtype is torch.bfloat16 or torch.is_autocast_enabled("cpu")
        right = expected.dtype == output.dtype and torch.allclose(
            expected.float(), output.float(), atol=1e-2 if halves else 1e-5
        )
        told = [
            str(each.message)
            for each in caught
            if "compile cache" in str(each.message) or "compiled code" in str(each.message)
        ]
    return {
        "traced": figures.traces,
        "compiled": figures.compilations,
        "loaded": figures.loads,
        "right": right,
        "backend": f"{figures.backend} {figures.backend_reason}",
        "told": told,
    }


def _child(request: dict[str, Any], pipe: int) -> None:
    try:
        record = start(request)
    except BaseException:
        record = {"error": traceback.format_exc()}
    with os.fdopen(pipe, "w") as out:
        out.write(json.dumps(record))
    os._exit(0)


def forked(several: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each start tells, all at once."""
    pipes = []
    for request in several:
        here, there = os.pipe()
        if (child := os.fork()) == 0:
            os.close(here)
            _child(request, there)
        os.close(there)
        pipes.append((child, here))
    records = []
    for child, here in pipes:
        with os.fdopen(here) as answer:
            records.append(json.loads(answer.read() or '{"error": "it died"}'))
        os.waitpid(child, 0)
    return records


def serve() -> None:
    """Answer each line, the starts to run at once, with a line."""
    import torch

    import graphrt
    from graphrt.compile.cache.key.values import Values
    from graphrt.compile.cache.key.versions import compiler_settings

    # What every start would import.
    torch.set_num_threads(1)
    compiler_settings(Values())
    import torch._inductor.decomposition
    import torch._inductor.lowering
    from torch._functorch.aot_autograd import aot_function

    graphrt.compile(lambda x: x + 1, ["x"]).ensure_compiled(torch.ones(3, 4))
    with torch.no_grad():
        aot_function(lambda x: (x.sin(),), fw_compiler=lambda graph, _: graph.forward)(
            torch.ones(3)
        )
    torch._dynamo.reset()
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
