"""What compiling a module took."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.core.base.homes import public


@public("graphrt.compile")
@dataclass
class Figures:
    """Counts and seconds of one compiled module, from its first trace on."""

    traces: int = 0
    """Dynamo traces: one, and one more for each size of 0 or 1 that needs code of its own."""
    pieces: int = 0
    """Pieces between the splitting operators."""
    splitting_pieces: int = 0
    distinct_pieces: int = 0
    """Pieces that differ in structure, each of which is compiled once."""
    compilations: int = 0
    """Calls of the backend's compiler, with those for single sizes."""
    static_compilations: int = 0
    """Of these, for single sizes."""
    loads: int = 0
    """Pieces taken from the cache instead of being compiled."""
    trace_s: float = 0.0
    compile_s: float = 0.0
    backend: str = ""
    """The backend that compiled."""
    backend_reason: str = ""
    """Why it is another one than was asked for."""
    partitions: int = 0
    """Parts that Inductor itself split its code into."""
    partition_reason: str = ""
    """Why it did not, where that was asked for."""
    call_reason: str = ""
    """Why the code that Dynamo left stays around every call, which makes it slower."""

    def add(self, more: Figures) -> None:
        """Count what another trace of the same module took; its pieces are not among `pieces`."""
        self.traces += more.traces
        self.compilations += more.compilations
        self.loads += more.loads
        self.trace_s += more.trace_s
        self.compile_s += more.compile_s
