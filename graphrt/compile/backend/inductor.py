"""Compiles pieces by Inductor, which is only imported when the first piece is compiled."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx

from graphrt.compile.backend.process import (
    compiling,
    keep_libraries,
    loading,
    new_directory,
    trusted_folders,
)
from graphrt.compile.errors import CompileError
from graphrt.compile.private_torch.inductor import (
    Artifact,
    SaveFormat,
    find_cpp_compiler,
    generates_code,
    has_triton,
    inductor_compile,
    load_artifact,
)
from graphrt.compile.private_torch.patches import operators_in_order
from graphrt.compile.private_torch.traces import expressions, relied_on
from graphrt.compile.split.graph import returned_count
from graphrt.compile.trace.sizes import value_of

_CODE = "code"
_LIBRARIES = "libraries"
_CONDITIONS = "conditions"
_SEARCH = {"max_autotune": True, "coordinate_descent_tuning": True}
# A pass over the graph would move operators to their users, before any dependency is known.
_IN_ORDER = {"reorder_for_locality": False}


def compile_piece(
    piece: fx.GraphModule, inputs: Sequence[Any], *, static: bool, search: bool, in_order: bool
) -> CompiledPiece:
    """Code for all sizes of the batch, or with `static` for the shapes of `inputs` alone. With
    `search` Inductor looks for fast kernels, which takes longer. See `Backend.compile`."""
    settings = (_SEARCH if search else {}) | (_IN_ORDER if in_order else {})
    order = operators_in_order() if in_order else nullcontext()
    graph = _with_tuple(piece)
    with compiling() as libraries, order, size_conditions(inputs) as conditions:
        artifact = inductor_compile(graph, inputs, static=static, settings=settings)
    return CompiledPiece(artifact, returned_count(piece), tuple(conditions), libraries)


class CompiledPiece:
    """Compiled code of one piece, which is right for sizes at which `conditions` hold.

    `returns` is how many values the piece returns (None: nothing), `libraries` the C++ libraries
    that the code calls, by a hash of their source.
    """

    def __init__(
        self,
        artifact: Artifact,
        returns: int | None,
        conditions: Sequence[Any] = (),
        libraries: Mapping[str, Path] | None = None,
    ) -> None:
        self.artifact = artifact
        self.conditions = conditions
        self._returns = returns
        self._libraries = libraries or {}

    def __call__(self, *args: Any) -> Any:
        results = self.artifact(*args)
        if self._returns is None:
            return None
        return results[0] if self._returns == 1 else tuple(results)

    def save(self, path: Path, save_format: SaveFormat) -> None:
        """Write the code, and the libraries it calls, to an empty directory for `load`."""
        self.artifact.save(path=str(path / _CODE), format=save_format)
        keep_libraries(self._libraries, path / _LIBRARIES)
        (path / _CONDITIONS).write_bytes(pickle.dumps(self.conditions))

    @classmethod
    def load(cls, path: Path, returns: int | None, own_caches: str | None = None) -> CompiledPiece:
        """The code of a piece that another process compiled; compiles and tunes nothing.

        It needs no C++ compiler, and nothing of Inductor's or Triton's own caches: what they write
        goes to `own_caches`, an empty directory.
        """
        code = path / _CODE
        unpacked = code.is_dir()
        directory = code if unpacked else None
        with loading(own_caches or new_directory(), path / _LIBRARIES, directory):
            artifact = load_artifact(code, "unpacked" if unpacked else "binary")
        return cls(artifact, returns, pickle.loads((path / _CONDITIONS).read_bytes()))


def why_not(device_type: str, *, compiles: bool = True) -> str:
    """Why Inductor cannot be used for a device here; "" if it can.

    Without `compiles` only kept pieces are to be loaded, for which no C++ compiler has to be there.
    """
    try:
        if not generates_code(device_type):
            return f"Inductor generates no code for device type {device_type!r}"
    except Exception as error:
        return f"Inductor cannot be used: {type(error).__name__}: {error}"
    if device_type == "cpu":
        if not compiles:
            return ""
        try:
            with trusted_folders():
                find_cpp_compiler()
        except Exception as error:
            return f"Inductor needs a C++ compiler: {error}"
        return ""
    return "" if has_triton() else "Inductor needs Triton, which is not there for this device"


def _with_tuple(piece: fx.GraphModule) -> fx.GraphModule:
    """A copy that returns a tuple, as Inductor wants it."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in piece.graph.nodes:
        if node.op == "output":
            returned = fx.node.map_arg(node.args[0], copies.__getitem__)
            results = returned if isinstance(returned, tuple) else (returned,)
            graph.output(() if returned is None else results)
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        value = value_of(node)
        if value is not None:
            copies[node].meta["example_value"] = value
    return fx.GraphModule(piece, graph)


@contextmanager
def size_conditions(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Collect the conditions on sizes, as sympy relations, of code that the block compiles.

    A compiler decides by the sizes of the example, and relies on that in later pieces too. So after
    the block the list also has conditions of the trace and of earlier pieces; those that all sizes
    from 2 on fulfil are left out. Raises `CompileError` if the compiler took a size for a constant,
    or two sizes for one.
    """
    symbols = _resolved(inputs)
    conditions: list[Any] = []
    yield conditions
    conditions += [each for each in relied_on(inputs) if not _always_holds(each)]
    now = _resolved(inputs)
    if now != symbols:
        changed = next((a, b) for a, b in zip(symbols, now, strict=True) if a != b)
        raise CompileError(
            "the compiler takes a batch size for another one, or for a constant",
            got=f"{changed[0]} = {changed[1]}",
            expected="code for every batch size",
            advice="call ensure_compiled() with 4 rows or more before smaller batches; else take "
            "the lines that computation_graph shows for this piece into an opaque operator, "
            "or use backend='eager'",
        )


def _resolved(inputs: Sequence[Any]) -> list[Any]:
    sizes = (size for each in inputs for size in getattr(each, "shape", (each,)))
    return [expressions(size)[0] for size in sizes if isinstance(size, torch.SymInt)]


def _always_holds(condition: Any) -> bool:
    """Whether a condition holds for all sizes from 2 on."""
    import sympy  # type: ignore[import-untyped]

    larger = {
        symbol: sympy.Symbol(f"{symbol}_less_2", integer=True, nonnegative=True) + 2
        for symbol in condition.free_symbols
    }
    return condition.subs(larger) == True  # type: ignore[no-any-return]  # noqa: E712
